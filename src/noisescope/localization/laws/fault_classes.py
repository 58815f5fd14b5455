"""Infers the class of a fault from the laws that hold or fail, and from the facts that go with them.

Kept                            Broken                                  Class
everything exact                repeat, again and again                 noise; spike where few elements change
repeat on its own               repeat after another call, row order    stale data
repeat                          NaN passes alone                        nan to zero
repeat                          statistics: a bit never changes         stuck bit; truncation of the lowest bits
repeat                          zero                                    bias; stuck bit (f(0) is one bit); dead lane
repeat, odd, zero, 2 x, sums    statistics: constant channels           dead lane
repeat, oddness, zero           additivity; statistics: zeros in a gap  dead zone; flush to zero for a tiny gap
repeat, oddness, zero           additivity; statistics: ties at the top saturation
repeat, zero                    oddness: a constant even part           bias (relative to the output)
repeat, zero                    oddness: within an ulp                  rounding mode
repeat, zero                    oddness: signs that never change        stuck bit
repeat, oddness, zero, 2 x      additivity                              accumulation; rounding mode within an ulp
all of these                    one-hot readback, checksums             gain, swapped channels, dead input lane, ...
key shift                       log-odds                                function table (exp)
log-odds or not                 key shift                               the scores: truncation if errors grow with them
key shift, log-odds             probabilities sum to 1                  gain (of the normaliser), accumulation, P itself
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import judge
from noisescope.localization.laws.call_results import EvidenceFacts, LawResult, known_values
from noisescope.localization.laws.calls_with_other_inputs import ATTENTION_MODULE, MLP
from noisescope.localization.laws.output_statistics import Statistics
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import number_format
from noisescope.sites import FUSED, Site

_PROPORTIONAL = math.sqrt(2.2 * 12.7)
_TINY_GAP = 2.0**-8  # of the rms: a gap this small is a flush to zero, a larger one a dead zone
_PRODUCTS = ("linear", "matmul", "bmm")
_LINEARITY = frozenset({Law.ODDNESS, Law.ZERO, Law.SCALE_BY_TWO, Law.ADDITIVITY})
# Laws of fused attention that softmax or the scores break.
_BEFORE_V = frozenset(
    {Law.CAUSALITY, Law.PROBABILITIES_SUM_TO_ONE, Law.KEY_SHIFT, Law.LOG_ODDS, Law.ROW_ORDER},
)

Broken = Mapping[Law, LawResult]


def place_and_class(site: Site, broken: Broken, facts: EvidenceFacts) -> tuple[Site, Pattern]:
    """Narrow a fused call or a whole sub-layer down to an operator by its pattern."""
    if site.operator == MLP:
        return replace(site, operator=facts.activation), _classify(MLP, broken, facts)
    if site.operator == ATTENTION_MODULE:
        operator = "matmul" if broken.keys() & {Law.ODDNESS, Law.ZERO, Law.POSITION_SHIFT} else "softmax"
        return replace(site, operator=operator), _classify(FUSED, broken, facts)
    if site.operator != FUSED:
        return site, _classify(site.operator, broken, facts)
    # What comes out is linear in V whatever softmax and scores do, as long as they do it again and again.
    repeats = not (facts.random or facts.stale)
    after_softmax = facts.ones == "channels" or (repeats and bool(broken.keys() & _LINEARITY))
    # The probability of a single key is 1 whatever it is.
    after_softmax |= Law.SINGLE_KEY in broken and Law.PROBABILITIES_SUM_TO_ONE not in broken
    if after_softmax or not broken.keys() & _BEFORE_V:
        return replace(site, operator="matmul", occurrence=1), _classify("matmul", broken, facts)
    if Law.PROBABILITIES_SUM_TO_ONE in broken or not _in_scores(broken, facts):
        softmax: Broken = {law: result for law, result in broken.items() if law == Law.ZERO or law not in _LINEARITY}
        return replace(site, operator="softmax", occurrence=0), _softmax(softmax or broken, facts)
    pattern = _classify(FUSED, broken, facts)
    if pattern.fault_class not in ("noise", "spike", "stale data") and facts.read is not None:
        pattern = _from_scores(*facts.read)
    return replace(site, operator="matmul", occurrence=0), pattern


def _in_scores(broken: Broken, facts: EvidenceFacts) -> bool:
    """A table of exp breaks the key shift only at a step between two roundings; wrong scores break it almost
    everywhere.
    """
    if Law.KEY_SHIFT not in broken or facts.shift_overflows:
        return False
    return Law.LOG_ODDS not in broken or broken[Law.KEY_SHIFT].share > 0.2 * broken[Law.LOG_ODDS].share


def _softmax(broken: Broken, facts: EvidenceFacts) -> Pattern:
    pattern = _classify("softmax", broken, facts)
    if pattern.fault_class in ("noise", "spike", "stale data"):
        return pattern
    size, spread = facts.ones_size, facts.ones_spread
    if Law.CAUSALITY in broken and Law.PROBABILITIES_SUM_TO_ONE not in broken:
        return Pattern("unknown", 0.5, "masked keys reach the output")
    if facts.shift_overflows:
        return Pattern("unknown", 0.5, "scores overflow: the maximum is not subtracted first")
    if Law.PROBABILITIES_SUM_TO_ONE in broken and Law.ROW_ORDER in broken and size <= 0:
        return Pattern("dead input lane", 0.6, "keys at some positions are left out of the sum")
    if Law.LOG_ODDS not in broken and Law.PROBABILITIES_SUM_TO_ONE in broken:
        return Pattern("gain", 0.8) if abs(size) > 4 * spread else Pattern("accumulation", 0.6)
    if Law.PROBABILITIES_SUM_TO_ONE not in broken and Law.LOG_ODDS in broken:
        return Pattern(
            "function table", 0.8, "exp itself is inaccurate: probabilities sum to 1, but their ratios are wrong"
        )
    if facts.read is not None:
        return _from_probabilities(*facts.read)
    return pattern


def _classify(operator: str, broken: Broken, facts: EvidenceFacts) -> Pattern:
    """The likeliest class of a suspect's fault."""
    channels = next((r.channels for r in broken.values() if r.channels), ())
    unrepeatable = _unrepeatable(broken, facts)
    if unrepeatable is not None:
        return Pattern(*unrepeatable, "", channels)
    if facts.lost_inputs and operator in _PRODUCTS:
        lost = ", ".join(map(str, facts.lost_inputs[:8]))
        return Pattern("dead input lane", 0.9, f"inner indices {lost} do not reach the output")
    if set(broken) == {Law.NAN_PASSES}:
        return Pattern("nan to zero", 0.95)
    known = facts.expected
    seen = facts.statistics
    if Law.OUTPUT_STATISTICS in broken and operator == "norm" and (seen.stuck or seen.dead):
        return Pattern(*(_bits(seen) if seen.stuck else ("dead lane", 0.9)), "", seen.stuck_channels or seen.dead)
    if operator in _PRODUCTS:
        found = _linear(broken, facts)
        if found is not None and not (found[0] in ("unknown", "accumulation") and known is not None):
            return Pattern(*found, "", channels)
    elif operator in ("norm", "silu", "gelu", "embedding", "residual", "softmax") and Law.NAN_PASSES not in broken:
        offset = _offset(broken, facts)
        if offset is not None and known is None:
            return Pattern(*offset, "", channels)
    if known is not None:
        return _from_expected(operator, known)
    for law, (name, confidence) in _BY_LAW.items():
        if law in broken:
            return Pattern(name, confidence, "", channels)
    return Pattern("unknown", 0.3, "", channels)


