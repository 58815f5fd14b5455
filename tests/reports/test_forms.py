"""One report, four forms: they agree, and the JSON is what the schema says."""

from __future__ import annotations

import copy
import html
import json
import re
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import jsonschema
import pypdf
import pytest
import torch

import noisescope as ns
from noisescope import text_escaping
from noisescope.diagnosis.report import Robustness
from noisescope.errors import InvalidInput
from noisescope.reports.document import (
    Bullets,
    Cell,
    Chart,
    Columns,
    Command,
    Curve,
    Details,
    Document,
    HeatMap,
    HeatTable,
    Paragraph,
    Table,
    Verdict,
    every_block,
)
from noisescope.reports.saved_report import DiagnosisReport, Report, schema
from noisescope.testing import tiny_model

BATCHES = list(torch.randint(1, 60, (8, 10), generator=torch.Generator().manual_seed(4)).split(4))
QUICK: dict[str, Any] = {"seeds": 2, "metric": "agreement", "samples": 8}
NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@pytest.fixture(scope="module")
def reports(made: DiagnosisReport, made_curve: Robustness) -> dict[str, Report]:
    subject = ns.wrap(tiny_model("llama", layers=4))
    standard = ns.diagnose(subject, BATCHES, window=2, **QUICK)
    return {
        "standard": standard,
        "screen": ns.diagnose(subject, BATCHES, effort="screen", **QUICK),
        "one level": Report(replace(standard.diagnosis, layer_analysis=None, channel_analysis=None, correlations={})),
        "robustness": ns.robustness(subject, BATCHES, noise_levels=(0, 0.05), **QUICK),
        "by hand": Report(made),
        "curve by hand": Report(made_curve),
    }


KINDS = ("standard", "screen", "one level", "robustness", "by hand", "curve by hand")


def texts(document: Document) -> list[str]:
    """Every text of a document that all readable forms have to show."""
    found = [text for pair in document.facts for text in pair]
    for section in document.sections:
        found.append(section.title)
        for block in every_block(section.blocks):
            if isinstance(block, Paragraph):
                found += [block.lead, block.text, block.note]
            elif isinstance(block, Bullets):
                found += [text for item in block.items for text in (item.tag.text, item.lead, item.text, item.note)]
            elif isinstance(block, Verdict):
                found += [block.level.text, block.meaning, *block.reasons]
            elif isinstance(block, Table):
                found += [*block.head, *(cell.text for row in block.rows for cell in row)]
            elif isinstance(block, HeatTable):
                heat = block.heat
                found += [*heat.rows, *heat.columns, *(c.text for row in heat.cells for c in row if c)]
            elif isinstance(block, Command):
                found.append(block.words)
            elif isinstance(block, Columns):
                found += [panel.title for panel in block.panels]
            else:  # the numbers of pictures stand in a table, too, and what is folded comes by itself
                assert isinstance(block, (Chart, Curve, HeatMap, Details))
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
    shown = squeezed(html.unescape(re.sub(r"<[^>]+>", "", page)))
    for text in texts(document):
        assert text_escaping.markdown(text) in markdown, text
        assert squeezed(text) in shown, text
        missing = [number for number in NUMBER.findall(text) if number not in printed]
        assert not missing, (text, missing)  # a PDF wraps long texts between lines and columns; numbers stay whole
    tabled = {cell.text for b in document.blocks() if isinstance(b, Table) for row in b.rows for cell in row}
    for block in document.blocks():
        bars = block.bars if isinstance(block, Chart) else ()
        if isinstance(block, Curve):  # the best mixes are drawn as a line, and their number is endless
            bars += tuple(bar for _, bar in (*block.marked, *(() if block.line else block.points)))
        assert {bar.cell.text for bar in bars} <= tabled
    assert document.command in html.unescape(re.sub(r"<[^>]+>", "", page)) and document.command in markdown


