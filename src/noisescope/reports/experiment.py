"""The experiment on noise by training phase: its rows, and the document that they make up."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from noisescope.diagnosis.report import SCHEMA_VERSION
from noisescope.findings import finding
from noisescope.jsonform import Json
from noisescope.reports.cell_text import estimate, number, percent, span, table
from noisescope.reports.document import Bar, Block, Bullets, Cell, Chart, Document, Paragraph, Section
from noisescope.reports.saved_report import SavedReport
from noisescope.stats import Estimate
from noisescope.tables import Sheet, Table

LOGS = ("gradient_norm", "held_out")  # quantities that are compared as logs
_TONES = {"supported": "low", "refuted": "critical"}


@dataclass(frozen=True)
class ArmAccuracy(Estimate):
    """The accuracy of an arm at one noise level, and that of each of its seeds."""

    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True)
class InjectionCounts:
    forward: int
    backward: int


@dataclass(frozen=True)
class ArmTraining:
    """How an arm trained: geometric means over the second half; None where a run diverged."""

    diverged: int
    gradient_norm: float | None
    held_out_loss: float | None
    injections: InjectionCounts
    dose: float | None = None  # root mean square of the scale over the steps


@dataclass(frozen=True)
class ArmRow:
    """An arm in numbers; accuracy and retention by noise level."""

    name: str
    seeds: tuple[int, ...]
    accuracy: Mapping[str, ArmAccuracy]
    retention: Mapping[str, Estimate]
    training: ArmTraining
    earlier_epochs: tuple[Mapping[str, float], ...] = ()  # mean accuracy by noise level after each but the last


@dataclass(frozen=True)
class Needed:
    """The cheapest numbers of seeds and problems that would decide a criterion with this power."""

    seeds: int
    n: int
    power: float


@dataclass(frozen=True)
class JudgedCriterion:
    """A criterion with its verdict. `falsifies`: refuted, it falsifies the theory."""

    name: str
    statement: str
    quantity: str
    arms: tuple[str, str]
    noise_level: float
    region: tuple[float | None, float | None]
    estimate: Estimate
    seeds: int
    verdict: str
    would_decide: Needed | None
    falsifies: bool = False

    @property
    def as_log(self) -> bool:
        return self.quantity in LOGS


@dataclass(frozen=True)
class Theory:
    """The theory's verdict, and those of the criteria it follows from."""

    verdict: str
    because: Mapping[str, str]


@dataclass(frozen=True)
class Trained:
    """How many models were trained, failed, and were asked for."""

    done: int
    failed: int
    of: int


@dataclass(frozen=True)
class TaskSource:
    source: str


@dataclass(frozen=True)
class ProblemSource:
    source: str
    samples: int


@dataclass(frozen=True)
class TrainingSettings:
    """`completions` and `wear` are of training by rewards alone; `others` depend on the task."""

    method: str
    start: str
    steps: int
    batch: int
    rate: float
    completions: int | None
    wear: float | None
    others: Mapping[str, Json]


@dataclass(frozen=True)
class PhasesSettings:
    arms: tuple[str, ...]
    seeds: int
    noise_scale: float
    noise_levels: tuple[float, ...]
    noise_seeds: int
    operators: tuple[str, ...]
    factors: Mapping[str, float]
    training: TrainingSettings


@dataclass(frozen=True)
class PhasesRequest:
    """What an experiment was asked."""

    model: TaskSource
    data: ProblemSource
    settings: PhasesSettings
    device: str


@dataclass(frozen=True)
class PhasesCost:
    seconds: float
    training_seconds: float
    trials: int


@dataclass(frozen=True)
class PhasesRun(PhasesRequest):
    """An experiment that has ended, or was drawn from what is done."""

    cost: PhasesCost
    notes: tuple[str, ...]
    finished: str
    versions: Mapping[str, str]
    host: str


