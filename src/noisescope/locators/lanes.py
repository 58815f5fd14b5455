"""Errors of a product explained by its inputs: lanes of the inner dimension that are lost or scaled, short operands.

If lane k of the inner dimension counts 1 + c_k times, the error is e_rn = sum_k c_k a_rk b_kn. Least squares over all
elements needs only K x K numbers, since the Gram matrix of those patterns is a product element by element:

    G = (A^T A) o (B B^T),   G c = diag(A^T E B^T)
"""

from __future__ import annotations

import torch
from torch import Tensor

from noisescope.locators.pattern import Evidence, Pattern

_MOST_LANES = 1536
_MOST_COLUMNS = 512
_WIDTHS = (16, 32, 64, 128)


def input_pattern(e: Evidence) -> Pattern | None:
    """Dead or scaled input lanes, or operands cut short."""
    if e.operands is None:
        return None
    lanes, size, explained = _lanes(e)
    if explained and lanes:
        text = f"{len(lanes)} lanes of the inner dimension count {1 + size:.3g} times (such as lane {lanes[0]})"
        details = {"input_lanes": lanes}
        if abs(size + 1) < 0.25:
            return Pattern("dead input lane", 0.95, text, details=details)
        block = aligned_block(lanes, e.operands[0].shape[-1])
        return Pattern("block scale" if block is not None else "gain", 0.85, text, details=details)
    keep = _short_operands(e)
    if keep is not None:
        return Pattern("truncation", 0.9, f"as if the operands had {keep} bits of mantissa", details={"keep": keep})
    return None


def _lanes(e: Evidence) -> tuple[tuple[int, ...], float, bool]:
    """Lanes that are lost or scaled, by how much, and whether that explains the error."""
    assert e.operands is not None
    a, b = e.operands[0], e.operands[1].double()  # [B, M, K], [B, K, C]
    weight = e.weights()
    error = torch.where(weight > 0, e.error, 0.0).reshape(a.shape[0], a.shape[1], -1)
    number = a.shape[-1]
    gained = (a * (error @ b.transpose(-1, -2))).sum((0, 1))  # diag(A^T E B^T)
    energy = (a.square().sum(1) * b.square().sum(2)).sum(0)
    top = torch.arange(number)
    if number > _MOST_LANES:
        top = (gained.square() / energy.clamp_min(1e-300)).topk(_MOST_LANES).indices.sort().values
    a, b = a[..., top], b[:, top]
    gram = ((a.transpose(-1, -2) @ a) * (b @ b.transpose(-1, -2))).sum(0)
    gram.diagonal().add_(1e-9 * float(gram.diagonal().max()) + 1e-300)
    counts = torch.linalg.solve(gram, gained[top])
    strong = counts.abs() > 0.5 * float(counts.abs().max())
    if float(counts.abs().max()) < 0.05 or int(strong.sum()) > 0.5 * number:
        return (), 0.0, False
    size = float(counts[strong].median())
    fit = ((a[..., strong] * size) @ b[:, strong]).reshape(e.y.shape)
    alike = float((counts[strong] - size).abs().max()) < 0.3 * abs(size)
    return tuple(top[strong].tolist()), size, alike and e.explains(fit)


def _short_operands(e: Evidence) -> int | None:
    """How many bits of mantissa the operands seem to have had: 10 is TF32, 7 is bfloat16."""
    assert e.operands is not None
    a, b = e.operands
    columns = slice(0, _MOST_COLUMNS)
    exact = a @ b[..., columns].double()
    weight = e.weights().reshape(a.shape[0], a.shape[1], -1)[..., columns]
    error = e.error.reshape(a.shape[0], a.shape[1], -1)[..., columns]
    before = float((error.square() * weight).sum())
    best: tuple[float, int] | None = None
    for keep in range(1, e.form.bits - 1):
        for cut in (cut_short, round_short):
            change = cut(a, keep) @ cut(b[..., columns].double(), keep) - exact
            after = float(((error - change).square() * weight).sum())
            if best is None or after < best[0]:
                best = (after, keep)
    return best[1] if best is not None and best[0] < 0.2 * before else None


def cut_short(x: Tensor, keep: int) -> Tensor:
    """float64 x with `keep` bits of mantissa after the leading one, toward zero."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.trunc(torch.ldexp(mantissa, torch.tensor(keep + 1))), exponent - (keep + 1))


def round_short(x: Tensor, keep: int) -> Tensor:
    """The same to nearest."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(keep + 1))), exponent - (keep + 1))


def aligned_block(channels: tuple[int, ...], width: int) -> tuple[int, int] | None:
    """[start, stop) where channels are one run that a block of 16, 32 ... begins and ends with, and not all."""
    if len(channels) < _WIDTHS[0] or len(channels) >= width:
        return None
    start, stop = channels[0], channels[-1] + 1
    whole = stop - start == len(channels)
    return (start, stop) if whole and any(start % w == 0 and stop % w == 0 for w in _WIDTHS) else None
