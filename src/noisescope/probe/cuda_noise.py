"""The CUDA engine: the same numbers as `draws`, read and added in one Triton kernel. The only file that names CUDA.

A kernel moves each element once (read y, read the tape from cache, write y), so noise costs about the bytes it must
touch. Everything falls back to the plain engine: other devices, no Triton, odd layouts.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from noisescope.probe import draws

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@functools.cache
def _kernel() -> Any | None:
    """The compiled kernel, or None if Triton is not installed."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit(do_not_specialize=["multiplier"])  # type: ignore[untyped-decorator]
    def add_noise_kernel(  # type: ignore[no-untyped-def]
        y_ptr, out_ptr, size_ptr, keys_ptr, tape_ptr, scale, multiplier, width,
        PART: tl.constexpr, SHIFT: tl.constexpr, MASK: tl.constexpr, ALIGN: tl.constexpr, WIDEST: tl.constexpr,
        PER_ROW: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        start = tl.program_id(1) * BLOCK
        key = tl.load(keys_ptr + row)
        hashed = key * (multiplier + (start // WIDEST).to(tl.int64) * PART)
        offset = tl.multiple_of((hashed >> SHIFT) & MASK, ALIGN)
        lane = tl.arange(0, BLOCK)
        inside = start + lane < width
        z = tl.load(tape_ptr + offset + (start % WIDEST) + lane, mask=inside, other=0.0).to(tl.float32)
        at = row * width + start + lane
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        size = tl.load(size_ptr + row).to(tl.float32) if PER_ROW else y
        tl.store(out_ptr + at, (y + scale * size * z).to(out_ptr.dtype.element_ty), mask=inside)

    return add_noise_kernel


def usable(y: Tensor, size: Tensor | None) -> bool:
    """Whether the kernel can process this tensor; `size` is None or one number per row."""
    if _kernel() is None or y.dtype not in _DTYPES or not y.is_contiguous() or y.numel() == 0:
        return False
    return size is None or size.shape[-1] == 1


def add_noise(
    y: Tensor, scale: float, size: Tensor | None, keys: Tensor, key: int, *, kind: str, overwrite: bool
) -> Tensor:
    """y + scale * size * z with z from the tape; see `draws` for the hash."""
    kernel = _kernel()
    assert kernel is not None
    out = y if overwrite else torch.empty_like(y)
    width = y.numel() // keys.numel()
    # float16 numbers are finer than bfloat16's and half the bytes of float32's
    tape = draws.tape(kind, y.device, torch.float32 if y.dtype == torch.float32 else torch.float16)
    if size is not None:
        rows = y.numel() // y.shape[-1]
        size = size.expand(*y.shape[:-1], 1).reshape(rows)
        if rows != keys.numel():  # per-head sizes under per-token keys: one size no longer serves a whole row
            return _unfused(y, scale, size.reshape(*y.shape[:-1], 1), keys, key, kind, tape.dtype)
        size = size.contiguous()
    block = min(2048, 1 << max(6, (width - 1).bit_length()))
    grid = (keys.numel(), -(-width // block))
    here = y.device.index == torch.cuda.current_device()
    with contextlib.nullcontext() if here else torch.cuda.device(y.device):
        kernel[grid](
            y, out, y if size is None else size, keys.contiguous(), tape, float(scale), key, width,
            PART=draws.PART, SHIFT=draws.OFFSET_SHIFT, MASK=draws.OFFSET_MASK, ALIGN=1 << draws.ALIGN_BITS,
            WIDEST=draws.WIDEST, PER_ROW=size is not None, BLOCK=block, num_warps=4 if block <= 1024 else 8,
        )  # fmt: skip
    return out


def _unfused(y: Tensor, scale: float, size: Tensor, keys: Tensor, key: int, kind: str, dtype: torch.dtype) -> Tensor:
    z = draws.window(kind, keys, key, y.numel() // keys.numel(), dtype).view(y.shape)
    return torch.addcmul(y.float(), size.float(), z.float(), value=scale).to(y.dtype)
