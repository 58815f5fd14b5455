"""An injection: a perturbation, where it is applied, how strongly, and with which seed. A value, without torch."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.names_in_trial_ids import registered
from noisescope.sites import GROUPS, PHASES, TENSORS, Place, Site, canonical_operator, canonical_place, matches_operator
from noisescope.text_escaping import cut

Perturbation = Callable[[Any, Any], Any]  # (tensor, draw) -> tensor
LARGEST_SCALE = 1e9  # the product of three still fits float32


@registered("noisescope.Injection")
@dataclass(frozen=True)
class Injection:
    """A perturbation at sites.

    operators, layers, places, modules (glob patterns on dotted names) and channels narrow the target; None means no
    narrowing. `layers` and `places` add up: layers={3}, places={"lm_head"} is block 3 and the head. MoE routers take
    part only where `modules` names them, rotary angles only where `places` has "rotary" or `modules` names them.

    The strength at a site is the phase's scale (`phase_scales`, else the perturbation's own) times
    `operator_multipliers[operator]` times `layer_multipliers[place]`.

    >>> import noisescope as ns
    >>> ns.Injection(ns.Gaussian(0.05), operators={"RMS_Norm"}, layers={3}).operators
    frozenset({'norm'})
    """

    perturbation: Perturbation
    operators: frozenset[str] | None = None
    layers: frozenset[int] | None = None
    places: frozenset[Place] | None = None
    modules: tuple[str, ...] | None = None
    channels: tuple[int, ...] | None = None
    tensor: str = "output"
    phases: frozenset[str] = frozenset(PHASES)
    phase_scales: Mapping[str, float] = field(default_factory=dict)
    operator_multipliers: Mapping[str, float] = field(default_factory=dict)
    layer_multipliers: Mapping[Place, float] = field(default_factory=dict)
    renormalise: bool = False  # softmax rows divided by their sum again after the noise
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.perturbation) or isinstance(self.perturbation, type):
            raise InvalidInput(
                f"the first argument of Injection must be a perturbation such as Gaussian(0.05); got "
                f"{self.perturbation!r}"
            )
        put = functools.partial(object.__setattr__, self)  # the dataclass is frozen; here it is still being made
        narrowing: dict[str, Callable[[Any], Any]] = {
            "operators": canonical_operator,
            "layers": _layer,
            "places": canonical_place,
        }
        for name, canonical in narrowing.items():
            if vars(self)[name] is not None:
                put(name, frozenset(canonical(value) for value in _names(vars(self)[name], name)))
        if self.modules is not None:
            put("modules", tuple(_names(self.modules, "modules")))
            if wrong := [name for name in self.modules if not isinstance(name, str)]:
                raise InvalidInput(f"modules must be dotted names or patterns (strings), got {wrong[0]!r}")
        put("phases", frozenset(_names(self.phases, "phases")))
        if self.channels is not None:
            put("channels", _channels(self.channels))
            if self.phases == {"backward"}:
                raise InvalidInput("channels select from the forward tensor and can't be used with backward noise")
        if self.tensor not in TENSORS:
            raise unknown("tensor", self.tensor, TENSORS)
        for phase in [*self.phases, *self.phase_scales]:
            if phase not in PHASES:
                raise unknown("phase", phase, PHASES)
        if not self.phases:
            raise InvalidInput("phases is empty: an injection needs 'forward', 'backward' or both")
        factors: dict[str, tuple[Callable[[Any], Any], str]] = {
            "phase_scales": (str, "scale of"),
            "operator_multipliers": (canonical_operator, "multiplier of"),
            "layer_multipliers": (canonical_place, "multiplier of layer"),
        }
        for name, (canonical, what) in factors.items():
            given = vars(self)[name].items()
            put(name, {canonical(key): checked_scale(value, f"{what} {key}") for key, value in given})
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise InvalidInput(f"seed must be an int, got {self.seed!r}")

    def __hash__(self) -> int:
        """Of what differs between most injections; the dictionaries only by their keys."""
        target = (self.operators, self.layers, self.places, self.modules, self.channels, self.tensor, self.phases)
        multiplied = (frozenset(self.operator_multipliers), frozenset(self.layer_multipliers))
        return hash((self.perturbation, target, multiplied, self.seed))

    @property
    def named_places(self) -> frozenset[Place]:
        """Those of `layers` and `places` together."""
        return (self.layers or frozenset()) | (self.places or frozenset())

    def selects(self, site: Site) -> bool:
        """Whether this site is a target (channels and phases apart)."""
        if not matches_operator(self.operators, site.operator, site.component):
            return False
        named = self.modules is not None and (
            site.module in self.modules or any(fnmatch.fnmatchcase(site.module, p) for p in self.modules)
        )
        if self.modules is not None and not named:
            return False
        if site.component == "router" and not named:
            return False
        if self.layers is None and self.places is None:
            return site.place != "rotary" or named
        return (self.layers is not None and site.place in self.layers) or (
            self.places is not None and site.place in self.places
        )

    def strength(self, site: Site) -> float | None:
        """The effective scale at a site, or None where the perturbation has no scale (a number format)."""
        scale = self.phase_scales.get(site.phase, getattr(self.perturbation, "scale", None))
        multiplier = self.operator_multipliers.get(site.operator, 1.0)
        for group in GROUPS:
            if group in self.operator_multipliers and matches_operator({group}, site.operator, site.component):
                multiplier *= self.operator_multipliers[group]
        multiplier *= self.layer_multipliers.get(site.place, 1.0)
        if scale is None:
            return None
        return float(scale) * multiplier

    def perturbation_at(self, site: Site) -> Perturbation:
        """The perturbation with the strength for this site.

        A perturbation with a method `at(site)` stands for another one at each site, as it is.
        """
        at = getattr(self.perturbation, "at", None)
        if at is not None:
            found: Perturbation = at(site)
            return found
        if not (self.phase_scales or self.operator_multipliers or self.layer_multipliers):
            return self.perturbation
        strength = self.strength(site)
        if strength is None:
            raise InvalidInput(
                f"{self.perturbation!r} has no scale, so phase_scales and multipliers have no effect on it: omit them"
            )
        if strength == getattr(self.perturbation, "scale", None):
            return self.perturbation
        if dataclasses.is_dataclass(self.perturbation) and not isinstance(self.perturbation, type):
            return dataclasses.replace(self.perturbation, scale=strength)
        raise InvalidInput(f"{self.perturbation!r} must be a dataclass with a field `scale` to take multipliers")


def _names(values: Iterable[Any] | str | int, what: str) -> list[Any]:
    """A set given as a set, a list, or (by a common mistake) as a single name."""
    if isinstance(values, (str, int)):
        return [values]
    try:
        return list(values)
    except TypeError:
        raise InvalidInput(f"{what} must be a set or a list, got {values!r}") from None


def _layer(value: Any) -> int:
    try:
        layer = operator.index(value)
    except TypeError:
        layer = None
    if layer is None or isinstance(value, bool):
        raise InvalidInput(
            f"layers must be block indices (ints), got {value!r}; other places go into places={{'lm_head'}}"
        )
    if layer < 0:
        raise InvalidInput(f"layer {layer} is negative; blocks are numbered from 0")
    return layer


def _channels(values: Any) -> tuple[int, ...]:
    channels = tuple(sorted({int(c) for c in _names(values, "channels")}))
    if not channels or channels[0] < 0:
        raise InvalidInput(f"channels must be indices of at least 0, got {values!r}")
    return channels


def checked_scale(value: Any, what: str) -> float:
    """A number from 0 to LARGEST_SCALE."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidInput(f"{what} must be a number, got {cut(repr(value))}")
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        number = sys.float_info.max
    if not 0 <= number < math.inf:
        raise InvalidInput(f"{what} must be finite and at least 0, got {number:g}")
    if number > LARGEST_SCALE:
        raise InvalidInput(f"{what} must be at most {LARGEST_SCALE:g}, got {number:g}: 0.05 means noise of 5 %")
    return number
