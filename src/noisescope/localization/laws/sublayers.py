"""The laws of whole sub-layers (an attention module, an MLP) and of their rotary angles.

They cover what lies between operators, and are judged last: if an operator inside breaks one of its own laws, the
sub-layer's failure is a consequence. Errors of several operators add up in them, so if a law seems broken, the module's
own sensitivity to round-off is measured: its output for an input that is perturbed by one rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.formula_recognition import activation_formula
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.judge import TINY, Judgement, judge_law, judge_size
from noisescope.localization.laws.attention import masked_out
from noisescope.localization.laws.call_results import LawEvidence
from noisescope.localization.laws.calls_with_other_inputs import (
    adds_residual,
    biases,
    parameters_replaced,
    probe,
    without_residual,
)
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import (
    WORK_ROUNDOFF,
    Z_ELEMENT,
    number_format,
    product_roundoff,
    squares_from_split,
)
from noisescope.localization.tensors import host_rows, rms
from noisescope.model.anatomy import ROLES
from noisescope.probe.recorded_call import RecordedCall

_CROSS = ("key_value_states", "encoder_hidden_states")
# Guards, not derived: errors of five operators meet here. Of their limits healthy modules used at most, in 120 tests
# (benchmarks/healthy_limits.py: 5 architectures, 3 dtypes, 4 seeds), 0.51 by one token
# repeated, 0.00 by causality, 0.08 by the position shift.
_LOOSE = 32  # units of round-off that one token repeated, or tokens that may not be seen, may cost a module
_ANSWERS = 8  # times the module's answer to one rounding
_TERM = 3.0  # units of round-off in one term of an MLP's last sum: activation and product, three times over
_SEED = 17
_SHIFT = 17  # positions

Again = Callable[..., Tensor]


def examine_attention(recorded: RecordedCall, rotary: Rotary, *, causal: bool) -> LawEvidence:
    """Test oddness, zero, one repeated token, causality and position shift of one attention module."""
    x, y = recorded.first_input, recorded.output_tensor
    if any(isinstance(recorded.kwargs.get(name), Tensor) for name in _CROSS):
        return LawEvidence(skipped=["laws of cross attention: its keys come from another sequence"])
    if x is None or y is None or x.dim() != 3 or not x.is_floating_point() or x.shape[1] < 3:
        shape = "its input does not have the shape [batch, at least 3 tokens, width]"
        return LawEvidence(skipped=[f"attention sub-layer laws: {shape}"])
    attending = _attending(recorded, x)
    if not bool(attending.any()):
        return LawEvidence(skipped=["attention sub-layer laws: a mask hides every token"])
    found = LawEvidence()
    zeros = biases(recorded.callee)
    plain = recorded if isinstance(recorded.callee, nn.MultiheadAttention) else without_residual(recorded)

    def call(z: Tensor, **changed: Any) -> Tensor:
        with parameters_replaced(zeros):
            return plain.again(z, **changed)

    def without_sinks(z: Tensor) -> Tensor:
        with parameters_replaced(_closed_sinks(recorded.callee)):
            return call(z)

    base = call(x) if zeros or (plain is not recorded and adds_residual(recorded)) else y
    minus, zero = call(probe(x, torch.neg)), call(probe(x, torch.zeros_like))
    with host_arithmetic():
        b, odd, null = (_rows(t, attending) for t in (base, minus, zero))
        u, scale = _unit(y.dtype), rms(b)
        limit = _LOOSE * u * (b.abs() + scale)
        found.check(Law.ODDNESS, odd, -b, round_off=limit)
        found.check(Law.ZERO, null, torch.zeros_like(null), scale=scale)
    if _adds_keys(recorded.callee):
        found.skipped.append(f"{Law.REPEATED_TOKEN}: the module adds its own keys, which receive part of the attention")
    else:
        found.add(_repeated_token(without_sinks, x, attending))
    if causal:
        found.add(_later_tokens(call, x, base, attending))
    shifted = rotary.shifted(recorded.kwargs.get("position_embeddings"))
    if shifted is not None:
        found.add(_positions(call, x, base, recorded.kwargs["position_embeddings"], *shifted))
    return found


def _attending(recorded: RecordedCall, x: Tensor) -> Tensor:
    """Tokens [B, T] that may attend to something; the output of padding, which may not, is undefined."""
    attending = torch.ones(x.shape[:2], dtype=torch.bool)
    for value in (*recorded.args, *recorded.kwargs.values()):
        # [B, H, T, S], B and H perhaps 1
        if isinstance(value, Tensor) and value.dim() == 4 and value.shape[::2] in ((1, x.shape[1]), x.shape[:2]):
            attending &= ~masked_out(value.detach().cpu()).all(-1).all(1)
    padding = recorded.kwargs.get("attention_mask")
    if isinstance(padding, Tensor) and padding.shape == x.shape[:2] and not padding.is_floating_point():  # 1 and 0
        attending &= padding.detach().cpu() != 0
    return attending


def _rows(t: Tensor, chosen: Tensor) -> Tensor:
    """The chosen tokens of [B, T, C] on the host, [R, C]."""
    return host_rows(t)[chosen.flatten()].double()


def _adds_keys(module: nn.Module) -> bool:
    """Whether every token also attends to a key that is not a token."""
    return getattr(module, "bias_k", None) is not None or bool(getattr(module, "add_zero_attn", False))


def _closed_sinks(module: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Learned sinks, scores [H] of a key without a value, set so low that they receive no weight."""
    sinks = module._parameters.get("sinks")
    lowest = None if sinks is None else torch.full_like(sinks, torch.finfo(sinks.dtype).min, requires_grad=False)
    return [] if lowest is None else [(module, "sinks", lowest)]


