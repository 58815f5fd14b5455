"""The strength of noise: as a function of the training step, and per layer from a report. No state, no torch.

A schedule is a value and a function step -> scale; any callable of that form works. Steps are numbered from 0, and
after its last step a schedule keeps its final value, also in a resumed or extended run.

Exponential decay can't reach 0. Where `end` is 0 it falls as towards a hundredth of `start` (the ratio of QeRL's own
settings, 0.01 to 0.0001) and is exactly 0 at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import Effect, LayerAnalysis
from noisescope.errors import InvalidInput, unknown
from noisescope.injection import checked_scale
from noisescope.names_in_trial_ids import registered
from noisescope.reports.saved_report import Report
from noisescope.sites import Place

Schedule = Callable[[int], float]

TAIL = 0.01  # of `start`: where an exponential decay to 0 leaves off


@registered("noisescope.training.Constant")
@dataclass(frozen=True)
class Constant:
    """The same scale at every step."""

    scale: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", checked_scale(self.scale, "scale"))

    def __call__(self, step: int) -> float:
        _checked_step(step)
        return self.scale


@dataclass(frozen=True)
class _Ramp:
    """From `start` at step 0 to `end` at step `steps` - 1."""

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", checked_scale(self.start, "start"))
        object.__setattr__(self, "end", checked_scale(self.end, "end"))
        _checked_count(self.steps, "steps")

    def __call__(self, step: int) -> float:
        if _checked_step(step) == 0:
            return self.start
        return self.end if step >= self.steps - 1 else self._between(step / (self.steps - 1))

    def _between(self, share: float) -> float:
        raise NotImplementedError


@registered("noisescope.training.Linear")
@dataclass(frozen=True)
class Linear(_Ramp):
    """start + (end - start) t."""

    def _between(self, share: float) -> float:
        return self.start + (self.end - self.start) * share


@registered("noisescope.training.Cosine")
@dataclass(frozen=True)
class Cosine(_Ramp):
    """end + (start - end) (1 + cos pi t) / 2: slow at both ends."""

    def _between(self, share: float) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * share)) / 2


@registered("noisescope.training.Exponential")
@dataclass(frozen=True)
class Exponential(_Ramp):
    """start (end / start)^t."""

    def _between(self, share: float) -> float:
        return geometric(self.start, self.end, share)


@registered("noisescope.training.Staged")
@dataclass(frozen=True)
class Staged:
    """QeRL's staged decay: no noise during a warm-up, then `stages` plateaus falling geometrically from start to end.

    warm_up is the share of steps without noise; None is the original's 1 / (stages + 1). With `epochs` above 1 the run
    of `steps` is cut into that many equal parts, and the warm-up and the stages start again in each ("epoch-aware").
    One stage is a constant `start`. Where there are fewer steps than stages, each step is a stage, still from start to
    end. After `steps` the last stage continues.

    QeRL (2025): sigma_k = start (end / start)^((k - 1) / (K - 1)), k = 1 ... K.
    """

    start: float
    end: float
    steps: int
    stages: int = 10
    warm_up: float | None = None
    epochs: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", checked_scale(self.start, "start"))
        object.__setattr__(self, "end", checked_scale(self.end, "end"))
        for name in ("steps", "stages", "epochs"):
            _checked_count(getattr(self, name), name)
        if self.warm_up is not None and not 0 <= self.warm_up < 1:
            raise InvalidInput(f"warm_up must be a share of the steps, at least 0 and below 1; got {self.warm_up}")

    def __call__(self, step: int) -> float:
        at, length = self._in_epoch(_checked_step(step))
        if self.warm_up is None:
            quiet = length // (self.stages + 1)
        else:
            quiet = math.floor(length * self.warm_up + 1e-9)  # 0.29 of 100 steps are 29, not 28.999...
        quiet = min(quiet, length - 1)  # at least one step has noise
        if at < quiet:
            return 0.0
        noisy = length - quiet
        stages = min(self.stages, noisy)
        stage = min(stages - 1, (at - quiet) * stages // noisy)
        if stage == 0:
            return self.start
        return self.end if stage == stages - 1 else geometric(self.start, self.end, stage / (stages - 1))

    def _in_epoch(self, step: int) -> tuple[int, int]:
        """The step within its epoch, and that epoch's length."""
        epochs = min(self.epochs, self.steps)
        epoch = min(
            epochs - 1, ((step + 1) * epochs - 1) // self.steps
        )  # the last with epoch * steps // epochs <= step
        start, stop = epoch * self.steps // epochs, (epoch + 1) * self.steps // epochs
        return step - start, stop - start


