"""Compares two records: measures every site, finds the first divergence and what accumulates, and gives a verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from noisescope.atomic_write import write_file
from noisescope.comparison.measures import Array, ErrorSums
from noisescope.comparison.priorities import DifferenceCosts, comparison_sheet, difference_costs
from noisescope.comparison.records import Record, check_comparable, unlike
from noisescope.comparison.rows import BlockError, Logits, Side, Sides, SiteRow, TokenRow
from noisescope.comparison.site_divergence import block_errors, coarser_dtype, judge_sites, measure_sites, round_off
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.findings import LIMITS, percent
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED, overall
from noisescope.findings.pass_fail import Verdict as CheckVerdict
from noisescope.jsonform import to_json
from noisescope.sites import Site
from noisescope.tables import Sheet, Tabular
from noisescope.text_escaping import last_part, shown
from noisescope.untrusted_files import FileKind, fitting, members, parse_json, read_text

SCHEMA_VERSION = 2  # 2: "diverges" for "parts"; undecided sites are counted; infinite differences are marked
COMPARISON = FileKind("comparison", "`noisescope compare A B -o FILE` writes one", root="comparison")
_WORST_TOKENS = 5
_MOST_NAMED = 8  # places in a message
Verdict = Literal["identical", "round-off", "diverged", "compared", "undecided"]


@dataclass(frozen=True, kw_only=True)
class Comparison(Tabular):
    """How two devices differ; `words` describes it in sentences. The fields are the keys of the JSON form.

    `verdict` is of all sites that can be compared; `undecided` of them have no finite number on either side, and where
    that is all of them the verdict is "undecided". `sites` are those of the chosen layers; `uncompared` of these layers
    are lacking on one side, of another shape, or whole here and sketched there.

    `passed` says whether every MAPE is within `max_mape`. It is False too where one side alone has NaN or infinite
    numbers, and where sites are uncompared: what was not seen has not passed. None: no limit was given, or no site
    decides.
    """

    schema_version: int = SCHEMA_VERSION
    verdict: Verdict
    words: str
    undecided: int
    sides: Sides
    first_divergence: SiteRow | None
    blocks: tuple[BlockError, ...]
    logits: Logits | None
    tokens: tuple[TokenRow, ...]
    sites: tuple[SiteRow, ...]
    uncompared: tuple[Site, ...]
    sensitivity: DifferenceCosts | None
    max_mape: float | None
    worst_mape: float | None
    worst_mape_site: Site | None
    passed: bool | None
    notes: tuple[str, ...]

    @property
    def first(self) -> SiteRow | None:
        """The first site that diverges."""
        return self.first_divergence

    @property
    def outcome(self) -> CheckVerdict:
        """ "fail" if `max_mape` is exceeded or, without that limit, the two diverged; else "undecided" or "pass"."""
        if self.passed is False or (self.max_mape is None and self.verdict == "diverged"):
            return FAIL
        return UNDECIDED if self.verdict == "undecided" or (self.max_mape is not None and not self.passed) else PASS

    def sheet(self) -> Sheet:
        return comparison_sheet(self)

    def to_json(self) -> str:
        return json.dumps(to_json(self), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write as JSON; creates the folder if needed."""
        return write_file(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Read what `save` wrote; rejected if it is damaged or of another version."""
        file = Path(path)
        found = members(parse_json(read_text(file, COMPARISON), file, COMPARISON), file, COMPARISON)
        version = found.get("schema_version")
        if version != SCHEMA_VERSION:
            came = f"{path} has schema version {shown(version)}; this noisescope reads"
            raise InvalidInput(f"{came} comparisons of version {SCHEMA_VERSION}: compare the records again")
        return fitting(cls, found, file, COMPARISON)


def compare_records(
    a: Record,
    b: Record,
    *,
    layers: Iterable[int] | None = None,
    max_mape: float | None = None,
    sensitivity: Diagnosis | None = None,
    affordable: float | None = None,
) -> Comparison:
    """Compare two records; `a` is the reference.

    `layers` limits the rows and the check of `max_mape` to those blocks; a divergence is searched for in all of them.
    `sensitivity` is a diagnosis of the same model; `affordable` nats, 0.01 if not given, is what a layer's difference
    may cost by it.
    """
    if max_mape is not None and not 0 <= max_mape < math.inf:
        raise InvalidInput(f"--max-mape must be a share of at least 0, such as 0.05; got {max_mape}")
    if affordable is not None and sensitivity is None:
        raise InvalidInput(
            "a limit on the cost of a difference needs a sensitivity report (--sensitivity), which gives that cost"
        )
    check_comparable(a, b)
    notes = [f"{last_part(side.path)}: {note}" for side in (a, b) for note in side.notes]
    seen = measure_sites(a, b, notes)
    reason = unlike(a, b)
    rows = tuple(judge_sites(seen.found, coarser_dtype(a.dtype, b.dtype)))
    chosen = None if layers is None else frozenset(layers)
    shown = rows if chosen is None else _chosen(rows, chosen)
    uncompared = tuple(site for site in seen.uncompared if chosen is None or site.place in chosen)
    if max_mape is not None:
        notes += _check_detail(shown, chosen)
    worst = max((row for row in shown if row.mape is not None), key=lambda row: row.mape or 0.0, default=None)
    logits = _logits(a, b)
    allowed = LIMITS["affordable_nats"] if affordable is None else affordable
    return Comparison(
        verdict=verdict_of(rows, logits, reason),
        words=describe(rows, logits, a.dtype, seen.sites, reason),
        undecided=sum(not row.decided for row in rows),
        sides=Sides(*(_side(record) for record in (a, b))),
        first_divergence=None if reason else next((row for row in rows if row.diverges), None),
        blocks=tuple(block_errors(rows)),
        logits=logits,
        tokens=tuple(_tokens(a, b, seen.sums)),
        sites=shown,
        uncompared=uncompared,
        sensitivity=None if sensitivity is None else difference_costs(rows, sensitivity, a.model, allowed),
        max_mape=max_mape,
        worst_mape=None if worst is None else worst.mape,
        worst_mape_site=None if worst is None else worst.site,
        passed=None if max_mape is None else _passed(shown, uncompared, max_mape),
        notes=tuple(notes),
    )


def _passed(rows: Sequence[SiteRow], uncompared: Sequence[Site], max_mape: float) -> bool | None:
    """By the sites that decide; None if none does."""
    checks: list[CheckVerdict] = [FAIL] if uncompared else []
    for row in rows:
        if row.mape is not None:
            checks.append(PASS if row.mape <= max_mape else FAIL)
        elif row.critical:
            checks.append(FAIL)
    found = overall(checks)
    return None if found == UNDECIDED else found == PASS


def _check_detail(rows: Sequence[SiteRow], layers: frozenset[int] | None) -> list[str]:
    """Notes on sites whose MAPE is unknown; an error if layers were selected, or if no MAPE is known."""
    sketched = [row for row in rows if row.detail == "sketch"]
    if not sketched:
        return []
    if layers is not None or len(sketched) == len(rows):
        lacking = list(dict.fromkeys(str(row.place) for row in sketched))
        enough = "--detail full" if layers is None else f"--full-layers {','.join(map(str, sorted(layers)))}"
        named = f"{', '.join(lacking[:_MOST_NAMED])}{' ...' if len(lacking) > _MOST_NAMED else ''}"
        raise InvalidInput(
            f"MAPE needs full tensors, but a record has only sketches of {named}: record again with {enough}"
        )
    return [
        f"MAPE was checked at {len(rows) - len(sketched)} of {len(rows)} sites; the others were recorded as sketches"
    ]


def _chosen(rows: tuple[SiteRow, ...], layers: frozenset[int]) -> tuple[SiteRow, ...]:
    blocks = sorted({row.place for row in rows if isinstance(row.place, int)})
    missing = sorted(layers.difference(blocks))
    if not layers:
        raise InvalidInput(f"no layers selected: choose from the blocks {', '.join(map(str, blocks))}")
    if missing:
        raise InvalidInput(
            f"no site of layers {', '.join(map(str, missing))} is in both records: choose from the blocks "
            f"{', '.join(map(str, blocks))}"
        )
    return tuple(row for row in rows if row.place in layers)


# -- tokens, logits, sides


def _tokens(a: Record, b: Record, by_site: Mapping[Site, ErrorSums]) -> list[TokenRow]:
    """The tokens that differ most: those with NaN or infinite numbers on one side only, then by size.

    From whole tensors the size is the rms over sites of the relative L2. The blocks' signed sums give only a score for
    ranking: the largest of many rough estimates are too large.
    """
    squares: dict[tuple[int, int], list[float]] = {}
    for sums in by_site.values():
        for key, value in sums.tokens.items():
            squares.setdefault(key, []).append(value * value)
    whole = bool(squares)
    squares = squares or _token_sums(a, b)
    sizes = {key: float(np.mean(values)) ** 0.5 for key, values in squares.items()}
    ranked = sorted(  # of infinite ones those at more sites first: others inherit it
        (key for key, size in sizes.items() if size > 0),
        key=lambda key: (-sizes[key], -squares[key].count(math.inf), key),
    )
    found = []
    for prompt, token in ranked[:_WORST_TOKENS]:
        size = sizes[prompt, token]
        known = size if math.isfinite(size) else None
        number = a.prompts[prompt][token] if a.prompts else None
        relative, score = (known, None) if whole else (None, known)
        found.append(TokenRow(prompt, token, number, relative, score, nonfinite=math.isinf(size)))
    return found


def _token_sums(a: Record, b: Record) -> dict[tuple[int, int], list[float]]:
    """One number per block and token is little, but over all blocks it is enough to rank tokens."""
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


def _logits(a: Record, b: Record) -> Logits | None:
    left, right = a.logits(), b.logits()
    if left is None or right is None or left.shape != right.shape:
        return None
    usable = np.isfinite(left).all(1) & np.isfinite(right).all(1)
    n, nonfinite = int(usable.sum()), int((~usable).sum())
    if not n:
        return Logits(None, None, None, None, n, nonfinite)
    left, right = left[usable], right[usable]
    log_p, log_q = _log_softmax(left), _log_softmax(right)
    kl = np.maximum((np.exp(log_p) * (log_p - log_q)).sum(1), 0.0)
    agreement = float((left.argmax(1) == right.argmax(1)).mean())
    return Logits(float(kl.mean()), float(kl.max()), agreement, float(np.abs(left - right).max()), n, nonfinite)


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(1, keepdims=True)
    found: Array = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return found


def _side(a: Record) -> Side:
    return Side(last_part(a.path), a.architecture, a.dtype, a.count, a.device, a.versions, a.detail, a.created)


# -- the verdict, and the sentences that say it


def verdict_of(rows: Sequence[SiteRow], logits: Logits | None, reason: str = "") -> Verdict:
    """By the rows that decide; "undecided" where none does, since no values are finite on both sides.

    With a `reason` why the two compute other things, differences are "compared": round-off is no explanation then.
    """
    if any(row.diverges for row in rows):
        return "compared" if reason else "diverged"
    decided = [row for row in rows if row.decided]
    if not decided:
        return "undecided"
    same = all(row.size == 0 for row in decided) and (logits is None or not logits.max_error)
    return "identical" if same else "compared" if reason else "round-off"


def describe(rows: Sequence[SiteRow], logits: Logits | None, dtype: str, sites: int, reason: str = "") -> str:
    """What the rows and logits show; the rows cover the compared ones of `sites` sites."""
    verdict = verdict_of(rows, logits, reason)
    if verdict == "diverged":
        text = _divergence(next(row for row in rows if row.diverges), dtype)
    elif verdict == "compared":
        text = (
            f"{reason[0].upper()}{reason[1:]}, so noisescope can't conclude that the difference is round-off. "
            f"{_largest(rows)}"
        )
    elif verdict == "identical":
        text = _identical(rows, sites)
    elif verdict == "round-off":
        worst = max((row for row in rows if row.relative_l2 is not None), key=lambda row: row.relative_l2 or 0.0)
        text = (
            f"The difference looks like round-off: in {dtype} it grows from layer to layer without a jump. The largest "
            f"relative L2 is {worst.relative_l2:.2g}, at {worst.site}. {_power(rows)}"
        )
    else:
        text = f"None of the {len(rows)} sites has finite values on both sides, so nothing could be compared."
    if len(rows) < sites:
        text += (
            f" {len(rows)} of {sites} sites could be compared: the others are missing on one side or differ in shape."
        )
    return text + _undecided(rows) + _left_out(rows) + ("" if verdict == "identical" else _next_token(logits))


def _largest(rows: Sequence[SiteRow]) -> str:
    sized = [row for row in rows if row.relative_l2 is not None]
    if not sized:
        return "No site has a finite difference."
    worst = max(sized, key=lambda row: row.relative_l2 or 0.0)
    return f"The largest relative L2 is {worst.relative_l2:.2g}, at {worst.site}."


def _identical(rows: Sequence[SiteRow], sites: int) -> str:
    which = "The records are" if len(rows) == sites else "The sites that could be compared are"
    sketched = sum(row.detail == "sketch" for row in rows)
    if not sketched:
        return f"{which} identical in every element."
    where = "all sites" if sketched == len(rows) else f"{sketched} of {len(rows)} sites"
    return f"{which} identical; {where} were compared by sketch, which can't detect a relative L2 below 2e-7."


def _divergence(first: SiteRow, dtype: str) -> str:
    gain = first.gain or 0.0
    least_size, least_gain = round_off(dtype)
    if first.nonfinite:
        what = f"{first.nonfinite} {first.counted} are NaN or infinite on one side only, which is critical"
    elif first.relative_l2 is None:
        what = "the reference is all zeros there, but the other side is not"
    elif first.too_far:
        what = f"relative L2 {first.relative_l2:.2g}, {_times(first.relative_l2, first.expected, least_size)}"
        what += f", mostly a gain of {100 * gain:+.2f} %" if gain else ""
    else:
        what = (
            f"a gain of {100 * gain:+.2f} %, {_times(abs(gain), first.expected_gain, least_gain)}, although the "
            f"relative L2 of {first.relative_l2:.2g} may be round-off"
        )
    return f"The devices diverge at {first.site}: {what}. Later sites inherit this difference."


def _times(size: float, expected: float, least: float) -> str:
    """How many times the error of the inputs, or round-off if theirs is no larger."""
    return f"{size / expected:.0f} times {'the error of its inputs' if expected > least else 'round-off'}"


def _power(rows: Sequence[SiteRow]) -> str:
    """How large a fault must be to count as a divergence."""
    sizes = [row.smallest_detectable for row in rows]
    gains = [row.smallest_detectable_gain for row in rows if row.smallest_detectable_gain is not None]
    text = f"A fault in one operator is detected if it adds a relative L2 above {_range(sizes)}"
    return (
        (f"{text}; a gain common to all elements if it exceeds {_range([100 * gain for gain in gains])} %.")
        if gains
        else f"{text}."
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}, depending on the site"


def _undecided(rows: Sequence[SiteRow]) -> str:
    """Rows without a decision, if others decide."""
    lost = [row for row in rows if not row.decided]
    if not lost or len(lost) == len(rows):
        return ""
    which = f"{len(lost)} of {len(rows)} sites are undecided, {lost[0].site} first"
    return f" {which}: no values are finite on both sides."


def _left_out(rows: Sequence[SiteRow]) -> str:
    """What is NaN or infinite on both sides."""
    there = [row for row in rows if row.nonfinite_both]
    if not there:
        return ""
    first = there[0]
    return (
        f" NaN or infinite values that match on both sides were ignored at {len(there)} of {len(rows)} sites: "
        f"{first.nonfinite_both} {first.counted} at {first.site}first."
    )


def _next_token(logits: Logits | None) -> str:
    if logits is None:
        return ""
    if logits.kl is None or logits.agreement is None:
        return f" The next token can't be compared: the logits of all {logits.nonfinite} prompts are NaN or infinite."
    left_out = f" ({logits.nonfinite} more have NaN or infinite logits)" if logits.nonfinite else ""
    return (
        f" The next token's distribution differs by {logits.kl:.2g} nats on average, and the likeliest token is the "
        f"same in {percent(logits.agreement)} of {logits.n} prompts{left_out}."
    )
