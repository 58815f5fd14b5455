"""Metrics under the names of the original method notes: signals, curvature, divergence between two devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.compat.diagnostic.adapter import model_of
from noisescope.errors import InvalidInput
from noisescope.injection import checked_scale
from noisescope.measures import curvature
from noisescope.model.loading import Subject

LossFunction = Callable[[Any, Any], Tensor]  # (model, data) -> scalar


def compute_snr(activations: Tensor, noise_scale: float | Tensor) -> float | None:
    """Signal-to-noise ratio in dB: measured if a second (noisy) tensor is given, nominal if a scale is.

    The measured one is 10 log10(sum clean^2 / sum (noisy - clean)^2), -inf without a signal. The nominal ratio is the
    notes' 20 log10(1 / scale): the same for every tensor, 26 dB at 5 %. None without noise.
    """
    if isinstance(noise_scale, Tensor) and noise_scale.dim():
        clean, noisy = _pair(activations, noise_scale, names=("activations", "noise_scale"))
        noise, signal = (float(x.square().sum()) for x in (noisy - clean, clean))
        return None if noise == 0 else 10 * math.log10(signal / noise) if signal > 0 else -math.inf
    scale = checked_scale(float(noise_scale), "the noise scale")
    return -20 * math.log10(scale) if scale > 0 else None


def compute_sparsity(activations: Tensor, threshold: float = 1e-6, relative: float | None = None) -> float:
    """The share of |x| < threshold or, where `relative` is given, of |x| < relative * rms(x).

    An absolute threshold finds almost nothing behind SiLU or GELU, which only come near zero. The measure is the
    tensor's rms rather than its maximum, which one outlier channel would set. A tensor of zeros has sparsity 1.
    """
    check_activations(activations, activations, names=("activations", "activations"))
    x, limit = _wide(activations, "activations").abs(), checked_scale(threshold, "threshold")
    if relative is not None:
        rms = float(x.square().mean().sqrt())
        limit = checked_scale(relative, "relative") * rms if rms else math.inf
    return float((x < limit).double().mean())


def compute_gradient_ratio(
    model: Subject | nn.Module,
    clean_loss: Tensor | Callable[[Any], Tensor],
    noisy_loss: Tensor | Callable[[Any], Tensor],
) -> float | None:
    """Norm of the noisy loss's gradient over that of the clean one; None where the clean one is 0.

    A loss is a scalar with its graph (spent by this call), or a function of the model.
    """
    parameters = {"model": [p for p in model_of(model).parameters() if p.requires_grad]}
    if not parameters["model"]:
        raise InvalidInput("no parameter of the model requires a gradient, so there is none to compare")
    noisy, clean = (
        curvature.gradient_norms(model_of(model), _function(loss), parameters)["model"]
        for loss in (noisy_loss, clean_loss)
    )
    if not math.isfinite(noisy + clean):
        raise InvalidInput(f"gradient norms must be finite, got {noisy:g} under noise and {clean:g} without")
    return noisy / clean if clean > 0 else None


def compute_layer_hessian_trace(
    model: Subject | nn.Module,
    loss_fn: LossFunction,
    data: Any,
    num_samples: int = 10,
    *,
    per_parameter: bool = False,
    seed: int = 0,
) -> dict[str, float]:
    """Trace of the Hessian of loss_fn(model, data) in each weight, by its name.

    A trace grows with the weight's size: to compare layers ask for it `per_parameter` (HAWQ-V2).
    """
    weights = {
        name: [p] for name, p in model_of(model).named_parameters() if "weight" in name and p.is_floating_point()
    }
    found = _traces(model, loss_fn, data, weights, num_samples, seed)
    return {name: trace.per_parameter if per_parameter else trace.trace for name, trace in found.items()}


def estimate_hessian_trace(
    model: Subject | nn.Module, loss_fn: LossFunction, data: Any, num_samples: int = 10, *, seed: int = 0
) -> float:
    """Trace of the Hessian of loss_fn(model, data) in all parameters, from `num_samples` random vectors."""
    everything = {"model": [p for p in model_of(model).parameters() if p.is_floating_point()]}
    return _traces(model, loss_fn, data, everything, num_samples, seed)["model"].trace


def estimate_fim_diagonal(
    model: Subject | nn.Module, data_loader: Iterable[Any], *, draws: int = 1, seed: int = 0
) -> dict[str, Tensor]:
    """The diagonal of the Fisher information by parameter name.

    The square is that of one sample's gradient, for labels drawn from the model; the notes square the gradient of a
    batch's mean for the true labels, which shrinks with the batch and vanishes where the model fits.
    """
    return curvature.parameter_fisher(model_of(model), data_loader, draws=draws, seed=seed)


def compute_mae(gpu_activations: Tensor, npu_activations: Tensor) -> float:
    """Mean absolute error."""
    gpu, npu = _pair(gpu_activations, npu_activations)
    return float((npu - gpu).abs().mean())


def compute_mape(gpu_activations: Tensor, npu_activations: Tensor) -> float:
    """Mean of |npu - gpu| / (|gpu| + 1e-8), as a fraction. Elements of the first near 0 dominate it."""
    gpu, npu = _pair(gpu_activations, npu_activations)
    return float(((npu - gpu).abs() / (gpu.abs() + 1e-8)).mean())


def compute_correlation(gpu_activations: Tensor, npu_activations: Tensor) -> float | None:
    """Pearson's correlation over all elements; None where one is constant."""
    gpu, npu = _pair(gpu_activations, npu_activations)
    x, y = gpu - gpu.mean(), npu - npu.mean()  # means first: an offset far above the spread costs no digits
    # Rounding of a mean leaves 1e-16 of it in each element of a constant tensor: that is no spread.
    if any(bool(part.square().mean() <= 1e-28 * whole.mean() ** 2) for part, whole in ((x, gpu), (y, npu))):
        return None
    return max(-1.0, min(1.0, float((x * y).sum() / (x.norm() * y.norm()))))


