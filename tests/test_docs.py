"""What README and docs tell people to type works; what they link to is there."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noisescope.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
BLOCK = re.compile(r"(?P<mark><!-- not run[^>]*-->\n)?```(?P<kind>bash|python)\n(?P<text>.*?)```", re.DOTALL)
Stores = dict[tuple[str, ...], bytes]  # the command without its folder -> what it stored
ELSEWHERE = {"noisescope demo": "tests/cli/test_demo.py"}  # a command that has a test of its own


def blocks(page: Path, kind: str) -> list[str]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [match["text"] for match in found if match["kind"] == kind and not match["mark"]]


def commands(page: Path) -> Iterator[list[str]]:
    """Command lines of a page's bash blocks; a backslash joins lines, comments go."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.fixture(scope="module")
def stores() -> Stores:
    return {}


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run(page: Path, stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command of a page, in its order, in one folder, as it stands there; a diagnosis that another page asks for
    in the same words resumes from that one's store."""
    monkeypatch.chdir(tmp_path)
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for words in commands(page):
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        elif words[0] == "cat" or words[0] in (".", "pip", "python", "python3", "git", "export"):
            continue
        elif " ".join(words) in ELSEWHERE:
            assert (ROOT / ELSEWHERE[" ".join(words)]).exists()
        else:
            assert words[0] == "noisescope", f"{page.name}: can't run {' '.join(words)}; mark it <!-- not run -->"
            asked, stored = tuple(words[:-1]), Path(words[-1]) / "run.sqlite"
            if asked in stores and not stored.exists():
                stored.parent.mkdir()
                stored.write_bytes(stores[asked])
            result = CliRunner().invoke(app, words[1:])
            assert result.exit_code == 0, f"{page.name}: {' '.join(words)}\n{result.output}"
            if words[1] == "diagnose" and words[-2] == "-o":
                stores[asked] = stored.read_bytes()


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python blocks of a page, one after the other in one namespace: later ones build on earlier ones."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Relative links and pictures are files of the repository, and anchors are headings."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}"
        if anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, target


def test_every_page_is_in_the_navigation_and_on_the_start_page() -> None:
    """mkdocs.yml orders the site; docs/index.md is for readers of the repository."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    start = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert not [page for page in pages if not re.search(rf": {re.escape(page)}$", navigation, re.MULTILINE)]
    assert not [page for page in pages if f"]({page}" not in start]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_list_starts_after_an_empty_line(page: Path) -> None:
    """Otherwise the site shows it as part of the paragraph."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^(?![-*\d|#<]|\s).+\n(?:- |1\. ).*", prose, re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="pip install 'noisescope[docs]'")
def test_the_site_builds(tmp_path: Path) -> None:
    """With strict links, as `make docs` (--quiet would hide what --strict counts); nothing is fetched."""
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    start = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert not re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"?https?://[^>]*", start)
