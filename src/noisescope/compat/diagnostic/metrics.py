"""Metrics under the names of the original method notes: signals, curvature, divergence between two devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.compat.diagnostic.adapter import model_of
from noisescope.errors import InvalidInput
from noisescope.measures import curvature, tensor_errors
from noisescope.model.loading import Subject

LossFunction = Callable[[Any, Any], Tensor]  # (model, data) -> scalar


def compute_snr(activations: Tensor, noise_scale: float | Tensor) -> float | None:
    """Signal-to-noise ratio in dB: measured if a second (noisy) tensor is given, nominal if a scale is.

    The nominal ratio is the notes' 20 log10(1 / scale): the same for every tensor, 26 dB at 5 %. None without noise.
    """
    if isinstance(noise_scale, Tensor) and noise_scale.dim():
        return tensor_errors.snr_db(activations, noise_scale)
    return tensor_errors.nominal_snr_db(float(noise_scale))


def compute_sparsity(activations: Tensor, threshold: float = 1e-6, relative: float | None = None) -> float:
    """The share of |x| < threshold, or with `relative` of |x| < relative * rms(x), which SiLU and GELU need."""
    return tensor_errors.sparsity(activations, threshold, relative)


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
    return tensor_errors.gradient_ratio(noisy, clean)


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
    return tensor_errors.mae(*_finite(gpu_activations, npu_activations))


def compute_mape(gpu_activations: Tensor, npu_activations: Tensor) -> float:
    """Mean absolute error relative to the first, elementwise, as a fraction."""
    return tensor_errors.mape(*_finite(gpu_activations, npu_activations))


def compute_correlation(gpu_activations: Tensor, npu_activations: Tensor) -> float | None:
    """Pearson's correlation over all elements; None where one is constant."""
    return tensor_errors.pearson(*_finite(gpu_activations, npu_activations))


def compute_max_error(gpu_activations: Tensor, npu_activations: Tensor) -> float:
    """Largest absolute error."""
    return tensor_errors.max_error(*_finite(gpu_activations, npu_activations))


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


def check_activations(gpu_activations: Tensor, npu_activations: Tensor) -> None:
    """Reject anything but a pair of tensors [..., channels] of one shape."""
    for name, x in (("gpu_activations", gpu_activations), ("npu_activations", npu_activations)):
        if not isinstance(x, Tensor) or not x.dim() or not x.numel():
            came = f"one of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise InvalidInput(
                f"{name} must be a non-empty tensor [..., channels], such as capture_layer_output returns; got {came}"
            )
    if gpu_activations.shape != npu_activations.shape:
        raise InvalidInput(
            f"gpu_activations have the shape {tuple(gpu_activations.shape)}, npu_activations "
            f"{tuple(npu_activations.shape)}: compare outputs of the same module for the same input"
        )


def _finite(gpu_activations: Tensor, npu_activations: Tensor) -> tuple[Tensor, Tensor]:
    check_activations(gpu_activations, npu_activations)
    for name, x in (("gpu_activations", gpu_activations), ("npu_activations", npu_activations)):
        if not bool(x.isfinite().all()):
            raise InvalidInput(
                f"{name} contain NaN or infinity, which would spoil every average; MetricsDashboard and `noisescope "
                f"compare` count them"
            )
    return gpu_activations, npu_activations


def _function(loss: Tensor | Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    return (lambda model: loss) if isinstance(loss, Tensor) else loss


def _traces(
    model: Subject | nn.Module, loss_fn: LossFunction, data: Any, groups: curvature.Groups, probes: int, seed: int
) -> dict[str, curvature.TraceEstimate]:
    return curvature.hessian_traces(
        model_of(model), lambda inner: loss_fn(inner, data), groups, probes=probes, seed=seed
    )
