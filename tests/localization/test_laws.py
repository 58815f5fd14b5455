"""The parts of the laws: results, statistics of outputs, floors from a module's own answers."""

from __future__ import annotations

import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from noisescope.faults import bit_patterns
from noisescope.localization.judge import Judgement, judge_law
from noisescope.localization.laws.call_results import EvidenceFacts, LawEvidence
from noisescope.localization.laws.fault_classes import place_and_class
from noisescope.localization.laws.linear import Linear, examine, probe_suspect
from noisescope.localization.laws.output_statistics import copies, measure
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import combination, mean_square_limit, squares_from_split, truncation_share
from noisescope.localization.tensors import lane_period
from noisescope.sites import Site

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_exact_results_take_nan_and_zero_as_they_are():
    """NaN equals itself, 0 equals -0, anything else breaks the law; sizes are relative to the rms."""
    a = torch.tensor([[math.nan, 0.0, 1.0, -3.0]], dtype=torch.float64)
    assert not judge_law(Law.REPEAT, a, torch.tensor([[math.nan, -0.0, 1.0, -3.0]], dtype=torch.float64)).alarm
    broken = judge_law(Law.REPEAT, a, torch.tensor([[math.nan, 0.0, 1.5, -3.0]], dtype=torch.float64))
    assert broken.alarm and broken.share == 0.25 and broken.channels == {2}
    assert broken.size == pytest.approx(0.5 / math.sqrt((1.5**2 + 9) / 4))


def test_exact_results_within_round_off_say_so():
    """What another order of summation may do is distinguished from what it may not."""
    a = normal(4, 8)
    limit = torch.full_like(a, 1e-6)
    assert judge_law(Law.REPEAT, a + 1e-7, a, round_off=limit).within_round_off
    assert not judge_law(Law.REPEAT, a + 1e-5, a, round_off=limit).within_round_off
    assert not judge_law(Law.REPEAT, a + 1e-7, a).within_round_off


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0])
def test_results_within_a_bound_count_what_is_not_finite(value):
    """NaN and Inf are beyond every limit, and so is anything beyond a limit that is not a number."""
    error, limit = torch.zeros(2, 4, dtype=torch.float64), torch.ones(2, 4, dtype=torch.float64)
    right = torch.zeros_like(error)
    assert not judge_law(Law.ADDITIVITY, error, right, limit, scale=1.0).alarm
    error[0, 3] = value
    result = judge_law(Law.ADDITIVITY, error, right, limit, scale=1.0)
    assert result.alarm and result.channels == {3}
    assert judge_law(Law.ADDITIVITY, torch.ones_like(error), right, limit * math.nan, scale=1.0).alarm


def test_the_worse_of_two_results_keeps_the_larger_floor():
    """The detection limit is that of the worst call."""
    found, half = LawEvidence(), torch.full((1, 2), 0.5)
    for limit in (2.0, 0.25):
        found.check(Law.ADDITIVITY, half, torch.zeros_like(half), torch.full_like(half, limit), scale=1.0)
    assert found.broken[Law.ADDITIVITY].visible_share == 2.0


@hypothesis.given(step=st.integers(2, 64), offset=st.integers(0, 63), width=st.integers(8, 512))
def test_a_lane_s_period_is_found(step, offset, width):
    """All channels of one lane give its stride; with one missing, only where less than all will do."""
    offset %= step
    channels = list(range(offset, width, step))
    if len(channels) < 3:
        assert lane_period(channels, width, least=0.5) is None
        return
    assert lane_period(channels, width, least=1.0) == step
    assert lane_period(channels[:-1], width, least=1.0) is None or len(channels) == 3
    assert lane_period(channels[:-1], width, least=0.5) == step or len(channels) == 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_healthy_numbers_have_no_statistics_to_show(dtype):
    """Normal numbers, also with a massive channel, one near-constant channel and rows that repeat."""
    y = normal(64, 96)
    y[:, 3] *= 300
    y[:, 5] = 40 + 1e-3 * y[:, 5]
    seen = measure(y.to(dtype))
    assert not seen.stuck and not seen.gap and not seen.clear_ties
    assert set(seen.dead) <= {5}  # in 16 bits it is a constant, and nothing but its weights can say why


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("lane", [False, True])
def test_a_stuck_bit_is_seen(dtype, value, lane):
    """In all channels, and in a single one of 96."""
    y = normal(64, 96).to(dtype)
    stuck = bit_patterns.stick_bit(y, 1, value)
    seen = measure(torch.where(torch.arange(96) == 7, stuck, y) if lane else stuck)
    assert seen.stuck == ((1, value),)
    assert seen.stuck_channels == ((7,) if lane else ())