def numbers_in(value: Any) -> set[float]:
    """Every number of a JSON value."""
    if isinstance(value, dict):
        return {number for member in value.values() for number in numbers_in(member)}
    if isinstance(value, list):
        return {number for member in value for number in numbers_in(member)}
    return {float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else set()


def valued_cells(document: Document) -> list[Cell]:
    return [
        cell
        for block in document.blocks()
        if isinstance(block, (Table, HeatMap))
        for row in (block.rows if isinstance(block, Table) else block.cells)
        for cell in row
        if cell is not None and cell.value is not None
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_cells_are_the_jsons_numbers(reports: dict[str, Report], kind: str) -> None:
    """The number behind a cell is one of the JSON's, unrounded, and its text begins with that number in words."""
    known = numbers_in(json.loads(reports[kind].to_json())) | {float(layer) for layer in range(64)}
    cells = valued_cells(reports[kind].document())
    assert len(cells) > 3
    for cell in cells:
        assert cell.value in known, cell
        assert cell.value is not None
        first = NUMBER.search(cell.text)
        assert first is not None, cell
        scale = 100 if cell.shown.endswith("%") else 1
        assert float(first.group()) == pytest.approx(scale * cell.value, rel=6e-3, abs=0.051), cell


@pytest.mark.parametrize("kind", KINDS)
def test_the_json_validates(reports: dict[str, Report], kind: str) -> None:
    """Every kind of report is what the schema says, after a trip through text, and what the reader takes."""
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    data = json.loads(reports[kind].to_json())
    assert [e.message for e in validator.iter_errors(data)] == []
    assert Report.from_data(data, kind).value == reports[kind].value


def test_the_schema_refuses_what_the_reader_refuses(made: DiagnosisReport) -> None:
    """A missing n, a misspelt key, a wrong type, a missing part and another version."""
    validator = jsonschema.Draft202012Validator(schema())
    whole = json.loads(Report(made).to_json())

    def broken(change: Any) -> bool:
        changed = copy.deepcopy(whole)
        change(changed)
        with pytest.raises(InvalidInput):
            Report.from_data(changed, "changed")
        return not validator.is_valid(changed)

    assert validator.is_valid(whole)
    assert broken(lambda r: r["operator_analysis"]["gemm"]["degradation"].pop("n"))
    assert broken(lambda r: r["operator_analysis"]["gemm"].update(degradatoin={}))
    assert broken(lambda r: r["operator_analysis"]["gemm"].update(band="AWFUL"))
    assert broken(lambda r: r["executive_summary"].update(overall_risk_level="SEVERE"))
    assert broken(lambda r: r["layer_analysis"]["places"].update(attic=r["layer_analysis"]["places"]["lm_head"]))
    assert broken(lambda r: r["layer_analysis"]["windows"][0].update(start_layer="0"))
    assert broken(lambda r: r["executive_summary"].pop("next_step"))
    assert broken(lambda r: r.pop("run"))
    assert broken(lambda r: r.update(schema_version=1))


def test_the_published_schema_is_that_of_the_types() -> None:
    """docs/report.schema.json is what `noisescope report --schema` prints: write it again after a type has changed."""
    published = Path(__file__).parents[2] / "docs" / "report.schema.json"
    assert json.loads(published.read_text(encoding="utf-8")) == schema()


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
    assert dict(Report.load(reports["screen"].save(tmp_path)[0])) == dict(reports["screen"])


def test_plain_words_say_no_more_than_was_measured(reports: dict[str, Report]) -> None:
    """With random weights nothing is significant, and the paragraph for stakeholders says so."""
    words = reports["screen"].diagnosis.executive_summary.in_plain_words
    assert "can't tell" in words.risk and words.success == ""


def test_a_finding_states_a_number_that_its_table_shows(reports: dict[str, Report]) -> None:
    """One fact, one number: the size of every finding about a loss is in the row of its place."""
    found = reports["by hand"].diagnosis
    markdown = reports["by hand"].to_markdown()
    for finding in found.findings:
        if finding.unit == "share" and finding.size is not None and finding.size.value is not None:
            assert markdown.count(f"{100 * finding.size.value:.1f} %") > 1
