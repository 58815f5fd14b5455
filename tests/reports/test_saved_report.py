"""A report.json is read whole or refused in one line: mutated in hundreds of ways, it is never half understood."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from noisescope.diagnosis.report import Robustness
from noisescope.errors import InvalidInput
from noisescope.reports.saved_report import DiagnosisReport, Report, schema

MUTATIONS = 150
DROP = object()
CHANNELS = ("channel_analysis", "per_layer", "model.layers.0.mlp.down_proj")


def parts_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every part of a JSON value, leaves and containers."""
    if path:
        yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in pairs:
        yield from parts_of(member, (*path, name))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def mutated(data: Any, path: tuple[Any, ...], change: Any) -> Any:
    found = copy.deepcopy(data)
    holder = at(found, path[:-1])
    if change is DROP:
        del holder[path[-1]]
    else:
        holder[path[-1]] = change
    return found


def changes_of(value: Any, draw: random.Random) -> tuple[str, Any]:
    """What may have happened to one part."""
    wrong = [None, True, -1, 3.7, "text", [], {}, [value], {"value": value}, "x" * 5000, "line\nbreak\x1b[31m"]
    numbers = [float("nan"), float("inf"), 10**400, -(10**18), 2**60, 1e308, "1e999"]
    kind = draw.choice(("drop", "type", "extra", "number"))
    if kind == "extra" and isinstance(value, dict):
        return kind, {**value, draw.choice(("unknown", "x" * 5000, "a\nb")): 1}
    if kind == "number":
        return kind, draw.choice(numbers)
    return (kind, DROP) if kind == "drop" else ("type", draw.choice(wrong))


def read(text: str, folder: Path) -> Report | str:
    """The report, or what the refusal says."""
    (folder / "report.json").write_text(text, encoding="utf-8", newline="")
    try:
        return Report.load(folder)
    except InvalidInput as error:
        return str(error)


def test_a_mutated_report_is_refused_in_a_line_or_read_as_it_stands(made: DiagnosisReport, tmp_path: Path) -> None:
    """Many changes: a key dropped, a wrong type, an unknown key, NaN, infinity, numbers beyond any use."""
    draw = random.Random(3)
    data = json.loads(Report(made).to_json())
    paths = list(parts_of(data))
    refused = 0
    for number in range(MUTATIONS):
        path = draw.choice(paths)
        kind, change = changes_of(at(data, path), draw)
        changed = mutated(data, path, change)
        text = json.dumps(changed).replace('"1e999"', "1e999")
        found = read(text, tmp_path)
        if isinstance(found, str):
            refused += 1
            message = found.replace(str(tmp_path), "")
            assert "\n" not in found and found.isprintable() and len(message) < 300, (path, kind, found)
            continue
        assert found.to_json() == Report.from_data(json.loads(found.to_json()), "again").to_json()
        assert json.loads(found.to_json()) == json.loads(text), (path, kind)  # nothing lost, nothing guessed
        if number % 10 == 0:
            found.to_markdown()
    assert refused > MUTATIONS / 2