@dataclass(frozen=True, kw_only=True)
class PhasesResult:
    """Everything the experiment shows."""

    schema_version: int = SCHEMA_VERSION
    run: PhasesRun
    arms: tuple[ArmRow, ...]
    seeds: tuple[int, ...]
    n: int
    levels: tuple[float, ...]
    trained: Trained
    hypotheses: tuple[JudgedCriterion, ...]
    theory: Theory
    could_not_see: tuple[str, ...]


# -- the document: verdicts first, then arms, then how it was done


class PhasesReport(SavedReport[PhasesResult]):
    """Reads, prints and saves as a report does."""

    kinds: ClassVar = {"hypotheses": PhasesResult}
    command: ClassVar = "noisescope experiment phases"

    def __repr__(self) -> str:
        return f"<PhasesReport: {self.value.trained.done} of {self.value.trained.of} trained>"

    def document(self) -> Document:
        found = self.value
        run, settings, trained = found.run, found.run.settings, found.trained
        facts = (
            ("Task", f"{run.model.source}; {run.data.source}"),
            ("Trained", f"{trained.done} of {trained.of} models: {len(settings.arms)} arms x {settings.seeds} seeds"),
            ("Asked", f"{found.n} problems at each noise level, {settings.noise_seeds} draws of noise each"),
            ("Noise", f"relative Gaussian on {', '.join(settings.operators)}"),
        )
        sections = (
            Section("verdicts", "What it shows", tuple(_verdicts(found))),
            Section("arms", "Arms", tuple(_arms(found))),
            Section("method", "How it was done", tuple(_method(found))),
        )
        return Document("noisescope: noise in training, by phase", facts, sections, run.finished)

    def sheet(self) -> Sheet:
        found = self.value
        accuracy = [
            (arm.name, level, one.value, one.low, one.high, one.n)
            for arm in found.arms
            for level, one in arm.accuracy.items()
        ]
        columns = ("arm", "noise_level", "accuracy", "accuracy_low", "accuracy_high", "accuracy_n")
        tables = {"hypotheses": Table.of(JudgedCriterion, found.hypotheses), "arms": Table(columns, tuple(accuracy))}
        heads = {"name": "hypothesis", "statement": "", "estimate": "measured", "verdict": "verdict"}
        trained = f"{found.trained.done} of {found.trained.of} models trained."
        return Sheet(theory_line(found), tables, heads, (trained, *found.could_not_see))


def theory_line(report: PhasesResult) -> str:
    """The theory's verdict in a sentence."""
    return (
        f"The theory that backward noise regularises and forward noise makes models robust, by its own criteria: "
        f"{report.theory.verdict}."
    )


def verdict_line(row: JudgedCriterion) -> str:
    """A criterion in a line."""
    return f"{row.verdict}: {row.statement} ({quantity(row).text}{_more(row)})"


def quantity(row: JudgedCriterion) -> Cell:
    """The estimate in the criterion's own unit, with the interval that holds for all criteria together."""
    found = row.estimate
    if found.value is None or found.low is None or found.high is None:
        return Cell(found.note or "not measured", tone="unsure")
    if row.as_log:
        value, low, high = (math.exp(end) for end in (found.value, found.low, found.high))
        return Cell(f"factor {number(value)}", value, interval=span(low, high))
    return Cell(f"{100 * found.value:+.2f} points", found.value, interval=finding.span(found, "+.2f", 100))


def _more(row: JudgedCriterion) -> str:
    if row.verdict in _TONES:
        return f", {row.seeds} seeds"
    if row.would_decide is not None:
        return f"; {_needed(row)} would probably decide"
    if row.estimate.note:
        return "" if row.estimate.value is None else f"; {row.estimate.note}"
    return "; no number of seeds up to 1000 would decide"


def _needed(row: JudgedCriterion) -> str:
    needed = row.would_decide
    if needed is None:
        return ""
    problems = "" if row.as_log else f", {needed.n} problems"  # no problem is asked for these
    return f"{needed.seeds} seeds{problems}"


