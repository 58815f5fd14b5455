"""Precision plans: a number format for each linear, with the lowest predicted KL within a budget.

Predicted KL adds up over modules (measures/format_costs.py), so the best plan is a multiple-choice knapsack: one format
per module, the sum of costs least, weighted sums of bits, bytes or milliseconds within their limits. HiGHS solves it.

Bits are nominal, averaged over the weights of the planned linears: those of the blocks, lm_head excluded. Bits with
scales are reported beside it (`effective_bits`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.section_types import FormatScore, FormatScores
from noisescope.errors import InvalidInput, unknown
from noisescope.findings import LIMITS
from noisescope.options.fields import GRANULARITIES
from noisescope.tables import Sheet, Table, Tabular

Array = NDArray[np.float64]
Limit = tuple[str, float, list[dict[str, float]]]  # name, limit, what each format of each module takes of it

INTEGERS = ("int8", "int4", "int3")  # one family: the same rounding, each with fewer bits than the one before
GAP = 1e-4  # the plan found is within this share of the best there is
SECONDS = 30.0  # the solver gives what it has by then


@dataclass(frozen=True)
class Module:
    """A linear to plan for."""

    name: str
    place: int
    parameters: int
    choices: Mapping[str, FormatScore]  # by format
    inputs: int | None = None  # weights of an output channel; exports need it
    kind: str = "Linear"  # its class


@dataclass(frozen=True)
class Budget:
    """Limits of a plan; at least one.

    `latency` has milliseconds by module and format; under "*" they are for a million weights, for modules not named.
    """

    average_bits: float | None = None
    megabytes: float | None = None  # of the planned weights with their scales, 10^6 bytes
    milliseconds: float | None = None
    latency: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = {"average_bits": self.average_bits, "megabytes": self.megabytes, "milliseconds": self.milliseconds}
        given = {name: limit for name, limit in limits.items() if limit is not None}
        if not given:
            raise InvalidInput("a plan needs a limit, such as --average-bits 5; or --max-megabytes, --max-milliseconds")
        for name, limit in given.items():
            if not math.isfinite(limit) or limit <= 0:
                raise InvalidInput(f"{name} must be a number above 0, got {limit}")
        if (self.milliseconds is None) != (not self.latency):
            raise InvalidInput(
                "a latency limit needs both a limit in milliseconds and a latency table by module and format"
            )
        for module, row in self.latency.items():
            for name, time in row.items():
                if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < math.inf:
                    raise InvalidInput(
                        f"the latency table has {time!r} for {module!r}, {name!r}: milliseconds must be numbers of "
                        f"at least 0"
                    )

    def milliseconds_of(self, module: Module, name: str) -> float:
        own = self.latency.get(module.name)
        row, share = (self.latency.get("*", {}), module.parameters / 1e6) if own is None else (own, 1.0)
        if name not in row:
            raise InvalidInput(f"the latency table has no {name!r} for {module.name} and no row '*'")
        return float(row[name]) * share

    def limits(self, modules: Sequence[Module]) -> list[Limit]:
        """(name, limit, what each format of each module takes of it)."""
        found: list[Limit] = []
        weights = sum(module.parameters for module in modules)
        if self.average_bits is not None:
            share = [{f: c.bits * m.parameters / weights for f, c in m.choices.items()} for m in modules]
            found.append(("average_bits", self.average_bits, share))
        if self.megabytes is not None:
            size = [{f: c.effective_bits * m.parameters / 8e6 for f, c in m.choices.items()} for m in modules]
            found.append(("megabytes", self.megabytes, size))
        if self.milliseconds is not None:
            names = [module.name for module in modules]
            for name in self.latency:
                if name not in ("*", *names):
                    raise InvalidInput(
                        f"the latency table has a row for {name!r}, which is not in the plan: module names look "
                        f"like {names[0]!r}, and '*' stands for all modules without a row"
                    )
            time = [{f: self.milliseconds_of(m, f) for f in m.choices} for m in modules]
            found.append(("milliseconds", self.milliseconds, time))
        return found


@dataclass(frozen=True)
class Plan(Tabular):
    """A format for each module, with the resulting totals."""

    method: str
    assignment: Mapping[str, str]  # module -> format
    average_bits: float
    effective_bits: float
    megabytes: float
    predicted_mean_kl: float
    note: str = ""

    def counts(self) -> dict[str, int]:
        """How many modules have each format."""
        names = list(self.assignment.values())
        return {name: names.count(name) for name in sorted(set(names))}

    def sheet(self) -> Sheet:
        modules = Table(("module", "format"), tuple(self.assignment.items()))
        title = f"{self.method}: {self.average_bits:.3g} bits per weight, {self.megabytes:.3g} MB"
        lines = (f"Predicted mean KL {self.predicted_mean_kl:.3g} nats per token.", self.note)
        return Sheet(title, {"modules": modules}, {"module": "module", "format": "format"}, tuple(filter(None, lines)))


def scores_of(found: Diagnosis) -> FormatScores:
    """The format scores of a diagnosis; an error if there are none."""
    section = found.format_scores
    if section is None or not section.modules:
        reason = f" ({section.error})" if section is not None and section.error else ""
        raise InvalidInput(
            f"the report has no format scores{reason}: make one with the layer level by noisescope diagnose MODEL "
            "-o DIR"
        )
    return section


def modules_of(found: Diagnosis, formats: Iterable[str] | None = None) -> tuple[Module, ...]:
    """The linears that have format scores in a diagnosis, restricted to the requested formats."""
    rows = scores_of(found).modules
    offered = rows[0].formats
    wanted = tuple(offered) if formats is None else tuple(formats)
    for name in wanted:
        if name not in offered:
            raise unknown("format", name, offered)
    if not wanted:
        raise InvalidInput(f"no formats selected: choose from {', '.join(offered)}")
    return tuple(
        Module(row.module, row.place, row.parameters, _choices(row.formats, wanted), row.inputs, row.kind)
        for row in rows
    )


def _choices(scores: Mapping[str, FormatScore], wanted: Sequence[str]) -> dict[str, FormatScore]:
    """The requested formats. A narrower integer is predicted to cost no less than a wider one.

    Rounding to fewer bits of one kind is worse; where a few samples say the opposite it is their noise, and a plan
    would pick exactly these.
    """
    found = dict(scores)
    wider: FormatScore | None = None  # the costliest integer so far
    for name in INTEGERS:
        if name in found:
            if wider is not None and wider.predicted_kl > found[name].predicted_kl:
                found[name] = replace(found[name], predicted_kl=wider.predicted_kl, standard_error=wider.standard_error)
            wider = found[name]
    return {name: choice for name, choice in found.items() if name in wanted}


def plan_of(modules: Sequence[Module], assignment: Mapping[str, str], method: str, note: str = "") -> Plan:
    """An assignment with its totals."""
    chosen = [(module, module.choices[assignment[module.name]]) for module in modules]
    weights = sum(module.parameters for module in modules)
    effective = sum(module.parameters * choice.effective_bits for module, choice in chosen) / weights
    return Plan(
        method,
        {module.name: assignment[module.name] for module in modules},
        sum(module.parameters * choice.bits for module, choice in chosen) / weights,
        effective,
        effective * weights / 8e6,
        sum(choice.predicted_kl for _, choice in chosen),
        note,
    )


def uniform_plan(modules: Sequence[Module], name: str) -> Plan:
    return plan_of(modules, {module.name: name for module in modules}, f"uniform {name}")


def optimal_plan(modules: Sequence[Module], budget: Budget, *, granularity: str = "module") -> Plan:
    """The assignment of lowest predicted KL within the budget; with "layer", one format for all linears of a block."""
    return solve(modules, budget.limits(modules), granularity=granularity)


def solve(modules: Sequence[Module], limits: Sequence[Limit], *, granularity: str = "module") -> Plan:
    """The assignment of lowest predicted KL within limits."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    if granularity not in GRANULARITIES:
        raise unknown("granularity", granularity, GRANULARITIES)
    groups = [[i] for i in range(len(modules))]  # indices of modules that share a format
    if granularity == "layer":
        places = sorted({module.place for module in modules})
        groups = [[i for i, module in enumerate(modules) if module.place == place] for place in places]
    formats = list(modules[0].choices)
    count, width = len(groups), len(formats)
    costs = np.array([[sum(modules[i].choices[f].predicted_kl for i in g) for f in formats] for g in groups])
    one_each = csr_array((np.ones(count * width), (np.repeat(np.arange(count), width), np.arange(count * width))))
    constraints = [LinearConstraint(one_each, 1, 1)]
    shares = []  # of each limit: what every group takes of it with every format [groups, formats]
    for what, limit, taken in limits:
        table = np.array([[sum(taken[i][f] for i in g) for f in formats] for g in groups])
        least = float(table.min(1).sum())
        if least > limit * (1 + 1e-9):
            raise InvalidInput(f"{what} = {limit:g} can't be reached: the smallest formats need {least:.4g}")
        shares.append(table / limit)
        constraints.append(LinearConstraint(csr_array(shares[-1].reshape(1, -1)), -np.inf, 1))
    scaled = costs / np.abs(costs).mean() if costs.any() else costs  # of size 1: the solver's tolerances are absolute
    found = milp(
        scaled.ravel(),
        integrality=np.ones(count * width),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"mip_rel_gap": GAP, "time_limit": SECONDS},
    )
    if found.x is None:
        raise InvalidInput(f"no plan was found: {found.message}")
    bits = [modules[0].choices[name].bits for name in formats]
    chosen = _widened(found.x.reshape(count, width).argmax(1), costs, bits, shares)
    assignment = {modules[i].name: formats[c] for group, c in zip(groups, chosen, strict=True) for i in group}
    note = "" if found.status == 0 else f"the best plan found in {SECONDS:g} s; it may not be optimal"
    return plan_of(modules, assignment, f"optimal by {granularity}", note)