def test_sums_that_cancel_are_no_stuck_bits():
    """A float32 channel whose sums cancel ends in zeros for a good reason."""
    y = normal(64, 96).float()
    y[:, 4] = ((y[:, 4] + 1000) - 1000).float()
    assert not measure(y).stuck


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [1.0, 0.1])
def test_a_gap_round_zero_is_seen(dtype, share):
    """Zeros where small numbers should be, in all channels or in some."""
    y = normal(64, 96)
    here = torch.arange(96) < 96 * share
    seen = measure(torch.where(here & (y.abs() < 0.1), 0.0, y).to(dtype))
    assert seen.gap == pytest.approx(0.1, rel=0.2)


def test_structural_zeros_are_no_gap():
    """Rows of zeros (padding) and exact zeros among numbers of all sizes say nothing."""
    y = normal(64, 96).float()
    y[:7] = 0
    y[20, :40] = 0
    assert measure(y).gap == 0


def test_ties_at_the_top_are_seen():
    """Saturated numbers pile up in several channels."""
    assert measure(normal(64, 96).clamp(-2, 2).float()).clear_ties


def alike(dtype: torch.dtype, *, massive: float = 1.0) -> torch.Tensor:
    """One row 48 times, but for one or two spacings of the dtype; its largest channel tie in four places."""
    row = normal(1, 96)
    row[:, :4], row[:, 50] = 4.0, 2.5 * massive
    u = torch.finfo(dtype).eps
    return (row * (1 + u * normal(48, 96, seed=1))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("massive", [1.0, 100.0])
def test_rows_alike_but_for_roundings_have_no_statistics(dtype, massive):
    """Channels that are constant, and numbers that tie, in copies of one row say nothing; a channel of zeros does."""
    y = alike(dtype, massive=massive)
    y[:, 7] = y[0, 7]
    seen = measure(y)
    assert not seen.dead and not seen.clear_ties and not seen.gap
    y[:, 7] = 0
    assert measure(y).dead == (7,)


def test_numbers_under_the_normal_range_have_no_statistics():
    """A few spacings of float16's smallest number are zeros, ties and constants for a good reason; 2^-14 is none."""
    y = normal(64, 96)
    seen = measure((y * 2.0**-23).half())
    assert not seen.dead and not seen.clear_ties and not seen.gap
    flushed = torch.where(y.abs() < 0.1, 0.0, y) * 10 * 2.0**-14
    assert measure(flushed.half()).gap == pytest.approx(2.0**-14, rel=0.05)


def test_copies_are_elements_that_another_row_of_the_channel_has():
    """All outputs must be the same, in the same channel; the first of them is no copy."""
    a = torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    b = torch.tensor([[5.0, 5.0], [5.0, 5.0], [6.0, 5.0], [5.0, 5.0]], dtype=torch.float64)
    assert copies([a, b]).tolist() == [[False, False], [True, False], [False, True], [False, False]]


def test_many_rows_of_short_numbers_are_not_all_copies():
    """bfloat16 has few numbers, so that late rows hold little new; early ones do."""
    new = ~copies([normal(4096, 64).bfloat16().double()])
    assert bool((new[:100].double().mean(-1) > 0.5).all())


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    seed=st.integers(0, 10**6),
    terms=st.sampled_from([32, 96, 256]),
    massive=st.sampled_from([1.0, 30.0, 1000.0]),
    dtype=st.sampled_from(DTYPES),
)
def test_a_healthy_linear_keeps_its_laws(seed, terms, massive, dtype):
    """Random weights and inputs, with rows and inner channels of very different size."""
    x = normal(24, terms, seed=seed) * normal(24, 1, seed=seed + 1).exp()
    x[:, 0] *= massive
    weight = (normal(40, terms, seed=seed + 2) / math.sqrt(terms)).to(dtype)
    x = (x / max(1.0, float(x.abs().max()) / 2000)).to(dtype)
    found, _ = examine(Linear(lambda z: torch.nn.functional.linear(z, weight), x, terms), None)
    assert not found.broken, [result.said for result in found.broken.values()]


