"""Where inside a fused call or a sub-layer a fault is, by the laws it breaks, and which class of fault it is.

A fault that does not repeat itself is noise, a spike or stale data. Else, where the host can recompute a suspect's
output and finds it wrong too, the audit's classifier names the errors (classify.py); where it can't (packed weights, a
class that does not run there), the laws that are broken do. Of a fused attention call:

=============================  ======================  =========================================================
kept                           broken                  what is wrong
=============================  ======================  =========================================================
key shift                      log-odds                softmax: its exp
log-odds or not                key shift               the scores
key shift, log-odds            probabilities sum to 1  softmax: its normaliser, or P itself
probabilities sum to 1         a single key            the product with V; also if the error differs by channel
=============================  ======================  =========================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import Judgement, judge
from noisescope.localization.laws.call_results import EvidenceFacts
from noisescope.localization.laws.calls_with_other_inputs import ATTENTION_MODULE, MLP
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import Reference, number_format
from noisescope.sites import FUSED, Site

_PROPORTIONAL = math.sqrt(2.2 * 12.7)
_TINY_GAP = 2.0**-8  # of the rms: a gap this small is a flush to zero, a larger one a dead zone
_SPARSE = 0.02  # of the elements, at most, that are spikes
_SCALE_FREE = ("accumulation", "rounding mode", "truncation")  # they do to 2 x what they do to x
_LINEARITY = frozenset({Law.ODDNESS, Law.ZERO, Law.SCALE_BY_TWO, Law.ADDITIVITY})
# Laws of fused attention that softmax or the scores break.
_BEFORE_V = frozenset(
    {Law.CAUSALITY, Law.PROBABILITIES_SUM_TO_ONE, Law.KEY_SHIFT, Law.LOG_ODDS, Law.ROW_ORDER},
)

Broken = Mapping[Law, Judgement]


def place_and_class(site: Site, broken: Broken, facts: EvidenceFacts) -> tuple[Site, Pattern]:
    """Narrow a fused call or a whole sub-layer down to an operator by its pattern."""
    if site.operator == MLP:
        return replace(site, operator=facts.activation), _classify(broken, facts)
    if site.operator == ATTENTION_MODULE:
        operator = "matmul" if broken.keys() & {Law.ODDNESS, Law.ZERO, Law.POSITION_SHIFT} else "softmax"
        return replace(site, operator=operator), _classify(broken, facts)
    if site.operator != FUSED:
        return site, _classify(broken, facts)
    # What comes out is linear in V whatever softmax and scores do, as long as they do it again and again.
    repeats = not (facts.random or facts.stale)
    after_softmax = facts.ones == "channels" or (repeats and bool(broken.keys() & _LINEARITY))
    # The probability of a single key is 1 whatever it is.
    after_softmax |= Law.SINGLE_KEY in broken and Law.PROBABILITIES_SUM_TO_ONE not in broken
    if after_softmax or not broken.keys() & _BEFORE_V:
        return replace(site, operator="matmul", occurrence=1), _classify(broken, facts)
    if Law.PROBABILITIES_SUM_TO_ONE in broken or not _in_scores(broken, facts):
        pattern = _inside(broken, facts, _from_probabilities)
        if facts.shift_overflows:
            pattern = Pattern("unknown", 0.5, "scores overflow: the maximum is not subtracted first")
        elif pattern.fault_class == "dead lane" and Law.ROW_ORDER in broken:
            pattern = Pattern("dead input lane", 0.6, "keys at some positions are left out of the sum")
        return replace(site, operator="softmax", occurrence=0), pattern
    return replace(site, operator="matmul", occurrence=0), _inside(broken, facts, _from_scores)


def _inside(broken: Broken, facts: EvidenceFacts, name: Callable[..., Pattern]) -> Pattern:
    """By the probabilities that were read back, if they were."""
    known = _unrepeatable(broken, facts)
    return known or (_classify(broken, facts) if facts.read is None else name(*facts.read))


def _in_scores(broken: Broken, facts: EvidenceFacts) -> bool:
    """A table of exp breaks the key shift only at a step between two roundings; wrong scores break it almost
    everywhere.
    """
    if Law.KEY_SHIFT not in broken or facts.shift_overflows:
        return False
    return Law.LOG_ODDS not in broken or broken[Law.KEY_SHIFT].share > 0.2 * broken[Law.LOG_ODDS].share


def _classify(broken: Broken, facts: EvidenceFacts) -> Pattern:
    """The likeliest class of a suspect's fault."""
    found = _unrepeatable(broken, facts) or facts.pattern
    if found is not None and found.fault_class in _SCALE_FREE and Law.SCALE_BY_TWO in broken:
        return Pattern("unknown", 0.3, "errors that do not scale with the input", found.channels)
    return found if found is not None and found.fault_class != "unknown" else _by_laws(broken, facts)


