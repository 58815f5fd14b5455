"""Texts that people read are plain technical English: no phrase of a list that reviews have made.

Add a phrase with what to write instead. `SOURCE` names the packages whose strings and docstrings are checked.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import noisescope
from noisescope.cli import app
from noisescope.options.docs_tables import COMMANDS
from noisescope.options.fields import options_of

ROOT = Path(__file__).parents[1]
PACKAGE = Path(noisescope.__file__).parent
PAGES = sorted(
    path
    for folder in (ROOT, ROOT / "docs", ROOT / "benchmarks")
    for path in folder.glob("*.md")
    if path.name not in ("CHANGELOG.md",)  # what earlier versions said
)
SOURCE = ("",)  # all of the package; a folder such as "reports" narrows it

_UNIT = (
    r"(?:nats?|bits?|bytes?|scales?|samples?|tokens?|forwards?|launches|bins?|seconds?|points?|draws?|seeds?|calls?)"
)
_EACH = r"(?:token|weight|tensor|sample|channel|row|layer|head|step|site|block|octave|answer|value|percent|pair)"
BANNED = {  # a pattern, and what to write instead
    rf"\b{_UNIT} an? {_EACH}\b": "'per': nats per token",
    r"\bparted\b|\bparts? company\b|\bpartings?\b|\bmay part\b|\bthey part\b": "diverged, diverge",
    r"\bsurely\b": "significantly",
    r"\b(?:is|are|was|were) (?:said|told)\b(?! apart)": "is reported, is printed",
    r"\b(?:can't|cannot|can not) stand\b|\bstands? clear of\b": "is sensitive to; is significantly above",
    r"\bwhat comes out tells\b": "the change in output shows",
    r"\bmore samples (?:see|catch|find)\b": "more samples detect smaller losses",
    r"\bthat would have been seen\b|\bit would have seen\b": "that the run could have detected",
    r"\bmay stand (?!alone)|\bstands? in the log\b": "may appear, appears",
    r"\b(?:are|is|be) advised\b": "recommended",
    r"\baimed (?:measures|fixes)\b": "targeted",
    r"\bmakes robust\b": "makes the model robust",
    r"\bhow each number is made\b": "computed",
    r"\bfor use in house\b": "for internal use",
    r"\bthat scored no\b": "that were not used to",
    r"\bmeasures? .{0,30}\banew\b|\basks? everything anew\b": "again",
    r"\bnobody tells\b|\btells? the cost\b": "reports; is not notified",
    r"\bputs? the findings to the test\b": "tests the findings",
    r"\b(?:doors?|ledgers?|strays|stations?|seams)\b(?! (?:cost|rate))": "the field's own word",
    r"\bas ever\b|\bever after\b": "as before; then constant",
    r"\bput (?:it )?in words\b": "as text",
    r"\brule a mean\b|\brules? it\b": "dominate",
    r"\bgoes? (?:on )?by the\b": "follows the",
}


ANY = re.compile("|".join(f"(?:{pattern})" for pattern in BANNED), re.IGNORECASE)


def prose(page: Path) -> str:
    """A page on one line, without code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return " ".join(re.sub(r"`[^`]*`", "`", text).split())


def strings(file: Path) -> Iterator[str]:
    """String literals and docstrings of a file, each on one line; none of a file without any of the phrases."""
    text = file.read_text(encoding="utf-8")
    if not ANY.search(" ".join(re.sub(r'"\s+f?"', "", text).split())):  # adjacent literals are one string
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield " ".join(node.value.split())


def offences(text: str) -> list[str]:
    return [
        f"{text[max(0, found.start() - 30) : found.end() + 30]!r}: write {instead}"
        for pattern, instead in BANNED.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages(page: Path) -> None:
    assert not offences(prose(page))


def test_help() -> None:
    """Every command's own words, and every option's, whether shown or not."""
    found = [one for cls in COMMANDS for option in options_of(cls).values() for one in offences(option.sentence)]
    for command in ([], *(cls.command.split() for cls in COMMANDS)):
        found += offences(" ".join(CliRunner().invoke(app, [*command, "--help"]).output.split()))
    assert not found


@pytest.mark.parametrize("folder", SOURCE)
def test_source(folder: str) -> None:
    """Reports, errors, progress and docstrings."""
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    found = {
        file.relative_to(PACKAGE).as_posix(): [one for text in strings(file) for one in offences(text)]
        for file in files
    }
    assert not {name: made for name, made in found.items() if made}


def test_the_list_finds_what_it_is_for() -> None:
    """Each example of a text that was changed."""
    bad = (
        "0.1 nats a token",
        "the systems parted at block 3",
        "is surely worse",
        "the cost is told",
        "channels can't stand it",
    )
    assert all(offences(text) for text in bad)
    assert not offences("0.1 nats per token; they diverge at block 3, significantly; this is reported.")