def compute_max_error(gpu_activations: Tensor, npu_activations: Tensor) -> float:
    """Largest absolute error."""
    gpu, npu = _pair(gpu_activations, npu_activations)
    return float((npu - gpu).abs().max())


def compute_kl_divergence(p_logits: Tensor, q_logits: Tensor, *, eps: float = 1e-6) -> float:
    """KL(p || q) in nats per token between two sets of logits [..., V], averaged over all tokens.

    This is the notes' formula: float32 softmax, with `eps` added to every probability. It is never negative, but `eps`
    hides what happens below it: a divergence that rests on tokens with less probability than that is underestimated.
    `noisescope.measures.divergence.kl_divergence` needs no eps and resolves 1e-10 nats.
    """
    if p_logits.shape != q_logits.shape or not p_logits.dim() or not p_logits.numel():
        raise InvalidInput(
            f"p_logits have the shape {tuple(p_logits.shape)}, q_logits {tuple(q_logits.shape)}: pass logits "
            "[..., vocabulary] of the same tokens"
        )
    if not eps > 0:
        raise InvalidInput(f"eps must be above 0, such as 1e-6, because log(0) is infinite; got {eps}")
    with torch.no_grad():
        p, q = (logits.float().softmax(-1) + eps for logits in (p_logits, q_logits))
        divergence = float((p * (p.log() - q.log())).sum(-1).mean())
    if divergence != divergence:
        raise InvalidInput("the logits hold NaN or infinity, so their divergence is not defined")
    return max(divergence, 0.0)  # equal inputs may round to -1e-9


def check_activations(
    gpu_activations: Tensor, npu_activations: Tensor, *, names: tuple[str, str] = ("gpu_activations", "npu_activations")
) -> None:
    """Reject anything but a pair of tensors [..., channels] of one shape."""
    for name, x in zip(names, (gpu_activations, npu_activations), strict=True):
        if not isinstance(x, Tensor) or not x.dim() or not x.numel():
            came = f"one of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InvalidInput(
                f"{name} must be a non-empty tensor [..., channels], such as capture_layer_output returns; got {came}"
            )
    if gpu_activations.shape != npu_activations.shape:
        raise InvalidInput(
            f"{names[0]} have the shape {tuple(gpu_activations.shape)}, {names[1]} {tuple(npu_activations.shape)}: "
            "compare outputs of the same module for the same input"
        )


def _pair(
    gpu_activations: Tensor, npu_activations: Tensor, *, names: tuple[str, str] = ("gpu_activations", "npu_activations")
) -> tuple[Tensor, Tensor]:
    """Both in float64, checked."""
    check_activations(gpu_activations, npu_activations, names=names)
    gpu, npu = (_wide(x, name) for x, name in zip((gpu_activations, npu_activations), names, strict=True))
    return gpu, npu.to(gpu.device)


def _wide(x: Tensor, name: str) -> Tensor:
    """In float64, which mps does not have."""
    if not bool(x.isfinite().all()):
        raise InvalidInput(
            f"{name} contain NaN or infinity, which would spoil every average; MetricsDashboard and `noisescope "
            f"compare` count them"
        )
    return (x.detach().cpu() if x.device.type == "mps" else x.detach()).double()


def _function(loss: Tensor | Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return (lambda model: loss) if isinstance(loss, Tensor) else loss


def _traces(
    model: Subject | nn.Module, loss_fn: LossFunction, data: Any, groups: curvature.Groups, probes: int, seed: int
) -> dict[str, curvature.TraceEstimate]:
    return curvature.hessian_traces(
        model_of(model), lambda inner: loss_fn(inner, data), groups, probes=probes, seed=seed
    )