def _repeated_token(call: Again, x: Tensor, attending: Tensor) -> Judgement:
    """If every token is the same, so is every output."""
    one = probe(x, lambda t: t[:, 1:2].expand_as(t).contiguous())
    out = call(one)
    same, u = out.detach().cpu().double(), _unit(out.dtype)
    first = same[torch.arange(len(same)), attending.int().argmax(1)]  # of each sequence, [B, C]
    got, expected = _rows(same, attending), _rows(first[:, None].expand_as(same), attending)
    size = rms(got)
    limit = _LOOSE * u * size
    if float((got - expected).abs().max()) > limit:
        # One rounding of the input is as good a measure as any of what one rounding of a probability costs.
        jittered = call(probe(one, lambda t: _jitter(t, u)))
        limit += _LOOSE * rms(_rows(jittered, attending) - got)
    return judge_law(Law.REPEATED_TOKEN, got, expected, torch.full_like(got, limit) + 2.0**-60, scale=size)


def _later_tokens(call: Again, x: Tensor, base: Tensor, attending: Tensor) -> Judgement:
    """Changing later tokens must not change earlier outputs."""
    late = x.shape[1] - x.shape[1] // 3
    changed = probe(x, lambda t: torch.cat([t[:, :late], -2 * t[:, late:].flip(-1)], 1))
    earlier = attending & (torch.arange(x.shape[1]) < late)
    ahead, kept = (_rows(t, earlier) for t in (call(changed), base))
    u = _unit(base.dtype)
    limit = _LOOSE * u * (kept.square().mean(-1, keepdim=True).sqrt() + kept.abs())
    return judge_law(Law.CAUSALITY, ahead, kept, limit)


def _positions(call: Again, x: Tensor, base: Tensor, pair: Any, further: Any, last: int) -> Judgement:
    """Shift all positions."""
    b = host_rows(base).double()
    u, scale = _unit(base.dtype), max(rms(b), TINY)
    error = rms(host_rows(call(x, position_embeddings=further)).double() - b)
    floor = 4 * u * scale
    if error > _ANSWERS * floor:  # what angles that are off by one rounding cost here
        size = max(u, last * 2.0**-24)
        angles = tuple(probe(each, lambda t: _jitter(t, size)) for each in pair)
        floor += rms(host_rows(call(x, position_embeddings=angles)).double() - b)
    floor *= _ANSWERS
    return judge_size(Law.POSITION_SHIFT, error, floor, scale, b.numel())


