"""The field benchmark: its split is fixed, its faults are visible and leave no trace, its judge counts rightly."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from noisescope.localization.verdict import Suspect, Verdict
from noisescope.sites import Site

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SAMPLE = 24  # cases that are run; the list is in a pseudo-random order


@pytest.fixture(scope="module")
def cases(benchmark_module) -> tuple[Any, ...]:
    return benchmark_module("field_list").fault_cases()


@pytest.fixture(scope="module")
def judge(benchmark_module) -> ModuleType:
    return benchmark_module("field_judge")


@pytest.fixture(scope="module")
def values(benchmark_module) -> ModuleType:
    return benchmark_module("field_cases")


@pytest.fixture(scope="module")
def visibility(benchmark_module) -> ModuleType:
    return benchmark_module("field_visibility")


def test_the_split_depends_on_the_name_alone(values, cases):
    assert values.half_of("gain-3-percent/llama.bfloat16.model.layers.1.self_attn.q_proj") == "held-out"
    assert values.half_of("attention-padding-ignored/llama.bfloat16.1") == "tune"
    sizes = [sum(case.half == half for case in cases) for half in values.HALVES]
    assert sum(sizes) == len(cases) >= 150
    assert min(sizes) > len(cases) // 3


def test_cases_cover_the_ways_phases_and_architectures(cases):
    assert {case.kind for case in cases} == {"forward", "function", "hook", "kernel", "cache"}
    assert sum(case.phase == "decode" for case in cases) >= 15
    assert len({case.model for case in cases}) >= 20
    assert {case.dtype for case in cases} == {"float32", "bfloat16", "float16"}
    classes = importlib.import_module("noisescope.localization.verdict").CLASSES
    assert all(case.classes & set(classes) for case in cases), "every case has a class that locate can name"


def test_no_fault_comes_from_the_simulator():
    for path in BENCHMARKS.glob("field_*.py"):
        text = path.read_text()
        assert "noisescope.faults" not in text, path
        assert "noisescope.probe" not in text, path
        assert len(text.splitlines()) < 400, path


@pytest.fixture(scope="module")
def sample(cases) -> tuple[Any, ...]:
    tiny = [case for case in cases if case.model != "demo" and case.shape.calls < 4]
    kinds = {(case.kind, case.phase): case for case in tiny}  # one of each, whatever the order
    return tuple(dict.fromkeys((*kinds.values(), *tiny)))[:SAMPLE]


def test_faults_are_visible_where_they_say_and_leave_no_trace(sample, visibility, benchmark_module):
    models = benchmark_module("field_models")
    for case in sample:
        model = models.build(case.model, case.dtype)
        state = {name: dict(vars(module)) for name, module in model.named_modules()}
        hooks = {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
        before = visibility.outputs(model, case.shape)
        with case.fault(model):
            faulty = visibility.outputs(model, case.shape)
        after = visibility.outputs(model, case.shape)
        assert all(map(torch.equal, before, after)), case.name
        assert not all(map(torch.equal, before, faulty)), case.name
        for name, module in model.named_modules():
            assert set(vars(module)) == set(state[name]), (case.name, name)
            assert (len(module._forward_hooks), len(module._forward_pre_hooks)) == hooks[name], (case.name, name)


def test_the_first_tensor_that_changes_is_where_the_case_says(sample, visibility):
    for case in sample[:12]:
        change = visibility.measure(case)
        assert change.visible, case.name
        places = {p for answer in case.answers for p in (answer.places or ())}
        blocks = [int(part) for part in change.module.split(".") if part.isdigit()]
        if case.module and blocks and places:
            assert blocks[0] in places, (case.name, change.module)


def test_a_fault_is_undone_after_an_exception(cases, visibility, benchmark_module):
    models = benchmark_module("field_models")
    case = next(case for case in cases if case.kind == "function" and case.model == "llama")
    model = models.build(case.model, case.dtype)
    before = visibility.outputs(model, case.shape)
    with pytest.raises(ZeroDivisionError), case.fault(model):
        raise ZeroDivisionError
    assert all(map(torch.equal, before, visibility.outputs(model, case.shape)))


def test_a_change_of_nothing_is_not_visible(values, visibility):
    trace = visibility.Trace({("a", "output", 0): torch.ones(2, 3)}, {}, [torch.ones(2)])
    assert not visibility.difference(trace, trace, torch.float32).visible


# -- the judge


@pytest.fixture
def case(values) -> Any:
    return values.FaultCase(
        "made-up",
        "forward",
        "llama",
        "bfloat16",
        (values.at(2, values.LINEAR),),
        values.GAIN,
        lambda model: None,
        values.Shape(decode=3),
        "model.layers.2.mlp.up_proj",
    )


@pytest.fixture
def change(visibility) -> Any:
    return visibility.Visibility("model.layers.2.mlp.up_proj", "output", 1.0, 0.05, 12.0, 0.05, 0.02, 2**-8)


def said(judge: ModuleType, verdict: str, *suspects: tuple[str, int, str], **more: Any) -> dict[str, Any]:
    found = tuple(
        Suspect(Site(operator, place, "model.layers.2.mlp.up_proj"), kind, 0.9, "evidence", 1.0)
        for operator, place, kind in suspects
    )
    return judge.said_by(Verdict(verdict, "auto", found, **{k: v for k, v in more.items() if k != "coverage"})) | {
        k: v for k, v in more.items() if k == "coverage"
    }


def test_named_needs_place_operator_and_class_at_rank_1(judge, case, change):
    def outcome(*suspects: tuple[str, int, str]) -> Any:
        return judge.judge_fault(case, change, said(judge, "faulty", *suspects))

    assert outcome(("linear", 2, "gain")).outcome == judge.NAMED
    assert outcome(("linear", 2, "gain")).module_right
    assert outcome(("linear", 2, "spike")).outcome == judge.WRONG_CLASS
    assert outcome(("linear", 1, "gain")).outcome == judge.WRONG
    assert outcome(("norm", 2, "gain")).outcome == judge.WRONG
    second = outcome(("norm", 2, "gain"), ("linear", 2, "gain"))
    assert (second.outcome, second.rank) == (judge.WRONG, 2)


def test_an_edge_is_named_by_an_input_and_not_by_a_modules_output(values):
    edge = values.at((1, 2), values.NORM, edge=True)
    assert edge.matches(2, "norm", "input")
    assert not edge.matches(2, "norm", "output")
    assert not edge.matches(3, "norm", "input")


def test_healthy_on_a_visible_fault_is_a_miss_unless_a_limit_or_the_coverage_says_so(judge, case, change, visibility):
    def outcome(verdict: str, seen: Any = change, **more: Any) -> str:
        return judge.judge_fault(case, seen, said(judge, verdict, **more)).outcome

    assert outcome("healthy") == judge.HEALTHY
    assert outcome("undecided") == judge.UNDECIDED
    small = visibility.Visibility("m", "output", 0.1, 0.001, 1.0, 0.0001, 0.01, 2**-8)
    limits = {"linear": {"element_ulp": 1.0, "gain": 0.001}}
    assert outcome("healthy", small, smallest_visible=limits) == judge.BELOW
    assert outcome("healthy", change, smallest_visible=limits) == judge.HEALTHY
    wide = {"linear": {"element_ulp": 50.0, "gain": 0.5}}  # larger than version 0.1's: does not count
    assert outcome("healthy", change, smallest_visible=wide) == judge.HEALTHY


def test_not_judged_must_name_this_module_phase_or_shape(judge, case, change):
    def outcome(verdict: str = "undecided", **more: Any) -> str:
        return judge.judge_fault(case, change, said(judge, verdict, **more), "", "Int8Linear").outcome

    assert outcome(unseen=(Site("linear", 2, "model.layers.2.mlp.up_proj"),)) == judge.NOT_JUDGED
    assert outcome(unseen=(Site("linear", 1, "model.layers.1.mlp.up_proj"),)) == judge.UNDECIDED
    assert outcome(coverage={"not_judged": ["Int8Linear"]}) == judge.NOT_JUDGED
    assert outcome(coverage={"phases": {"not_run": ["decode"]}}) == judge.NOT_JUDGED
    assert outcome(coverage={"not_judged": ["decoder blocks"]}) == judge.UNDECIDED
    assert outcome("healthy", coverage={"phases": {"run": ["prefill", "decode"]}}) == judge.HEALTHY
    assert outcome("healthy", notes=("decode was not run",)) == judge.HEALTHY  # a note is no coverage
    assert outcome("healthy", coverage={"shares": {"modules": 0.81}}) == judge.UNDECIDED


def test_crashes_exclusions_and_healthy_models(judge, case, change, visibility):
    assert judge.judge_fault(case, change, None, "ValueError: no").outcome == judge.CRASH
    assert judge.judge_fault(case, visibility.Visibility(), None).outcome == judge.EXCLUDED
    assert judge.judge_healthy(said(judge, "faulty", ("linear", 2, "gain"))) == judge.ALARM
    assert judge.judge_healthy(said(judge, "healthy")) == judge.HEALTHY
    assert judge.judge_healthy(said(judge, "undecided")) == judge.UNDECIDED
    assert judge.judge_healthy(None, "RuntimeError: shape") == judge.CRASH


def test_the_zoo_is_large_enough_and_builds(benchmark_module):
    zoo = benchmark_module("field_zoo")
    architectures = benchmark_module("field_architectures")
    models = zoo.healthy_models()
    assert len({model.name.split(".")[0] for model in models}) >= 60
    assert len(architectures.names()) >= 100
    assert not set(architectures.names()) & set(architectures.LEFT_OUT)
    model = architectures.architecture("llama", "float32", "sdpa")
    with torch.no_grad():
        assert model(input_ids=torch.arange(3, 11)[None]).logits.shape == (1, 8, architectures.VOCABULARY)


def test_runs_are_stored_and_not_run_again(benchmark_module, tmp_path, monkeypatch):
    script = benchmark_module("field_faults")
    cells = [cell for cell in script.chosen("all", "faults", None, "gain-3-percent/llama") if cell.model == "llama"]
    first = script.run(cells, ["auto"], tmp_path / "runs.jsonl", "t")
    assert [row["outcome"] for row in first] == ["named"]
    monkeypatch.setattr(script, "run_fault", lambda *_: pytest.fail("run again"))
    assert script.run(cells, ["auto"], tmp_path / "runs.jsonl", "t") == first
    found = benchmark_module("field_tables").summary(first)
    assert (found["faults"], found["named_share"], found["class_right_share"]) == (1, 1.0, 1.0)
