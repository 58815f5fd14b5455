"""One report, four forms: they agree, and the JSON is what the schema says."""

from __future__ import annotations

import copy
import json
import re
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import pypdf
import pytest
import torch

import noisescope as ns
from noisescope import api
from noisescope.errors import InvalidInput
from noisescope.reports.document import Bullets, Chart, Curve, Document, HeatMap, Paragraph, Table, Verdict
from noisescope.reports.markdown import escape
from noisescope.reports.report import Report
from noisescope.reports.schema import schema
from noisescope.testing import tiny_model

BATCHES = list(torch.randint(1, 60, (8, 10), generator=torch.Generator().manual_seed(4)).split(4))
QUICK: dict[str, Any] = {"seeds": 2, "metric": "agreement", "samples": 8}
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    subject = ns.wrap(tiny_model("llama", layers=4))
    return {
        "standard": api.diagnose(subject, BATCHES, window=2, **QUICK),
        "screen": api.diagnose(subject, BATCHES, effort="screen", **QUICK),
        "one level": api.diagnose(subject, BATCHES, levels=("operator",), **QUICK),
        "robustness": api.robustness(subject, BATCHES, noise_levels=(0, 0.05), **QUICK),
    }


KINDS = ("standard", "screen", "one level", "robustness")


def texts(document: Document) -> list[str]:
    """Every text of a document that all readable forms have to show."""
    found = [text for pair in document.facts for text in pair]
    for section in document.sections:
        found.append(section.title)
        for block in section.blocks:
            if isinstance(block, Paragraph):
                found += [block.lead, block.text]
            elif isinstance(block, Bullets):
                found += [text for item in block.items for text in (item.lead, item.text)]
            elif isinstance(block, Verdict):
                found += [block.level.text, block.meaning, *block.reasons]
            elif isinstance(block, Table):
                found += [*block.head, *(cell.text for row in block.rows for cell in row)]
            elif isinstance(block, HeatMap):
                found += [*block.rows, *block.columns, *(c.text for row in block.cells for c in row if c)]
            else:
                assert isinstance(block, (Chart, Curve))  # their numbers stand in a table, too
    return [text for text in found if text]


def squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_says_every_number(reports: dict[str, Report], kind: str) -> None:
    """Markdown, HTML and PDF hold every text of the document; charts show nothing that no table has."""
    report = reports[kind]
    document = report.document()
    markdown, page = report.to_markdown(), report.to_html()
    pages = pypdf.PdfReader(BytesIO(report.to_pdf())).pages
    printed = squeezed("".join(page.extract_text() for page in pages))
    import html

    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    for text in texts(document):
        assert escape(text) in markdown, text
        assert squeezed(text) in squeezed(shown), text
        missing = [number for number in NUMBER.findall(text) if number not in printed]
        assert not missing, (text, missing)  # a PDF wraps long texts between lines and columns; numbers stay whole
    tabled = {
        cell.text for s in document.sections for b in s.blocks if isinstance(b, Table) for r in b.rows for cell in r
    }
    for section in document.sections:
        for block in section.blocks:
            bars = block.bars if isinstance(block, Chart) else ()
            bars += tuple(bar for _, bar in block.points) if isinstance(block, Curve) else ()
            assert {bar.cell.text for bar in bars} <= tabled


@pytest.mark.parametrize("kind", KINDS)
def test_cells_are_the_jsons_numbers(reports: dict[str, Report], kind: str) -> None:
    """The number behind a cell is one of the JSON's, unrounded, and its text begins with that number in words."""
    known: set[float] = set()

    def walk(value: Any) -> None:
        if isinstance(value, bool) or value is None:
            return
        if isinstance(value, (int, float)):
            known.add(float(value))
        for member in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(member)

    walk(json.loads(reports[kind].to_json()))
    for layer in range(64):
        known.add(float(layer))
    cells = [
        cell
        for section in reports[kind].document().sections
        for block in section.blocks
        if isinstance(block, (Table, HeatMap))
        for row in (block.rows if isinstance(block, Table) else block.cells)
        for cell in row
        if cell is not None and cell.value is not None
    ]
    assert len(cells) > 3
    for cell in cells:
        assert cell.value in known, cell
        first = NUMBER.search(cell.text)
        assert first is not None, cell
        scale = 100 if cell.text.split("[")[0].strip().endswith("%") else 1
        assert float(first.group()) == pytest.approx(scale * cell.value, rel=6e-3, abs=0.051), cell


@pytest.mark.parametrize("kind", KINDS)
def test_the_json_validates(reports: dict[str, Report], kind: str) -> None:
    """Every kind of report is what the schema says, after a trip through text."""
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    assert [e.message for e in validator.iter_errors(json.loads(reports[kind].to_json()))] == []


def test_the_schema_is_not_empty_talk(reports: dict[str, Report]) -> None:
    """A missing n, a misspelt key, a wrong type and a missing part are all refused."""
    validator = jsonschema.Draft202012Validator(schema())
    whole = json.loads(reports["standard"].to_json())

    def broken(change: Any) -> bool:
        changed = copy.deepcopy(whole)
        change(changed)
        return not validator.is_valid(changed)

    assert broken(lambda r: r["operator_analysis"]["linear"]["degradation"].pop("n"))
    assert broken(lambda r: r["operator_analysis"]["linear"].update(degradatoin={}))
    assert broken(lambda r: r["layer_analysis"]["windows"][0].update(start_layer="0"))
    assert broken(lambda r: r["executive_summary"].pop("next_step"))
    assert broken(lambda r: r.pop("run"))
    assert broken(lambda r: r.update(schema_version=2))


def test_the_published_schema_is_this_one() -> None:
    """docs/report.schema.json is what `noisescope report --schema` prints."""
    published = Path(__file__).parents[2] / "docs" / "report.schema.json"
    assert json.loads(published.read_text()) == schema()


def test_saving_some_forms(reports: dict[str, Report], tmp_path: Path) -> None:
    """Only what is asked for is written; an unknown form says which there are."""
    paths = reports["screen"].save(tmp_path, formats=("md", "html"))
    assert (
        sorted(path.name for path in tmp_path.iterdir())
        == ["report.html", "report.md"]
        == sorted(p.name for p in paths)
    )
    with pytest.raises(InvalidInput, match=r"docx.*json, md, html, pdf"):
        reports["screen"].save(tmp_path, formats=("docx",))
    assert Report.load(reports["screen"].save(tmp_path)[0]).same_as(reports["screen"])


def test_plain_words_say_no_more_than_was_measured(reports: dict[str, Report]) -> None:
    """With random weights nothing is sure, and the paragraph for stakeholders says so."""
    words = reports["screen"]["executive_summary"]["in_plain_words"]
    assert set(words) == {"risk", "work"} and "can't say" in words["risk"]