def _unit(dtype: torch.dtype) -> float:
    """The largest round-off in a module of this dtype: that of its numbers, or of truncated operands."""
    return max(number_format(dtype).u, product_roundoff(dtype))


def _jitter(t: Tensor, size: float) -> Tensor:
    """t (1 +- size), signs from a fixed stream; a size that rounds away moves by one number of the dtype."""
    signs = torch.randint(0, 2, t.shape, generator=torch.Generator("cpu").manual_seed(_SEED), device="cpu") * 2 - 1
    step = max(size, 2 * number_format(t.dtype).u)
    return (t.float() * (1 + step * signs)).to(t.dtype)


def examine_mlp(recorded: RecordedCall, parts: dict[str, Tensor]) -> LawEvidence:
    """Test the MLP identity; `parts` are the outputs of the linears inside, by last name, from this same call."""

    def skipped(why: str) -> LawEvidence:
        return LawEvidence(skipped=[f"{Law.MLP_IDENTITY}: {why}"])

    x, y = recorded.tensors
    children = dict(recorded.callee.named_children())
    gate, up, down = _roles([name for name in children if name in parts], parts)
    if down is None or gate is None:
        return skipped("an MLP of a form other than down(act(gate) up) or down(act(up))")
    others = [child for name, child in children.items() if name not in parts and not isinstance(child, nn.Dropout)]
    if len(others) != 1 or not _odd_part_is_half(others[0]):
        return skipped("the MLP's activation is not known to satisfy a(z) - a(-z) = z")
    if biases(recorded.callee) or adds_residual(recorded):
        return skipped("the MLP adds biases or a residual")
    with host_arithmetic():
        terms = [t.detach().cpu() for t in (gate, up) if t is not None]
        product = math.prod(terms[1:], start=terms[0]).reshape(*x.shape[:-1], -1)
        if not bool(product.isfinite().all()):
            return skipped("its products overflow")
        coins = torch.randint(0, 2, product.shape[-1:], generator=torch.Generator("cpu").manual_seed(_SEED))
        signs = (2 * coins - 1).to(product.dtype)
        inputs = [product.to(x.device), (product * signs).to(x.device)]  # the same terms with random signs
    found = LawEvidence()
    through: Again = functools.partial(recorded.rerun, children[down])
    minus = recorded.again(probe(x, torch.neg))
    expected, spread = (through(each) for each in inputs)
    with host_arithmetic():
        a, b, e = host_rows(y).double(), host_rows(minus).double(), host_rows(expected).double()
        got = a + b if up is not None else a - b
        form, work, u = number_format(y.dtype), WORK_ROUNDOFF, _unit(y.dtype)
        flat = host_rows(product).double()
        # Numbers below the normal ones may be rounded to 0: those of a row, and the terms of a sum.
        least = number_format(torch.float32).flushed
        size = flat.square().mean(-1).sqrt()
        normal = (size >= least) | (size == 0)
        squares = squares_from_split(host_rows(spread).double(), flat, torch.arange(len(flat)))
        # Each term is off by the roundings of activation and product, in three outputs, and by their sums.
        deviation = (_TERM * u + work * math.sqrt(flat.shape[-1])) * squares.sqrt()
        limit = Z_ELEMENT * deviation + 2 * (form.ulp(a) + form.ulp(b) + form.ulp(e)) + 3 * flat.shape[-1] * least
        if not bool(normal.any()):
            return skipped("its numbers are subnormal")
        found.check(Law.MLP_IDENTITY, got[normal], e[normal], limit[normal], scale=rms(a))
    return found