def _widened(chosen: NDArray[np.intp], costs: Array, bits: Sequence[float], shares: Sequence[Array]) -> list[int]:
    """Use more bits where they fit and cost no more: among formats of equal cost the solver picks any."""
    rows = np.arange(len(chosen))
    left = [1 - float(share[rows, chosen].sum()) for share in shares]
    found = []
    for row, now in enumerate(chosen):
        better = [f for f in range(len(bits)) if bits[f] > bits[now] and costs[row, f] <= costs[row, now]]
        fitting = (
            f for f in better if all(s[row, f] - s[row, now] <= room for s, room in zip(shares, left, strict=True))
        )
        best = max(fitting, key=lambda f: bits[f], default=int(now))
        left = [room - float(s[row, best] - s[row, now]) for s, room in zip(shares, left, strict=True)]
        found.append(best)
    return found


def random_plans(
    modules: Sequence[Module], average_bits: float, count: int, *, seed: int = 0, tolerance: float = 0.02
) -> list[Plan]:
    """Assignments drawn from the same formats, with that many bits on average: what a plan has to beat.

    Each starts with a format drawn for every module; then changes of one module are drawn from those that bring the
    average nearer, until it is within `tolerance` or none does. Of at most 20 such draws the first within `tolerance`
    counts, else the nearest: where modules are few and large, it is within half a step of the largest.
    """
    rng = np.random.default_rng(seed)
    formats = list(modules[0].choices)
    bits = np.array([modules[0].choices[name].bits for name in formats])
    share = np.array([module.parameters for module in modules], dtype=np.float64)
    share /= share.sum()
    if not bits.min() - tolerance <= average_bits <= bits.max() + tolerance:
        raise InvalidInput(f"formats of {bits.min():g} to {bits.max():g} bits can't average {average_bits:g}")

    def draw() -> tuple[float, NDArray[np.int64]]:
        """How far the average is off, and the index of each module's format."""
        drawn = rng.integers(len(formats), size=len(modules))
        while (off := abs(share @ bits[drawn] - average_bits)) > tolerance:
            changed = np.abs(share @ bits[drawn] - average_bits + share[:, None] * (bits - bits[drawn][:, None]))
            nearer = np.argwhere(changed < off - 1e-12)
            if not len(nearer):
                break
            i, name = rng.choice(nearer)
            drawn[i] = name
        return off, drawn

    plans = []
    for _ in range(count):
        nearest = draw()
        for _ in range(19):
            if nearest[0] <= tolerance:
                break
            nearest = min(nearest, draw(), key=lambda found: found[0])
        assignment = {module.name: formats[choice] for module, choice in zip(modules, nearest[1], strict=True)}
        plans.append(plan_of(modules, assignment, "random"))
    return plans


