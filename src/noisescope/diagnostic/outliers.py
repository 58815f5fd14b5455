"""Outlier channels by three of the rules of the original method notes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisescope.diagnosis import channels, screen
from noisescope.diagnosis.channels import over_median as over_median
from noisescope.diagnosis.frame import Array, Frame
from noisescope.diagnosis.screen import Screened
from noisescope.diagnostic.asking import Question, Row, ask
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.findings import LIMITS
from noisescope.jsonform import to_json
from noisescope.model import Subject
from noisescope.sites import Site
from noisescope.trials import Results


def detect_outliers(activations: Tensor, threshold: float = LIMITS["outlier_channel_ratio"]) -> Tensor:
    """Which channels [C] of activations [..., C] have a largest |x| over `threshold` times the median channel's."""
    if activations.dim() < 2:
        raise InvalidInput(f"activations have the shape [..., channels], got {tuple(activations.shape)}")
    largest = activations.detach().abs().flatten(0, -2).amax(0).double().cpu().numpy()
    return torch.from_numpy(_ratios(largest, "the activations") > threshold).to(activations.device)


def detect_outliers_quantile(activations: Tensor, quantile: float = 0.99) -> bool:
    """Whether the `quantile` of all |x| is over 5 times their median. False where most are 0: nothing to compare."""
    if not 0 < quantile < 1:
        raise InvalidInput(f"quantile must lie between 0 and 1, such as 0.99; got {quantile}")
    size = activations.detach().abs().double().cpu().numpy()
    high, middle = np.quantile(size, [quantile, 0.5])
    return bool(high > LIMITS["outlier_quantile_ratio"] * middle > 0)


def detect_outliers_fisher(model: Subject | nn.Module, calibration_data: Any, **more: Any) -> dict[str, Tensor]:
    """Which channels [C] of each linear carry a Fisher information above the 95th percentile of that linear's."""
    screened: Screened = ask(model, calibration_data, _SCREEN, levels=("operator",), **more)
    if screened.error:
        raise NoisescopeError(f"the screen failed: {screened.error}")
    shares = {site_label(site): screened.channel_shares(site) for site in screened.sites if site.operator == "linear"}
    limit = LIMITS["outlier_fisher_quantile"]
    return {name: torch.from_numpy(share > np.quantile(share, limit)) for name, share in shares.items()}


def outlier_row(name: str, columns: Mapping[str, Array], threshold: float) -> Row:
    """The rules on the channels of the module `name`, with every outlier listed in the order of channels."""
    ratio = _ratios(columns["max"], name)
    found = np.flatnonzero(ratio > threshold)
    row = to_json(channels.outliers(columns, None, threshold))
    return {**row, "outlier_indices": found.tolist(), "outlier_ratios": ratio[found].tolist()}


def _ratios(largest: Array, what: str) -> Array:
    """Each channel's largest |x| over the median channel's. NaN would compare as "no outlier", so it is refused."""
    if np.isnan(largest).any():
        raise InvalidInput(f"{what}: {int(np.isnan(largest).sum())} channels hold NaN, so nothing can be said of them")
    return over_median(largest)


def site_label(site: Site) -> str:
    """The module's name; the second product of one module (MoE experts have two) is told apart by its number."""
    name = site.module if site.operator == "linear" else f"{site.module} ({site.operator})"
    return name if site.occurrence == 0 else f"{name} #{site.occurrence}"


def _screened(frame: Frame, results: Results) -> Screened:
    found = screen.conclude(frame, results)
    assert found is not None  # nothing more was proposed, so all is known
    return found


_SCREEN = Question(screen.propose, _screened)
