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
R13 or not              R12                              the scores: truncation where errors grow with them
R12, R13                R11                              gain (of the normaliser), accumulation, P itself
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence
from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import judge
from noisescope.localization.laws.calls import ATTENTION_MODULE, MLP
from noisescope.localization.laws.evidence import EvidenceFacts, Known
from noisescope.localization.laws.law_result import LawResult
from noisescope.localization.laws.statistics import Statistics
from noisescope.localization.roundoff_floors import Reference, number_format
from noisescope.sites import FUSED, Site

_PROPORTIONAL = math.sqrt(2.2 * 12.7)
_TINY_GAP = 2.0**-8  # of the rms: a gap this small is a flush to zero, a larger one a dead zone


@dataclass(frozen=True)
class Named:
    """A class, how sure it is among the classes, and what is known of the channels."""

    fault_class: str
    confidence: float
    channels: tuple[int, ...] = ()
    text: str = ""


def place_and_class(site: Site, broken: Mapping[str, LawResult], facts: EvidenceFacts) -> tuple[Site, Named]:
    """A fused call or a whole sub-layer is narrowed down to an operator by its pattern."""
    if site.operator == MLP:
        return replace(site, operator=facts.activation), _name(MLP, broken, facts)
    if site.operator == ATTENTION_MODULE:
        operator = "matmul" if broken.keys() & {"R7", "R8", "R14"} else "softmax"
        return replace(site, operator=operator), _name(FUSED, broken, facts)
    if site.operator != FUSED:
        return site, _name(site.operator, broken, facts)
    # What comes out is linear in V whatever softmax and scores do, as long as they do it again and again.
    steady = not (facts.random or facts.stale)
    after_softmax = facts.ones == "channels" or (steady and bool(broken.keys() & {"R7", "R8", "R17", "R18"}))
    after_softmax |= "R9" in broken and "R11" not in broken  # the probability of a single key is 1 whatever it is
    if after_softmax or not broken.keys() & {"R4", "R11", "R12", "R13", "R2"}:
        return replace(site, operator="matmul", occurrence=1), _name("matmul", broken, facts)
    if "R11" in broken or not _in_scores(broken, facts):
        softmax = {law: result for law, result in broken.items() if law not in ("R7", "R17", "R18")}
        return replace(site, operator="softmax", occurrence=0), _softmax(softmax or broken, facts)
    named = _name(FUSED, broken, facts)
    if named.fault_class not in ("noise", "spike", "stale data") and facts.read is not None:
        named = _from_scores(*facts.read)
    return replace(site, operator="matmul", occurrence=0), named


def _in_scores(broken: Mapping[str, LawResult], facts: EvidenceFacts) -> bool:
    """A table of exp breaks R12 only where a step lies between two roundings, wrong scores nearly everywhere."""
    if "R12" not in broken or facts.shift_overflows:
        return False
    return "R13" not in broken or broken["R12"].share > 0.2 * broken["R13"].share


def _softmax(broken: Mapping[str, LawResult], facts: EvidenceFacts) -> Named:
    named = _name("softmax", broken, facts)
    if named.fault_class in ("noise", "spike", "stale data"):
        return named
    size, spread = facts.ones_size, facts.ones_spread
    if "R4" in broken and "R11" not in broken:
        return Named("unknown", 0.5, (), "keys that the mask shuts out reach the output")
    if facts.shift_overflows:
        return Named("unknown", 0.5, (), "scores overflow: their maximum is not taken off")
    if "R11" in broken and "R2" in broken and size <= 0:
        return Named("dead input lane", 0.6, (), "keys at some addresses are not summed")
    if "R13" not in broken and "R11" in broken:
        return Named("gain", 0.8) if abs(size) > 4 * spread else Named("accumulation", 0.6)
    if "R11" not in broken and "R13" in broken:
        return Named("function table", 0.8, (), "exp itself is off: probabilities add up, their ratios are wrong")
    if facts.read is not None:
        return _from_probabilities(*facts.read)
    return named


