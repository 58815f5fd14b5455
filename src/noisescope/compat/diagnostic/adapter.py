"""Runs one part of a diagnosis on a model, and returns rows in the shape of the original method notes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from noisescope import api
from noisescope.data.dataset import DataSet
from noisescope.diagnosis.context import GROUP, StudyContext
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.model.loading import Subject, wrap
from noisescope.reports.saved_report import Report, read_report
from noisescope.sites import GROUPS, canonical_operator
from noisescope.trials import Results, Trial

Row = dict[str, Any]
# What a measured row of the notes holds; None where it could not be measured.
ROW_KEYS = ("degradation", "sensitivity_score", "baseline_acc", "noisy_acc", "total_injections")


@dataclass(frozen=True)
class Question:
    """A part of a diagnosis: the trials it needs, and what it concludes from them."""

    propose: Callable[[StudyContext, Results], list[Trial]]
    answer: Callable[[StudyContext, Results], Any]

    def conclude(self, context: StudyContext, results: Results, notes: Sequence[str] = ()) -> Any:
        return self.answer(context, results)


def ask(
    model: Subject | nn.Module,
    data: Any,
    question: Question,
    *,
    options: api.Options | None = None,
    settings: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Run it on a model and data; `more` are keywords of `diagnose`, `settings` are other fields of Settings."""
    prepared = api.prepare_diagnosis(subject_of(model), batches_of(data), **more)
    context = prepared.context
    context = replace(context, settings=replace(context.settings, **settings or {}))
    return replace(prepared, context=context).run(question, options or api.Options())[1]


def subject_of(model: Subject | nn.Module) -> Subject:
    return model if isinstance(model, Subject) else wrap(model)


def model_of(model: Subject | nn.Module) -> nn.Module:
    return model.model if isinstance(model, Subject) else model


def batches_of(data: Any) -> Any:
    """Batches as a list: a loader may shuffle, a generator runs out, and all noise must see the same samples."""
    if data is None or isinstance(data, (str, Path, DataSet, Tensor, Mapping)):
        return data
    return list(data) if isinstance(data, Iterable) else data


def full_report(report: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """noisescope's own report from that of `IntegratedDiagnostic`, in memory or in a file; another one unchanged."""
    found = read_report(report) if isinstance(report, (str, Path)) else report
    if not isinstance(found, Mapping):
        raise InvalidInput(f"a report must be a dictionary or the path of a report.json; got a {type(found).__name__}")
    full: Mapping[str, Any] = found.get("full", found)
    return full


def diagnosis_in(report: Mapping[str, Any]) -> Diagnosis:
    """The diagnosis inside noisescope's own report."""
    return report.diagnosis if isinstance(report, Report) else Report.from_data(dict(report), "the report").diagnosis


def layer_of(module: str) -> int | None:
    """The block that a dotted name such as model.layers.9.mlp.down_proj is in; None where it has no number.

    For reports that say no layer themselves. A number counts as a whole: layer 1 is not layer 11.
    """
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
    return None if found is None else int(found[1])


def ends_of(label: str) -> tuple[int, int]:
    """First and last layer of a window by its label, "L9-11"."""
    found = re.fullmatch(r"L(\d+)-L?(\d+)", label)
    if found is None:
        raise InvalidInput(f"the report names {label!r}, which is not a range of layers such as L9-11")
    return int(found[1]), int(found[2])


def our_name(operator: str) -> str:
    """noisescope's name for an operator of the notes, where "matmul" means every matrix product."""
    name = canonical_operator(operator)
    return GROUP if name == "matmul" else name


def notes_name(operator: str) -> str:
    return {GROUP: "matmul", "norm": "layernorm"}.get(operator, operator)


def value_of(row: Any) -> Any:
    """The number of an estimate in JSON form; a bare number, or None, unchanged."""
    return row["value"] if isinstance(row, Mapping) else row


def loss_of(row: Mapping[str, Any]) -> float | None:
    """The degradation of a row, whether it is a bare number or has an interval; None where there is none."""
    loss: float | None = value_of(row.get("degradation"))
    return loss


def flat(row: Mapping[str, Any]) -> Row:
    """A row with `degradation` as a number, and its interval beside it."""
    loss = {"degradation": loss_of(row), "degradation_interval": row.get("degradation")}
    return {**dict.fromkeys(ROW_KEYS), **row, **loss}


def operator_rows(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Row]:
    """Operators under the notes' names, without those the model lacks; products are in `parts` of "matmul"."""
    present = {name: flat(row) for name, row in rows.items() if row["evidence"] != "absent"}
    parts = GROUPS[GROUP][0] if GROUP in present else frozenset()
    found = {notes_name(name): {"operator": name, **row} for name, row in present.items() if name not in parts}
    if parts & set(present):
        found["matmul"]["parts"] = {name: row for name, row in present.items() if name in parts}
    return found


def window_rows(rows: Iterable[Mapping[str, Any]]) -> dict[str, Row]:
    """Windows by their label, "L9-11"."""
    return {row["layer_range"]: flat(row) for row in rows}
