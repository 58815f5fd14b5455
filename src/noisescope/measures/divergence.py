"""Divergence and other scores of two sets of logits, accurate even where they hardly differ.

Rows are tokens, [N, V]; nothing makes the host wait for an accelerator. A broken row (NaN, +inf, nothing but -inf, or
-inf where the clean logits have none) is a wrong answer: agreement 0, correct 0; what it has no value for is NaN, and
`nonfinite` is 1 so that callers can count it. A logit of -inf is a masked token otherwise. A negative target (-100)
means that the row has none: correct and nll NaN.

Subtracting two float32 log-likelihoods leaves no digit of a divergence below 1e-7 nats, and a screen of single layers
lives down there. So they are not subtracted. With p = softmax(z), q = softmax(z'), dz = z' - z and
D = log sum p e^dz, the difference of the two log-sum-exps,

    delta = log q - log p = dz - D,      KL(p || q) = sum p phi(delta),      phi(x) = e^x - 1 - x,

where every term is >= 0 and nothing cancels. A rounding error e in D adds exactly phi(e) to the sum and e to
sum p delta = -KL, so it can be read off the second and taken from the first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from noisescope.errors import InvalidInput

# Nats per token that two float32 evaluations of one model can't tell from 0. SmolLM2-135M, 128 tokens of GSM8K, CPU:
# fused against plain attention, and float32 against float64, give a median of 5e-12 and at most 3e-11; a factor of
# three for larger models. The form itself goes further: against float64, with 50,257 logits of spread 1 to 6, it is
# within 1e-5 of divergences from 1e-1 to 1e-14. A shift common to all noisy logits costs digits, as float32 logits
# near 35 are rounded by 1e-6: with a shift of 30 it is within 1 % down to 1e-9.
KL_FLOOR = 1e-10

# Elements in a block of rows. On a CPU the half dozen float32 temporaries of a block stay in its cache (V = 49,152, one
# core: 13 ns an element at 2^19, 33 ns at 2^23); on an accelerator 32 MiB each stay in its L2 and hide the launches.
_BLOCK_ELEMENTS = {"cpu": 2**19}
_BLOCK_ELEMENTS_ELSEWHERE = 2**23

# phi(x) = (x / (1 - x/6))^2 / 2 * (1 - x^3/540 + ...). Below this value of phi, |x| < 0.25, the first factor alone is
# within 3e-5; above it, e^x - 1 - x loses so few digits that it is as good.
_NEAR = 0.03
_ROOT = math.sqrt(2)
_ROWS = 1024  # rows of logits compared at once: bounds the copies made of them


def kl_divergence(clean_logits: Tensor, noisy_logits: Tensor, *, block_rows: int | None = None) -> Tensor:
    """KL(clean || noisy) in nats for each row of logits [N, V]; float32 [N].

    Logits may be of any floating type; blocks of `block_rows` rows are computed in float32 (float64 where an input is),
    so no wide copy of all of them is made. A logit of -inf on both sides is a masked token and adds nothing. A row that
    has NaN or an infinity anywhere else gives NaN, and no other row does. No host synchronisation.
    """
    check_logits(clean_logits, noisy_logits)
    with torch.no_grad():
        divergence = clean_logits.new_empty(clean_logits.shape[0], dtype=torch.float32)
        for rows in row_blocks(clean_logits, block_rows):
            clean, noisy = widened(clean_logits[rows], noisy_logits[rows])
            divergence[rows] = kl_of_rows(clean, noisy, clean.softmax(-1), noisy.softmax(-1))
    return divergence


def rounding_floor(logits: Tensor, dtype: torch.dtype | None = None, *, block_rows: int | None = None) -> Tensor:
    """The divergence [N] to expect between two evaluations of these logits [N, V] that differ in their rounding alone.

    Rounding to `dtype` (default: that of the logits) is off by ulp/sqrt(12) rms, twice, and small errors of variance
    s_i^2 give KL = sum p_i (1 - p_i) s_i^2 / 2. Where the divergence of two bfloat16 models is at this size, it shows
    how the logits are stored and nothing about the models. Errors inside the model come on top: see KL_FLOOR.
    """
    check_logits(logits, logits)
    eps = torch.finfo(dtype or logits.dtype).eps
    with torch.no_grad():
        floor = logits.new_empty(logits.shape[0], dtype=torch.float32)
        for rows in row_blocks(logits, block_rows):
            (z,) = widened(logits[rows])
            p = z.softmax(-1)
            ulp = z.abs().log2_().floor_().exp2_().mul_(eps)
            spread = ulp.square_().mul_(p * (1 - p))
            floor[rows] = spread.nan_to_num_(nan=0.0).sum(-1) / 12 + p.sum(-1) * 0  # the last is NaN for a broken row
    return floor


def check_logits(clean: Tensor, noisy: Tensor) -> None:
    """Both must be floating-point [N, V] with V > 0, of the same shape and on one device."""
    if clean.dim() != 2 or clean.shape != noisy.shape or clean.shape[1] == 0:
        raise InvalidInput(
            f"clean and noisy logits must both have the shape [tokens, vocabulary], got {tuple(clean.shape)} and "
            f"{tuple(noisy.shape)}: flatten batches with logits.flatten(0, -2)"
        )
    if not (clean.is_floating_point() and noisy.is_floating_point()):
        raise InvalidInput(f"logits must be floating-point, got {clean.dtype} and {noisy.dtype}")
    if clean.device != noisy.device:
        raise InvalidInput(
            f"clean logits are on {clean.device}, noisy ones on {noisy.device}: move them to the same device"
        )


def row_blocks(logits: Tensor, block_rows: int | None = None) -> Iterator[slice]:
    """Slices over the rows of logits [N, V], each as many rows as the device's cache holds."""
    if block_rows is None:
        elements = _BLOCK_ELEMENTS.get(logits.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
        block_rows = max(1, elements // logits.shape[1])
    elif block_rows < 1:
        raise InvalidInput(f"block_rows must be at least 1, got {block_rows}")
    for start in range(0, logits.shape[0], block_rows):
        yield slice(start, start + block_rows)


def widened(*blocks: Tensor) -> tuple[Tensor, ...]:
    """The blocks in float32, or in float64 if one of them is. Wide blocks are not copied: don't write to them."""
    wide = torch.float32
    for block in blocks:
        wide = torch.promote_types(wide, block.dtype)
    return tuple(block.to(wide) for block in blocks)


def kl_of_rows(clean: Tensor, noisy: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """KL [R] of wide logits [R, V] with their softmax p and q; q is used up.

    Few passes over memory: in-place steps, and no `where` over [R, V], which a CPU doesn't vectorise.
    """
    # log-sum-exp = largest logit - log of the largest probability
    shift = (noisy.amax(-1) - clean.amax(-1)) + (p.amax(-1) / q.amax(-1)).log_()
    delta = (noisy - clean).sub_(shift[:, None])
    # NaN: masked on both sides, or a broken row, whose p or q is NaN all along. +inf: masked in clean alone, p = 0, and
    # any finite number works. -inf, masked in noisy alone, stays and spoils its row.
    delta.nan_to_num_(nan=0.0, posinf=torch.finfo(torch.float32).max, neginf=-math.inf)

    near = delta.clamp(-1.0, 1.0)  # phi by its approximation, finite everywhere
    near.div_(torch.rsub(near, _ROOT, alpha=_ROOT / 6)).square_()
    is_near = torch.lt(near, _NEAR, out=torch.empty_like(near))  # 1.0 or 0.0
    near.mul_(p)
    weighted = delta.mul_(p)
    far = q.sub_(p).sub_(weighted)  # p phi(delta) = q - p - p delta: nothing here can overflow

    divergence = torch.lerp(far, near, is_near).sum(-1)
    error_of_shift = divergence + weighted.sum(-1)
    divergence = (divergence - error_of_shift.square_() / 2).clamp_(min=0.0)
    return torch.where(divergence.isfinite(), divergence, torch.nan)


def token_scores(
    clean_logits: Tensor, noisy_logits: Tensor, targets: Tensor, *, block_rows: int | None = None
) -> dict[str, Tensor]:
    """Noisy logits [N, V] against clean ones and targets [N]; float32 [N] each.

    kl         KL(clean || noisy) in nats, see `divergence.py`; NaN where either row is broken
    agreement  1 where both have the same most likely token (of equal ones, the first); 0 where either is broken
    correct    1 where the most likely noisy token is the target
    nll        -log q(target) in nats
    margin     the largest noisy logit less the second largest
    nonfinite  1 where the noisy row is broken
    """
    check_logits(clean_logits, noisy_logits)
    _check_targets(noisy_logits, targets)
    with torch.no_grad():
        scores = _empty(noisy_logits, "kl", "agreement", "correct", "nll", "margin", "nonfinite")
        for rows in row_blocks(noisy_logits, block_rows):
            clean, noisy = widened(clean_logits[rows], noisy_logits[rows])
            p, q = clean.softmax(-1), noisy.softmax(-1)
            best = noisy.argmax(-1)
            largest_q = q.gather(-1, best[:, None])[:, 0]
            kl = kl_of_rows(clean, noisy, p, q)
            clean_is_whole = p[:, 0].isfinite()  # NaN or +inf anywhere in a row makes its whole softmax NaN
            whole = largest_q.isfinite() & ~(kl.isnan() & clean_is_whole)
            agreement = (best == clean.argmax(-1)) & whole & clean_is_whole
            _put(scores, rows, kl=kl, agreement=agreement, **_scores_of(noisy, best, largest_q, targets[rows], whole))
    return scores


def compare(clean: Tensor, noisy: Tensor, rows: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """token_scores and `powers` of clean logits [N, V] against the rows [N] of noisy ones [R, V], in bounded memory."""
    if clean.device.type == "cuda":
        from noisescope.measures import cuda_kernels

        if cuda_kernels.can_compare(clean, noisy):
            return cuda_kernels.compare(clean, noisy.to(clean.device), rows.to(clean.device), targets)
    parts = []
    for at in range(0, len(rows), _ROWS):
        part = slice(at, at + _ROWS)
        picked = noisy.index_select(0, rows[part]).to(clean.device)
        parts.append({**token_scores(clean[part], picked, targets[part]), **powers(clean[part], picked)})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def powers(clean: Tensor, noisy: Tensor) -> dict[str, Tensor]:
    """Variance [N] of the clean logits [N, V] and of their error over the vocabulary: signal and error.

    A constant added to all logits changes no probability, so it is neither.
    """
    signal, error = [], []
    for rows in row_blocks(clean):
        first, second = widened(clean[rows], noisy[rows])
        signal.append(first.var(-1, correction=0))
        error.append((second - first).var(-1, correction=0))
    return {"signal": torch.cat(signal).float(), "error": torch.cat(error).float()}


def clean_scores(logits: Tensor, targets: Tensor, *, block_rows: int | None = None) -> dict[str, Tensor]:
    """Correct, nll, margin and nonfinite as in token_scores, of one set of logits [N, V]."""
    check_logits(logits, logits)
    _check_targets(logits, targets)
    with torch.no_grad():
        scores = _empty(logits, "correct", "nll", "margin", "nonfinite")
        for rows in row_blocks(logits, block_rows):
            (wide,) = widened(logits[rows])
            best = wide.argmax(-1)
            largest_q = wide.softmax(-1).gather(-1, best[:, None])[:, 0]
            _put(scores, rows, **_scores_of(wide, best, largest_q, targets[rows], largest_q.isfinite()))
    return scores


def _scores_of(z: Tensor, best: Tensor, largest_q: Tensor, targets: Tensor, whole: Tensor) -> dict[str, Tensor]:
    """Scores of wide logits z [R, V] from their argmax, its probability, and which rows are whole."""
    largest = z.gather(-1, best[:, None])[:, 0]
    second = z.scatter(-1, best[:, None], -torch.inf).amax(-1)
    of_target = z.gather(-1, targets.clamp(min=0)[:, None])[:, 0]
    nll = (largest - of_target) - largest_q.log()  # two terms >= 0: exact also where the target is almost certain
    has_target = targets >= 0
    return {
        "correct": torch.where(has_target, ((best == targets) & whole).float(), torch.nan),
        "nll": torch.where(has_target & whole, nll, torch.nan),
        "margin": torch.where(whole, largest - second, torch.nan),
        "nonfinite": ~whole,
    }


def _empty(logits: Tensor, *names: str) -> dict[str, Tensor]:
    return {name: logits.new_empty(logits.shape[0], dtype=torch.float32) for name in names}


def _put(scores: dict[str, Tensor], rows: slice, **values: Tensor) -> None:
    for name, value in values.items():
        scores[name][rows] = value


def _check_targets(logits: Tensor, targets: Tensor) -> None:
    if targets.shape != logits.shape[:1] or targets.dtype != torch.int64:
        raise InvalidInput(
            f"targets must be int64 token ids, one per row for {logits.shape[0]} rows, got "
            f"{targets.dtype} {tuple(targets.shape)}"
        )
