"""Each test of the judge sees its own kind of error, and none of them alarms on healthy rounding."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from noisescope.localization.host_operators import recompute
from noisescope.localization.host_products import Rows
from noisescope.localization.judge import Judgement, judge
from noisescope.localization.roundoff_floors import Reference, number_format, rounded_once, sum_grain, sum_spread

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact_values(rows: int = 64, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def reference(values: torch.Tensor, dtype: torch.dtype) -> Reference:
    terms = (96, torch.ones_like(values), values, 2.0**-24)
    return Reference(values, (rounded_once(values, dtype),), sum_spread(*terms), grain=sum_grain(*terms), sums=True)


def judged(y: torch.Tensor, values: torch.Tensor):
    return judge(y, reference(values, y.dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_healthy_rounding_is_no_alarm(dtype):
    """Forty correctly rounded outputs stay below every limit; the largest error is half an ulp."""
    for seed in range(40):
        values = exact_values(seed=seed)
        found = judged(values.to(dtype), values)
        assert not found.alarm, (found.test, found.strength)
        assert found.worst_ulp <= 0.501  # torch rounds float64 twice on the way to 16 bits
        assert found.bad == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_one_element_four_ulps_off_is_seen(dtype):
    """A single wrong element among thousands is beyond its own tolerance, and its channel is named."""
    values = exact_values()
    y = values.to(dtype)
    y[17, 5] += 4 * number_format(dtype).ulp(values[17:18, 5:6])[0, 0].to(dtype)
    found = judged(y, values)
    assert found.alarm
    assert found.bad == 1
    assert found.channels == {5}
    assert found.test == "element"


def toward_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    near = values.to(dtype)
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    smaller = (near.view(integer) - 1).view(dtype)
    return torch.where(near.double().abs() > values.abs(), smaller, near)


def test_a_wrong_rounding_mode_shows_in_the_signed_mean():
    """Rounding toward zero is half an ulp off along the sign, and 0.00 for rounding to nearest."""
    values = exact_values(rows=200)
    found = judged(toward_zero(values, torch.bfloat16), values)
    assert found.alarm
    assert found.mean_ulp == pytest.approx(-0.5, abs=0.03)
    assert abs(judged(values.bfloat16(), values).mean_ulp) < 0.02


def test_a_wrong_rounding_mode_in_a_tenth_of_the_channels_is_seen():
    """The whole output's mean hardly moves, but each channel is looked at by itself."""
    values = exact_values()
    y = values.bfloat16()
    y[:, ::10] = toward_zero(values, torch.bfloat16)[:, ::10]
    found = judged(y, values)
    assert found.alarm
    assert found.channels == set(range(0, 96, 10))


def test_a_small_gain_is_seen():
    """A gain of a fifth of an ulp, far below any single tolerance, moves the mean."""
    values = exact_values(rows=200)
    found = judged((values * 1.001).bfloat16(), values)
    assert found.alarm
    assert found.bad == 0


def test_noise_below_an_ulp_shows_in_the_rms():
    """Zero-mean noise of half an ulp leaves means and elements alone."""
    values = exact_values(rows=200)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    y = (values + 0.3 * noise.clamp(-1.6, 1.6) * number_format(torch.bfloat16).ulp(values)).bfloat16()
    found = judged(y, values)
    assert found.strengths["rms"] > 1 > found.strengths["element"]


def test_a_stuck_bit_below_the_error_of_long_sums_is_an_alarm():
    """In float32 no element and no mean gives it away: it is named with its channel."""
    values = exact_values()
    y = values.float()
    y.view(torch.int32)[:, 3] |= 1
    found = judged(y, values)
    assert found.test == "bits"
    assert 3 in found.channels


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_repeat_teach_nothing(dtype):
    """Sixty-four times the same row has the errors of one: its channel means are no alarm."""
    values = exact_values(rows=1).expand(64, -1).contiguous()
    assert not judged(values.to(dtype), values).alarm


def test_channels_that_hardly_vary_teach_nothing():
    """A large bias puts all rows of a channel into one cell of the format, where all are off alike."""
    values = 100.3 + 0.002 * exact_values() + torch.linspace(0, 30, 96, dtype=torch.float64)
    assert not judged(values.bfloat16(), values).alarm


