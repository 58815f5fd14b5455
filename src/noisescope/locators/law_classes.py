"""The class of a fault from the laws that were kept and broken, and from the facts that go with them.

Kept                    Broken                          Class
everything exact        R1, again and again              noise; spike where few elements change
R1 on its own           R1 after another call, R2        stale data
R1                      R26 alone                        nan to zero
R1                      R24: a bit that never changes    stuck bit; truncation where the lowest bits are 0
R1                      R8                               bias; stuck bit (f(0) is one bit); dead lane (a constant)
R1, R7, R8, R17, R18    R24: constant channels           dead lane
R1, R7, R8              R18, R24: zeros in a gap         dead zone; flush to zero where the gap is tiny
R1, R7, R8              R18, R24: ties at the top        saturation
R1, R8                  R7: a constant even part         bias (relative to the output)
R1, R8                  R7: within an ulp                rounding mode
R1, R8                  R7: signs that never change      stuck bit
R1, R7, R8, R17         R18                              accumulation; rounding mode where it is short of an ulp
all of these            R20, R21                         gain, swapped channels, dead input lane, block scale
R12                     R13                              function table (exp)
R13 or not              R12                              the scores
R12, R13                R11                              gain (of the normaliser), accumulation, P itself
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from noisescope.locators.classify import classify
from noisescope.locators.floors import Reference, number_format
from noisescope.locators.judge import judge
from noisescope.locators.law_readings import Reading
from noisescope.locators.law_statistics import Statistics
from noisescope.locators.products import Recomputed

_TINY_GAP = 2.0**-10  # of the rms: a gap this small is a flush to zero, a larger one a dead zone


@dataclass(frozen=True)
class Named:
    """A class, how sure it is among the classes, and what is known of the channels."""

    fault_class: str
    confidence: float
    channels: tuple[int, ...] = ()
    text: str = ""


def name_fault(operator: str, broken: Mapping[str, Reading], facts: Mapping[str, Any]) -> Named:
    """The likeliest class of a suspect's fault."""
    channels = next((r.channels for r in broken.values() if r.channels), ())
    unsteady = _unsteady(broken, facts)
    if unsteady is not None:
        return Named(*unsteady, channels)
    if set(broken) == {"R26"}:
        return Named("nan to zero", 0.95)
    known = facts.get("expected") or facts.get("recomputed")
    if operator in ("linear", "matmul", "bmm"):
        found = _linear(broken, facts)
        if found is not None and not (found[0] in ("unknown", "accumulation") and known is not None):
            return Named(*found, channels)
    elif operator in ("norm", "silu", "gelu", "embedding", "residual", "softmax") and "R26" not in broken:
        offset = _offset(broken, facts)
        if offset is not None and known is None:
            return Named(*offset, channels)
    if known is not None:
        return from_expected(operator, known)
    for law, (name, confidence) in _BY_LAW.items():
        if law in broken:
            return Named(name, confidence, channels)
    return Named("unknown", 0.3, channels)


# Where a single law says it all; the first that is broken counts.
_BY_LAW = {
    "R24": ("dead lane", 0.6),
    "R6'": ("function table", 0.8),
    "R15": ("function table", 0.8),
    "R16": ("function table", 0.5),
    "R14": ("function table", 0.6),
    "R27": ("gain", 0.6),
    "R11": ("gain", 0.5),
    "R9": ("gain", 0.6),
    "R13": ("function table", 0.8),
    "R21": ("gain", 0.3),
}


def _unsteady(broken: Mapping[str, Reading], facts: Mapping[str, Any]) -> tuple[str, float] | None:
    if facts.get("random"):
        few = facts.get("changed within channels", 1.0) <= 0.25 and facts.get("changed share", 1.0) < 0.1
        return ("spike" if few else "noise"), 0.9
    if facts.get("stale"):
        return "stale data", 0.9
    if "R1" in broken:  # it changed once and then no more: a rare event
        few = facts.get("changed share", 1.0) < 0.1
        return ("spike" if few else "noise"), 0.6
    return None