def _name(operator: str, broken: Mapping[str, LawResult], facts: EvidenceFacts) -> Named:
    """The likeliest class of a suspect's fault."""
    channels = next((r.channels for r in broken.values() if r.channels), ())
    unsteady = _unsteady(broken, facts)
    if unsteady is not None:
        return Named(*unsteady, channels)
    if facts.lost_inputs and operator in ("linear", "matmul", "bmm"):
        told = f"inner indices {', '.join(map(str, facts.lost_inputs[:8]))} reach no output"
        return Named("dead input lane", 0.9, (), told)
    if set(broken) == {"R26"}:
        return Named("nan to zero", 0.95)
    known = facts.expected
    seen = facts.statistics
    if "R24" in broken and operator == "norm" and (seen.stuck or seen.dead):
        return Named(*(_bits(seen) if seen.stuck else ("dead lane", 0.9)), seen.stuck_channels or seen.dead)
    if operator in ("linear", "matmul", "bmm"):
        found = _linear(broken, facts)
        if found is not None and not (found[0] in ("unknown", "accumulation") and known is not None):
            return Named(*found, channels)
    elif operator in ("norm", "silu", "gelu", "embedding", "residual", "softmax") and "R26" not in broken:
        offset = _offset(broken, facts)
        if offset is not None and known is None:
            return Named(*offset, channels)
    if known is not None:
        return _from_expected(operator, known)
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


def _unsteady(broken: Mapping[str, LawResult], facts: EvidenceFacts) -> tuple[str, float] | None:
    if facts.random:
        few = facts.changed_in_channels <= 0.25 and facts.changed_share < 0.1
        return ("spike" if few else "noise"), 0.9
    if facts.stale:
        return "stale data", 0.9
    if "R1" in broken:  # it changed once and then no more: a rare event
        few = facts.changed_share < 0.1
        return ("spike" if few else "noise"), 0.6
    return None


def _offset(broken: Mapping[str, LawResult], facts: EvidenceFacts) -> tuple[str, float] | None:
    if "R8" not in broken:
        return None
    if facts.at_zero == "one bit":
        return "stuck bit", 0.95
    if facts.at_zero == "constant channel":
        return "dead lane", 0.9
    return ("unknown", 0.3) if facts.at_zero == "varied" else ("bias", 0.9)


def _linear(broken: Mapping[str, LawResult], facts: EvidenceFacts) -> tuple[str, float] | None:
    """The table above, narrow patterns first."""
    seen = facts.statistics
    if seen.stuck and ("R24" in broken or "R18" in broken):
        return ("accumulation", 0.7) if facts.coarse_sums else _bits(seen)
    offset = _offset(broken, facts)
    if offset is not None:
        return offset
    if seen.dead and "R24" in broken:
        return "dead lane", 0.9
    if seen.gap:
        tiny = facts.gap_size < _TINY_GAP
        return ("flush to zero" if tiny else "dead zone"), 0.9
    if "R7" in broken and facts.even == "constant":
        return "bias", 0.9
    if "R7" in broken and facts.even == "sign stuck":
        return "stuck bit", 0.8
    if "R7" in broken and facts.even == "within an ulp":
        return "rounding mode", 0.9
    if ("R18" in broken or "R17" in broken) and (seen.ties >= 3 or facts.at_top == "short"):
        return "saturation", 0.9
    if facts.at_top == "beyond":
        return "spike", 0.8
    if abs(facts.truncates) > 0.4 and "R18" in broken and facts.mean_square < 16:
        return "rounding mode", 0.8
    if "R2" in broken and "R1" not in broken:
        return ("spike", 0.7) if broken["R2"].share < 0.05 else ("stale data", 0.5)
    if facts.few or ("R17" in broken and broken["R17"].share < 0.02):
        return "spike", 0.7
    if "R18" in broken and "R17" not in broken and "R7" not in broken:
        return ("truncation", 0.8) if facts.adds_up_by_halves else ("accumulation", 0.7)
    return ("unknown", 0.3) if broken.keys() & {"R7", "R17", "R18", "R3"} else None