def test_nan_on_one_side_only_is_an_alarm():
    """NaN where a number belongs, and a number where NaN or Inf belongs; on both sides it is fine."""
    values = exact_values()
    y = values.bfloat16()
    y[0, 0] = math.nan
    assert judged(y, values).test == "non-finite"
    values[0, 0] = math.nan
    assert not judged(y, values).alarm
    y[0, 0] = 0.0
    assert judged(y, values).test == "non-finite"


def test_overflow_of_the_format_is_expected():
    """A value beyond float16 is Inf on a healthy device; 65504 in its place is an alarm."""
    values = exact_values()
    values[3, 3] = 1e6
    y = values.half()
    assert math.isinf(y[3, 3])
    assert not judged(y, values).alarm
    y[3, 3] = 65504.0
    assert judged(y, values).alarm


def test_an_exact_relation_has_no_tolerance():
    """One bit is an alarm where two things must be equal; NaN equals NaN."""
    values = exact_values().float()
    values[0, 0] = math.nan
    y = values.clone()
    assert not judge(y, Reference(values.double(), (), exact=True)).alarm
    y.view(torch.int32)[5, 6] ^= 1
    found = judge(y, Reference(values.double(), (), exact=True))
    assert (found.bad, found.channels, found.test) == (1, {6}, "exact")


def test_an_exact_relation_is_told_of_by_size():
    """How many, the largest difference, and that in ulps of the largest element: a value near 0 has none that count."""
    values = torch.tensor([[1e-12, 100.0, 3.0], [2.0, -1.0, 5.0]])
    y = values.clone()
    y[0, 0] += 2.0**-10
    found = judge(y, Reference(values.double(), (), exact=True))
    assert (found.bad, found.nonfinite) == (1, 0)
    assert found.worst == pytest.approx(2.0**-10, rel=1e-6)
    assert found.worst_ulp == pytest.approx(2.0**-10 / 2.0 ** (6 - 23), rel=1e-6)  # 100 lies in [2^6, 2^7)
    assert found.words == (
        "1 of 6 elements differ (exact equality required), by up to 0.000977 (128 ulp of the largest element)"
    )
    y[1] = math.nan
    assert (
        "4 of 6 elements differ (exact equality required), 3 of them NaN or infinite on one side only, by up to "
        "0.000977"
    ) in (judge(y, Reference(values.double(), (), exact=True)).words)
    y = torch.full_like(y, math.inf)
    assert judge(y, Reference(values.double(), (), exact=True)).words.endswith("one side only")


def test_it_says_what_it_could_have_seen():
    """The visible mean is what the same test would have alarmed at."""
    values = exact_values(rows=200)
    visible = judged(values.bfloat16(), values).visible_mean
    ulp = number_format(torch.bfloat16).ulp(values)
    shifted = values + 1.3 * visible * ulp * values.sign()
    assert judged(shifted.bfloat16(), values).alarm
    assert visible < 0.15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1e-3, 3e-3, 1.0])
def test_roundings_that_lean_by_themselves_are_healthy(dtype, size):
    """silu of a small number in 16 bits is always rounded to half of it."""
    assert judged_silu(size, dtype).strength <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_toward_zero_is_no_such_lean(dtype):
    """It goes beyond what correct rounding does."""
    found = judged_silu(1.0, dtype, toward_zero=True)
    assert found.strength > 1 and found.mean_ulp == pytest.approx(-0.5, abs=0.1)


def judged_silu(size: float, dtype: torch.dtype, *, toward_zero: bool = False) -> Judgement:
    x = (size * torch.randn(64, 48, generator=torch.Generator().manual_seed(0))).to(dtype)
    y, true = F.silu(x), F.silu(x.double())
    if toward_zero:
        y = torch.where(y.double().abs() > true.abs(), torch.nextafter(y, torch.zeros_like(y)), y)
    found = recompute("silu", F.silu, (x,), {}, y, Rows(64, 0))
    return judge(found.y, found.reference)


def test_the_mean_that_shows_is_no_larger_than_what_shows_in_an_element():
    """Of few rows a mean says little, but so large a shift of all elements would alarm in every other one."""
    values = exact_values(rows=1, columns=4)
    found = judged(values.float(), values)
    assert 0 < found.visible_mean <= found.visible_element
