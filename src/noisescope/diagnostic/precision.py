"""Bits by layer, and outliers folded away, by the names of the original method notes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from noisescope.api.smoothing import smooth_outliers
from noisescope.diagnostic.asking import batches_of, subject_of
from noisescope.model import Subject
from noisescope.plans.bit_rule import bits_by_rule, missed_target
from noisescope.quantisation.smoothing import Smoothed


def generate_mixed_precision_config(
    sensitivity_profile: Mapping[Any, Any], target_avg_bits: float = 6
) -> dict[Any, int]:
    """16, 8 or 4 bits for each layer by its degradation; warns where the target is missed.

    The profile has the degradation of each layer, or a row of a report that holds one under 'degradation'.
    `noisescope plan precision` finds better plans: this rule knows layers alone, and three widths.
    """
    bits = bits_by_rule({layer: _loss(given) for layer, given in sensitivity_profile.items()}, target_avg_bits)
    if missed := missed_target(bits, target_avg_bits):
        warnings.warn(f"the bit rule {missed}", stacklevel=2)
    return bits


def _loss(given: Any) -> Any:
    """A degradation as it is, or out of a row, where it may have an interval; the rule refuses what is no number."""
    loss = given["degradation"] if isinstance(given, Mapping) and "degradation" in given else given
    loss = loss["value"] if isinstance(loss, Mapping) and "value" in loss else loss
    return float(loss) if isinstance(loss, np.floating) else loss


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
