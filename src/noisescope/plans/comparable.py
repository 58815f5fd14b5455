"""Whether a model may be held against a baseline at all, and under which conditions both were measured.

Refused are another architecture, data of another kind, and other samples unless the caller says that they come from the
same source: what differs then is not the model alone. Another dtype, device, attention path, noise engine or number of
seeds is said beside the verdict: people move models between these, and want to know what it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from noisescope.diagnosis.effects import Row
from noisescope.errors import InvalidInput
from noisescope.plans.words import counted

Run = Mapping[str, Any]  # what a report says of its making, under "run"
Section = Mapping[str, Any]  # what diagnosis/gauge.py keeps, under "gate"
Pairs = tuple[list[int], list[int]] | None  # the places of the same samples on both sides; None: other samples


def pairs_of(first: Sequence[str], second: Sequence[str]) -> Pairs:
    """Where the smaller set of samples lies in the larger; None unless all of it does."""
    places = [{name: at for at, name in enumerate(names)} for names in (first, second)]
    common = [name for name in places[0] if name in places[1]]
    if len(common) < min(map(len, places)):
        return None
    return [places[0][name] for name in common], [places[1][name] for name in common]


def refuse_architecture(run: Run, architecture: str, blocks: int) -> None:
    """A model of another kind, or of another depth, than a report is about."""
    model = run["model"]
    if (model["architecture"], model["blocks"]) != (architecture, blocks):
        raise InvalidInput(
            f"the report is about {model['architecture']} with {model['blocks']} blocks, and this model is "
            f"{architecture} with {blocks}: what holds for one tells nothing of the other. Make a report of this one: "
            "noisescope diagnose MODEL -o DIR"
        )


def refuse_kind(before: Run, now: Run) -> None:
    """Data of another kind: their scores and divergences are not of one sort."""
    if before["data"]["kind"] != now["data"]["kind"]:
        kinds = [f"{run['data']['kind']} ({run['data']['source']})" for run in (before, now)]
        raise InvalidInput(
            f"the baseline was measured on data of kind {kinds[0]}, this is {kinds[1]}: they can't be compared. Give "
            "the baseline's data with --data"
        )


def refuse_other_samples(before: Run, now: Run, samples: tuple[Sequence[str], Sequence[str]]) -> None:
    """Samples are known by their tokens, so another file, tokenizer or cut gives others."""
    if pairs_of(*samples) is not None:
        return
    shared = len(set(samples[0]) & set(samples[1]))
    raise InvalidInput(
        f"{shared} of these {len(samples[1])} samples ({now['data']['source']}) are the baseline's "
        f"({before['data']['source']}): what differs may be the data. Give the same --data and --max-tokens, or say "
        "--other-samples if these were drawn from the same source"
    )


def conditions_row(before: Run, now: Run, sections: tuple[Section, Section]) -> Row:
    """How both were measured, as a check: passed where alike, undecided where not."""
    sides = [_conditions(run, section) for run, section in zip((before, now), sections, strict=True)]
    unlike = [
        {"what": name, "baseline": value, "candidate": sides[1][name]}
        for name, value in sides[0].items()
        if value != sides[1][name]
    ]
    if unlike:
        told = "; ".join(f"{one['what']} {one['baseline']} before, {one['candidate']} now" for one in unlike)
        told += ": a difference may come from that, and not from the model"
    else:
        told = "both " + ", ".join(f"{name} {value}" for name, value in sides[0].items())
    return {
        "name": "conditions of the baseline",
        "verdict": "undecided" if unlike else "pass",
        "message": f"{told}; {samples_told(samples_of(*(section['samples'] for section in sections)))}",
        "differences": unlike,
    }


def _conditions(run: Run, section: Section) -> dict[str, Any]:
    found = run["conditions"]
    return {
        "dtype": found["dtype"],
        "device": found["device"],
        "attention": found["attention"],
        "noise engine": found["engine"],
        "seeds": len(section["seeds"]),
    }


def samples_of(before: Sequence[str], now: Sequence[str]) -> dict[str, int]:
    """How many either side has, and how many of them are compared in pairs."""
    pairs = pairs_of(before, now)
    return {"baseline": len(before), "candidate": len(now), "pairs": 0 if pairs is None else len(pairs[0])}


def samples_told(n: Mapping[str, int]) -> str:
    """The counts of `samples_of` in words."""
    before, now = n["baseline"], n["candidate"]
    if not n["pairs"]:
        return f"{counted(now, 'other sample')} than the baseline's {before}"
    told = f"{counted(n['pairs'], 'sample')} in pairs"
    return told if before == now else f"{told}, of {before} before and {now} now"
