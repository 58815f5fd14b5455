"""The rules of CONTRIBUTING.md that a machine can check, one test per rule."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import noisescope
from noisescope.probe.draws import ENGINE_VERSION, Draw, Rows

SOURCE = Path(noisescope.__file__).parent
ROOT = Path(__file__).parents[1]
FILES = {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}
DRAWS = ("rand", "randn", "randint", "randperm", "bernoulli", "normal")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Callable[[type[ast.AST]], list[tuple[str, Any]]]]:
    """Those of a kind, with the files they are in."""
    kinds = (ast.Assign, ast.Delete, ast.Attribute, ast.Global, ast.Call)
    found = [(name, n) for name, text in FILES.items() for n in ast.walk(ast.parse(text)) if isinstance(n, kinds)]
    yield lambda kind: [(name, node) for name, node in found if isinstance(node, kind)]
    found.clear()


def dotted(node: ast.AST) -> str:
    """`torch.rand` and the like; "" where something else than a name begins."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_no_file_is_longer_than_400_lines() -> None:
    assert len(FILES) > 100
    assert not {name: text.count("\n") for name, text in FILES.items() if text.count("\n") > 400}


def test_only_the_probe_replaces_a_forward_and_nothing_registers_hooks(nodes: Any) -> None:
    """`module.forward = ...`, `module.__dict__["forward"] = ...` and hooks on modules."""
    found = set()
    for name, node in nodes(ast.Assign | ast.Delete):
        for target in node.targets:
            held = isinstance(target, ast.Subscript) and ast.unparse(target).endswith("__dict__['forward']")
            put = isinstance(target, ast.Attribute) and target.attr == "forward" and ast.unparse(target.value) != "self"
            if held or put:
                found.add(name)
    for name, node in nodes(ast.Attribute):
        if re.fullmatch(r"register_(module_)?(forward|full_backward)(_pre)?_hook", node.attr):
            found.add(name)
    assert found == {"probe/forward_patching.py", "probe/forward_wrapper.py", "model/streaming.py"}


def test_only_the_compatibility_layer_has_global_state(nodes: Any) -> None:
    assert {name for name, _ in nodes(ast.Global)} <= {"compat/noisy_ops/state.py"}


def test_nothing_draws_from_the_callers_generators(nodes: Any) -> None:
    """Every draw names its generator; numpy's comes from default_rng; only training seeds torch, in a saved state."""
    drawn, seeded = set(), set()
    for name, node in nodes(ast.Call):
        called = dotted(node.func)
        keywords = {one.arg for one in node.keywords}
        if called in {f"torch.{draw}" for draw in DRAWS} and "generator" not in keywords:
            drawn.add(name)
        if re.fullmatch(r"np\.random\.(?!default_rng|get_state|set_state)\w+", called):
            drawn.add(name)
        if called == "torch.manual_seed":
            seeded.add(name)
    assert not drawn
    assert seeded <= {"demo/experiment_tasks.py", "demo/train.py", "training/tuning_task.py"}


def test_draws_are_those_of_this_engine_version() -> None:
    """Change a drawn number, raise ENGINE_VERSION, and put the new digest here."""
    rows = Rows(number=3)
    numbers = Draw(rows, 12345, layout="tokens", tensor="output").normal(torch.zeros(2, 5, 7))
    digest = hashlib.sha256((numbers.double() * 1e6).round().numpy().tobytes()).hexdigest()[:16]
    assert (ENGINE_VERSION, digest) == (2, "632f9e9689ebe07c")


def test_no_network_pickles_or_remote_code(nodes: Any) -> None:
    for name, node in nodes(ast.Call):
        called = dotted(node.func)
        keywords = {one.arg: ast.unparse(one.value) for one in node.keywords}
        if name != "runs/ray_worker.py":  # what Ray's driver sends to its own actors
            assert called not in ("pickle.load", "pickle.loads", "yaml.load", "eval", "exec"), name
        if called == "torch.load":
            assert keywords.get("weights_only") == "True", name
        assert keywords.get("trust_remote_code", "False") != "True", name
    for name, text in FILES.items():
        assert not re.search(r"^\s*(import|from) (requests|urllib\.request|httpx)\b", text, re.M), name


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"\b(?:[a-z_]+/)+[a-z_]+\.(?:py|md)\b", text))
    assert named
    assert not {name for name in named if not any((base / name).is_file() for base in (SOURCE, ROOT, ROOT / "docs"))}


def test_every_rule_names_a_test_that_exists() -> None:
    """A rule in CONTRIBUTING.md ends in the test that holds it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rules = re.findall(r"^- .*?(?=^- |^#|\Z)", text, re.M | re.S)
    assert len(rules) > 8
    for rule in rules:
        tests = re.findall(r"`(tests/[\w/]+\.py)`|`(make \w+)`", rule)
        assert tests, rule
        assert all((ROOT / test).is_file() for test, _ in tests if test), rule