def _offset(broken: Mapping[str, Reading], facts: Mapping[str, Any]) -> tuple[str, float] | None:
    if "R8" not in broken:
        return None
    at_zero = facts.get("f(0)", "constant")
    if at_zero == "one bit":
        return "stuck bit", 0.95
    if at_zero == "constant channel":
        return "dead lane", 0.9
    return ("bias", 0.9) if at_zero == "constant" else ("unknown", 0.3)


def _linear(broken: Mapping[str, Reading], facts: Mapping[str, Any]) -> tuple[str, float] | None:
    """The table above, narrow patterns first."""
    seen: Statistics = facts.get("statistics") or Statistics()
    if seen.stuck and "R24" in broken:
        return _bits(seen)
    offset = _offset(broken, facts)
    if offset is not None:
        return offset
    if seen.dead and "R24" in broken:
        return "dead lane", 0.9
    if seen.gap:
        tiny = facts.get("gap size", 1.0) < _TINY_GAP
        return ("flush to zero" if tiny else "dead zone"), 0.9
    even = facts.get("even", "none")
    if "R7" in broken and even == "constant":
        return "bias", 0.9
    if "R7" in broken and even == "sign stuck":
        return "stuck bit", 0.8
    if "R7" in broken and even == "within an ulp":
        return "rounding mode", 0.9
    if ("R18" in broken or "R17" in broken) and (seen.ties >= 3 or facts.get("at top")):
        return "saturation", 0.9
    if abs(facts.get("truncates", 0.0)) > 0.4 and "R18" in broken and facts.get("mean square", 1e9) < 16:
        return "rounding mode", 0.8
    if "R2" in broken and "R1" not in broken:
        return ("spike", 0.7) if broken["R2"].share < 0.05 else ("stale data", 0.5)
    if facts.get("few") or ("R17" in broken and broken["R17"].share < 0.02):
        return "spike", 0.7
    if "R18" in broken and "R17" not in broken and "R7" not in broken:
        return "accumulation", 0.7
    return ("unknown", 0.3) if broken.keys() & {"R7", "R17", "R18", "R3"} else None


def _bits(seen: Statistics) -> tuple[str, float]:
    zeros = {bit for bit, value in seen.stuck if value == 0}
    run = 0
    while run in zeros:
        run += 1
    return ("truncation", 0.9) if run >= 2 and run == len(seen.stuck) else ("stuck bit", 0.9)


def from_expected(operator: str, known: Recomputed | tuple[Tensor, Tensor, Tensor]) -> Named:
    """Where the right numbers are known: the audit's patterns. `known` may be (output, expected, limit), [R, C] each."""
    if isinstance(known, tuple):
        y, expected, limit = known
        known = Recomputed(y, Reference(expected, (limit / 2,)), total_rows=len(y))
    judgement = judge(known.y, known.reference, bits=operator != "softmax")
    pattern = classify(operator, known, judgement)
    return Named(pattern.fault_class, pattern.confidence, pattern.channels, pattern.text)


def from_scores(p: Tensor, q: Tensor, k: Tensor, scale: float) -> Named:
    """The class of a fault in q k^T, from the probabilities it led to: log p is the score, but for a constant a row."""
    p, q, k = (t.detach().cpu().double() for t in (p, q, k))
    scores = (q @ k.transpose(-1, -2)) * scale
    got = p.clamp_min(1e-30).log()
    got = got + (scores - got).median(-1, keepdim=True).values
    flat = (got.reshape(-1, got.shape[-1]).float(), scores.reshape(-1, got.shape[-1]))
    limit = torch.full_like(flat[1], 1e-5) + 64 * number_format(torch.float32).u * flat[1].abs().amax()
    return from_expected("matmul", (*flat, limit))
