"""Random numbers that depend only on (seed, site, sample, position, channel): no generator, no call order.

A row's numbers are a window on a fixed tape of normals. The window's offset is a hash of the row's key and the site's
key, so it is a pure function of what the row *is*. Reading a tape costs a tenth of drawing normals; hashing the offset
of every row is what keeps it noise (one window per tensor would be a shifted copy of its neighbours).

    key(row)    = mix64(sample, position)  or  mix64(forward number, row index)      [int64, mixed once a forward]
    offset      = top 19 bits (below the sign) of key * a, times 8;  a odd = hash(seed, site)
    z[row, c]   = tape[offset + c]

Offsets are multiples of 8 numbers, so that every read is aligned. Rows wider than 65,536 use one window per 65,536
channels. The promise holds per engine and ENGINE_VERSION. Outside it: rows that a MoE layer permuted by expert, and
key columns moved by padding (a softmax column is a channel here, so left padding shifts it).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noisescope.errors import InvalidInput

ENGINE_VERSION = 2  # part of every trial's id: raise it whenever a drawn number changes

TAPE = 1 << 22
WIDEST = 1 << 16  # channels one window may hold; the tape is that much longer than its last offset
ALIGN_BITS = 3
OFFSET_SHIFT = 63 - 22  # leaves the 22 bits below the sign; the mask clears the last 3, which aligns the offset
OFFSET_MASK = TAPE - (1 << ALIGN_BITS)


def _signed(x: int) -> int:
    """The int64 with the bits of an unsigned 64-bit constant."""
    return x - (1 << 64) if x >= 1 << 63 else x


_C1, _C2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
_GOLDEN, _SPREAD = _signed(0x9E3779B97F4A7C15), _signed(0xD1342543DE82EF95)
STEP = 0.6  # m * STEP lies between 1/2 and 3/2 for every mantissa m in [1, 2): y (1 + STEP eps) rounds to y's neighbour
MOVED = 1 / 256  # share of a "steps" tape that is +STEP, and share that is -STEP: see noise.Rounding
PART = _signed(0x9E3779B97F4A7C15 * 2 % (1 << 64))  # even, so that a site's multiplier stays odd in every part


def mix64(x: Tensor) -> Tensor:
    """SplitMix64 (Steele, Lea, Flood 2014) on int64: a bijection that maps no small number to 0.

    torch shifts int64 arithmetically, so the copied sign bits are masked off (else x and ~x would meet).
    """
    x = x + _GOLDEN
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _C1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _C2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


@functools.cache
def tape(kind: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The fixed table of numbers: a constant, memoised per device and dtype.

    "normal" and "uniform" have mean 0 and variance 1; "steps" are 0, and rarely +STEP or -STEP.
    """
    generator = torch.Generator("cpu").manual_seed(0x6E6F697365 + ("normal", "uniform", "steps").index(kind))
    size = (TAPE + WIDEST,)
    if kind == "steps":
        numbers = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
        steps = (numbers < MOVED).double() - (numbers >= 1 - MOVED).double()
        return (steps * STEP).to(dtype).to(device)
    if kind == "normal":
        numbers = torch.randn(size, generator=generator, dtype=torch.float64, device="cpu")
    else:  # uniform on [-sqrt 3, sqrt 3]
        numbers = (torch.rand(size, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1) * 3**0.5
    numbers = (numbers - numbers.mean()) / numbers.std(correction=0)
    return numbers.to(dtype).to(device)


@dataclass
class Rows:
    """Names of the tokens of one forward: `samples` [B] and `positions` [B, T], or neither (then rows are numbered)."""

    number: int  # of this forward in its scope
    samples: Tensor | None = None
    positions: Tensor | None = None
    kept: Tensor | None = None  # [K] indices of the tokens that logits are computed for, where not for all
    _keys: dict[Any, Tensor] = field(default_factory=dict)

    def token_keys(self, device: torch.device) -> Tensor | None:
        """Keys [B, T] of named tokens."""
        if self.samples is None or self.positions is None:
            return None
        if device not in self._keys:
            samples = self.samples.to(device, torch.int64, non_blocking=True)
            positions = self.positions.to(device, torch.int64, non_blocking=True)
            self._keys[device] = mix64(mix64(samples * _GOLDEN)[:, None] + positions * _SPREAD)
        return self._keys[device]

    def numbered_keys(self, count: int, device: torch.device) -> Tensor:
        """Keys of rows identified only by their number in this forward."""
        known = (count, device)
        if known not in self._keys:
            index = torch.arange(count, device=device)
            named = self.token_keys(device)
            start = named.flatten()[0] if named is not None else _signed(self.number * 0x9E3779B97F4A7C15 % (1 << 64))
            self._keys[known] = mix64(mix64(index * _SPREAD + start))
        return self._keys[known]

    def keys(self, shape: torch.Size, layout: str, device: torch.device) -> Tensor:
        """Keys of all rows of a tensor, flat.

        layout: "tokens" [B, T, ...] or [B * T, C], "heads" [B, H, T, C] or [B * H, T, C], "positions" (a table of
        positions [1 or B, T, C]: no sample), "plain" [R, C] (weights: neither).
        """
        tokens = None if layout == "plain" else self.token_keys(device)
        if tokens is not None and len(shape) >= 2:
            named = self._named_keys(tokens, tuple(shape), layout)
            if named is not None:
                return named
        return self.numbered_keys(math.prod(shape[:-1]), device)

    def _named_keys(self, tokens: Tensor, shape: tuple[int, ...], layout: str) -> Tensor | None:
        """Keys of rows that are tokens of named samples, or None where the shape fits no layout."""
        batch, length = tokens.shape
        if layout == "positions":
            return self._table_keys(shape, tokens)
        if layout == "tokens" and len(shape) == 4 and shape[1] != length and shape[2] == length:
            layout = "heads"  # q_norm of Gemma 3 is computed head by head
        if layout == "heads" and len(shape) in (3, 4) and shape[0] % batch == 0:
            heads = shape[1] if len(shape) == 4 else shape[0] // batch
            return self._head_keys(self._part_keys(tokens, shape[-2]), heads)
        if len(shape) == 2 and shape[0] == batch * length:
            return tokens.flatten()
        if shape[0] == batch:  # [B, C] is one row a sample: a pooled token
            return self._part_keys(tokens, shape[1] if len(shape) > 2 else 1).flatten()
        return None

    def _table_keys(self, shape: tuple[int, ...], tokens: Tensor) -> Tensor:
        """Keys of a table of positions: no sample in them, since all samples may share the row."""
        assert self.positions is not None
        if len(shape) == 3 and shape[0] in (1, tokens.shape[0]) and shape[1] == tokens.shape[1]:
            index = self.positions[: shape[0]].to(tokens.device, torch.int64).flatten()
        else:
            index = torch.arange(math.prod(shape[:-1]), device=tokens.device)
        return mix64(mix64(index * _SPREAD))

    def _part_keys(self, tokens: Tensor, kept: int) -> Tensor:
        """[B, kept]: all tokens, those chosen for logits, the last of them, or more than the call named (encoder)."""
        if self.kept is not None and kept == len(self.kept) != tokens.shape[1]:
            return tokens.index_select(1, self.kept.to(tokens.device))
        if kept <= tokens.shape[1]:
            return tokens[:, tokens.shape[1] - kept :]
        assert self.samples is not None
        samples = self.samples.to(tokens.device, torch.int64)
        index = torch.arange(kept, device=tokens.device)
        return mix64(mix64(samples * _GOLDEN)[:, None] + index * _SPREAD)

    def _head_keys(self, tokens: Tensor, heads: int) -> Tensor:
        known = (tokens.device, "heads", heads, tokens.shape[1])
        if known not in self._keys:
            head = torch.arange(heads, device=tokens.device)[None, :, None] * _SPREAD
            self._keys[known] = mix64(tokens[:, None, :] + head).flatten()
        return self._keys[known]


class Draw:
    """What a perturbation can request: numbers for this site and these rows, in the shape of its tensor."""

    __slots__ = ("_key", "_layout", "_rows", "overwrite", "scratch", "tensor")

    def __init__(self, rows: Rows, key: int, *, layout: str, tensor: str, overwrite: bool = False) -> None:
        self.scratch: dict[Any, Tensor] | None = None  # buffers of the forward that runs now
        self.tensor = tensor  # "output", "input" or "weight"
        self.overwrite = overwrite  # the tensor is nobody else's: it may be changed in place
        self._rows = rows
        self._key = key
        self._layout = layout

    def keys(self, like: Tensor) -> Tensor:
        """Row keys [R] of a tensor; its channels are whatever is left: like.numel() / R."""
        return self._rows.keys(like.shape, self._layout, like.device)

    def normal(self, like: Tensor) -> Tensor:
        """z ~ N(0, 1) in the shape and dtype of `like`."""
        return self._window("normal", like)

    def uniform(self, like: Tensor) -> Tensor:
        """Uniform on [-sqrt 3, sqrt 3] (variance 1) in the shape and dtype of `like`."""
        return self._window("uniform", like)

    def add_noise(self, y: Tensor, scale: float, size: Tensor | None = None, *, kind: str = "normal") -> Tensor:
        """y + scale * size * z, in one pass and one rounding; `size` defaults to y itself (relative noise)."""
        if y.device.type == "cuda":
            from noisescope.probe import cuda_noise

            if cuda_noise.usable(y, size):
                return cuda_noise.add_noise(
                    y, scale, size, self.keys(y), self._key, kind=kind, overwrite=self.overwrite
                )
        z = self._window(kind, y, reuse=True)
        size = y if size is None else size
        if self.overwrite:
            return y.addcmul_(size, z, value=scale)
        return torch.addcmul(y, size, z, value=scale)

    def _room(self, like: Tensor, dtype: torch.dtype) -> Tensor | None:
        """A buffer for as many numbers as `like` has, created once per forward: fresh pages cost more than the tape."""
        if self.scratch is None:
            return None
        known = (like.numel(), dtype, like.device)
        if known not in self.scratch:
            self.scratch[known] = torch.empty(like.numel(), dtype=dtype, device=like.device)
        return self.scratch[known]

    def _window(self, kind: str, like: Tensor, *, reuse: bool = False) -> Tensor:
        """Numbers in the shape of `like`; with `reuse` they are overwritten by this forward's next draw."""
        if not like.is_floating_point():
            raise InvalidInput(f"noise applies only to floating-point tensors; this one is {like.dtype}")
        if like.numel() == 0:
            return torch.empty_like(like)
        keys = self.keys(like)
        width = like.numel() // keys.numel()
        dtype = like.dtype if like.dtype in (torch.float16, torch.bfloat16) else torch.float32
        if width <= WIDEST:
            buffer = self._room(like, dtype) if reuse else None
            z = window(kind, keys, self._key, width, dtype, out=buffer)
        else:
            z = wide_window(kind, keys, self._key, width, dtype)
        z = z.view_as(like)
        return z if z.dtype == like.dtype else z.to(like.dtype)


def window(
    kind: str, keys: Tensor, key: int, width: int, dtype: torch.dtype, part: int = 0, out: Tensor | None = None
) -> Tensor:
    """Rows [R, width] read from the tape at hashed offsets."""
    multiplier = key if part == 0 else _signed((key + part * PART) % (1 << 64))
    if keys.numel() == 1 and keys.device.type == "cpu":  # one token: hash in Python and look, rather than copy
        offset = (int(keys) * multiplier >> OFFSET_SHIFT) & OFFSET_MASK
        return tape(kind, keys.device, dtype).narrow(0, offset, width)
    offsets = (keys * multiplier >> OFFSET_SHIFT) & OFFSET_MASK
    if out is not None:
        out = out.view(keys.numel(), width)
    return torch.index_select(_windows(kind, keys.device, dtype, width), 0, offsets, out=out)


def wide_window(kind: str, keys: Tensor, key: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows [R, width] of any width: a window per 65,536 channels."""
    starts = range(0, width, WIDEST)
    parts = [window(kind, keys, key, min(WIDEST, width - at), dtype, at // WIDEST) for at in starts]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@functools.lru_cache(maxsize=1024)
def _windows(kind: str, device: torch.device, dtype: torch.dtype, width: int) -> Tensor:
    """Every window of a width as a view [TAPE, width] of the tape: row o is tape[o : o + width]."""
    return tape(kind, device, dtype).as_strided((TAPE, width), (1, 1))
