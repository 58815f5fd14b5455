"""Findings and recommendations as values: their targets, their order, and the text of their sentences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from noisescope.errors import unknown
from noisescope.estimate import Estimate
from noisescope.findings.thresholds import NOT_MEASURABLE
from noisescope.sites import GROUPS, OuterPlace, Place

BORDERLINE: Final = "BORDERLINE"  # a significant loss whose interval reaches from the lowest band into a higher one
NOT_RATED: Final = "not rated"  # ranked by nats: bands belong to losses of a task metric
# Worst first. What could not be measured comes before what was measured and found harmless.
Severity = Literal["CRITICAL", "HIGH", "MODERATE", "BORDERLINE", "not rated", "not measurable", "LOW"]
SEVERITIES: tuple[Severity, ...] = ("CRITICAL", "HIGH", "MODERATE", BORDERLINE, NOT_RATED, NOT_MEASURABLE, "LOW")
Urgency = Literal["CRITICAL", "HIGH", "MEDIUM", "LOW"]
PRIORITIES: tuple[Urgency, ...] = ("CRITICAL", "HIGH", "MEDIUM", "LOW")

Evidence = Literal["injected", "predicted", "captured", "failed", "absent", "none"]
Kind = Literal["model", "operator", "window", "layer", "place", "cell", "channels"]
Unit = Literal["share", "nats", "ratio", "count"]


@dataclass(frozen=True)
class Target:
    """What a finding is about. `layers` () means every layer, `operators` () every operator."""

    kind: Kind
    operators: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    place: OuterPlace | None = None  # outside the blocks: embed, final_norm, lm_head
    module: str | None = None

    @property
    def name(self) -> str:
        """For people: "layers 0 to 2", "layer 0, matmul", "operator softmax", "lm_head"."""
        operators = " + ".join(self.operators)
        first, last = (self.layers[0], self.layers[-1]) if self.layers else (None, None)
        names: dict[Kind, str] = {
            "model": "the whole model",
            "operator": f"operator {operators}",
            "window": f"layers {first} to {last}",
            "layer": f"layer {first}",
            "place": str(self.place),
            "cell": f"layer {first}, {operators}",
            "channels": str(self.module),
        }
        return names[self.kind]

    @property
    def places(self) -> tuple[Place, ...]:
        """The blocks by index, or the place outside them; () if it is everywhere."""
        return self.layers or (() if self.place is None else (self.place,))

    @property
    def computes(self) -> frozenset[str]:
        """Single operators, with groups expanded."""
        found: set[str] = set()
        for name in self.operators:
            found |= GROUPS[name][0] if name in GROUPS else {name}
        return frozenset(found)

    def contains(self, other: Target) -> bool:
        """Whether noise in this target is also in all of the other, which is the more specific one.

        Noise in an operator also affects the places outside the blocks that compute it.
        """
        if self == other or other.kind not in ("window", "layer", "cell", "place") or self.place is not None:
            return False
        if self.layers and not (other.layers and set(other.layers) <= set(self.layers)):
            return False
        return not self.operators or (bool(other.operators) and other.computes <= self.computes)


@dataclass(frozen=True)
class Finding:
    """A conclusion with the number behind it.

    `size` accounts for the choice of the largest of many rows where it is a loss; `nats` orders findings of one
    severity. `notes` say what else is known of the same target, and what nested ones add.
    """

    severity: Severity
    component: str  # the target's name
    statement: str
    target: Target
    size: Estimate | None
    unit: Unit
    nats: float | None
    evidence: Evidence
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.severity not in SEVERITIES:
            raise unknown("severity", self.severity, SEVERITIES)

    @property
    def rated(self) -> bool:
        """Whether the interval of a loss of the task metric clears the limit of a band."""
        return self.severity in ("CRITICAL", "HIGH", "MODERATE")

    @property
    def urgent(self) -> bool:
        return self.severity in ("CRITICAL", "HIGH")


@dataclass(frozen=True)
class Recommendation:
    """What to do about a component, and why."""

    priority: Urgency
    component: str
    issue: str
    action: str

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise unknown("priority", self.priority, PRIORITIES)


def by_priority(recommendations: Iterable[Recommendation]) -> list[Recommendation]:
    """Most urgent first; equally urgent ones keep their order."""
    return sorted(recommendations, key=lambda r: PRIORITIES.index(r.priority))


def percent(share: float, digits: int = 1) -> str:
    """A share as text: 0.123 is "12.3 %"."""
    return f"{100 * share:.{digits}f} %"


METRIC_NAMES = {
    "accuracy": "accuracy",
    "next_token_accuracy": "next-token accuracy",
    "agreement": "agreement with the clean model",
    "perplexity": "inverse perplexity",
    "custom": "score",
    "kl": "KL divergence",
    "nll": "loss",
}


def metric_name(metric: str) -> str:
    """A metric as named in a sentence: "costs 12.3 % of the next-token accuracy"."""
    return METRIC_NAMES.get(metric, metric.replace("_", " "))


def counted(number: int, noun: str) -> str:
    """ "1 sample", "2 samples", "12,000 samples"."""
    return f"{number:{',' if number >= 10_000 else ''}} {noun}{'' if number == 1 else 's'}"


def span(estimate: Estimate, form: str, times: float = 1) -> str:
    """An interval as text; an unbounded end is "..."."""
    low, high = ("..." if end is None else f"{times * end:{form}}" for end in (estimate.low, estimate.high))
    return f"[{low}, {high}]"


def times_better(gain: float) -> str:
    """The factor that divides an error, as text: 0.04 is "25 x worse", and 0 means that there was no error before."""
    if not gain:
        return "no gain possible"
    return f"{gain:.3g} x better" if gain >= 1 else f"{1 / gain:.3g} x worse"
