"""Scores and sketches on an accelerator, each in one Triton kernel, where the plain engines cost as much as the model.

`compare` is that of divergence.py, which makes some twenty passes over float32 copies: two passes over the logits, and
nothing else touches memory. `read` is that of sketches.py for several outputs at once: each is read once, its signs
come from cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

COLUMNS = ("kl", "agreement", "correct", "nll", "margin", "nonfinite", "signal", "error")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LOGITS = 4096  # logits of a row that a step takes
_CHANNELS = 64  # channels of each group that a step takes


@functools.cache
def _compare_kernel() -> Any | None:
    """The compiled kernel, or None where Triton is not installed."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit  # type: ignore[untyped-decorator]
    def compare_kernel(  # type: ignore[no-untyped-def]
        clean_ptr, noisy_ptr, rows_ptr, targets_ptr, out_ptr, width, clean_stride, noisy_stride,
        COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        clean = clean_ptr + row * clean_stride
        noisy = noisy_ptr + tl.load(rows_ptr + row) * noisy_stride
        lane = tl.arange(0, BLOCK)
        # pass 1: largest, runner-up, log-sum-exp (scaled by the largest so far), sums for the variances
        top_c, top_n, second = -float("inf"), -float("inf"), -float("inf")
        at_c, at_n = 0, 0
        exp_c, exp_n, sum_c, squares_c, sum_d, squares_d = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            zc = tl.load(clean + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            zn = tl.load(noisy + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            best_c, best_n = tl.max(zc, 0), tl.max(zn, 0)
            where_c, where_n = tl.argmax(zc, 0), tl.argmax(zn, 0)
            runner = tl.max(tl.where(lane == where_n, -float("inf"), zn), 0)
            second = tl.where(best_n > top_n, tl.maximum(top_n, runner), tl.maximum(second, best_n))
            at_c = tl.where(best_c > top_c, start + where_c, at_c)
            at_n = tl.where(best_n > top_n, start + where_n, at_n)
            new_c, new_n = tl.maximum(top_c, best_c), tl.maximum(top_n, best_n)
            exp_c = exp_c * tl.exp(top_c - new_c) + tl.sum(tl.exp(zc - new_c), 0)
            exp_n = exp_n * tl.exp(top_n - new_n) + tl.sum(tl.exp(zn - new_n), 0)
            top_c, top_n = new_c, new_n
            kept, d = tl.where(inside, zc, 0.0), tl.where(inside, zn - zc, 0.0)
            sum_c += tl.sum(kept, 0)
            squares_c += tl.sum(kept * kept, 0)
            sum_d += tl.sum(d, 0)
            squares_d += tl.sum(d * d, 0)
        # pass 2: KL = sum p phi(delta), see divergence.py
        shift = (top_n - top_c) + (tl.log(exp_n) - tl.log(exp_c))
        kl, weighted = 0.0, 0.0
        for start in range(0, width, BLOCK):
            inside = start + lane < width
            zc = tl.load(clean + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            zn = tl.load(noisy + start + lane, mask=inside, other=-float("inf")).to(tl.float32)
            p, q = tl.exp(zc - top_c) / exp_c, tl.exp(zn - top_n) / exp_n
            delta = tl.where(p > 0, (zn - zc) - shift, 0.0)
            near = delta / (1.0 - delta / 6.0)
            near = p * near * near * 0.5
            far = q - p - p * delta
            kl += tl.sum(tl.where(tl.abs(delta) < 0.25, tl.where(p > 0, near, q), far), 0)
            weighted += tl.sum(p * delta, 0)
        off = kl + weighted
        kl = tl.maximum(kl - off * off * 0.5, 0.0)
        target = tl.load(targets_ptr + row)
        of_target = tl.load(noisy + tl.maximum(target, 0)).to(tl.float32)
        nan = float("nan")
        clean_whole = (exp_c > 0) & (exp_c < float("inf")) & (tl.abs(top_c) < float("inf"))
        noisy_whole = (exp_n > 0) & (exp_n < float("inf")) & (tl.abs(top_n) < float("inf"))
        finite = (kl == kl) & (kl < float("inf"))
        whole = noisy_whole & (finite | (clean_whole == 0))
        out = out_ptr + row * COLUMNS
        variance_c = squares_c / width - (sum_c / width) * (sum_c / width)
        variance_d = squares_d / width - (sum_d / width) * (sum_d / width)
        tl.store(out, tl.where(clean_whole & noisy_whole & finite, kl, nan))
        tl.store(out + 1, tl.where((at_c == at_n) & whole & clean_whole, 1.0, 0.0))
        tl.store(out + 2, tl.where(target < 0, nan, tl.where((at_n == target) & whole, 1.0, 0.0)))
        tl.store(out + 3, tl.where((target >= 0) & whole, (top_n - of_target) + tl.log(exp_n), nan))
        tl.store(out + 4, tl.where(whole, top_n - second, nan))
        tl.store(out + 5, tl.where(whole, 0.0, 1.0))
        tl.store(out + 6, tl.maximum(variance_c, 0.0))
        tl.store(out + 7, tl.maximum(variance_d, 0.0))

    return compare_kernel


def can_compare(clean: Tensor, noisy: Tensor) -> bool:
    """Whether the kernel can process these logits: Triton is installed, plain dtypes, rows without gaps."""
    plain = all(x.dtype in _DTYPES and x.stride(-1) == 1 and x.numel() for x in (clean, noisy))
    return plain and _compare_kernel() is not None


def compare(clean: Tensor, noisy: Tensor, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Scores [N] of clean logits [N, V] against the rows [N] of noisy ones [R, V]."""
    kernel = _compare_kernel()
    assert kernel is not None
    out = torch.empty(len(rows), len(COLUMNS), dtype=torch.float32, device=clean.device)
    block = min(_LOGITS, max(16, _power_of_two(clean.shape[-1])))
    with torch.cuda.device_of(clean):  # type: ignore[no-untyped-call]
        kernel[(len(rows),)](
            clean, noisy, rows.contiguous(), targets.contiguous(), out, clean.shape[-1], clean.stride(0),
            noisy.stride(0), COLUMNS=len(COLUMNS), BLOCK=block, num_warps=8,
        )  # fmt: skip
    return dict(zip(COLUMNS, out.unbind(1), strict=True))


@functools.cache
def _read_kernel() -> Any | None:
    """The compiled kernel, or None where Triton is not installed."""
    try:
        import triton
        import triton.language as tl
    except ImportError:
        return None

    @triton.jit(do_not_specialize=["rows", "tokens"])  # type: ignore[untyped-decorator]
    def read_kernel(  # type: ignore[no-untyped-def]
        table_ptr, tape_ptr, sums_ptr, sizes_ptr, rows, tokens, period,
        FIELDS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, BYTES: tl.constexpr, ROOM: tl.constexpr,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        program = tl.program_id(0).to(tl.int64)
        row = program % rows  # of one token of one prompt
        prompt, token = row // tokens, row % tokens
        about = table_ptr + program // rows * FIELDS
        y_row = tl.load(about).to(tl.pointer_type(DTYPE)) + prompt * tl.load(about + 1) + token * tl.load(about + 2)
        y_row = tl.multiple_of(y_row, ALIGNED * BYTES)
        groups, part, before = tl.load(about + 5), tl.multiple_of(tl.load(about + 6), ALIGNED), tl.load(about + 7)
        signs = tape_ptr + (tl.load(about + 3) + prompt * tl.load(about + 4) + token * (groups * part)) % period
        group = tl.arange(0, ROOM)
        lane = tl.arange(0, BLOCK)
        sums = tl.zeros([ROOM, BLOCK], tl.float32)
        squares = tl.zeros([ROOM, BLOCK], tl.float32)
        for first in range(0, part, BLOCK):
            channel = group[:, None] * part + (first + lane)[None, :]
            inside = (group < groups)[:, None] & (first + lane < part)[None, :]
            y = tl.load(y_row + channel, mask=inside, other=0.0).to(tl.float32)
            sums += y * tl.load(signs + channel, mask=inside, other=0).to(tl.float32)
            squares += y * y
        tl.store(sums_ptr + before + row * groups + group, tl.sum(sums, 1), mask=group < groups)
        tl.store(sizes_ptr + program, tl.sqrt(tl.sum(tl.sum(squares, 1), 0)))

    return read_kernel


def can_read(y: Tensor) -> bool:
    """Whether the kernel can process y [B, T, C]: Triton is installed, a plain dtype, channels without gaps."""
    return y.dtype in _DTYPES and y.stride(-1) == 1 and y.numel() > 0 and _read_kernel() is not None


def read(
    outputs: Sequence[Tensor], tape: Tensor, *, places: Sequence[tuple[int, int]], groups: Sequence[int], period: int
) -> list[tuple[Tensor, Tensor]]:
    """Each y [B, T, C] of `outputs` -> signed sums [B, T, G] and sizes [B, T]; all in one launch, so B, T are shared.

    sign(p, t, c) is tape[(start + p step + t C) mod period + c], (start, step) being its place; the tape has two
    periods, so that no row runs over the end.
    """
    kernel = _read_kernel()
    assert kernel is not None
    (batch, tokens), device = outputs[0].shape[:2], outputs[0].device
    rows, before, table, size = batch * tokens, 0, [], outputs[0].element_size()
    aligned = 16 // size  # elements: what all rows and groups start at multiples of, up to 16 bytes
    for y, place, count in zip(outputs, places, groups, strict=True):
        part = y.shape[2] // count
        table.append((y.data_ptr(), y.stride(0), y.stride(1), *place, count, part, before))
        aligned = math.gcd(aligned, y.data_ptr() // size, y.stride(0), y.stride(1), part)
        before += rows * count
    sums = torch.empty(before, dtype=torch.float32, device=device)
    sizes = torch.empty(len(outputs), batch, tokens, dtype=torch.float32, device=device)
    with nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device):
        kernel[(len(outputs) * rows,)](
            torch.tensor(table, device="cpu").to(device, non_blocking=True), tape, sums, sizes, rows, tokens, period,
            FIELDS=len(table[0]), DTYPE=_triton_dtype(outputs[0].dtype), ALIGNED=aligned, BYTES=size,
            ROOM=_power_of_two(max(groups)), BLOCK=_CHANNELS, num_warps=4,
        )  # fmt: skip
    each = torch.split(sums, [rows * count for count in groups])
    return [(x.view(batch, tokens, -1), norms) for x, norms in zip(each, sizes.unbind(0), strict=True)]


def _triton_dtype(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
