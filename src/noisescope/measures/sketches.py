"""Sketches: a few numbers that represent a tensor, so that two devices can be compared by files of a few kilobytes.

Each number is a sum of elements under random signs, so a difference of sketches is the sketch of the difference, order
and sign of every element included. For one prompt's tensor y [T, C] and m numbers,

    s[k] = sum over (t, c) in bucket k of sign(p, t, c) y[t, c],     E |s|^2 = |y|^2,     var |s|^2 <= 2 |y|^4 / m

for elements that fall into buckets at random: a norm estimated from M numbers (all prompts together) has the relative
standard error 1 / sqrt(2 M). (Alon, Matias and Szegedy 1996; Charikar, Chen and Farach-Colton 2002.) The size |y| is
kept beside the sketch, so that only the difference of two devices is estimated, not what it is relative to.

Signs, not normals: flipping a sign is exact in every dtype, so 16-bit outputs need no wide copy and no product, whose
unit may be the one at fault, and an error in one element or one massive channel is kept whole. One Gaussian matrix for
all tokens would cost as little, but tell what is alike in all tokens (a wrong channel) by its G numbers only: to 12 %.

Buckets: neighbouring channels are summed in G <= 32 groups j, then group j of token t goes to bucket (t G + j) mod m, m
prime, so that one channel in all tokens, or one token in all channels, is spread over all numbers. The worst case is a
difference in two neighbouring channels of one token alone: one number a prompt.

Signs come from a counter-based hash on the host: sign i is the top bit of mix64(key(seed) + i). No generator is
involved, since generators differ between devices and releases; a record holds SEED and VERSION.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.measures import cuda_kernels
from noisescope.probe.draws import mix64

SEED = 0
VERSION = 3  # raise it whenever a sign or a bucket changes
SHORT, LONG, LONG_FROM = 13, 29, 128  # numbers for a prompt, and for one of that many tokens or more; prime
# Different signs, a prime; sign(p, t, c) is number p step + t C + c modulo the period, step = min(T C, 2^20). Elements
# of a prompt share signs only where it has more elements than the period, prompts hardly at all: elements that share
# a sign and a bucket would add up, not average out.
_PERIOD = 5_000_011
_LONGEST_STEP = 1 << 20
_MOST_GROUPS = 32


def numbers_of(tokens: int) -> int:
    """How many numbers represent the output of one operator on one prompt."""
    return LONG if tokens >= LONG_FROM else SHORT


def signs(seed: int = SEED) -> Tensor:
    """The period of signs, int8 [5,000,011], on the host: integer arithmetic, the same everywhere."""
    counter = torch.arange(_PERIOD, dtype=torch.int64, device="cpu")
    key = mix64(torch.tensor(seed, dtype=torch.int64, device="cpu"))
    return (1 - 2 * (mix64(counter + key) < 0)).to(torch.int8)


@functools.lru_cache(maxsize=8)
def _tape(seed: int, periods: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return signs(seed).repeat(periods).to(device=device, dtype=dtype)


def _place(shape: torch.Size, first: int) -> tuple[int, int]:
    """Where on the tape the signs of prompt `first` start, and how far on those of the next one do."""
    step = min(shape[1] * shape[2], _LONGEST_STEP)
    return first * step % _PERIOD, step


@functools.lru_cache(maxsize=256)
def _signs_at(shape: torch.Size, first: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """sign(p, t, c) for a tensor [B, T, C] of prompts from `first` on: a view of the tape."""
    batch, tokens, width = shape
    start, step = _place(shape, first)
    length = start + (batch - 1) * step + tokens * width
    tape = _tape(seed, -(-length // _PERIOD), device, dtype)
    return tape.as_strided(shape, (step, width, 1), start)


def read(y: Tensor, first: int, *, seed: int = SEED) -> tuple[Tensor, Tensor]:
    """y [B, T, C] of prompts from `first` on -> signed sums of neighbouring channels [B, T, G], and |y| [B, T]."""
    return read_together([y], first, seed=seed)[0]


def read_together(outputs: Sequence[Tensor], first: int, *, seed: int = SEED) -> list[tuple[Tensor, Tensor]]:
    """The same of several outputs; on an accelerator those of one shape [B, T] and one dtype in one launch."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    alike: dict[Hashable, list[int]] = {}
    for at, y in enumerate(outputs):
        if y.device.type == "cuda" and cuda_kernels.can_read(y):
            alike.setdefault((*y.shape[:2], y.dtype, y.device), []).append(at)
        else:
            found[at] = _read_plainly(y, first, seed)
    for numbers in alike.values():
        together = [outputs[at] for at in numbers]
        tape = _tape(seed, 2, together[0].device, torch.int8)
        places, groups = zip(*((_place(y.shape, first), _groups(y.shape[2])) for y in together), strict=True)
        sums = cuda_kernels.read(together, tape, places=places, groups=groups, period=_PERIOD)
        found.update(zip(numbers, sums, strict=True))
    return [found[at] for at in range(len(outputs))]


def _read_plainly(y: Tensor, first: int, seed: int) -> tuple[Tensor, Tensor]:
    groups, wide = _groups(y.shape[2]), torch.promote_types(y.dtype, torch.float32)
    flipped = (y * _signs_at(y.shape, first, seed, y.device, y.dtype)).reshape(*y.shape[:2], groups, -1)
    return flipped.sum(-1, dtype=wide), torch.linalg.vector_norm(y, dim=-1, dtype=wide)


def folded(groups: Tensor, numbers: int) -> Tensor:
    """Groups [..., T, G] -> the sketch [..., numbers]."""
    flat = groups.flatten(-2)
    flat = F.pad(flat, (0, -flat.shape[-1] % numbers))
    return torch.unflatten(flat, -1, (-1, numbers)).sum(-2)


def sketch(y: Tensor, first: int = 0, *, seed: int = SEED) -> Tensor:
    """The sketches [B, m] of one operator's output y [B, T, C]."""
    return folded(read(y, first, seed=seed)[0], numbers_of(y.shape[1]))


@functools.cache
def _groups(width: int) -> int:
    """The most groups of equal size, but fewer than sketch numbers, or a channel would always share one bucket."""
    return max(g for g in range(1, _MOST_GROUPS + 1) if width % g == 0 and g % SHORT and g % LONG)
