"""The one reader of reports: JSON to a typed value, or one line that says what does not fit.

A report is data from outside. Its version is checked first; then every part must have the type it is written with
(jsonform.py), layers must be layers of the model, and an analysis of layers has all of them. No report is half
understood.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from noisescope.diagnosis.report import SCHEMA_VERSION, Robustness
from noisescope.errors import InvalidInput
from noisescope.jsonform import Json, from_json, schema_of
from noisescope.reports.values import DiagnosisReport

V = TypeVar("V")
MADE = "noisescope diagnose"
LARGEST = 2**53  # beyond it JSON readers disagree on whole numbers
MOST_BLOCKS = 100_000
LONGEST = 240  # characters of an error, beside the name of the file


def read_report(path: str | Path) -> Json:
    """What a report.json holds, or that of a folder: of any kind, not checked yet."""
    file = Path(path) / "report.json" if Path(path).is_dir() else Path(path)
    try:
        return parsed(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInput(f"there is no report at {path}: give a report.json or the folder that holds it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(
            f"{file} is no report: {_line(str(error))}. Give the report.json that `{MADE} MODEL -o DIR` writes"
        ) from None


def parsed(text: str) -> Json:
    """JSON as the standard has it: finite numbers, each key once."""
    return json.loads(
        text, parse_constant=_refused, parse_float=_finite, parse_int=_counted, object_pairs_hook=_each_once
    )


def value_of(data: Json, kinds: Mapping[str, type[V]], where: str, *, made: str = MADE) -> V:
    """The value that a report's JSON stands for. `kinds` are its possible types, by a key that only that one has."""
    if not isinstance(data, Mapping) or "schema_version" not in data:
        raise InvalidInput(f"{where} is JSON, but no report of noisescope (it has no schema_version)")
    found = data["schema_version"]
    if type(found) is not int or found != SCHEMA_VERSION:
        first = type(found) is int and found == 1
        release = "noisescope 0.1 (report version 1)" if first else f"another noisescope (report version {found!r})"
        raise InvalidInput(
            f"{where} was written by {_line(release)}; this version reads {SCHEMA_VERSION}. Run `{made}` again to "
            "write a new one"
        )
    kind = next((kind for key, kind in kinds.items() if key in data), None)
    if kind is None:
        raise InvalidInput(f"{where} is not a whole report: it has no {' and no '.join(map(repr, kinds))}")
    try:
        value = from_json(kind, data, "report")
        if isinstance(value, DiagnosisReport):
            _check_layers(value)
    except InvalidInput as error:
        raise InvalidInput(f"{where} is not a whole report: {_line(str(error))}") from None
    return value


def _check_layers(report: DiagnosisReport) -> None:
    """Every layer that a report names is one of its model's, and a layer analysis has a row for each."""
    blocks = report.run.model.blocks
    if not 0 < blocks <= MOST_BLOCKS:
        raise InvalidInput(f"report.run.model.blocks: 1 to {MOST_BLOCKS} blocks were expected, got {blocks}")
    for where, layers in _named_layers(report):
        if list(layers) != sorted(layers) or any(not 0 <= layer < blocks for layer in layers):
            raise InvalidInput(f"report.{where}: the model has layers 0 to {blocks - 1}, got {list(layers)[:8]}")
    rows = None if report.layer_analysis is None else [row.layer for row in report.layer_analysis.layers]
    if rows is not None and rows != list(range(blocks)):
        raise InvalidInput(
            f"report.layer_analysis.layers: a row for each of {blocks} layers was expected, got {rows[:8]}"
        )


def _named_layers(report: DiagnosisReport) -> Iterator[tuple[str, Iterable[int]]]:
    if section := report.layer_analysis:
        yield from (
            (f"layer_analysis.windows[{i}]", (w.start_layer, w.end_layer)) for i, w in enumerate(section.windows)
        )
        yield from ((f"layer_analysis.layers[{i}]", (row.layer,)) for i, row in enumerate(section.layers))
        yield from ((f"layer_analysis.map[{i}]", (row.layer,)) for i, row in enumerate(section.map))
        for i, point in enumerate(section.avalanche_points):
            yield f"layer_analysis.avalanche_points[{i}]", (point.start, point.end)
            yield f"layer_analysis.avalanche_points[{i}].common", point.common
        for i, rule in enumerate(section.point_rule_avalanches):
            yield f"layer_analysis.point_rule_avalanches[{i}]", (rule.start, rule.end)
    if report.channel_analysis:
        for name, channels in report.channel_analysis.per_layer.items():
            if isinstance(channels.layer, int):
                yield f"channel_analysis.per_layer.{name}", (channels.layer,)
    for i, finding in enumerate(report.findings):
        yield f"findings[{i}].target.layers", finding.target.layers
    for i, finding in enumerate(report.executive_summary.top_findings):
        yield f"executive_summary.top_findings[{i}].target.layers", finding.target.layers
    if report.format_scores:
        for i, module in enumerate(report.format_scores.modules):
            yield f"format_scores.modules[{i}].place", (module.place,)


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _counted(digits: str) -> int:
    if len(digits) > 17 or abs(int(digits)) > LARGEST:
        raise ValueError(f"the whole number {digits[:20]} is too large")
    return int(digits)


def _each_once(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:40]!r} occurs twice")
    return found


def _line(text: str) -> str:
    """One line that can be printed, its middle left out where it is long."""
    line = "".join(sign if sign.isprintable() else "?" for sign in " ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 3 :]}"


# The JSON Schema of report.json (draft 2020-12), derived from the types. Published in docs/.


TITLE = "noisescope report"


def schema() -> dict[str, Json]:
    """A diagnosis, or accuracy at noise levels."""
    kinds = [schema_of(kind, title=TITLE) for kind in (DiagnosisReport, Robustness)]
    definitions = {name: part for kind in kinds for name, part in kind["$defs"].items()}
    for kind in kinds:
        named = definitions[kind["$ref"].removeprefix("#/$defs/")]
        named["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    return {
        "$schema": kinds[0]["$schema"],
        "title": TITLE,
        "anyOf": [{"$ref": kind["$ref"]} for kind in kinds],
        "$defs": {name: definitions[name] for name in sorted(definitions)},
    }