def _bits(seen: Statistics) -> tuple[str, float]:
    zeros = {bit for bit, value in seen.stuck if value == 0}
    run = 0
    while run in zeros:
        run += 1
    return ("truncation", 0.9) if run >= 2 and run == len(seen.stuck) else ("stuck bit", 0.9)


def _from_expected(operator: str, known: Known) -> Named:
    """Where the right numbers are known: the audit's patterns. `known` may be (output, expected, limit), [R, C]."""
    if isinstance(known, tuple):
        y, expected, limit = known
        known = Recomputed(y, Reference(expected, (limit / 2,)), total_rows=len(y))
    judgement = judge(known.y, known.reference, probabilities=operator == "softmax")
    pattern = classify(Evidence.of(operator, known, judgement))
    return Named(pattern.fault_class, pattern.confidence, pattern.channels, pattern.text)


def _from_scores(p: Tensor, q: Tensor, k: Tensor, scale: float) -> Named:
    """The class of a fault in q k^T, from the probabilities it led to: log p is the score, but for a constant a row."""
    p, q, k = (t.detach().cpu().double() for t in (p, q, k))
    scores = (q @ k.transpose(-1, -2)) * scale
    got = p.clamp_min(1e-30).log()
    got = got + (scores - got).median(-1, keepdim=True).values
    limit = 1e-5 + 64 * number_format(torch.float32).u * scores.abs().amax()
    off = (got - scores).abs() > limit
    if bool(off.any()):
        held, wanted = got[off].abs(), scores[off].abs()
        top = float(held.median())
        if bool((wanted > held).all()) and bool(((held - top).abs() < 0.02 * top).all()):
            return Named("saturation", 0.9, (), f"{int(off.sum())} scores that should be larger lie at about {top:.3g}")
    width = got.shape[-1]
    wide = scores.reshape(-1, width)
    named = _from_expected("matmul", (got.reshape(-1, width).float(), wide, torch.full_like(wide, float(limit))))
    if named.fault_class == "accumulation" and _in_proportion(got, scores):
        return Named("truncation", 0.7, (), "scores are off in proportion to their size, as one short rounding makes")
    return named


def _in_proportion(got: Tensor, scores: Tensor) -> bool:
    """Whether errors grow with the numbers themselves, as those of one rounding do and those of a sum do not.

    Of |e / s|, the 95 % quantile is 2.2 times the median for one rounding (s log-uniform in its binade, e uniform in
    its cell), and 12.7 times for normal errors that know nothing of s (a Cauchy ratio); the limit is their geometric
    mean.
    """
    weight = scores.square().clamp_min(1e-12).reciprocal()  # the constant of each row, by the same hypothesis
    error = got - scores
    error = error - (weight * error).sum(-1, keepdim=True) / weight.sum(-1, keepdim=True)
    ratio = (error / scores).abs().nan_to_num(math.inf).flatten().sort().values
    return float(ratio[int(0.95 * len(ratio))]) < _PROPORTIONAL * float(ratio[len(ratio) // 2])


def _from_probabilities(p: Tensor, q: Tensor, k: Tensor, scale: float) -> Named:
    """The class of a fault in softmax, from its probabilities and those of the same scores on the host."""
    p, q, k = (t.detach().cpu() for t in (p, q, k))
    expected = ((q.double() @ k.double().transpose(-1, -2)) * scale).softmax(-1)
    limit = 64 * number_format(torch.float32).u * (1 + (q.double().abs() @ k.double().abs().transpose(-1, -2)) * scale)
    width = p.shape[-1]
    return _from_expected(
        "softmax", (p.reshape(-1, width), expected.reshape(-1, width), (limit * expected).reshape(-1, width))
    )
