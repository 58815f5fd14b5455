"""Two records compared: every site measured, the first that parts, what adds up, and a verdict in words."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noisescope.comparison.crossing import Crossing, crossed
from noisescope.comparison.measures import Array, Sums
from noisescope.comparison.parting import Row, judged, measured, piled_up
from noisescope.comparison.records import Record, check_comparable
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS, percent
from noisescope.sites import Site

SCHEMA_VERSION = 1
_WORST_TOKENS = 5


@dataclass(frozen=True)
class Comparison:
    """How two devices differ. `verdict` is "identical", "round-off" or "parted"; `words` say it in sentences."""

    verdict: str
    words: str
    rows: tuple[Row, ...]
    first: Row | None  # the first site to part
    blocks: tuple[Mapping[str, Any], ...]  # error of each block's output, and how much the block added
    logits: Mapping[str, Any] | None
    tokens: tuple[Mapping[str, Any], ...]  # the worst
    crossing: Crossing | None
    worst_mape: Row | None
    max_mape: float | None
    sides: Mapping[str, Any]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool | None:
        """Whether every MAPE is within `max_mape`; None where none was asked for."""
        if self.max_mape is None:
            return None
        worst = None if self.worst_mape is None else self.worst_mape.measures.mape
        return worst is not None and worst <= self.max_mape and not any(r.measures.nonfinite for r in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "words": self.words,
            "sides": dict(self.sides),
            "first_to_part": None if self.first is None else self.first.to_dict(),
            "blocks": [dict(block) for block in self.blocks],
            "logits": None if self.logits is None else dict(self.logits),
            "tokens": [dict(token) for token in self.tokens],
            "sites": [row.to_dict() for row in self.rows],
            "sensitivity": None if self.crossing is None else self.crossing.to_dict(),
            "max_mape": self.max_mape,
            "worst_mape": None if self.worst_mape is None else self.worst_mape.measures.mape,
            "passed": self.passed,
            "notes": list(self.notes),
        }

    def save(self, path: str | Path) -> Path:
        """Write it as JSON."""
        target = Path(path)
        target.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        return target


def compare_records(
    a: Record,
    b: Record,
    *,
    layers: Iterable[int] | None = None,
    max_mape: float | None = None,
    sensitivity: Mapping[str, Any] | None = None,
    affordable: float = LIMITS["affordable_nats"],
) -> Comparison:
    """Compare two records; `a` is the reference.

    `layers` limits the rows and the check of `max_mape` to those blocks; where the devices part is sought in all.
    `sensitivity` is a diagnosis's report of the same model (its dictionary).
    """
    check_comparable(a, b)
    chosen = None if layers is None else frozenset(layers)
    notes: list[str] = []
    found, by_site = measured(a, b, notes)
    rows = tuple(judged(found, a.dtype))
    shown = tuple(row for row in rows if chosen is None or row.site.place in chosen)
    if not shown:
        raise InvalidInput(f"no site of layers {sorted(chosen or ())} is in both records: see `sites` in record.json")
    whole = [row for row in shown if row.measures.mape is not None]
    if max_mape is not None and len(whole) < len(shown) and (chosen is not None or not whole):
        lacking = sorted({str(row.site.place) for row in shown if row.measures.mape is None})
        raise InvalidInput(
            f"MAPE needs full detail, and of {', '.join(lacking[:8])} only sketches are in both records: record again "
            "with --detail full, or with --full-layers"
        )
    if max_mape is not None and len(whole) < len(shown):
        notes.append(f"MAPE was checked at {len(whole)} of {len(shown)} sites: the others are sketches")
    first = next((row for row in rows if row.parts), None)
    logits = _logits(a, b)
    crossing = None
    if sensitivity is not None:
        crossing = crossed({row.site: row.measures.relative_l2 for row in rows}, sensitivity, a.model, affordable)
    return Comparison(
        _verdict(rows, logits, first),
        _words(rows, first, logits, a.dtype),
        shown,
        first,
        tuple(piled_up(rows)),
        logits,
        tuple(_tokens(a, b, by_site)),
        crossing,
        max(whole, key=lambda row: row.measures.mape or 0.0, default=None),
        max_mape,
        {"a": _side(a), "b": _side(b)},
        tuple(notes),
    )


# -- what both sides say


def _tokens(a: Record, b: Record, by_site: Mapping[Site, Sums]) -> list[dict[str, Any]]:
    """The tokens that differ most: rms over sites of the relative L2, from whole tensors or the blocks' signed sums."""
    squares: dict[tuple[int, int], list[float]] = {}
    for sums in by_site.values():
        for key, value in sums.tokens.items():
            squares.setdefault(key, []).append(value * value)
    if not squares:
        squares = _token_sums(a, b)
    ranked = sorted(((float(np.mean(values)) ** 0.5, key) for key, values in squares.items()), reverse=True)
    return [
        {"prompt": prompt, "token": token, "id": a.prompts[prompt][token] if a.prompts else None, "relative_l2": size}
        for size, (prompt, token) in ranked[:_WORST_TOKENS]
        if size > 0
    ]