# Where a single law says it all; the first that is broken counts.
_BY_LAW = {
    Law.OUTPUT_STATISTICS: ("dead lane", 0.6),
    Law.NORM_SCALED: ("function table", 0.8),
    Law.ACTIVATION_IDENTITY: ("function table", 0.8),
    Law.MLP_IDENTITY: ("function table", 0.5),
    Law.POSITION_SHIFT: ("function table", 0.6),
    Law.STORED_NUMBERS: ("gain", 0.6),
    Law.PROBABILITIES_SUM_TO_ONE: ("gain", 0.5),
    Law.SINGLE_KEY: ("gain", 0.6),
    Law.LOG_ODDS: ("function table", 0.8),
    Law.CHECKSUMS: ("gain", 0.3),
}


def _unrepeatable(broken: Broken, facts: EvidenceFacts) -> tuple[str, float] | None:
    if facts.random:
        few = facts.changed_in_channels <= 0.25 and facts.changed_share < 0.1
        return ("spike" if few else "noise"), 0.9
    if facts.stale:
        return "stale data", 0.9
    if Law.REPEAT in broken:  # it changed once and then no more: a rare event
        few = facts.changed_share < 0.1
        return ("spike" if few else "noise"), 0.6
    return None


def _offset(broken: Broken, facts: EvidenceFacts) -> tuple[str, float] | None:
    if Law.ZERO not in broken:
        return None
    if facts.at_zero == "one bit":
        return "stuck bit", 0.95
    if facts.at_zero == "constant channel":
        return "dead lane", 0.9
    return ("unknown", 0.3) if facts.at_zero == "varied" else ("bias", 0.9)


