"""From logits to reported log-probabilities, and back: what temperature and truncation an engine's values show.

With z the logits of a row, an engine may report log softmax(z), that of z / T, or that of the kept tokens alone, where
top-k keeps the k likeliest and top-p the smallest set of likeliest tokens that holds a share p. All of it shows in the
values: a temperature scales differences between tokens, a truncation adds -log(kept share) to every token that is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.engines.protocol import Sampling

CLOSE = 2e-3  # nats by which a reported value may be off its formula: engines compute and store it in float32
_LEAST_TOKENS = 3  # of a row, to tell a temperature


def reported_rows(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [T, V] that an engine with these settings reports; -inf for tokens that it leaves out."""
    if not sampling.processed:
        return logits.double().log_softmax(-1)
    return truncated((logits.double() / sampling.temperature).log_softmax(-1), sampling)


def truncated(rows: Tensor, sampling: Sampling) -> Tensor:
    """The likeliest tokens alone, with probabilities that sum to 1 again."""
    order = rows.argsort(-1, descending=True)
    ranked = rows.gather(-1, order)
    kept = torch.ones_like(ranked, dtype=torch.bool)
    if sampling.top_k:
        kept[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        left = ranked.masked_fill(~kept, -torch.inf).softmax(-1)  # top-p is a share of what top-k left
        kept &= left.cumsum(-1) - left < sampling.top_p
    return torch.full_like(rows, -torch.inf).scatter(-1, order, ranked.masked_fill(~kept, -torch.inf)).log_softmax(-1)


@dataclass(frozen=True)
class Processing:
    """What was done to logits: `raw` where the values are the logits themselves; `off`: nats left unexplained."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    unnormalised: bool = False
    off: float = 0.0

    @property
    def truncates(self) -> bool:
        return bool(self.top_k) or self.top_p < 1

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.top_k, processed=True)


def find_processing(rows: Tensor, logits: Tensor) -> Processing:
    """The settings that turn logits [T, V] into reported rows [T, V] (NaN: no value; -inf: left out)."""
    rows, logits = rows.double(), logits.double()
    given = rows.isfinite()
    if not bool(given.any()):
        return Processing()
    total = rows.masked_fill(~given, -torch.inf).logsumexp(-1)
    unnormalised = bool((total > CLOSE).all()) or (bool(given.all()) and bool((total.abs() > 0.1).all()))
    if unnormalised:
        rows = rows - total[:, None]
    temperature = _temperature(rows, logits, given)
    whole = (logits / temperature).log_softmax(-1)
    lifted = _median(rows - whole, given)  # -log of the kept share
    found = Processing(temperature, unnormalised=unnormalised)
    if float(lifted.max()) > CLOSE and not unnormalised:
        found = _truncation(whole, lifted, temperature)
    expected = reported_rows(logits, found.sampling)
    both = given & expected.isfinite()
    gaps = (rows - expected)[both].abs()
    return Processing(
        found.temperature, found.top_k, found.top_p, unnormalised, float(gaps.quantile(0.9)) if gaps.numel() else 0.0
    )


def _temperature(rows: Tensor, logits: Tensor, given: Tensor) -> float:
    """From differences between tokens, which no truncation changes; 1 where too few tokens are given."""
    slopes = []
    for row, z, known in zip(rows, logits, given, strict=True):
        if int(known.sum()) >= _LEAST_TOKENS:
            x, y = z[known] - z[known].mean(), row[known] - row[known].mean()
            slopes.append(float((x * y).sum() / (x * x).sum()))
    if not slopes:
        return 1.0
    slope = float(torch.tensor(slopes).median())
    return 1.0 if abs(slope - 1) < CLOSE or slope <= 0 else 1 / slope


def _truncation(whole: Tensor, lifted: Tensor, temperature: float) -> Processing:
    """The same number of tokens kept in every row is top-k, the same share top-p."""
    ranked = whole.sort(-1, descending=True).values.exp().cumsum(-1)
    share = (-lifted.clamp_min(0)).exp()
    counts = (ranked < share[:, None] * (1 - 1e-4)).sum(-1) + 1
    if int(counts.min()) == int(counts.max()):
        return Processing(temperature, top_k=int(counts[0]))
    without_last = torch.where(counts > 1, ranked.gather(-1, (counts - 2).clamp_min(0)[:, None])[:, 0], 0.0)
    low, high = float(without_last.max()), float(share.min())
    if low <= high * (1 + 1e-3):
        return Processing(temperature, top_p=round((low + high) / 2, 3))
    return Processing(temperature, top_k=int(counts.max()), top_p=min(round(high, 3), 0.999))


def _median(values: Tensor, given: Tensor) -> Tensor:
    """Of each row's given values; 0 where a row has none."""
    found: Tensor = values.masked_fill(~given, torch.nan).nanmedian(-1).values.nan_to_num(0.0)
    return found
