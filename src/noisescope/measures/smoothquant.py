"""SmoothQuant: moves outlier channels of activations into the weights that read them, before both are rounded.

    s_j = max|X_j|^alpha / max|W_j|^(1 - alpha),   X' = X / s,   W' = W s     (Xiao et al. 2023, arXiv 2211.10438)

X_j is channel j of the linears' input on calibration data, W_j column j of all linears that read it. The division is
folded into the source of X, which changes nothing in exact arithmetic:

==================================  ==========================================  ==============================
source                              linears that read it                        exact because
==================================  ==========================================  ==============================
a norm with a weight                those that are given its output             the weight multiplies at the end
v_proj                              o_proj                                      attention averages values
up_proj beside a gate_proj          down_proj                                   act(gate) * up is linear in up
==================================  ==========================================  ==============================

With grouped-query attention several heads of o_proj's input come from one head of v_proj, so they share their scales.
Norms and their readers are found by running the model: a linear reads a norm where it is given that very tensor. A norm
that also feeds a router is left out.

alpha is fixed, or searched for each fold: the one whose rounded linears come nearest to the exact ones, "leave it
alone" among the candidates. AWQ (Lin et al. 2024) has the same form for rounded weights alone: s_j = mean|X_j|^alpha.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope import progress
from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.injection import Injection
from noisescope.measures.divergence import kl_divergence
from noisescope.measures.format_costs import is_planned, weight_format
from noisescope.model.anatomy import MODULE, Anatomy, Unit, dissect, linear_weight
from noisescope.model.forwards import evaluating
from noisescope.probe.formats import Format, quantise
from noisescope.probe.inject import inject
from noisescope.probe.watch import RecordedCall, watch

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
ROWS = 256  # tokens of the calibration data on which candidates are compared
LARGEST_FLOAT_ERROR = 1e-3  # relative L2 of float32 logits above which a fold was not exact after all: usual is 1e-6


@dataclass(frozen=True)
class Fold:
    """A source, the linears that read it, and how many consecutive heads of their input share a head of the source."""

    source: str
    targets: tuple[str, ...]
    place: int
    repeats: int = 1
    head: int = 1  # channels of a head, where heads repeat
    norm: int | None = None  # of a norm: how often the block had added to the residual stream before it, 0 or 1


@dataclass(frozen=True)
class Scheme:
    """What is rounded to which format."""

    name: str
    weight: Format
    activation: Format | None


W8A8 = Scheme("W8A8", Format("int8", "channel"), Format("int8", "token"))
W8A8_TENSOR = Scheme("W8A8, one scale per tensor", Format("int8", "tensor"), Format("int8", "tensor"))
W4A16 = Scheme("W4A16", weight_format("int4"), None)


@dataclass(frozen=True)
class Folded:
    """The result at one fold. Errors are of the rounded linears that read it, relative and squared."""

    fold: Fold
    alpha: float | None  # None: left alone
    largest_scale: float
    gains: dict[str, float]  # by how much a method divides the error: SmoothQuant, AWQ, scales of their own

    def to_dict(self) -> dict[str, Any]:
        fold = self.fold
        about = {"source": fold.source, "targets": list(fold.targets), "place": fold.place, "norm": fold.norm}
        return {**about, "alpha": self.alpha, "largest_scale": self.largest_scale, "gains": self.gains}


@dataclass(frozen=True)
class Smoothed:
    """A copy of the model with its outliers folded into the weights."""

    model: nn.Module
    folds: tuple[Folded, ...]
    float_error: float  # relative L2 of the logits against the original's, both in the model's own dtype


def smooth(
    model: nn.Module,
    batches: Sequence[Tensor],
    *,
    alpha: float | None = None,
    places: frozenset[int] | None = None,
    anatomy: Anatomy | None = None,
) -> Smoothed:
    """A smoothed copy; `batches` are token ids [B, T] without padding. `alpha` None searches; `places` None is all.

    Scales are folded in, and the output compared, in float32: in 16 bits round-off would hide a fold that is not exact.
    """
    if alpha is not None and not 0 <= alpha <= 1:
        raise InvalidInput(f"alpha must be from 0 (all to the activations) to 1 (all to the weights), got {alpha}")
    anatomy = anatomy or dissect(model)
    found = [fold for fold in find_folds(model, batches[0], anatomy) if places is None or fold.place in places]
    if not found:
        raise UnsupportedModel("no norm or linear was found that scales could be folded into")
    inputs = _inputs(model, batches, {fold.targets[0] for fold in found}, anatomy)
    smoothed = _in_float32(model)
    before = _logits(smoothed, batches[0])
    done = []
    for fold in progress.track("folds", found):
        largest, rows = inputs[fold.targets[0]]
        done.append(_fold(smoothed, fold, largest, rows, alpha))
    error = _moved(before, _logits(smoothed, batches[0]))
    if not error <= LARGEST_FLOAT_ERROR:  # NaN is refused, too
        raise UnsupportedModel(
            f"folding the scales changed the model's own output by {error:.2g} in float32: this architecture can't "
            f"be smoothed"
        )
    for folded, given in zip(_numbers(smoothed), _numbers(model), strict=True):
        folded.data = folded.data.to(given.dtype)
    return Smoothed(smoothed, tuple(done), _moved(_logits(model, batches[0]), _logits(smoothed, batches[0])))


def _in_float32(model: nn.Module) -> nn.Module:
    """A copy whose 16-bit parameters and buffers are float32."""
    copied = copy.deepcopy(model)
    for tensor in _numbers(copied):
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor.data = tensor.data.float()
    return copied


def _numbers(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with evaluating(model), torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _moved(before: Tensor, after: Tensor) -> float:
    return float((after - before).norm() / before.norm())


def _inputs(
    model: nn.Module, batches: Sequence[Tensor], names: set[str], anatomy: Anatomy
) -> dict[str, tuple[Tensor, Tensor]]:
    """(largest |x| of each channel [in], some rows [<= ROWS, in]) of what linears are given."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    each = -(-ROWS // len(batches))  # rows of a batch

    def on_call(call: RecordedCall) -> None:
        x, module = call.tensors[0], call.unit.module
        rows = x.reshape(-1, x.shape[-1]).float()
        largest, some = rows.abs().amax(0), rows[:: max(1, -(-len(rows) // each))]
        if module in found:
            known = found[module]
            largest, some = torch.maximum(known[0], largest), torch.cat([known[1], some])
        found[module] = (largest, some)

    def where(unit: Unit, operator: str) -> bool:
        return unit.kind == MODULE and unit.module in names

    with evaluating(model), watch(model, on_call, where, anatomy=anatomy), torch.no_grad():
        for ids in progress.track("calibration", batches):
            model(input_ids=ids, use_cache=False)
    return found


def _fold(model: nn.Module, fold: Fold, largest: Tensor, rows: Tensor, alpha: float | None) -> Folded:
    """Choose scales for one fold, apply them, and report the gain of each method."""
    modules = dict(model.named_modules())
    weights = [linear_weight(modules[name]).float() for name in fold.targets]
    columns = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    x_max, w_max = gathered(fold, largest), gathered(fold, columns)
    means = gathered(fold, rows.abs().mean(0))

    def error(scheme: Scheme, scales: Tensor | None) -> float:
        return sum(rounding_error(rows, w, scheme, None if scales is None else spread(fold, scales)) for w in weights)

    plain = error(W8A8, None)
    tried = {a: smoothing_scales(x_max, w_max, a) for a in ((alpha,) if alpha is not None else ALPHAS)}
    errors = {a: error(W8A8, scales) for a, scales in tried.items()}
    best = min(errors, key=lambda a: errors[a])
    wanted = alpha is not None or errors[best] < plain
    done = wanted and fold_in(model, fold, tried[best])
    awq = min(error(W4A16, awq_scales(means, a)) for a in (*ALPHAS, 0.0))
    gains = {
        "SmoothQuant": plain / max(errors[best], 1e-30) if done else 1.0,
        "AWQ": error(W4A16, None) / max(awq, 1e-30),
        "per-channel": error(W8A8_TENSOR, None) / max(plain, 1e-30),
    }
    return Folded(fold, best if done else None, float(tried[best].max()) if done else 1.0, gains)


def smoothing_scales(x_max: Tensor, w_max: Tensor, alpha: float) -> Tensor:
    """SmoothQuant's scales [C]; 1 for channels that carry nothing."""
    scales = x_max.pow(alpha) / w_max.clamp_min(1e-5).pow(1 - alpha)
    return torch.where((x_max > 0) & (w_max > 0), scales, torch.ones_like(scales)).clamp(1e-5, 1e5)


def awq_scales(means: Tensor, alpha: float) -> Tensor:
    """AWQ's scales [C], brought to a geometric middle of 1 as its authors do."""
    scales = means.clamp_min(1e-4).pow(alpha)
    return scales / (scales.max() * scales.min()).sqrt()


def rounding_error(x: Tensor, weight: Tensor, scheme: Scheme, scales: Tensor | None) -> float:
    """|| x W^T - Q(x / s) Q(W s)^T ||^2 over || x W^T ||^2; x [N, in], weight [out, in], scales [in]."""
    exact = x @ weight.T
    given, held = (x, weight) if scales is None else (x / scales, weight * scales)
    rounded = given if scheme.activation is None else quantise(given, scheme.activation)
    error = rounded @ quantise(held, scheme.weight, weight=True).T - exact
    return float(error.square().sum() / exact.square().sum().clamp_min(1e-30))


def rounded_kl(
    model: nn.Module, exact: nn.Module, batches: Sequence[Tensor], scheme: Scheme = W8A8, anatomy: Anatomy | None = None
) -> list[float]:
    """KL(exact || model with all linears of its blocks rounded), mean over the tokens of each batch."""
    anatomy = anatomy or dissect(model)
    names = tuple(unit.module for unit in anatomy.units if is_planned(unit))
    found = []
    with ExitStack() as scopes, evaluating(model), evaluating(exact), torch.no_grad():
        clean = [exact(input_ids=ids, use_cache=False).logits[:, :-1] for ids in progress.track("exact", batches)]
        for tensor, fmt in (("weight", scheme.weight), ("input", scheme.activation)):
            if fmt is not None:
                target = Injection(fmt, modules=names, operators={"linear"}, tensor=tensor, phases={"forward"})  # type: ignore[arg-type]
                scopes.enter_context(inject(model, target, anatomy=anatomy))
        for ids, logits in progress.track("rounded", zip(batches, clean, strict=True)):
            rounded = model(input_ids=ids, use_cache=False).logits[:, :-1]
            found.append(float(kl_divergence(logits.flatten(0, 1), rounded.flatten(0, 1)).double().mean()))
    return found


# -- folds


def find_folds(model: nn.Module, ids: Tensor, anatomy: Anatomy) -> list[Fold]:
    """Every fold of every block, in order of blocks."""
    modules = dict(model.named_modules())
    place = {unit.module: unit.place for unit in anatomy.units}
    folds: list[Fold] = []
    stages: dict[int, list[int]] = {}  # of each block: addresses of what its norms are given, in order
    for norm, (address, linears) in _readers(model, ids, anatomy).items():
        at = place[norm]
        if isinstance(at, int) and getattr(modules[norm], "weight", None) is not None:
            known = stages.setdefault(at, [])
            if address not in known:  # the norms of parallel attention and MLP are given the same
                known.append(address)
            folds.append(Fold(norm, tuple(linears), at, norm=known.index(address)))
    projections = {(unit.module.rpartition(".")[0], unit.role): unit.module for unit in anatomy.units if unit.role}
    for unit in anatomy.units:
        parent = unit.module.rpartition(".")[0]
        source = projections.get((parent, {"o": "v", "down": "up"}.get(unit.role, "")))
        if source is None or not isinstance(unit.place, int) or unit.packed:
            continue
        outputs, inputs = linear_weight(modules[source]).shape[0], linear_weight(modules[unit.module]).shape[1]
        if unit.role == "down" and outputs == inputs and (parent, "gate") in projections:
            folds.append(Fold(source, (unit.module,), unit.place))
        head = getattr(modules[parent], "head_dim", None)
        if unit.role == "o" and head and inputs % outputs == 0 and outputs % head == 0:
            folds.append(Fold(source, (unit.module,), unit.place, inputs // outputs, head))
    return sorted(folds, key=lambda fold: fold.place)


def _readers(model: nn.Module, ids: Tensor, anatomy: Anatomy) -> dict[str, tuple[int, list[str]]]:
    """Linears that are given the output of a norm, with the address of what the norm was given; in order of calls."""
    norms: dict[int, str] = {}  # address of a norm's output; unique as long as `kept` holds it
    inputs: dict[str, int] = {}
    kept: list[Tensor] = []
    found: dict[str, list[str]] = {}
    routed: set[str] = set()  # experts read these, too, through functions that no module stands for

    def on_call(call: RecordedCall) -> None:
        unit, (x, y) = call.unit, call.tensors
        if "norm" in unit.operators:
            kept.extend((x, y))
            norms[y.data_ptr()] = unit.module
            inputs[unit.module] = x.data_ptr()
        elif (norm := norms.get(x.data_ptr())) is not None:
            if unit.component == "router":
                routed.add(norm)
            found.setdefault(norm, []).append(unit.module)

    def where(unit: Unit, operator: str) -> bool:
        return unit.kind == MODULE and operator in ("norm", "linear")

    with evaluating(model), watch(model, on_call, where, anatomy=anatomy), torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return {norm: (inputs[norm], linears) for norm, linears in found.items() if norm not in routed}


def fold_in(model: nn.Module, fold: Fold, scales: Tensor) -> bool:
    """Divide the source by scales [its channels] and multiply the targets' columns; False where the source can't be."""
    modules = dict(model.named_modules())
    source = modules[fold.source]
    with torch.no_grad():
        if not _divide(source, scales):
            return False
        for name in fold.targets:
            linear_weight(modules[name]).mul_(spread(fold, scales))  # a view of the parameter: changed in place
    return True


def spread(fold: Fold, scales: Tensor) -> Tensor:
    """Scales of the source's channels as scales of the targets' input channels."""
    if fold.repeats == 1:
        return scales
    return scales.view(-1, 1, fold.head).expand(-1, fold.repeats, -1).reshape(-1)


def gathered(fold: Fold, largest: Tensor) -> Tensor:
    """The largest values of the targets' input channels [in] as those of the source's channels."""
    return largest if fold.repeats == 1 else largest.view(-1, fold.repeats, fold.head).amax(1).reshape(-1)


def _divide(source: nn.Module, scales: Tensor) -> bool:
    """Make a module return 1 / scales of its output. A norm may weight by w or by 1 + w (Gemma): whichever fits."""
    weight: Any = source.weight
    bias: Any = getattr(source, "bias", None)
    if weight.dim() == 2:
        linear_weight(source).div_(scales[:, None])
    else:
        x = torch.randn(4, len(scales), generator=torch.Generator().manual_seed(0)).to(weight)
        shift = 0.0 if bias is None else bias
        before, gain = weight.clone(), (source(x) - shift) / scales
        for weighed in (before / scales, (1 + before) / scales - 1, before):
            weight.copy_(weighed)
            if weighed is before:
                return False
            if torch.allclose(source(x) - shift, gain, rtol=1e-2, atol=1e-4 * float(gain.abs().max())):
                break
    if bias is not None:
        bias.div_(scales)
    return True
