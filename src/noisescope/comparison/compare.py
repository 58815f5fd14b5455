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
from noisescope.comparison.measures import Array, Sums, plain
from noisescope.comparison.parting import Row, judged, measured, piled_up
from noisescope.comparison.records import Record, check_comparable
from noisescope.comparison.words import in_words, verdict_of
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS
from noisescope.sites import Site

SCHEMA_VERSION = 1
_WORST_TOKENS = 5
_MOST_NAMED = 8  # places in a message


@dataclass(frozen=True)
class Comparison:
    """How two devices differ; `words` say it in sentences.

    `verdict` is "identical", "round-off", "parted", or "not measurable" where NaN or infinite numbers on both sides
    leave nothing to compare at some site.
    """

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
    uncompared: tuple[Site, ...]  # of the chosen layers: one side lacks them, or has no tensor of that shape

    @property
    def passed(self) -> bool | None:
        """Whether every MAPE is within `max_mape`; None where none was asked for.

        False too where NaN or infinite numbers, other shapes, or sites that one side lacks leave nothing to check:
        what was not seen has not passed.
        """
        if self.max_mape is None:
            return None
        worst = None if self.worst_mape is None else self.worst_mape.measures.mape
        return worst is not None and worst <= self.max_mape and not self.unmeasurable and not self.uncompared

    @property
    def unmeasurable(self) -> tuple[Row, ...]:
        """Rows where NaN or infinite numbers, on one side or on both, leave nothing to measure."""
        return tuple(row for row in self.rows if not row.measures.measurable)

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
            "uncompared": [
                {"place": site.place, "operator": site.operator, "module": site.module} for site in self.uncompared
            ],
            "sensitivity": None if self.crossing is None else self.crossing.to_dict(),
            "max_mape": self.max_mape,
            "worst_mape": None if self.worst_mape is None else self.worst_mape.measures.mape,
            "passed": self.passed,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write it as JSON; its folder is made where there is none."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self.to_json(), encoding="utf-8")
        return target


def compare_records(
    a: Record,
    b: Record,
    *,
    layers: Iterable[int] | None = None,
    max_mape: float | None = None,
    sensitivity: Mapping[str, Any] | None = None,
    affordable: float | None = None,
) -> Comparison:
    """Compare two records; `a` is the reference.

    `layers` limits the rows and the check of `max_mape` to those blocks; where the devices part is sought in all.
    `sensitivity` is a diagnosis's report of the same model (its dictionary); `affordable` nats, 0.01 if not given, is
    what a layer's difference may cost by it.
    """
    if max_mape is not None and not 0 <= max_mape < math.inf:
        raise InvalidInput(f"the largest MAPE allowed is a share such as 0.05, not below 0; got {max_mape}")
    if affordable is not None and sensitivity is None:
        raise InvalidInput("what a difference may cost needs a sensitivity report, which tells what it costs")
    check_comparable(a, b)
    notes = [f"{side.path}: {note}" for side in (a, b) for note in side.about.get("notes", ())]
    seen = measured(a, b, notes)
    rows = tuple(judged(seen.found, a.dtype))
    chosen = None if layers is None else frozenset(layers)
    shown = rows if chosen is None else _chosen(rows, chosen)
    whole = [row for row in shown if row.measures.elements]
    if max_mape is not None and len(whole) < len(shown) and (layers is not None or not whole):
        lacking = list(dict.fromkeys(str(row.site.place) for row in shown if not row.measures.elements))
        more = " ..." if len(lacking) > _MOST_NAMED else ""
        raise InvalidInput(
            f"MAPE needs full detail, and one record or both have but sketches of {', '.join(lacking[:_MOST_NAMED])}"
            f"{more}: record again with --detail full, or with --full-layers"
        )
    if max_mape is not None and len(whole) < len(shown):
        notes.append(f"MAPE was checked at {len(whole)} of {len(shown)} sites: the others are sketches")
    logits = _logits(a, b)
    crossing = None
    if sensitivity is not None:
        nats = LIMITS["affordable_nats"] if affordable is None else affordable
        crossing = crossed({row.site: row.measures for row in rows}, sensitivity, a.model, nats)
    return Comparison(
        verdict_of(rows, logits),
        in_words(rows, logits, a.dtype, seen.sites),
        shown,
        next((row for row in rows if row.parts), None),
        tuple(piled_up(rows)),
        logits,
        tuple(_tokens(a, b, seen.sums)),
        crossing,
        max(
            (row for row in whole if row.measures.mape is not None),
            key=lambda row: row.measures.mape or 0,
            default=None,
        ),
        max_mape,
        {"a": _side(a), "b": _side(b)},
        tuple(notes),
        tuple(site for site in seen.uncompared if chosen is None or site.place in chosen),
    )