def _odd_part_is_half(activation: nn.Module) -> bool:
    """Whether a(z) - a(-z) = z: relu, and the known formulas, all z g(z) with g(z) + g(-z) = 1."""
    return isinstance(activation, nn.ReLU) or activation_formula(activation) is not None


def _roles(names: list[str], parts: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, str | None]:
    """Gate, up, and the name of down."""
    by_role = {ROLES.get(name, ""): name for name in names}
    if {"gate", "up", "down"} <= by_role.keys():
        return parts[by_role["gate"]], parts[by_role["up"]], by_role["down"]
    if by_role.keys() == {"gate_up", "down"}:
        gate, up = parts[by_role["gate_up"]].chunk(2, -1)
        return gate, up, by_role["down"]
    if len(names) == 2 and parts[names[0]].shape[-1] != parts[names[1]].shape[-1]:
        return parts[names[0]], None, names[1]
    return None, None, None


# -- rotary angles


class Rotary:
    """The rotation from one position to another depends on their distance alone.

    Stores what the rotary modules of this forward returned, with the same angles 17 positions further on.
    """

    def __init__(self) -> None:
        self._shifted: dict[int, tuple[Any, tuple[Tensor, Tensor], int]] = {}

    def shifted(self, pair: Any) -> tuple[tuple[Tensor, Tensor], int] | None:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            return None
        known = self._shifted.get(id(pair[0]))
        return None if known is None or known[0] is not pair[0] else (known[1], known[2])

    def examine(self, recorded: RecordedCall) -> LawEvidence:
        """The rotation from a position to the one 17 further on is the same everywhere."""
        found = LawEvidence()
        given = [*recorded.args, *recorded.kwargs.values()]
        positions = next((t for t in given if isinstance(t, Tensor) and not t.is_floating_point()), None)
        like, pair = recorded.first_input, recorded.output
        if positions is None or like is None or not isinstance(pair, (tuple, list)) or len(pair) != 2:
            found.skipped.append(f"{Law.POSITION_SHIFT}: the rotary embedding is not (cos, sin) of positions")
            return found

        def call(x: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
            swapped = {id(positions): where, id(like): x}
            args = tuple(swapped.get(id(arg), arg) for arg in recorded.args)
            kwargs = {name: swapped.get(id(value), value) for name, value in recorded.kwargs.items()}
            cos, sin = recorded.repeat(*args, **kwargs)
            return cos, sin

        on = probe(positions, lambda t: t + _SHIFT)
        further = call(like, on)
        last = int(on.max())
        self._shifted[id(pair[0])] = (pair[0], further, last)
        again = call(like, positions)
        wide = like if like.dtype.itemsize >= 4 else probe(like, Tensor.float)
        fine, fine_further = ((pair[0], pair[1]), further) if wide is like else (call(wide, positions), call(wide, on))
        with host_arithmetic():
            for one, two in zip(again, pair, strict=True):
                found.check(Law.REPEAT, host_rows(one).double(), host_rows(two).double())
            found.add(_rotations(pair, further, last))
            if wide is not like:
                found.add(_rotations(fine, fine_further, last))
        return found


def _rotations(here: Any, there: Any, last: int) -> Judgement:
    """c c' + s s' and s' c - c' s, [.., T, D], must not depend on the position."""
    form = number_format(here[0].dtype)
    c, s, c2, s2 = (t.detach().cpu().double() for t in (*here, *there))
    size = float((c.square() + s.square()).mean())
    parts = [c * c2 + s * s2, s2 * c - c2 * s, c.square() + s.square()]
    got = torch.stack(parts)
    expected = got.median(-2, keepdim=True).values.expand_as(got)
    limit = torch.full_like(got, 8 * size * (2 * form.u + 2 * last * 2.0**-24 + 2.0**-22))
    return judge_law(Law.POSITION_SHIFT, *(t.reshape(-1, c.shape[-1]) for t in (got, expected, limit)), scale=size)
