"""The laws of whole sub-layers: an attention module, an MLP, and the rotary angles. They see what lies between operators.

They are judged last: where an operator inside breaks a law of its own, its sub-layer's break is a consequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.locators.floors import number_format, work_roundoff
from noisescope.locators.law_linear import Examined
from noisescope.locators.law_readings import Reading, exact, floored, host, rms
from noisescope.locators.law_scope import Heard, biases, parameters_replaced
from noisescope.locators.recompute import host_arithmetic

SHIFT = 17  # positions
_CROSS = ("key_value_states", "encoder_hidden_states")
_LOOSE = 32  # units of round-off that one token repeated, or tokens that may not be seen, may cost a module


class Rotary:
    """What the rotary modules of this forward gave, with the same angles 17 positions further on."""

    def __init__(self) -> None:
        self._shifted: dict[int, tuple[Any, tuple[Tensor, Tensor], int]] = {}

    def shifted(self, pair: Any) -> tuple[tuple[Tensor, Tensor], int] | None:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            return None
        known = self._shifted.get(id(pair[0]))
        return None if known is None or known[0] is not pair[0] else (known[1], known[2])

    def examine(self, heard: Heard) -> Examined:
        """R14: the rotation from a position to one 17 further on is the same everywhere."""
        found = Examined()
        given = [*heard.args, *heard.kwargs.values()]
        positions = next((t for t in given if isinstance(t, Tensor) and not t.is_floating_point()), None)
        like, pair = heard.x, heard.y
        if positions is None or like is None or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            found.skipped.append("R14: rotary angles that are not (cos, sin) of positions")
            return found

        def call(x: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
            swapped = {id(positions): where, id(like): x}
            args = tuple(swapped.get(id(arg), arg) for arg in heard.args)
            kwargs = {name: swapped.get(id(value), value) for name, value in heard.kwargs.items()}
            cos, sin = heard.callee(*args, **kwargs)
            return cos, sin

        further = call(like, positions + SHIFT)
        last = int(positions.max()) + SHIFT
        self._shifted[id(pair[0])] = (pair[0], further, last)
        again = call(like, positions)
        wide = like if like.dtype.itemsize >= 4 else like.float()
        fine, fine_further = (
            ((pair[0], pair[1]), further) if wide is like else (call(wide, positions), call(wide, positions + SHIFT))
        )
        with host_arithmetic():
            for one, two in zip(again, pair, strict=True):
                found.readings.append(exact("R1", host(one).double(), host(two).double()))
            found.readings.append(_turning(pair, further, last))
            if wide is not like:
                found.readings.append(_turning(fine, fine_further, last))
        return found


def _turning(here: Any, there: Any, last: int) -> Reading:
    """c c' + s s' and s' c - c' s, [.., T, D], must not depend on the position."""
    form = number_format(here[0].dtype)
    c, s, c2, s2 = (t.detach().cpu().double() for t in (*here, *there))
    size = float((c.square() + s.square()).mean())
    parts = [c * c2 + s * s2, s2 * c - c2 * s, c.square() + s.square()]
    error = torch.stack([part - part.median(-2, keepdim=True).values for part in parts])
    limit = torch.full_like(error, 8 * size * (2 * form.u + 2 * last * 2.0**-24 + 2.0**-22))
    return floored("R14", error.reshape(-1, c.shape[-1]), limit.reshape(-1, c.shape[-1]), size)


def examine_attention(heard: Heard, rotary: Rotary, *, causal: bool | None) -> Examined:
    """R4, R7, R8, R10 and R14 of one attention module; `causal` None: not known to look back only."""
    found = Examined()
    x, y, module = heard.x, heard.output, heard.callee
    if any(isinstance(heard.kwargs.get(name), Tensor) for name in _CROSS):
        found.skipped.append("R4, R7, R8, R10 of cross attention: its keys come from elsewhere")
        return found
    if x is None or y is None or x.dim() != 3 or not x.is_floating_point() or x.shape[1] < 3:
        found.skipped.append("attention sub-layer laws: its input has not the shape [batch, tokens, width]")
        return found
    if isinstance(module, nn.MultiheadAttention):
        def call(z: Tensor, **changed: Any) -> Tensor:
            same = {id(x): z}  # query, key and value are one tensor
            args = tuple(same.get(id(arg), arg) for arg in heard.args)
            kwargs = {k: same.get(id(value), value) for k, value in heard.kwargs.items()} | changed
            with parameters_replaced(zeros):
                return module(*args, **kwargs)[0]  # type: ignore[no-any-return]
    else:
        def call(z: Tensor, **changed: Any) -> Tensor:
            with parameters_replaced(zeros):
                return plain.again(z, **changed)
    zeros, plain = biases(module), heard.alone()
    base = call(x) if zeros or heard.adds else y
    minus, zero = call(-x), call(torch.zeros_like(x))
    constant = call(x[:, 1:2].expand_as(x).contiguous())
    late = x.shape[1] - x.shape[1] // 3
    changed = x.clone()
    changed[:, late:] = -2 * x[:, late:].flip(-1)
    later = call(changed) if causal else None
    pair = heard.kwargs.get("position_embeddings")
    shifted = rotary.shifted(pair)
    moved = jittered = None
    if shifted is not None and pair is not None:
        moved = call(x, position_embeddings=shifted[0])
        size = max(number_format(x.dtype).u, shifted[1] * 2.0**-24)
        jittered = call(x, position_embeddings=tuple(_jitter(t, size) for t in pair))
    with host_arithmetic():
        b = host(base).double()
        u, scale = number_format(y.dtype).u, rms(b)
        found.readings.append(exact("R7", host(minus).double(), -b))
        found.readings.append(exact("R8", host(zero).double(), torch.zeros_like(host(zero).double())))
        same = constant.detach().cpu().double()
        limit = torch.full_like(same, 2 * _LOOSE * u * rms(same)) + 2.0**-60
        found.readings.append(floored("R10", (same - same[:, :1]).flatten(0, 1), limit.flatten(0, 1), rms(same)))
        if later is not None:
            ahead, kept = (t.detach().cpu().double()[:, :late] for t in (later, base))
            limit = _LOOSE * u * (kept.square().mean(-1, keepdim=True).sqrt() + kept.abs())
            found.readings.append(floored("R4", (ahead - kept).flatten(0, 1), limit.flatten(0, 1), scale))
        if moved is not None and jittered is not None:
            # The response to angles that are off by one rounding is what one rounding costs here.
            floor = rms(host(jittered).double() - b) + 4 * u * scale
            error = host(moved).double() - b
            size_now = rms(error)
            found.readings.append(Reading("R14", size_now / (8 * floor), size_now / max(scale, 1e-300),
                                          8 * floor / max(scale, 1e-300), 1.0, (), error.numel()))  # fmt: skip
    return found


def _jitter(t: Tensor, size: float) -> Tensor:
    """t (1 +- size), signs from a fixed stream; a size that rounds away moves by one number of the dtype."""
    signs = torch.randint(0, 2, t.shape, generator=torch.Generator("cpu").manual_seed(SHIFT), device="cpu") * 2 - 1
    step = max(size, torch.finfo(t.dtype).eps)
    return (t.float() * (1 + step * signs.to(t.device))).to(t.dtype)


def examine_mlp(heard: Heard, parts: dict[str, Tensor]) -> Examined:
    """R16; `parts` are outputs of the linears inside, by their last name, from this same call."""
    found = Examined()
    x, y, module = heard.x, heard.output, heard.callee
    if x is None or y is None:
        return found
    names = [name for name, child in module.named_children() if name in parts]
    children = dict(module.named_children())
    gate, up, down = _roles(names, parts)
    if down is None or gate is None:
        found.skipped.append("R16: an MLP of another form than down(act(gate) up) or down(act(up))")
        return found
    zeros = biases(module)
    if zeros or heard.adds:
        found.skipped.append("R16: the MLP adds biases or a residual")
        return found
    minus = heard.again(-x)
    product = gate if up is None else gate * up
    through: Callable[[Tensor], Tensor] = children[down]
    expected = through(product.reshape(*x.shape[:-1], -1))
    size = through(product.abs().reshape(*x.shape[:-1], -1))
    with host_arithmetic():
        a, b, e = host(y).double(), host(minus).double(), host(expected).double()
        error = a + b - e if up is not None else a - b - e
        u, work = number_format(y.dtype).u, work_roundoff(y.dtype)
        scale = max(rms(a), rms(b), rms(e), rms(host(size).double()) / math.sqrt(product.shape[-1]))
        limit = torch.full_like(error, (_LOOSE * u + work * math.sqrt(product.shape[-1])) * scale)
        row = torch.stack([t.square().mean(-1).sqrt() for t in (a, b, e)]).amax(0)[:, None]
        limit = torch.maximum(limit, _LOOSE * u * row)
        found.readings.append(floored("R16", error, limit, rms(a)))
    return found


def _roles(names: list[str], parts: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, str | None]:
    """Gate, up, and the name of down."""
    if {"gate_proj", "up_proj", "down_proj"} <= set(names):
        return parts["gate_proj"], parts["up_proj"], "down_proj"
    if set(names) == {"gate_up_proj", "down_proj"}:
        gate, up = parts["gate_up_proj"].chunk(2, -1)
        return gate, up, "down_proj"
    if len(names) == 2 and parts[names[0]].shape[-1] != parts[names[1]].shape[-1]:
        return parts[names[0]], None, names[1]
    return None, None, None