def _chosen(rows: tuple[Row, ...], layers: frozenset[int]) -> tuple[Row, ...]:
    blocks = sorted({row.site.place for row in rows if isinstance(row.site.place, int)})
    missing = sorted(layers.difference(blocks))
    if not layers:
        raise InvalidInput(f"no layers are chosen: name some of the blocks {', '.join(map(str, blocks))}")
    if missing:
        raise InvalidInput(
            f"no site of layers {', '.join(map(str, missing))} is in both records: choose from the blocks "
            f"{', '.join(map(str, blocks))}"
        )
    return tuple(row for row in rows if row.site.place in layers)


# -- what both sides say


def _tokens(a: Record, b: Record, by_site: Mapping[Site, Sums]) -> list[dict[str, Any]]:
    """The tokens that differ most: those with NaN or infinite numbers on one side only, then by size.

    From whole tensors the size is the rms over sites of the relative L2. The blocks' signed sums give a score alone,
    good for a rank: the largest of many rough estimates are too large.
    """
    squares: dict[tuple[int, int], list[float]] = {}
    for sums in by_site.values():
        for key, value in sums.tokens.items():
            squares.setdefault(key, []).append(value * value)
    size_name, other_name = ("relative_l2", "score") if squares else ("score", "relative_l2")
    squares = squares or _token_sums(a, b)
    sizes = {key: float(np.mean(values)) ** 0.5 for key, values in squares.items()}
    ranked = sorted(  # of infinite ones those at more sites first: others inherit it
        (key for key, size in sizes.items() if size > 0),
        key=lambda key: (-sizes[key], -squares[key].count(math.inf), key),
    )
    return [
        {
            "prompt": prompt,
            "token": token,
            "id": a.prompts[prompt][token] if a.prompts else None,
            size_name: plain(sizes[prompt, token]),
            other_name: None,
            "nonfinite": math.isinf(sizes[prompt, token]),
        }
        for prompt, token in ranked[:_WORST_TOKENS]
    ]


def _token_sums(a: Record, b: Record) -> dict[tuple[int, int], list[float]]:
    """One number a block and token is little; over the blocks of a model it is enough to rank tokens."""
    left, right = a.by_token("sum"), b.by_token("sum")
    found: dict[tuple[int, int], list[float]] = {}
    for prompt, (mine, its) in enumerate(zip(left or (), right or (), strict=False)):
        finite, other_finite = np.isfinite(mine), np.isfinite(its)
        x, y = np.where(finite, mine, 0.0), np.where(finite & other_finite, its, 0.0)
        size = np.maximum((x * x).mean(1, keepdims=True), 1e-300)  # of a block's usual token
        relative = np.where(finite & other_finite, (x - y) ** 2 / size, np.where(finite != other_finite, np.inf, 0.0))
        for token in range(relative.shape[1]):
            found[(prompt, token)] = list(map(float, relative[:, token]))
    return found


def _logits(a: Record, b: Record) -> dict[str, Any] | None:
    """KL(a || b) of the next token in nats, and whether the likeliest one is the same."""
    left, right = a.logits(), b.logits()
    if left is None or right is None or left.shape != right.shape:
        return None
    usable = np.isfinite(left).all(1) & np.isfinite(right).all(1)
    counts = {"n": int(usable.sum()), "nonfinite": int((~usable).sum())}
    if not usable.any():
        return {"kl": None, "worst_kl": None, "agreement": None, "max_error": None, **counts}
    left, right = left[usable], right[usable]
    log_p, log_q = _log_softmax(left), _log_softmax(right)
    kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(1), 0.0)
    return {
        "kl": float(kl.mean()),
        "worst_kl": float(kl.max()),
        "agreement": float((left.argmax(1) == right.argmax(1)).mean()),
        "max_error": float(np.abs(left - right).max()),
        **counts,
    }


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


def _side(record: Record) -> dict[str, Any]:
    names = ("device", "versions", "detail", "created")
    return {
        "path": record.path,
        "architecture": record.architecture,
        "dtype": record.dtype,
        "prompts": record.count,
        **{name: record.about[name] for name in names if name in record.about},
    }
