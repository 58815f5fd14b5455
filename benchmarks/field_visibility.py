"""How visible a fault is: the first tensor that changes in the order of the calls, and the logits.

A clean and a faulty model run on the same input, in the phase the fault needs; where the fault is a kernel of our own,
the clean model has the same kernel without the mistake. A fault that changes nothing is excluded, not counted.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from field_cases import FaultCase, Shape
from field_models import build
from torch import Tensor, nn

_LEAST = 2.0  # ulp of one element; or 1/16 of a unit of round-off as the rms of all
_FIRST, _LAST = 3, 60  # token ids that every model knows, without pad, bos and eos


@dataclass(frozen=True)
class Visibility:
    """What a fault changes. Ulps are of each element, or of an eighth of the rms for elements below it."""

    module: str = ""  # the first whose output or input changed
    tensor: str = ""
    changed: float = 0.0  # the share of elements
    relative: float = 0.0  # rms of the change over the rms of the tensor
    largest_ulp: float = 0.0
    gain: float = 0.0  # the change along the tensor itself
    logits: float = 0.0  # rms of the change over the rms of the logits
    round_off: float = 0.0

    @property
    def visible(self) -> bool:
        return self.logits > 0 and (self.largest_ulp > _LEAST or self.relative > self.round_off / 16)


@dataclass
class Trace:
    """Every tensor that enters or leaves a module, in the order of the calls."""

    tensors: dict[tuple[str, str, int], Tensor] = field(default_factory=dict)
    calls: dict[tuple[str, str], int] = field(default_factory=dict)
    logits: list[Tensor] = field(default_factory=list)

    def add(self, module: str, side: str, value: object) -> None:
        if isinstance(value, tuple):
            value = value[0] if value else None
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return
        call = self.calls.get((module, side), 0)
        self.calls[module, side] = call + 1
        self.tensors[module, side, call] = value.detach().clone()


@contextlib.contextmanager
def traced(model: nn.Module) -> Iterator[Trace]:
    trace = Trace()
    handles = []
    for name, module in model.named_modules():
        if not name:
            continue

        def before(_: nn.Module, args: tuple[object, ...], name: str = name) -> None:
            trace.add(name, "input", args)

        def after(_: nn.Module, args: tuple[object, ...], output: object, name: str = name) -> None:
            trace.add(name, "output", output)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def tokens(shape: Shape, call: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 + call)
    return torch.randint(_FIRST, _LAST, (shape.batch, shape.tokens), generator=draw)


def outputs(model: nn.Module, shape: Shape) -> list[Tensor]:
    """The logits of each call: prefill, padded if asked for, then decode steps with the model's own cache."""
    found = []
    with torch.no_grad():
        for call in range(shape.calls):
            ids = tokens(shape, call)
            if not shape.decode and not shape.padding:
                found.append(_logits(model(input_ids=ids)))
                continue
            mask = torch.ones_like(ids)
            if shape.padding:
                mask[1:, slice(0, 7) if shape.padding == "left" else slice(-7, None)] = 0
            result = model(input_ids=ids, attention_mask=mask, use_cache=bool(shape.decode))
            found.append(_logits(result)[mask.bool()])
            for step in range(shape.decode):
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
                newest = tokens(Shape(shape.batch, 1), 50 + step)
                cache = result.past_key_values
                result = model(input_ids=newest, attention_mask=mask, past_key_values=cache, use_cache=True)
                found.append(_logits(result))
    return found


def _logits(result: object) -> Tensor:
    logits = getattr(result, "logits", result)
    assert isinstance(logits, Tensor)
    return logits.detach().clone()


def run(model: nn.Module, shape: Shape) -> Trace:
    with traced(model) as trace:
        trace.logits = outputs(model, shape)
    return trace


def measure(case: FaultCase) -> Visibility:
    """The visibility of a case, each time in fresh models."""
    right, broken = build(case.model, case.dtype), build(case.model, case.dtype)
    with case.healthy(right) if case.healthy is not None else contextlib.nullcontext():
        clean = run(right, case.shape)
    with case.fault(broken):
        faulty = run(broken, case.shape)
    return difference(clean, faulty, getattr(torch, case.dtype))


def difference(clean: Trace, faulty: Trace, dtype: torch.dtype) -> Visibility:
    u = torch.finfo(dtype).eps / 2
    total = sum(float((a - b).float().square().sum()) for a, b in zip(clean.logits, faulty.logits, strict=True))
    logits = math.sqrt(total / sum(float(a.float().square().sum()) for a in clean.logits))
    if math.isnan(logits):
        logits = math.inf
    pairs = {key: (clean.tensors[key], after) for key, after in faulty.tensors.items() if key in clean.tensors}
    parted = [key for key, (x, y) in pairs.items() if x.shape == y.shape and not torch.equal(x, y)]
    if parted and logits > 0:
        module, side, _ = parted[0]
        calls = [_change(module, side, *pairs[key], logits, u) for key in parted if key[:2] == (module, side)]
        return max(calls, key=lambda change: change.relative)  # the call in which it changed most
    if logits > 0:  # changed after the last module
        a, b = next((a, b) for a, b in zip(clean.logits, faulty.logits, strict=True) if not torch.equal(a, b))
        return _change("", "logits", a, b, logits, u)
    return Visibility(round_off=u)


def _change(module: str, side: str, before: Tensor, after: Tensor, logits: float, u: float) -> Visibility:
    x, y = before.double(), after.double()
    error = (y - x).nan_to_num(nan=math.inf, posinf=math.inf, neginf=math.inf)
    rms = float(x.square().mean().sqrt()) or 1e-30
    ulp = torch.exp2(torch.floor(torch.log2(x.abs().clamp_min(rms / 8)))) * 2 * u
    return Visibility(
        module,
        side,
        float((error != 0).double().mean()),
        float(error.square().mean().sqrt()) / rms,
        float((error.abs() / ulp).max()),
        float((error * x).sum() / x.square().sum().clamp_min(1e-300)),
        logits,
        u,
    )
