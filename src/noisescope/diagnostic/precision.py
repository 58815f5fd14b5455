"""Bits by layer, and outliers folded away, by the names of the original method notes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from noisescope.api.smoothing import smooth_outliers
from noisescope.diagnostic.asking import batches_of, subject_of
from noisescope.model import Subject
from noisescope.plans.bit_rule import bits_by_rule, missed_target
from noisescope.quantisation.smoothing import Smoothed


def generate_mixed_precision_config(
    sensitivity_profile: Mapping[Any, float], target_avg_bits: float = 6
) -> dict[Any, int]:
    """16, 8 or 4 bits for each layer by its degradation; warns where the target is missed.

    `noisescope plan precision` finds better plans: this rule knows layers alone, and three widths.
    """
    bits = bits_by_rule(sensitivity_profile, target_avg_bits)
    if told := missed_target(bits, target_avg_bits):
        warnings.warn(f"the bit rule {told}", stacklevel=2)
    return bits


assign_precision = generate_mixed_precision_config


def apply_smoothquant_scaling(
    model: Subject | nn.Module, calibration_data: Any, alpha: float = 0.5, *, samples: int = 16, max_tokens: int = 256
) -> Smoothed:
    """A copy of the model whose outlier channels are folded into the weights; the model itself is left alone.

    smoothed = apply_smoothquant_scaling(model, batches, alpha=0.5)
    smoothed.model, smoothed.float_error
    """
    return smooth_outliers(
        subject_of(model), batches_of(calibration_data), alpha=alpha, samples=samples, max_tokens=max_tokens
    )
