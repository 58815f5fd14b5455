"""The settings of the process-wide interface, and the injection they define for a model's anatomy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from noisescope.errors import InvalidInput, unknown
from noisescope.injection import Injection, Perturbation
from noisescope.model.anatomy import Anatomy
from noisescope.probe.noise import Bias, Gaussian, Uniform
from noisescope.sites import PHASES, Place, matches_operator

ERROR_TYPES: dict[str, Callable[[float], Perturbation]] = {
    "relative_gaussian": Gaussian,
    "rms_gaussian": lambda scale: Gaussian(scale, "rms"),
    "absolute_gaussian": lambda scale: Gaussian(scale, "absolute"),
    "uniform": Uniform,
    "systematic_bias": Bias,
}
_PRODUCTS = frozenset({"gemm"})
_ALL_OPS = frozenset({"gemm", "softmax", "silu", "gelu", "norm"})


@dataclass(frozen=True)
class Settings:
    scale: float = 0.05
    kind: str = "relative_gaussian"
    all_ops: bool = False
    seed: int = 0
    phases: frozenset[str] = frozenset(PHASES)
    phase_scales: Mapping[str, float] = field(default_factory=dict)  # absolute; phases that are not here have `scale`
    layers: frozenset[int] | None = None
    operators: frozenset[str] | None = None
    operator_scales: Mapping[str, float] = field(default_factory=dict)
    layer_scales: Mapping[Place, float] = field(default_factory=dict)
    training_only: bool = False  # no noise where no gradients are recorded

    @property
    def off(self) -> bool:
        """Whether noise is turned off on purpose, by an empty selection."""
        return self.layers == frozenset() or self.operators == frozenset()

    @property
    def noisy_phases(self) -> frozenset[str]:
        """Phases that are on and whose own scale is not 0."""
        return frozenset(phase for phase in self.phases if self.phase_scales.get(phase) != 0)

    def wanted(self) -> frozenset[str]:
        return self.operators if self.operators is not None else _ALL_OPS if self.all_ops else _PRODUCTS

    def scale_of(self, phase: str) -> float:
        return self.phase_scales.get(phase, self.scale)

    def injection(self, anatomy: Anatomy | None = None, *, numbered: bool = True) -> Injection | None:
        """The injection for a module of this anatomy; None if nothing in it is a target.

        `numbered`: the block numbers of this anatomy are the layer numbers meant.
        """
        whole = self.anywhere(anatomy.places() if anatomy else (), numbered=numbered)
        if anatomy is None:
            return whole
        hits = [(op, u.component) for u in anatomy.units for op in u.operators if whole.selects(u.site(op))]
        present = frozenset(n for n in self.wanted() if any(matches_operator({n}, *hit) for hit in hits))
        targeted = present and self.noisy_phases and not self.off and (numbered or self.layers is None)
        return dataclasses.replace(whole, operators=present) if targeted else None

    def anywhere(self, places: Iterable[Place] = (), *, numbered: bool = True) -> Injection:
        """The injection for these places, whatever operators are there."""
        if self.kind not in ERROR_TYPES:
            raise unknown("error type", self.kind, ERROR_TYPES)
        layers = self.layer_scales if numbered else {}
        return Injection(
            ERROR_TYPES[self.kind](self.scale),
            operators=self.wanted(),
            layers=self.layers,
            phases=self.noisy_phases or frozenset(PHASES),
            phase_scales=self._ratios() if layers else {phase: self.scale_of(phase) for phase in PHASES},
            operator_multipliers=self.operator_scales,
            layer_multipliers={**dict.fromkeys(places, self.scale), **layers} if layers else {},
            seed=self.seed,
        )

    def _ratios(self) -> dict[str, float]:
        """Phases over the error scale: where layers have absolute scales those are the multipliers."""
        if self.phase_scales and not self.scale:
            raise InvalidInput(
                "error_scale is 0, so per-layer scales can't be expressed relative to it: give an error_scale above "
                "0, or no per-layer scales"
            )
        return {phase: self.scale_of(phase) / self.scale if phase in self.phase_scales else 1.0 for phase in PHASES}