def _token_sums(a: Record, b: Record) -> dict[tuple[int, int], list[float]]:
    """One number a block and token is little; over the blocks of a model it is enough to rank tokens."""
    left, right = a.by_token("sum"), b.by_token("sum")
    found: dict[tuple[int, int], list[float]] = {}
    for prompt, (mine, its) in enumerate(zip(left or (), right or (), strict=False)):
        size = np.maximum((mine * mine).mean(1, keepdims=True), 1e-300)  # of a block's usual token
        relative = np.nan_to_num((mine - its) ** 2 / size, nan=1.0, posinf=1.0)
        for token in range(relative.shape[1]):
            found[(prompt, token)] = list(map(float, relative[:, token]))
    return found


def _logits(a: Record, b: Record) -> dict[str, Any] | None:
    """KL(a || b) of the next token in nats, and whether the likeliest one is the same."""
    left, right = a.logits(), b.logits()
    if left is None or right is None or left.shape != right.shape:
        return None
    usable = np.isfinite(left).all(1) & np.isfinite(right).all(1)
    if not usable.any():
        return {"kl": None, "worst_kl": None, "agreement": None, "max_error": None, "n": 0}
    left, right = left[usable], right[usable]
    log_p, log_q = _log_softmax(left), _log_softmax(right)
    kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(1), 0.0)
    return {
        "kl": float(kl.mean()),
        "worst_kl": float(kl.max()),
        "agreement": float((left.argmax(1) == right.argmax(1)).mean()),
        "max_error": float(np.abs(left - right).max()),
        "n": int(usable.sum()),
    }


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


# -- words


def _verdict(rows: Iterable[Row], logits: Mapping[str, Any] | None, first: Row | None) -> str:
    if first is not None:
        return "parted"
    same = all(row.measures.relative_l2 == 0 for row in rows) and (logits is None or logits["max_error"] == 0)
    return "identical" if same else "round-off"


def _words(rows: tuple[Row, ...], first: Row | None, logits: Mapping[str, Any] | None, dtype: str) -> str:
    end = "" if logits is None or logits["kl"] is None else (
        f" The next token's distribution differs by {logits['kl']:.2g} nats on average, and the likeliest token is the "
        f"same in {percent(logits['agreement'])} of {logits['n']} prompts."
    )  # fmt: skip
    verdict = _verdict(rows, logits, first)
    if verdict == "identical":
        return "The records are identical, bit for bit as far as they go."
    if first is not None:
        size = first.measures.relative_l2
        if math.isfinite(size):
            what = f"relative L2 {size:.2g}, {size / first.expected:.0f} times what came in"
        else:
            what = f"{first.measures.nonfinite} elements are NaN or infinite on one side only"
        return f"The devices part at {first.site}: {what}. What comes after it inherits that.{end}"
    worst = max(rows, key=lambda row: row.measures.relative_l2)
    return (
        f"The difference looks like round-off only: in {dtype} it grows from layer to layer and jumps nowhere. The "
        f"largest relative L2 is {worst.measures.relative_l2:.2g}, at {worst.site}.{end}"
    )


def _side(record: Record) -> dict[str, Any]:
    names = ("device", "versions", "detail", "created")
    return {
        "path": record.path,
        "architecture": record.architecture,
        "dtype": record.dtype,
        "prompts": record.count,
        **{name: record.about[name] for name in names if name in record.about},
    }