# -- the bit rule of the original method notes: 16, 8 or 4 bits for a layer by what noise in it costs

L = TypeVar("L", bound=Hashable)  # a layer: its index, or whatever the caller knows it by
NAMES = {16: ("bf16",), 8: ("int8", "fp8_e4m3"), 4: ("int4", "nvfp4", "mxfp4")}  # the first that is offered


def bits_by_rule(sensitivity: Mapping[L, float], target_average_bits: float = 6.0) -> dict[L, int]:
    """Bits by layer, from what noise costs it: the degradation. The average counts layers.

    Above the target, 8-bit layers go to 4 bits, the least sensitive first, as long as they lose less than 10 %; 16-bit
    layers are never lowered, so the target may be missed. Below it, 4-bit layers go to 8, the most sensitive first.
    """
    if not sensitivity:
        raise InvalidInput("the bit rule needs the sensitivity of at least one layer")
    losses = {layer: _checked(layer, loss) for layer, loss in sensitivity.items()}
    most, more = LIMITS["precision_16_bits"], LIMITS["precision_8_bits"]
    bits = {layer: 16 if loss > most else 8 if loss > more else 4 for layer, loss in losses.items()}
    order = sorted(bits, key=lambda layer: losses[layer])
    if _average(bits) > target_average_bits:
        low = LIMITS["precision_8_to_4_bits"]
        for layer in order:
            if _average(bits) > target_average_bits and bits[layer] == 8 and losses[layer] < low:
                bits[layer] = 4
    else:
        for layer in reversed(order):
            if _average(bits) < target_average_bits and bits[layer] == 4:
                bits[layer] = 8
    return bits


