"""Sketches: a few numbers that stand for a tensor, so that two devices can be compared by files of a few kilobytes.

Each number is a sum of elements under random signs, so a difference of sketches is the sketch of the difference, order
and sign of every element included. For one prompt's tensor y [T, C] and m numbers,

    s[k] = sum over (t, c) in bucket k of sign(p, t, c) y[t, c],     E |s|^2 = |y|^2,     var |s|^2 <= 2 |y|^4 / m

for elements that fall into buckets at random: a norm estimated from M numbers (all prompts together) has the relative
standard error 1 / sqrt(2 M). (Alon, Matias and Szegedy 1996; Charikar, Chen and Farach-Colton 2002.) This is a Gaussian
projection's error without its cost, which is m products an element. Signs, not normals: flipping a sign is exact in
every dtype, so 16-bit outputs need no wide copy, and an error in one element or one massive channel is kept whole.

Buckets: neighbouring channels are summed in G <= 32 groups j, then group j of token t goes to bucket (t G + j) mod m, m
prime, so that one channel in all tokens, or one token in all channels, is spread over all numbers. The worst case is a
difference in two neighbouring channels of one token alone: one number a prompt.

Signs come from a counter-based hash on the host: sign i is the top bit of mix64(key(seed) + i). No generator is
involved, since generators differ between devices and releases; a record holds SEED and VERSION.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.probe.draws import mix64

SEED = 0
VERSION = 1  # raise it whenever a sign or a bucket changes
SHORT, LONG, LONG_FROM = 31, 61, 128  # numbers for a prompt, and for one of that many tokens or more; prime
_PERIOD = 1 << 20  # different signs; sign(p, t, c) is number 7919 p + 97 t + c, modulo the period
_PROMPT_STEP, _TOKEN_STEP = 7919, 97
_MOST_GROUPS = 32


def numbers_of(tokens: int) -> int:
    """How many numbers stand for the output of one operator on one prompt."""
    return LONG if tokens >= LONG_FROM else SHORT


def signs(seed: int = SEED) -> Tensor:
    """The period of signs, int8 [2^20], on the host: integer arithmetic, the same everywhere."""
    counter = torch.arange(_PERIOD, dtype=torch.int64, device="cpu")
    key = mix64(torch.tensor(seed, dtype=torch.int64, device="cpu"))
    return (1 - 2 * (mix64(counter + key) < 0)).to(torch.int8)


@functools.lru_cache(maxsize=8)
def _tape(seed: int, periods: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return signs(seed).repeat(periods).to(device=device, dtype=dtype)


@functools.lru_cache(maxsize=256)
def _signs_at(shape: torch.Size, first: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """sign(p, t, c) for a tensor [B, T, C] of prompts from `first` on: a view of the tape."""
    batch, tokens, width = shape
    start = first * _PROMPT_STEP % _PERIOD
    length = start + (batch - 1) * _PROMPT_STEP + (tokens - 1) * _TOKEN_STEP + width
    tape = _tape(seed, -(-length // _PERIOD), device, dtype)
    return tape.as_strided(shape, (_PROMPT_STEP, _TOKEN_STEP, 1), start)


def grouped(y: Tensor, first: int, *, seed: int = SEED) -> Tensor:
    """y [B, T, C] of prompts first, first + 1, ... -> signed sums of neighbouring channels [B, T, G], in two passes."""
    flipped = y * _signs_at(y.shape, first, seed, y.device, y.dtype)
    groups = flipped.reshape(*y.shape[:2], _groups(y.shape[2]), -1)
    return groups.sum(-1, dtype=torch.promote_types(y.dtype, torch.float32))


def folded(groups: Tensor, numbers: int) -> Tensor:
    """Groups [..., T, G] -> the sketch [..., numbers]."""
    flat = groups.flatten(-2)
    flat = F.pad(flat, (0, -flat.shape[-1] % numbers))
    return torch.unflatten(flat, -1, (-1, numbers)).sum(-2)


def sketch(y: Tensor, first: int = 0, *, seed: int = SEED) -> Tensor:
    """The sketches [B, m] of one operator's output y [B, T, C]."""
    return folded(grouped(y, first, seed=seed), numbers_of(y.shape[1]))


@functools.cache
def _groups(width: int) -> int:
    """The most groups of equal size; not as many as there are numbers, or a channel would always meet one bucket."""
    return max(g for g in range(1, _MOST_GROUPS + 1) if width % g == 0 and g % SHORT)
