"""Scores of logits per token. Nothing here makes the host wait for an accelerator.

Rows are tokens, [N, V]. A broken row (NaN, +inf, nothing but -inf, or -inf where the clean logits have none) is a wrong
answer: agreement 0, correct 0; what can't be said of it is NaN, and `nonfinite` is 1 so that callers can count it.
A logit of -inf is a masked token otherwise. A negative target (-100) means that the row has none: correct and nll NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from noisescope.errors import InvalidInput
from noisescope.metrics.divergence import check_logits, kl_of_rows, row_blocks, widened

_ROWS = 1024  # rows of logits compared at once: bounds the copies made of them


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
        from noisescope.metrics import cuda

        if cuda.usable(clean, noisy):
            return cuda.compare(clean, noisy.to(clean.device), rows.to(clean.device), targets)
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
            f"targets must be int64 token ids, one for each of the {logits.shape[0]} rows, got "
            f"{targets.dtype} {tuple(targets.shape)}"
        )