def _checked(layer: Hashable, loss: object) -> float:
    if isinstance(loss, bool) or not isinstance(loss, (int, float)) or not math.isfinite(loss):
        raise InvalidInput(
            f"the bit rule has no degradation of {layer!r} (got {loss!r}): give a number such as 0.12; leave out "
            f"layers that could not be measured, and keep them at 16 bits"
        )
    return float(loss)


def missed_target(bits: Mapping[L, int], target: float) -> str:
    """The message if the rule misses its target by more than one layer's share; "" if it does not."""
    average = _average(bits)
    if abs(average - target) <= 4 / len(bits):  # a layer between 4 and 8 bits
        return ""
    reason = (
        "16-bit layers, and 8-bit layers that lose 10 % or more, are never lowered"
        if average > target
        else "no layer that loses 15 % or less gets more than 8 bits"
    )
    return f"misses its target: {average:.2f} bits on average, {target:g} requested; {reason}"


def _average(bits: Mapping[L, int]) -> float:
    return sum(bits.values()) / len(bits)


def layer_sensitivity(found: Diagnosis) -> dict[int, float]:
    """What noise costs each layer: the mean degradation of the injected windows that hold it.

    The notes fill this with degradation / noise scale while their limits are degradations; here it is degradation.
    """
    windows = found.layer_analysis.windows if found.layer_analysis is not None else ()
    losses = [(row.layers, row.degradation.value) for row in windows if row.degradation is not None]
    known = {
        layer: [loss for layers, loss in losses if loss is not None and layer in layers]
        for layer in range(found.run.model.blocks)
    }
    return {layer: fmean(of) for layer, of in known.items()} if all(known.values()) else {}


def rule_plan(modules: Sequence[Module], sensitivity: Mapping[int, float], target: float) -> Plan:
    """The rule's bits as formats of the modules."""
    bits = bits_by_rule(sensitivity, target)
    names = {
        width: next((name for name in offered if name in modules[0].choices), None) for width, offered in NAMES.items()
    }
    missing = sorted(width for width in set(bits.values()) if names[width] is None)
    if missing:
        raise InvalidInput(f"the bit rule needs formats of {missing} bits, which are not among the allowed formats")
    assignment = {module.name: str(names[bits[module.place]]) for module in modules}
    missed = missed_target(bits, target)
    return plan_of(modules, assignment, "bit rule of the method notes", f"the bit rule {missed}" if missed else "")