KINDS = {"constant": Constant, "linear": Linear, "exponential": Exponential, "cosine": Cosine, "staged": Staged}


NAMES = (*KINDS, "rising")


def named(kind: str, scale: float, steps: int) -> Schedule:
    """A schedule by name for a run of `steps`: those that fall do so from `scale` to a hundredth of it.

    "rising" is linear the other way round.
    """
    if kind not in NAMES:
        raise unknown("schedule", kind, NAMES)
    if kind == "constant":
        return Constant(scale)
    if kind == "rising":
        return Linear(scale * TAIL, scale, steps)
    falling: Callable[[float, float, int], Schedule] = KINDS[kind]
    return falling(scale, scale * TAIL, steps)


def dose(schedule: Schedule, steps: int) -> float:
    """The root mean square of the scale over a run: to second order, what noise costs goes with the scale's square.

    >>> dose(Constant(0.05), 10)
    0.05
    """
    return math.sqrt(math.fsum(schedule(step) ** 2 for step in range(steps)) / steps)


def geometric(start: float, end: float, share: float) -> float:
    """start (end / start)^share between the ends; an end of 0 stands for a hundredth of the other."""
    low_start, low_end = start or end * TAIL, end or start * TAIL
    return low_start * (low_end / low_start) ** share if low_start else 0.0


def _checked_step(step: int) -> int:
    if step < 0:
        raise InvalidInput(f"steps are numbered from 0, got {step}")
    return step


