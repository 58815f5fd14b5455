from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from noisescope.stats import Estimate


@dataclass(frozen=True)
class CheckedWindow:
    role: Literal["warned", "between", "least"]
    start_layer: int
    end_layer: int
    reported_kl: float
    error: str
    baseline_acc: float | None
    noisy_acc: float | None
    noisy_acc_interval: Estimate | None
    degradation: Estimate | None
    band: str


@dataclass(frozen=True)
class CheckResult:
    fault: str
    operators: tuple[str, ...]
    samples: int
    windows: tuple[CheckedWindow, ...]
