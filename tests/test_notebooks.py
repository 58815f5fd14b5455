"""The notebooks in examples/ as files: whole, without outputs, on the bundled model. `make notebooks` executes them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import noisescope as ns

FOLDER = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["broken_device", "compare_records", "fragile_layers"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_not_kept(path: Path) -> None:
    """They would differ from machine to machine, and nobody would review them."""
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells(path, "code"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_to_do_next(path: Path) -> None:
    """It begins with a title and the pip line, and ends with next steps; what it links to is there."""
    first, *_, last = (source(cell) for cell in cells(path, "markdown"))
    assert first.startswith("# ") and "pip install 'noisescope[notebooks]'" in first
    assert last.startswith("## What to do next")
    for target in re.findall(r"\]\(([^)\s]+)\)", last):
        assert (FOLDER / target).is_file(), target


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_code_is_whole_and_names_exist(path: Path) -> None:
    """Executing them takes a minute, so a renamed function is found here first."""
    for cell in cells(path, "code"):
        for node in ast.walk(ast.parse(source(cell))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("ns", "ns.plan"):
                assert hasattr(ns if ast.unparse(node.value) == "ns" else ns.plan, node.attr), ast.unparse(node)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "ns.load":
                assert ast.literal_eval(node.args[0]) == "demo"
