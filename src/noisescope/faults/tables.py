"""Faults of the function units: exp, the gates of silu and gelu, rsqrt, and the gains they may have."""

from __future__ import annotations

from dataclasses import dataclass

from noisescope.faults.digits import Gain
from noisescope.faults.values import Fault, number


@dataclass(frozen=True)
class ExpTable(Fault):
    """A softmax whose exp is read from a table of this relative error, and `clip`: exp(t) for t < -clip is exp(-clip).

    What a mask shut out (-inf) stays out.
    """

    magnitude: float = 0.005
    clip: float | None = None

    family = "exp_table"
    fault_class = "function table"
    operators = ("softmax",)

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=1)
        if self.clip is not None:
            number(self, "clip", at_least=0)


@dataclass(frozen=True)
class ActivationTable(Fault):
    """silu or gelu z g(z) with the gate g (the sigmoid, Phi) read from a table of this relative error."""

    magnitude: float = 0.02

    family = "activation_table"
    fault_class = "function table"
    operators = ("silu", "gelu")

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=1)


@dataclass(frozen=True)
class ActivationCutOff(Fault):
    """silu or gelu that gives 0 below -limit and z above it, as if the gate were shut or open there."""

    limit: float = 4.0

    family = "activation_cut_off"
    fault_class = "function table"
    sized_by = "limit"
    operators = ("silu", "gelu")

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "limit", at_least=0)


@dataclass(frozen=True)
class RsqrtTable(Fault):
    """A norm whose 1 / sqrt(variance + eps) is read from a table of this relative error: a gain of each row's own."""

    magnitude: float = 0.02

    family = "rsqrt_table"
    fault_class = "function table"
    operators = ("norm",)

    def __post_init__(self) -> None:
        super().__post_init__()
        number(self, "magnitude", at_least=0, at_most=1)


@dataclass(frozen=True)
class NormGain(Gain):
    """A norm whose reciprocal root is too large by 1 + m; a bias is added after it."""

    family = "norm_gain"
    operators = ("norm",)


@dataclass(frozen=True)
class NormaliserGain(Gain):
    """A softmax whose rows sum to 1 + m."""

    family = "normaliser_gain"
    operators = ("softmax",)
