"""The JSON Schema of report.json (draft 2020-12), derived from the types. Published in docs/."""

from __future__ import annotations

from noisescope.diagnosis.report import SCHEMA_VERSION, Robustness
from noisescope.jsonform import Json, schema_of
from noisescope.reports.values import DiagnosisReport

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
