"""The sums of `sketches.read` in one Triton kernel: each output is read once, its signs come from cache.

The plain engine makes several passes; on an accelerator recording would cost more than the model itself.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BLOCK = 64  # channels of each group that a step takes


@functools.cache
def _kernel() -> Any | None:
    """The compiled kernel, or None where Triton is not installed."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit(do_not_specialize=["start"])  # type: ignore[untyped-decorator]
    def read_kernel(  # type: ignore[no-untyped-def]
        y_ptr, tape_ptr, sums_ptr, sizes_ptr, tokens, prompt_stride, token_stride, start, step, period,
        GROUPS: tl.constexpr, PART: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)  # of one token of one prompt
        prompt, token = row // tokens, row % tokens
        y_row = y_ptr + prompt * prompt_stride + token * token_stride
        signs = tape_ptr + (start + prompt * step + token * (GROUPS * PART)) % period
        group = tl.arange(0, ROOM)
        lane = tl.arange(0, BLOCK)
        sums = tl.zeros([ROOM, BLOCK], tl.float32)
        squares = tl.zeros([ROOM, BLOCK], tl.float32)
        for first in range(0, PART, BLOCK):
            channel = group[:, None] * PART + (first + lane)[None, :]
            inside = (group < GROUPS)[:, None] & (first + lane < PART)[None, :]
            y = tl.load(y_row + channel, mask=inside, other=0.0).to(tl.float32)
            sums += y * tl.load(signs + channel, mask=inside, other=0).to(tl.float32)
            squares += y * y
        tl.store(sums_ptr + row * GROUPS + group, tl.sum(sums, 1), mask=group < GROUPS)
        tl.store(sizes_ptr + row, tl.sqrt(tl.sum(tl.sum(squares, 1), 0)))

    return read_kernel


def usable(y: Tensor) -> bool:
    """Whether the kernel can take y [B, T, C]: Triton is there, a plain dtype, channels without gaps."""
    return y.dtype in _DTYPES and y.stride(-1) == 1 and y.numel() > 0 and _kernel() is not None


def read(y: Tensor, tape: Tensor, *, start: int, step: int, period: int, groups: int) -> tuple[Tensor, Tensor]:
    """y [B, T, C] -> signed sums [B, T, G] and sizes [B, T].

    sign(p, t, c) is tape[(start + p step + t C) mod period + c]; two periods, so that no row runs over the end.
    """
    kernel = _kernel()
    assert kernel is not None
    batch, tokens, width = y.shape
    part = width // groups
    sums = torch.empty(batch, tokens, groups, dtype=torch.float32, device=y.device)
    sizes = torch.empty(batch, tokens, dtype=torch.float32, device=y.device)
    with nullcontext() if torch.cuda.current_device() == y.device.index else torch.cuda.device(y.device):
        kernel[(batch * tokens,)](
            y, tape, sums, sizes, tokens, y.stride(0), y.stride(1), start, step, period,
            GROUPS=groups, PART=part, ROOM=_power_of_two(groups), BLOCK=min(_BLOCK, _power_of_two(part)), num_warps=4,
        )  # fmt: skip
    return sums, sizes


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
