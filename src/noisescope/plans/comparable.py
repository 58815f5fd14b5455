"""Whether a model may be compared with a baseline at all, and under which conditions both were measured.

Refused are another architecture, data of another kind, and other samples unless the caller says that they come from the
same source: what differs then is not the model alone. Another dtype, device, attention path, noise engine or number of
seeds is reported beside the verdict: people move models between these, and want to know the effect.
"""

from __future__ import annotations

from collections.abc import Sequence

from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts
from noisescope.diagnosis.sections import GateNumbers
from noisescope.errors import InvalidInput
from noisescope.findings.verdicts import PASS, UNDECIDED
from noisescope.plans.gate_rows import ConditionsRow, Difference, SampleCounts

Pairs = tuple[list[int], list[int]] | None  # the places of the same samples on both sides; None: other samples


def pairs_of(first: Sequence[str], second: Sequence[str]) -> Pairs:
    """Where the smaller set of samples lies in the larger; None unless all of it does."""
    places = [{name: at for at, name in enumerate(names)} for names in (first, second)]
    common = [name for name in places[0] if name in places[1]]
    if len(common) < min(map(len, places)):
        return None
    return [places[0][name] for name in common], [places[1][name] for name in common]


def refuse_architecture(model: ModelFacts, architecture: str, blocks: int) -> None:
    """A model of another kind, or of another depth, than a report is about."""
    if (model.architecture, model.blocks) != (architecture, blocks):
        raise InvalidInput(
            f"the report is about {model.architecture} with {model.blocks} blocks, and this model is {architecture} "
            f"with {blocks}: they can't be compared. Make a report of this one: noisescope diagnose MODEL -o DIR"
        )


def refuse_kind(before: DataFacts, now: DataFacts) -> None:
    """Data of another kind: scores and divergences of two kinds can't be compared."""
    if before.kind != now.kind:
        raise InvalidInput(
            f"the baseline was measured on data of kind {before.kind} ({before.source}), this is {now.kind} "
            f"({now.source}): they can't be compared. Give the baseline's data with --data"
        )


def refuse_other_samples(before: DataFacts, now: DataFacts, samples: tuple[Sequence[str], Sequence[str]]) -> None:
    """Samples are identified by their tokens, so another file, tokenizer or length limit gives others."""
    if pairs_of(*samples) is not None:
        return
    shared = len(set(samples[0]) & set(samples[1]))
    raise InvalidInput(
        f"{shared} of these {len(samples[1])} samples ({now.source}) are the baseline's ({before.source}): a "
        "difference may come from the data. Give the same --data and --max-tokens, or --other-samples if these were "
        "drawn from the same source"
    )


def conditions_row(before: Asked, now: Asked, numbers: tuple[GateNumbers, GateNumbers]) -> ConditionsRow:
    """How both were measured, as a check."""
    sides = [_conditions(run, side) for run, side in zip((before, now), numbers, strict=True)]
    both = [Difference(name, value, sides[1][name]) for name, value in sides[0].items()]
    unlike = tuple(one for one in both if one.baseline != one.candidate)
    if unlike:
        words = "; ".join(f"{one.what} {one.baseline} before, {one.candidate} now" for one in unlike)
        words += ": a difference may come from that, and not from the model"
    else:
        words = "both " + ", ".join(f"{one.what} {one.baseline}" for one in both)
    counts = counts_of(numbers[0].samples, numbers[1].samples)
    return ConditionsRow("conditions of the baseline", UNDECIDED if unlike else PASS, f"{words}; {counts}", unlike)


def _conditions(run: Asked, numbers: GateNumbers) -> dict[str, str | int]:
    found = run.conditions
    return {
        "dtype": found.dtype,
        "device": found.device,
        "attention": found.attention,
        "noise engine": found.engine,
        "seeds": len(numbers.seeds),
    }


def counts_of(before: Sequence[str], now: Sequence[str]) -> SampleCounts:
    """How many samples each side has, and how many of them are compared in pairs."""
    pairs = pairs_of(before, now)
    return SampleCounts(len(before), len(now), 0 if pairs is None else len(pairs[0]))