def _verdicts(report: PhasesResult) -> Iterator[Block]:
    yield Paragraph(theory_line(report))
    yield Bullets(tuple(Paragraph(verdict, f"{name}:") for name, verdict in report.theory.because.items()))
    head = ("criterion", "difference", "verdict", "what would probably decide")
    rows = (
        (row.statement, quantity(row), Cell(row.verdict, tone=_TONES.get(row.verdict, "unsure")), _needed(row))
        for row in report.hypotheses
    )
    yield table("hypotheses", head, rows, "Criteria of the original method notes")


def _arms(report: PhasesResult) -> Iterator[Block]:
    levels = [f"{level:g}" for level in report.levels]
    noisy = [level for level in levels if float(level)]
    head = ("arm", "seeds", *(f"accuracy at {_noise(level)}" for level in levels))
    head += tuple(f"retention at {_noise(level)}" for level in noisy)
    rows = (
        (
            arm.name,
            len(arm.seeds),
            *(estimate(arm.accuracy[level], share=True) for level in levels),
            *(estimate(arm.retention.get(level), share=True) for level in noisy),
        )
        for arm in report.arms
    )
    yield table("arms", head, rows, "Accuracy of the trained models, 95 % intervals over seeds and problems")
    for level in noisy:
        found = [(arm.name, arm.accuracy[level]) for arm in report.arms]
        bars = tuple(Bar(name, estimate(row, share=True), row.low, row.high) for name, row in found)
        yield Chart(f"accuracy-{level}", f"Accuracy at {_noise(level)}", "share of right answers", bars)
    epochs = [
        (arm.name, at, *(percent(row[level]) for level in levels))
        for arm in report.arms
        for at, row in enumerate(arm.earlier_epochs, 1)
    ]
    if epochs:
        yield table("epochs", ("arm", "epoch", *map(_noise, levels)), epochs, "Accuracy after earlier epochs")
    head = ("arm", "diverged", "gradient norm", "held-out loss", "forward injections", "backward injections", "dose")
    trainings = (
        (arm.name, of.diverged, of.gradient_norm, of.held_out_loss, *vars(of.injections).values(), of.dose)
        for arm in report.arms
        for of in (arm.training,)
    )
    yield table("training", head, trainings, "Training: geometric means over the second half")


def _noise(level: str) -> str:
    return f"{100 * float(level):g} % noise"


def _method(report: PhasesResult) -> Iterator[Block]:
    run, training = report.run, report.run.settings.training
    practised = ""
    if training.completions is not None:
        practised = (
            f" by GRPO (TRL), with {training.completions} completions per problem and a reward for right answers"
        )
        if training.wear is not None:
            practised += f", from the bundled model with noise of {percent(training.wear)} written into its weights"
    own = "lora" in training.others  # a model and data of the user's
    how = "teacher-forced, which is what greedy decoding would give"
    if own:
        how = "teacher-forced: the final answer, with the working before it given"
        if training.others["longest_answer"]:
            how = "by greedy decoding"
    if own and training.others["lora"]:
        practised += f" by LoRA adapters of rank {training.others['lora']}, merged for testing,"
    yield Paragraph(
        f"Each model was trained{practised} for {training.steps} steps of {training.batch} problems at a rate of "
        f"{training.rate:g} on {run.device}. All arms of a seed share their first weights and the order of their "
        f"data; all models answer the same problems under the same draws of noise, {how}. Intervals of arms take "
        "trainings and problems as two random samples; those of criteria hold for all criteria together (Bonferroni). "
        "The numbers that would probably decide are the cheapest that do so with a chance of 80 %, taking the estimate "
        "and its spread for the truth."
    )
    if training.start != "scratch" and training.wear is None:
        which = "the model" if own else "the bundled model"
        yield Paragraph(
            f"All seeds start from the weights of {which}: intervals are for trainings from that one start."
        )
    if report.could_not_see:
        yield Bullets(tuple(Paragraph(note) for note in report.could_not_see))