def _checked_count(value: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidInput(f"{what} must be an int of at least 1, got {value!r}")


# Per-layer factors from a sensitivity report: sensitive layers get less noise, robust ones more.
#
# Two rules are those of the original method notes, by name; both are of degradations (the share of the accuracy that
# noise in the layer takes), which the notes' limits are stated in. The third is smooth: to second order a layer's
# noise costs K m^2 nats, where K is its predicted (or injected) KL at the common scale and m its factor. Equal cost
# in every layer, at the total that uniform noise has, is
#
# m_l = sqrt(mean K / K_l).


# Degradation below which the factor is 2.0, and above which it is 0.5.
RULES = {"methodology": (0.05, 0.15), "summary": (0.02, 0.10)}
LIMITS = (0.25, 4.0)  # factors of the smooth rule: a layer that seems to cost nothing is not given all the noise


def ruled(degradations: Mapping[int, float | None], rule: str = "methodology") -> dict[Place, float]:
    """0.5 for layers above the rule's upper limit, 2.0 below its lower one, 1.0 between; 1.0 where nothing is known.

    >>> ruled({0: 0.2, 1: 0.1, 2: 0.01})
    {0: 0.5, 1: 1.0, 2: 2.0}
    """
    if rule not in RULES:
        raise unknown("adaptive rule", rule, RULES)
    low, high = RULES[rule]
    return {
        layer: 1.0 if loss is None or low <= loss <= high else 0.5 if loss > high else 2.0
        for layer, loss in degradations.items()
    }


def equalised(costs: Mapping[int, float], limits: tuple[float, float] = LIMITS) -> dict[Place, float]:
    """Factors with which each layer costs the same KL, at the total cost of uniform noise, within `limits`.

    >>> equalised({0: 4.0, 1: 4.0, 2: 4.0})
    {0: 1.0, 1: 1.0, 2: 1.0}
    """
    _checked_costs(costs)
    return _at_cost(costs, {layer: 1 / math.sqrt(cost) if cost else math.inf for layer, cost in costs.items()}, limits)


def concentrated(costs: Mapping[int, float], limits: tuple[float, float] = LIMITS) -> dict[Place, float]:
    """The opposite of `equalised`: factors that grow as the root of a layer's cost, at the same total.

    >>> concentrated({0: 1.0, 1: 4.0})
    {0: 0.542326, 1: 1.084652}
    """
    _checked_costs(costs)
    return _at_cost(costs, {layer: math.sqrt(cost) for layer, cost in costs.items()}, limits)


def at_uniform_cost(factors: Mapping[Place, float], costs: Mapping[int, float]) -> dict[Place, float]:
    """The factors times a number with which they cost in total what uniform noise does."""
    _checked_costs(costs)
    return _at_cost(costs, factors, (0.0, math.inf))


def _checked_costs(costs: Mapping[int, float]) -> None:
    if not costs or any(not math.isfinite(cost) or cost < 0 for cost in costs.values()) or not any(costs.values()):
        raise InvalidInput(
            f"costs must be finite KL values of at least 0, with at least one above 0; got {dict(costs)}"
        )


def _at_cost(
    costs: Mapping[int, float], shape: Mapping[Place, float], limits: tuple[float, float]
) -> dict[Place, float]:
    """The shape times a number, within limits, that makes the total cost that of uniform noise."""
    low, high = limits
    total = math.fsum(costs.values())

    def factors(times: float) -> dict[Place, float]:
        return {layer: min(max(times * shape[layer], low), high) if times else low for layer in costs}

    def spent(times: float) -> float:
        return math.fsum(factor**2 * costs[layer] for layer, factor in factors(times).items() if costs[layer])  # type: ignore[index]

    above = math.sqrt(total)
    while spent(above) < total and any(factor < high for factor in factors(above).values()):
        above *= 2
    below = 0.0
    for _ in range(200):
        middle = (below + above) / 2
        below, above = (middle, above) if spent(middle) < total else (below, middle)
    return {layer: round(factor, 6) for layer, factor in factors((below + above) / 2).items()}


def layer_degradations(section: LayerAnalysis) -> dict[int, float | None]:
    """Degradation of each layer: its own injection where there is one, else the mean of the windows that hold it."""

    def loss(row: Effect) -> float | None:
        return None if row.degradation is None else row.degradation.value

    found: dict[int, float | None] = {}
    for row in section.layers:
        around = (loss(window) for window in section.windows if row.layer in window.layers)
        known = [value for value in around if value is not None]
        own = loss(row)
        found[row.layer] = own if own is not None else math.fsum(known) / len(known) if known else None
    return found


def layer_costs(section: LayerAnalysis) -> dict[int, float]:
    """KL of each layer at the report's scale: predicted by the screen, or injected where every layer was."""
    for measured in ({row.layer: row.predicted_kl for row in section.layers}, {r.layer: r.kl for r in section.layers}):
        values = {layer: kl.mean.value for layer, kl in measured.items() if kl is not None}
        known = {layer: value for layer, value in values.items() if value is not None}
        if known and len(known) == len(measured):
            return known
    raise InvalidInput("the report has no KL for every layer: run noisescope diagnose with --level layer")


def from_report(report: Report | Diagnosis, rule: str = "equalised", *, matched: bool = False) -> dict[Place, float]:
    """Factors by the smooth rule, its opposite ("concentrated"), or one of the original method notes' rules
    ("methodology", "summary"). The latter cost more or less than uniform noise, unless `matched`.
    """
    section = (report if isinstance(report, Diagnosis) else report.diagnosis).layer_analysis
    if section is None:
        raise InvalidInput("the report has no layer analysis: run noisescope diagnose with --level layer")
    if rule in SMOOTH:
        return SMOOTH[rule](layer_costs(section))
    if rule not in RULES:
        raise unknown("adaptive rule", rule, [*SMOOTH, *RULES])
    found = ruled(layer_degradations(section), rule)
    return at_uniform_cost(found, layer_costs(section)) if matched else found


SMOOTH: dict[str, Callable[[Mapping[int, float]], dict[Place, float]]] = {
    "equalised": equalised,
    "concentrated": concentrated,
}
