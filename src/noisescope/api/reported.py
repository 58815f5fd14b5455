"""What a report was made on, found again."""

from __future__ import annotations

from pathlib import Path

from noisescope import demo
from noisescope.data import DataSet, built_in
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.plans.comparable import refuse_architecture
from noisescope.quantisation.scores import is_planned, weight_of
from noisescope.reports.report import Report, diagnosis_of

BUILT_IN = "built-in text"


def data_of(report: Report | Diagnosis) -> DataSet | str | Path:
    """What `diagnose` takes as data: the same file, the demo's problems, or the built-in text."""
    source = diagnosis_of(report).run.data.source
    if source == "demo":
        return demo.test_file()
    if source == BUILT_IN:
        return built_in()
    if not Path(source).exists():
        raise InvalidInput(f"the report was made on {source}, which is not there: give the data with --data")
    return source


def check_model(report: Report | Diagnosis, subject: Subject) -> None:
    """Refuse a model of another architecture or depth than the report's; its weights may be others."""
    model = diagnosis_of(report).run.model
    refuse_architecture(model, subject.anatomy.architecture, len(subject.anatomy.blocks))


def check_sizes(report: Report | Diagnosis, subject: Subject) -> None:
    """Refuse, too, a model whose linears have other sizes than the report's: plans count its weights and channels."""
    found = diagnosis_of(report)
    check_model(found, subject)
    modules = dict(subject.model.named_modules())
    shapes = {unit.module: weight_of(modules[unit.module]).shape for unit in subject.anatomy.units if is_planned(unit)}
    for scored in found.format_scores.modules if found.format_scores is not None else ():
        outputs, inputs = shapes.get(scored.module, (0, 0))
        _refuse_size(subject, f"weights in {scored.module}", scored.parameters, outputs * inputs)
    for name, row in found.channel_analysis.per_layer.items() if found.channel_analysis is not None else ():
        if name in shapes:
            _refuse_size(subject, f"output channels in {name}", row.total_channels, shapes[name][0])


def _refuse_size(subject: Subject, what: str, reported: int, found: int) -> None:
    if found != reported:
        raise InvalidInput(
            f"the report counts {reported} {what}, and {subject.source} has {found}: it is of another model. Make a "
            "report of this one: noisescope diagnose MODEL -o DIR"
        )


def other_numbers(report: Report | Diagnosis, fingerprint: str) -> list[str]:
    """A note where a model of the same sizes has other numbers than the report's."""
    if diagnosis_of(report).run.model.fingerprint == fingerprint:
        return []
    return [
        "the model's numbers are not those that the report was made on (other weights, another dtype or config): what "
        "the report predicts may not hold for it"
    ]