def _linear(broken: Broken, facts: EvidenceFacts) -> tuple[str, float] | None:
    """The table above, narrow patterns first."""
    seen = facts.statistics
    if seen.stuck and (Law.OUTPUT_STATISTICS in broken or Law.ADDITIVITY in broken):
        return ("accumulation", 0.7) if facts.coarse_sums else _bits(seen)
    offset = _offset(broken, facts)
    if offset is not None:
        return offset
    if seen.dead and Law.OUTPUT_STATISTICS in broken:
        return "dead lane", 0.9
    if seen.gap:
        tiny = facts.gap_size < _TINY_GAP
        return ("flush to zero" if tiny else "dead zone"), 0.9
    if Law.ODDNESS in broken and facts.even == "constant":
        return "bias", 0.9
    if Law.ODDNESS in broken and facts.even == "sign stuck":
        return "stuck bit", 0.8
    if Law.ODDNESS in broken and facts.even == "within an ulp":
        return "rounding mode", 0.9
    if (Law.ADDITIVITY in broken or Law.SCALE_BY_TWO in broken) and (seen.ties >= 3 or facts.at_top == "short"):
        return "saturation", 0.9
    if facts.at_top == "beyond":
        return "spike", 0.8
    if abs(facts.truncates) > 0.4 and Law.ADDITIVITY in broken and facts.mean_square < 16:
        return "rounding mode", 0.8
    if Law.ROW_ORDER in broken and Law.REPEAT not in broken:
        return ("spike", 0.7) if broken[Law.ROW_ORDER].share < 0.05 else ("stale data", 0.5)
    if facts.few or (Law.SCALE_BY_TWO in broken and broken[Law.SCALE_BY_TWO].share < 0.02):
        return "spike", 0.7
    if Law.ADDITIVITY in broken and Law.SCALE_BY_TWO not in broken and Law.ODDNESS not in broken:
        return ("truncation", 0.8) if facts.adds_up_by_halves else ("accumulation", 0.7)
    return ("unknown", 0.3) if broken.keys() & {Law.ODDNESS, Law.SCALE_BY_TWO, Law.ADDITIVITY, Law.BATCH_SIZE} else None


def _bits(seen: Statistics) -> tuple[str, float]:
    zeros = {bit for bit, value in seen.stuck if value == 0}
    run = 0
    while run in zeros:
        run += 1
    return ("truncation", 0.9) if run >= 2 and run == len(seen.stuck) else ("stuck bit", 0.9)


def _from_expected(operator: str, known: Recomputed) -> Pattern:
    """With known correct values: the audit's patterns."""
    judgement = judge(known.y, known.reference, probabilities=operator == "softmax")
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
    known = known_values(got.reshape(-1, width).float(), wide, torch.full_like(wide, float(limit)))
    pattern = _from_expected("matmul", known)
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
    known = known_values(*(t.reshape(-1, p.shape[-1]) for t in (p, expected, limit * expected)))
    return _from_expected("softmax", known)