def test_inputs_that_neither_double_nor_halve_keep_the_other_laws():
    """float16 with a massive and a tiny number: scaling is reported as skipped, an offset still breaks oddness."""
    x = normal(24, 64).half()
    x[:, 0], x[:, 1] = 30000.0, 3 * 2.0**-24
    weight = (normal(40, 64, seed=1) / 8).half()
    for offset, broken in ((0.0, False), (100.0, True)):
        linear = Linear(lambda z, added=offset: torch.nn.functional.linear(z, weight) + added, x, 64)
        found, base = examine(linear, None)
        assert any(text.startswith(Law.SCALE_BY_TWO) for text in found.skipped)
        assert (Law.ODDNESS in found.broken) is broken
        if broken:
            probe_suspect(linear, base, found)
    assert Law.SCALE_BY_TWO not in found.results


@pytest.mark.parametrize("massive", [1.0, 100.0])
def test_sums_of_squares_come_from_a_split(massive):
    """S^2 is right on average, and not much too small anywhere, also where one term is massive."""
    x, weight = normal(64, 256), normal(80, 256, seed=1)
    x[:, 0] *= massive
    mask = torch.rand(256, generator=torch.Generator().manual_seed(2)) < 0.5
    difference = (x * mask) @ weight.T - (x * ~mask) @ weight.T
    true = x.square() @ weight.square().T
    found = squares_from_split(difference, x, torch.arange(64))
    assert 0.5 < float((found / true).median()) < 4
    assert float((true / found).max()) < 30


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_truncation_shows_as_a_share_of_one(dtype):
    """Rounding to nearest gives 0, rounding toward zero 1, within a few standard errors."""
    exact_values = [normal(64, 96, seed=1), normal(64, 96, seed=2)]
    exact_values.append(exact_values[0] + exact_values[1])
    for mode, expected in (("nearest", 0.0), ("toward_zero", 1.0)):
        outputs = [
            (v.to(dtype) if mode == "nearest" else bit_patterns.round_towards(v, dtype, mode)).double()
            for v in exact_values
        ]
        floor = combination(outputs, [torch.zeros_like(outputs[0])] * 3, 1, dtype)
        error = outputs[0] + outputs[1] - outputs[2]
        share, uncertainty = truncation_share(error, outputs, [1, 1, -1], floor, dtype)
        assert share == pytest.approx(expected, abs=max(0.1, 8 * uncertainty))
        if mode == "nearest":
            assert float((error.square() / floor.variance).mean()) < mean_square_limit(error.numel())
            assert bool((error.abs() <= floor.limit).all())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["truncation", "accumulation"])
def test_one_short_rounding_of_scores_is_distinguished_from_short_sums(kind, seed):
    """Scores are read back from probabilities, but for a constant per row: in proportion to them, or all alike."""
    q, k = normal(1, 2, 24, 64, seed=seed).float(), normal(1, 2, 24, 64, seed=seed + 10).float()
    scores = (q @ k.transpose(-1, -2)).double() / 8
    if kind == "truncation":
        wrong = scores.to(torch.float8_e4m3fn).double()
    else:
        wrong = scores + 0.02 * normal(*scores.shape, seed=seed + 20)
    facts = EvidenceFacts(read=(wrong.softmax(-1).float(), q, k, 1 / 8))
    broken = {law: Judgement({law: 9.0}, bad=9, elements=10) for law in (Law.KEY_SHIFT, Law.LOG_ODDS)}
    site, named = place_and_class(Site("attention", 0, "attn"), broken, facts)
    assert (site.operator, site.occurrence, named.fault_class) == ("matmul", 0, kind)
