"""How far apart two tensors are, and how sparse one is: float64 sums in chunks, for tensors of any size.

Each function takes the clean (reference) tensor first, refuses other shapes and what is not finite, and returns a
number. None stands for what has no finite value there: JSON has no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.injection import checked_scale

_CHUNK = 2**20  # elements: 8 MiB in float64


def snr_db(clean: Tensor, noisy: Tensor) -> float | None:
    """Signal-to-noise ratio 10 log10(sum clean^2 / sum (noisy - clean)^2), measured; None where the two are identical.

    An all-zero clean tensor has no signal: -inf.
    """
    signal = noise = 0.0
    for x, y in _pairs(clean, noisy):
        signal += float(x.square().sum())
        noise += float((y - x).square().sum())
    if noise == 0:
        return None
    return 10 * (math.log10(signal) - math.log10(noise)) if signal > 0 else -math.inf


def nominal_snr_db(scale: float) -> float | None:
    """20 log10(1 / scale), the ratio at the place where relative noise of this scale is put in; None for no noise.

    The formula of the original method notes. It knows nothing of the tensor (26 dB for every layer at 5 %): to tell
    layers apart, measure `snr_db` downstream of the noise.
    """
    scale = checked_scale(scale, "the noise scale")
    return -20 * math.log10(scale) if scale > 0 else None


def sparsity(x: Tensor, threshold: float = 1e-6, relative: float | None = None) -> float:
    """The share of elements with |x| < threshold or, where `relative` is given, |x| < relative * rms(x).

    An absolute threshold finds almost nothing behind SiLU or GELU, which only come near zero. The measure is the
    tensor's rms rather than its maximum, which one outlier channel would set. A tensor of zeros has sparsity 1.
    """
    limit = checked_scale(threshold, "threshold")
    if relative is not None:
        rms = math.sqrt(sum(float(part.square().sum()) for part in _parts(x, "x")) / x.numel())
        if rms == 0:
            return 1.0
        limit = checked_scale(relative, "relative") * rms
    return sum(int((part.abs() < limit).sum()) for part in _parts(x, "x")) / x.numel()


def gradient_ratio(noisy_norm: float, clean_norm: float) -> float | None:
    """Gradient norm under noise over the clean one; None where the clean one is 0."""
    noisy_norm, clean_norm = checked_scale(noisy_norm, "noisy_norm"), checked_scale(clean_norm, "clean_norm")
    return noisy_norm / clean_norm if clean_norm > 0 else None


def mae(clean: Tensor, noisy: Tensor) -> float:
    """Mean absolute error."""
    return sum(float((y - x).abs().sum()) for x, y in _pairs(clean, noisy)) / clean.numel()


def mape(clean: Tensor, noisy: Tensor, *, eps: float = 1e-8) -> float:
    """Mean of |noisy - clean| / (|clean| + eps), as a fraction. Elements of clean near 0 dominate it."""
    return sum(float(((y - x).abs() / (x.abs() + eps)).sum()) for x, y in _pairs(clean, noisy)) / clean.numel()


def max_error(clean: Tensor, noisy: Tensor) -> float:
    """Largest absolute error."""
    return max(float((y - x).abs().max()) for x, y in _pairs(clean, noisy))


def pearson(clean: Tensor, noisy: Tensor) -> float | None:
    """Pearson correlation over all elements; None where one is constant. Two passes: means first, so that an offset
    far above the spread costs no digits."""
    means = [0.0, 0.0]
    for x, y in _pairs(clean, noisy):
        means[0] += float(x.sum()) / clean.numel()
        means[1] += float(y.sum()) / clean.numel()
    return _cosine_about(clean, noisy, *means)


def _cosine_about(clean: Tensor, noisy: Tensor, clean_centre: float, noisy_centre: float) -> float | None:
    xx = yy = xy = 0.0
    for x, y in _pairs(clean, noisy):
        x, y = x - clean_centre, y - noisy_centre
        xx += float(x.square().sum())
        yy += float(y.square().sum())
        xy += float((x * y).sum())
    # Rounding of a mean leaves 1e-16 of the centre in each element of a constant tensor: that is no spread.
    floor = 1e-28 * clean.numel()
    if xx <= floor * clean_centre**2 or yy <= floor * noisy_centre**2:
        return None
    return max(-1.0, min(1.0, xy / (math.sqrt(xx) * math.sqrt(yy))))


def _pairs(clean: Tensor, noisy: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Matching chunks of both tensors in float64, checked."""
    if clean.shape != noisy.shape:
        raise InvalidInput(
            f"the clean tensor has the shape {tuple(clean.shape)}, the noisy one {tuple(noisy.shape)}: compare outputs "
            "of the same module for the same input"
        )
    return zip(_parts(clean, "clean"), _parts(noisy.to(clean.device), "noisy"), strict=True)


def _parts(x: Tensor, name: str) -> Iterator[Tensor]:
    if x.numel() == 0:
        raise InvalidInput(f"the {name} tensor is empty: nothing to measure")
    for part in torch.split(x.detach().reshape(-1), _CHUNK):
        wide = (part.cpu() if part.device.type == "mps" else part).to(torch.float64)  # mps has no float64
        if not bool(wide.isfinite().all()):
            raise InvalidInput(f"the {name} tensor contains NaN or infinity: remove or count those rows first")
        yield wide
