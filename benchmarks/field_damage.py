"""What a device can do to a tensor: bits, lanes, rows, tiles, tails, stale and rare results.

Positions of flipped bits follow published statistics of silent data corruption: under 40 % of the corruptions are a
single bit, NaN and infinity are 1 %, addresses repeat with the period of a warp.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from field_scopes import Damage, MakeDamage
from torch import Tensor

_INTEGERS = {2: torch.int16, 4: torch.int32}
WARP = 32


def _rms(y: Tensor) -> Tensor:
    return y.float().square().mean().sqrt()


def plain(damage: Damage) -> MakeDamage:
    """A damage without memory."""
    return lambda: damage


def gain(factor: float) -> MakeDamage:
    return plain(lambda y: (y.float() * factor).to(y.dtype))


def offset(share: float) -> MakeDamage:
    """A constant: a share of the tensor's rms."""
    return plain(lambda y: (y.float() + share * _rms(y)).to(y.dtype))


def dead_zone(share: float) -> MakeDamage:
    return plain(lambda y: torch.where(y.float().abs() < share * _rms(y), torch.zeros_like(y), y))


def saturation(limit: float) -> MakeDamage:
    return plain(lambda y: y.clamp(-float(limit * _rms(y)), float(limit * _rms(y))))


def short(bits: int) -> MakeDamage:
    """The lowest mantissa bits are cut off."""

    def damage(y: Tensor) -> Tensor:
        kind = _INTEGERS[y.element_size()]
        return (y.contiguous().view(kind) & ~((1 << bits) - 1)).view(y.dtype)

    return plain(damage)


def stuck(bit: int, *, period: int = 1, lane: int = 0, one: bool = True) -> MakeDamage:
    """One bit of the dtype is stuck in every `period`-th channel."""

    def damage(y: Tensor) -> Tensor:
        kind = _INTEGERS[y.element_size()]
        raw = y.contiguous().clone().view(kind)
        mask = 1 << bit if bit < 8 * y.element_size() - 1 else -(1 << bit)
        lanes = raw[..., lane::period]
        raw[..., lane::period] = lanes | mask if one else lanes & ~mask
        return raw.view(y.dtype)

    return plain(damage)


def flips(rows: int, *, single: bool = True, period: int = WARP, lane: int = 5) -> MakeDamage:
    """Bits flip at addresses of one lane of a warp, in some rows; bit positions are drawn from the statistics."""

    def damage(y: Tensor) -> Tensor:
        kind = _INTEGERS[y.element_size()]
        width = 8 * y.element_size()
        draw = torch.Generator().manual_seed(11)
        # Low mantissa bits are the most common; the top exponent bit, which gives NaN and infinity, is rare (1 %).
        weights = torch.linspace(2.0, 1.0, width)
        weights[width - 2] = 0.01
        raw = y.contiguous().clone().view(kind)
        flat = raw.view(-1)
        addresses = torch.arange(lane, flat.numel(), period)
        chosen = addresses[torch.randperm(len(addresses), generator=draw)[:rows]]
        for _ in range(1 if single else 4):
            bits = torch.multinomial(weights, len(chosen), replacement=True, generator=draw)
            masks = torch.tensor([1 << int(b) if b < width - 1 else -(1 << int(b)) for b in bits], dtype=kind)
            flat[chosen] = flat[chosen] ^ masks
        return raw.view(y.dtype)

    return plain(damage)


def channels(index: slice | list[int], what: MakeDamage) -> MakeDamage:
    """Another damage, on some channels."""

    def make() -> Damage:
        inner = what()

        def damage(y: Tensor) -> Tensor:
            new = y.clone()
            new[..., index] = inner(y[..., index].contiguous())
            return new

        return damage

    return make


def rows(index: slice | list[int], what: MakeDamage) -> MakeDamage:
    """Another damage, on some tokens ([B, T, C] or [B, H, T, D])."""

    def make() -> Damage:
        inner = what()

        def damage(y: Tensor) -> Tensor:
            new = y.clone()
            part = y[..., index, :]
            if part.numel():
                new[..., index, :] = inner(part.contiguous())
            return new

        return damage

    return make


def tile(first_row: int, first_channel: int, side: int, what: MakeDamage) -> MakeDamage:
    """Another damage, on one tile of the first sequence."""

    def make() -> Damage:
        inner = what()

        def damage(y: Tensor) -> Tensor:
            new = y.clone()
            sequence = (0,) if y.dim() > 2 else ()  # [B * T, C] has no sequences
            where = (*sequence, ..., slice(first_row, first_row + side), slice(first_channel, first_channel + side))
            part = y[where]
            if part.numel():
                new[where] = inner(part.contiguous())
            return new

        return damage

    return make


def batch_above_zero(what: MakeDamage) -> MakeDamage:
    """Another damage, on all sequences of a batch but the first."""

    def make() -> Damage:
        inner = what()
        return lambda y: torch.cat([y[:1], inner(y[1:].contiguous())]) if y.shape[0] > 1 else y

    return make


def last_elements(count: int, value: float = 0.0) -> MakeDamage:
    """The last elements in memory, as after a copy that ended early."""

    def damage(y: Tensor) -> Tensor:
        new = y.contiguous().clone()
        new.view(-1)[-count:] = value
        return new

    return plain(damage)


def one_element(value: float) -> MakeDamage:
    """One element in the middle of the memory."""

    def damage(y: Tensor) -> Tensor:
        new = y.contiguous().clone()
        new.view(-1)[y.numel() // 2 + 3] = value
        return new

    return plain(damage)


def zero() -> MakeDamage:
    return plain(torch.zeros_like)


def negated() -> MakeDamage:
    return plain(torch.neg)


def swapped(one: int, other: int) -> MakeDamage:
    def damage(y: Tensor) -> Tensor:
        new = y.clone()
        new[..., one], new[..., other] = y[..., other], y[..., one]
        return new

    return plain(damage)


def shifted_rows() -> MakeDamage:
    """Each token gets what belongs to the one before."""
    return plain(lambda y: torch.cat([y[..., :1, :], y[..., :-1, :]], -2))


def stale_rows(first: int, last: int) -> MakeDamage:
    """Some tokens keep what the call before left in the buffer."""

    def make() -> Damage:
        memory: dict[tuple[int, ...], Tensor] = {}

        def damage(y: Tensor) -> Tensor:
            before = memory.get(tuple(y.shape))
            memory[tuple(y.shape)] = y.detach().clone()
            if before is None:
                return y
            new = y.clone()
            new[..., first:last, :] = before[..., first:last, :]
            return new

        return damage

    return make


def every(calls: int, what: MakeDamage) -> MakeDamage:
    """A rare fault: every n-th call."""

    def make() -> Damage:
        inner, count = what(), {"calls": 0}

        def damage(y: Tensor) -> Tensor:
            count["calls"] += 1
            return inner(y) if count["calls"] % calls == 0 else y

        return damage

    return make


def when(condition: Callable[[Tensor], bool], what: MakeDamage) -> MakeDamage:
    def make() -> Damage:
        inner = what()
        return lambda y: inner(y) if condition(y) else y

    return make


def long_only(tokens: int, what: MakeDamage) -> MakeDamage:
    return when(lambda y: y.shape[-2] >= tokens, what)


def ragged_only(unit: int, what: MakeDamage) -> MakeDamage:
    """Only where the number of tokens is not a multiple of the tile."""
    return when(lambda y: y.shape[-2] > 1 and y.shape[-2] % unit != 0, what)


def decode_only(what: MakeDamage) -> MakeDamage:
    return when(lambda y: y.shape[-2] == 1, what)