def _unrepeatable(broken: Broken, facts: EvidenceFacts) -> Pattern | None:
    channels = _channels(broken)
    if facts.random:
        few = facts.changed_in_channels <= 0.25 and facts.changed_share < 0.1
        return Pattern("spike" if few else "noise", 0.9, channels=channels)
    if facts.stale:
        return Pattern("stale data", 0.9, channels=channels)
    if Law.REPEAT in broken:  # it changed once and then no more: a rare event
        return Pattern("spike" if facts.changed_share < 0.1 else "noise", 0.6, channels=channels)
    return None


def _channels(broken: Broken) -> tuple[int, ...]:
    return tuple(sorted(next((result.channels for result in broken.values() if result.channels), ())))


def _by_laws(broken: Broken, facts: EvidenceFacts) -> Pattern:
    """By the broken law that says most about the kind of fault, and by what the output looks like."""
    seen, channels = facts.statistics, _channels(broken)
    if broken.keys() & {Law.OUTPUT_STATISTICS, Law.ADDITIVITY}:
        kinds = {
            "truncation": len(seen.stuck) > 1 and set(seen.stuck) == {(bit, 0) for bit in range(len(seen.stuck))},
            "stuck bit": seen.stuck,
            "dead lane": seen.dead,
            "flush to zero": 0 < seen.gap < _TINY_GAP * seen.rms,
            "dead zone": seen.gap,
            "saturation": seen.ties > 2,
        }
        for name, found in kinds.items():
            if found:
                return Pattern(name, 0.7, channels=channels)
    if Law.SCALE_BY_TWO in broken and broken[Law.SCALE_BY_TWO].share < _SPARSE:
        return Pattern("spike", 0.7, channels=channels)
    law = next((law for law in _TELLING if law in broken), None)
    name, confidence = ("unknown", 0.3) if law is None else (law.catches[0], 0.5)
    return Pattern(name, confidence, channels=channels)


# Laws whose first class of faults (table.py) is the likeliest; the first of them that is broken counts.
_TELLING = (
    Law.NORM_SCALED,
    Law.ACTIVATION_IDENTITY,
    Law.MLP_IDENTITY,
    Law.POSITION_SHIFT,
    Law.STORED_NUMBERS,
    Law.PROBABILITIES_SUM_TO_ONE,
    Law.SINGLE_KEY,
    Law.LOG_ODDS,
    Law.CHECKSUMS,
    Law.ZERO,
    Law.ADDITIVITY,
    Law.NAN_PASSES,
)


def _named(operator: str, y: Tensor, expected: Tensor, limit: Tensor) -> Pattern:
    """The audit's name for an output [R, C] whose right values, and tolerance, are known."""
    known = Recomputed(y, Reference(expected, (limit / 2,)))
    judgement = judge(y, known.reference, probabilities=operator == "softmax")
    return classify(Evidence.of(operator, known, judgement))


def _from_scores(p: Tensor, q: Tensor, k: Tensor, scale: float) -> Pattern:
    """The class of a fault in q k^T, from its probabilities: log p is the score up to a constant per row."""
    p, q, k = (t.detach().cpu().double() for t in (p, q, k))
    scores = (q @ k.transpose(-1, -2)) * scale
    got = p.clamp_min(1e-30).log()
    got = got + (scores - got).median(-1, keepdim=True).values
    limit = 1e-5 + 64 * number_format(torch.float32).u * scores.abs().amax()
    off = (got - scores).abs() > limit
    if bool(off.any()):
        got_size, wanted = got[off].abs(), scores[off].abs()
        top = float(got_size.median())
        if bool((wanted > got_size).all()) and bool(((got_size - top).abs() < 0.02 * top).all()):
            return Pattern(
                "saturation", 0.9, f"{int(off.sum())} scores that should be larger are clipped to about {top:.3g}"
            )
    width = got.shape[-1]
    wide = scores.reshape(-1, width)
    pattern = _named("matmul", got.reshape(-1, width).float(), wide, torch.full_like(wide, float(limit)))
    if pattern.fault_class == "accumulation" and _in_proportion(got, scores):
        return Pattern(
            "truncation", 0.7, "the error of scores is proportional to their size, as from one low-precision rounding"
        )
    return pattern


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


def _from_probabilities(p: Tensor, q: Tensor, k: Tensor, scale: float) -> Pattern:
    """The class of a fault in softmax, from its probabilities and those of the same scores on the host."""
    p, q, k = (t.detach().cpu() for t in (p, q, k))
    expected = ((q.double() @ k.double().transpose(-1, -2)) * scale).softmax(-1)
    limit = 64 * number_format(torch.float32).u * (1 + (q.double().abs() @ k.double().abs().transpose(-1, -2)) * scale)
    return _named("softmax", *(t.reshape(-1, p.shape[-1]) for t in (p, expected, limit * expected)))
