"""benchmarks/README.md explains every results file and every script, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")


def test_every_result_is_on_the_page() -> None:
    assert not {path.name for path in (FOLDER / "results").glob("*.json")} - set(re.findall(r"\w+\.json", PAGE))


def test_every_script_is_on_the_page() -> None:
    """A script is a file that runs by itself; the others are its parts."""
    scripts = {path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")}
    assert scripts and not scripts - set(re.findall(r"\w+\.py", PAGE))


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGE):
        path, _, anchor = target.partition("#")
        file = FOLDER / path if path else FOLDER / "README.md"
        headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
        slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in slugs, target