def test_every_dropped_key_is_named_with_its_path(made: DiagnosisReport) -> None:
    """Each field of each value is needed: without it the report is refused, and the line says where it was."""
    data = json.loads(Report(made).to_json())
    open_ended = ("operator_analysis", "correlations", "per_layer", "places", "versions", "uniform", "formats",
                  "fisher", "details", "smallest_visible", "assignment", "counts", "critical_thresholds", "precision",
                  "predicted_kl", "kl", "accuracy", "metrics", "layers", "coverage", "options")  # fmt: skip
    fields = [
        path
        for path in parts_of(data)
        if isinstance(path[-1], str) and len(path) > 1 and path[-2] not in open_ended and isinstance(path[-2], str)
        if path[-2:] not in (("run", "command"), ("data", "available"))  # older files have none
    ]
    assert len(fields) > 200
    for path in random.Random(1).sample(fields, 60):
        with pytest.raises(InvalidInput, match=rf"report\.json is not a whole report: report.*'{path[-1]}'"):
            Report.from_data(mutated(data, path, DROP), "report.json")


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        (("operator_analysis", "gemm", "degradation", "n"), "64", "operator_analysis.gemm.degradation.n: a whole num"),
        (("layer_analysis", "windows", 0, "start_layer"), "0", r"windows\[0\].start_layer: a whole number was expec"),
        (("layer_analysis", "windows", 1, "end_layer"), 10**9, r"windows\[1\]: the model has layers 0 to 3, got"),
        (("layer_analysis", "layers", 0, "layer"), -1, r"layers\[0\]: the model has layers 0 to 3"),
        (("layer_analysis", "map", 0, "layer"), 4, r"map\[0\]: the model has layers 0 to 3"),
        (("layer_analysis", "avalanche_points", 0, "common"), [1, 0], r"points\[0\].common: the model has layers"),
        (("layer_analysis", "layers"), [], r"analysis.layers: a row for each of 4 layers was expected, got \[\]"),
        (("layer_analysis", "layers", 1, "layer"), 0, r"a row for each of 4 layers was expected, got \[0, 0, 2, 3\]"),
        ((*CHANNELS, "layer"), 4, "down_proj: the model has layers"),
        ((*CHANNELS, "layer"), "attic", "layer: 'embed' or 'ro"),
        (("findings", 0, "target", "layers"), [0, 99], r"findings\[0\].target.layers: the model has layers"),
        (("run", "model", "blocks"), 10**9, "blocks: 1 to 100000 blocks were expected"),
        (("findings", 0, "severity"), "AWFUL", r"findings\[0\].severity: 'CRITICAL' or 'HIGH' or .*, got \"AWFUL\""),
        (("recommendations", 0, "priority"), "now", r"recommendations\[0\].priority: 'CRITICAL' or 'HIGH' or 'MEDIUM'"),
        (("layer_analysis", "windows", 0, "band"), "AWFUL", r"windows\[0\].band: 'LOW' or 'ROBUST' .*got \"AWFUL\""),
        (("operator_analysis", "gemm", "band_upper"), "", r"gemm.band_upper: 'LOW' or .* was expected, got \"\""),
        (("metrics", "secondary", "snr_band"), "HIGH", "snr_band: 'POOR' or 'FAIR' or 'GOOD' or 'EXCELLENT' or"),
        (("metrics", "secondary", "gradient_ratio", "point_band"), "GOOD", "point_band: 'CRITICAL' or 'CONCERNING'"),
        (("executive_summary", "overall_risk_level"), "SEVERE", "level: 'LOW' or 'MODERATE' or 'HIGH' or 'not meas"),
        (("executive_summary", "report_risk", "level"), "CRITICAL", "report_risk.level: 'LOW' or 'MODERATE' or"),
        (("findings", 0, "target", "place"), "attic", "target.place: 'embed' or 'rotary' or 'final_norm' or 'lm_head'"),
        (("migration_plan", "priorities", 1, "evidence", 0, "place"), "attic", r"evidence\[0\].place: 'embed' or"),
        (("layer_analysis", "places", "attic"), {}, "places.attic: 'embed' or 'rotary' .* was expected, got \"attic\""),
        (("locate", "verdict"), "perhaps", "report.locate.verdict: 'healthy' or 'faulty' or 'undecided' was expec"),
        (("executive_summary", "risk_meaning"), None, "executive_summary.risk_meaning: text was expected, got null"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(made: DiagnosisReport, path: Any, change: Any, message: str) -> None:
    """The part by its path, what was expected, what came."""
    data = mutated(json.loads(Report(made).to_json()), path, change)
    with pytest.raises(InvalidInput, match=message):
        Report.from_data(data, "report.json")


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (1, r"^out/report.json was written by noisescope 0.1 \(report version 1\); this version reads 2. Run "
            "`noisescope diagnose` again"),
        (3, r"written by another noisescope \(report version 3\); this version reads 2"),
        ("2", "report version '2'"),
        (2.0, "report version 2.0"),
        (True, "report version True"),
        (None, "report version None"),
        ("x" * 9000, "report version 'xxx"),
    ],
)  # fmt: skip
def test_another_version_is_refused_before_anything_else(version: Any, message: str) -> None:
    """Whatever else the file holds: an old report is not half understood, and the line says what to do."""
    with pytest.raises(InvalidInput, match=message) as caught:
        Report.from_data({"schema_version": version, "anything": object()}, "out/report.json")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a valid report"),
        ("[]", "no schema_version"),
        ('{"schema_version": 2}', "it has no 'executive_summary' and no 'robustness'"),
        ('{"schema_version": 2, "schema_version": 2}', '"schema_version" occurs twice'),
        ('{"schema_version": 2, "x": NaN}', "NaN is not a number in JSON"),
        ('{"schema_version": 2, "x": 1e999}', "the number 1e999 is too large"),
        ('{"schema_version": 2, "x": 1' + "0" * 5000 + "}", "has 5001 digits, at most 100"),
        ("[" * 100_000, "is not a valid report"),
        ("\ufeff{}", "is not a valid report"),
    ],
    ids=["empty", "a list", "nothing in it", "a key twice", "NaN", "infinite", "many digits", "deep", "a mark"],
)
def test_what_is_not_json_is_no_report(text: str, message: str, tmp_path: Path) -> None:
    """Numbers that JSON does not have, keys that occur twice, nesting without end."""
    found = read(text, tmp_path)
    assert isinstance(found, str) and message in found and "\n" not in found


def test_a_report_survives_the_trip(made: DiagnosisReport, made_curve: Robustness, tmp_path: Path) -> None:
    """Written and read back, the value is equal: types, tuples, None and all."""
    for value in (made, made_curve):
        report = Report(value)
        report.save(tmp_path, formats=["json"])
        again = Report.load(tmp_path / "report.json")
        assert again.value == value and dict(again) == dict(report)


def test_a_report_reads_as_its_json(made: DiagnosisReport) -> None:
    """By the published keys; the typed value beside it."""
    report = Report(made)
    assert report["executive_summary"]["top_findings"][0]["component"] == "layers 0 to 1"
    assert report["executive_summary"]["top_findings"][0]["statement"] == report.diagnosis.findings[0].statement
    assert report.data is report.data and len(report) == len(list(report))
    assert report["migration_plan"]["priorities"][0]["layers"] == [0]
    assert repr(report) == "<Report: HIGH>"


def test_a_curve_is_no_diagnosis(made_curve: Robustness) -> None:
    """What needs a diagnosis refuses a robustness curve in a line that says what to give."""
    with pytest.raises(InvalidInput, match=r"robustness at 3 noise levels.*`noisescope diagnose`"):
        _ = Report(made_curve).diagnosis


def test_a_report_from_before_a_field_was_added_is_read(made: DiagnosisReport) -> None:
    """Without the command and the count of samples there are fewer next steps, and nothing else."""
    older = json.loads(Report(made).to_json())
    del older["run"]["command"], older["run"]["data"]["available"]
    found = Report.from_data(older, "older").diagnosis
    assert found.run.command is None and found.run.data.available is None
    assert "### What to do" in Report(found).to_markdown() and "noisescope gate" in Report(found).to_markdown()
    assert {"command", "store"} & set(schema()["$defs"]["Run"]["required"]) == {"store"}
