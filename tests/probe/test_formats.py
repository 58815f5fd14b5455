"""Number formats against published tables, hand-computed blocks and torch's own casts."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noisescope.errors import InvalidInput
from noisescope.probe.formats import Format, e2m1, e8m0_scale, format_on, quantise

INF, NAN = math.inf, math.nan
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # OCP MX v1.0, table of FP4 values, codes 0..7
PLAIN = [Format(name) for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2")]
SCALED = [
    *(Format(n, g) for n in ("int8", "int4", "int3", "fp8_e4m3", "fp8_e5m2") for g in ("tensor", "channel", "token")),
    *(Format(n, "group", 24) for n in ("int8", "int4", "int3", "fp8_e4m3", "fp8_e5m2")),
    Format("mxfp4"),
    Format("nvfp4"),
]
EVERY = PLAIN + SCALED
SATURATING = PLAIN[2:] + SCALED
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def by_family(formats: list[Format]) -> pytest.MarkDecorator:
    """A case for each kind of scale and element, which loops over its formats: `formats` in the test."""
    families: dict[str, list[Format]] = {}
    for fmt in formats:
        kind = "integer" if fmt.name.startswith("int") else "block" if fmt.name.endswith("fp4") else "float"
        families.setdefault(kind if fmt.granularity else "plain", []).append(fmt)
    return pytest.mark.parametrize("formats", families.values(), ids=families)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).float()
    return values[values.isfinite()]


def minifloat_table(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> list[float]:
    """The non-negative values of a small float in code order, written out from the definition."""
    table = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits) + (exponent > 0)
        table.append(fraction * 2.0 ** (max(exponent, 1) - bias))
    assert exponent_bits + mantissa_bits <= 7 and table == sorted(table)
    return table


def nearest_even_code(x: float, table: list[float]) -> float:
    """Brute force: the table value nearest to |x|, of two equally near the one with the even code."""
    code = min(range(len(table)), key=lambda c: (abs(table[c] - abs(x)), c % 2))
    return math.copysign(table[code], x)


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return 10 * math.log10(float((x**2).mean() / ((x - y) ** 2).mean()))


# ---- element formats -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_bf16_and_fp16_are_torchs_cast(name: str, dtype: torch.dtype) -> None:
    """bf16 and fp16 give bit for bit what a cast there and back gives, overflow to Inf included."""
    x = torch.cat(
        [normal(4096) * 10.0 ** torch.arange(-8, 8).repeat(256), torch.tensor([7e4, -7e4, 3.4e38, INF, -INF])]
    )
    assert torch.equal(quantise(x, name), x.to(dtype).float())
    assert quantise(torch.tensor([3.4e38]), name).isinf().all()


@pytest.mark.parametrize(
    ("name", "dtype", "top"), [("fp8_e4m3", torch.float8_e4m3fn, 448.0), ("fp8_e5m2", torch.float8_e5m2, 57344.0)]
)
def test_fp8_is_torchs_cast_in_range_and_saturates_above(name: str, dtype: torch.dtype, top: float) -> None:
    """fp8 equals torch's cast for every 16-bit value in range, and gives the largest finite value above it."""
    x = torch.cat([every_16_bit_value(torch.bfloat16), every_16_bit_value(torch.float16)])
    inside = x[x.abs() <= top]
    assert torch.equal(quantise(inside, name), inside.to(dtype).float())
    above = torch.cat([x[x.abs() > top], torch.tensor([INF, -INF])])
    assert torch.equal(quantise(above, name), above.sign() * top)


@pytest.mark.parametrize(
    ("name", "table"),
    [("fp8_e4m3", minifloat_table(4, 3, 7, 0x7F)), ("fp8_e5m2", minifloat_table(5, 2, 15, 0x7C))],
)
def test_fp8_against_brute_force(name: str, table: list[float]) -> None:
    """fp8 is the nearest entry of the table built from the OCP definition, at every value, tie and near-tie."""
    points = [v for lo, hi in itertools.pairwise(table) for v in (lo, (lo + hi) / 2, 0.7 * lo + 0.3 * hi)]
    x = torch.tensor([*points, table[-1], *(-p for p in points)])
    assert quantise(x, name).tolist() == [nearest_even_code(v, table) for v in x.tolist()]


def test_e2m1_table_and_ties() -> None:
    """The 16 published E2M1 values stay, and every tie goes to the even code."""
    table = torch.tensor(E2M1)
    assert minifloat_table(2, 1, 1, 8) == E2M1
    assert torch.equal(e2m1(table), table) and torch.equal(e2m1(-table), -table)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0])
    assert torch.equal(e2m1(ties), expected) and torch.equal(e2m1(-ties), -expected)
    assert e2m1(torch.tensor([6.1, 7.0, 1e30, INF])).tolist() == [6.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e2m1_against_brute_force(dtype: torch.dtype) -> None:
    """E2M1 rounding is the nearest entry of the table on a fine grid and one float to each side of every tie."""
    grid = torch.arange(-800, 801, dtype=dtype) / 100
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=dtype)
    sides = [torch.nextafter(ties, torch.full_like(ties, to)) for to in (-INF, INF)]
    x = torch.cat([grid, ties, -ties, *sides])
    got = e2m1(x)
    assert got.dtype == dtype
    assert got.tolist() == [nearest_even_code(v, E2M1) for v in x.tolist()]


def test_e8m0_scale_is_exact_at_powers_of_two() -> None:
    """The shared scale is 2^(floor(log2 amax) - 2) at, just below and just above every power of two of float32."""
    exponents = range(-126, 128)
    power = torch.tensor([2.0**e for e in exponents])
    below, above = torch.nextafter(power, torch.zeros(())), torch.nextafter(power, torch.tensor(INF))
    expected = torch.tensor([2.0 ** max(e - 2, -127) for e in exponents])
    assert torch.equal(e8m0_scale(power), expected)
    assert torch.equal(e8m0_scale(above), expected)
    assert torch.equal(e8m0_scale(below), torch.tensor([2.0 ** max(e - 3, -127) for e in exponents]))


def test_e8m0_scale_fits_torchs_e8m0() -> None:
    """Every shared scale is a value of torch's E8M0 dtype, and the exponent is clamped to [-127, 127]."""
    amax = torch.cat([torch.tensor([2.0**e for e in range(-149, 128)]), normal(1000).abs(), torch.zeros(1)])
    scale = e8m0_scale(amax)
    assert torch.equal(scale.to(torch.float8_e8m0fnu).float(), scale)
    ends = e8m0_scale(torch.tensor([0.0, 5e-324, 1e300], dtype=torch.float64))
    assert ends.tolist() == [2.0**-127, 2.0**-127, 2.0**127]


# ---- block formats ---------------------------------------------------------------------------------------------------


def test_mxfp4_block_by_hand() -> None:
    """A block with amax 28 has the scale 4; 28 saturates to 24 and ties go to even."""
    x = [28, 24, 20, 20.5, 16, 14, 13, 12, 10, 8, 7, 6, 5, 4, 3, 2, 1, 1.01, 0.5, 0]
    y = [24, 24, 16, 24, 16, 16, 12, 12, 8, 8, 8, 6, 4, 4, 4, 2, 0, 2, 0, 0]
    x += [-28, -24, -20, -16, -14, -12, -10, -7, -5, -3, -2, -1]
    y += [-24, -24, -16, -16, -16, -12, -8, -8, -4, -4, -2, 0]
    assert len(x) == len(y) == 32
    assert quantise(torch.tensor(x), "mxfp4").tolist() == y


def test_mxfp4_powers_of_two_and_separate_blocks() -> None:
    """2^0, 2^-1, ... keeps four values and loses the rest, and each block of 32 has a scale of its own."""
    block = torch.tensor([2.0**-k for k in range(32)])
    kept = torch.tensor([1.0, 0.5, 0.25, 0.125] + [0.0] * 28)
    x = torch.cat([block, block * 2.0**100, torch.zeros(32), block * 2.0**-90])
    y = torch.cat([kept, kept * 2.0**100, torch.zeros(32), kept * 2.0**-90])
    assert torch.equal(quantise(x, "mxfp4"), y)
    assert torch.equal(quantise(x.reshape(2, 64), "mxfp4"), y.reshape(2, 64))


def test_mxfp4_scale_at_its_lower_clamp() -> None:
    """Below 2^-125 the scale stays at 2^-127 and the elements lose bits instead."""
    x = torch.tensor([6 * 2.0**-127, 2.0**-127, 2.0**-128, 2.0**-129, 2.0**-140])
    assert quantise(x, "mxfp4").tolist() == [6 * 2.0**-127, 2.0**-127, 2.0**-128, 0.0, 0.0]
    assert quantise(x[1:], "mxfp4").tolist() == [2.0**-127, 2.0**-128, 0.0, 0.0]


def test_nvfp4_blocks_by_hand() -> None:
    """With tensor scale 1, block scales are rounded to E4M3: exact, ties down and up, subnormal, and down to zero."""
    blocks: list[tuple[list[float], list[float]]] = [
        # block scale 448, exact
        ([2688, 1344, 448, -224, 112], [2688, 1344, 448, -224, 0]),
        # 102 / 6 = 17 is a tie of 16 and 18, and becomes 16; 102 / 16 saturates
        ([102, 51, 40, 41, -16], [96, 48, 32, 48, -16]),
        # 114 / 6 = 19 is a tie of 18 and 20, and becomes 20; 114 / 20 = 5.7 rounds up past the block's amax
        ([114, 57, -10], [120, 60, -10]),
        # 3 / 512 is an E4M3 subnormal
        ([18 / 512, 9 / 512, -3 / 512], [18 / 512, 9 / 512, -3 / 512]),
        # 2.4 / 512 becomes 2 / 512
        ([14.4 / 512, 2 / 512], [12 / 512, 2 / 512]),
        # 7 / 6 of half the smallest subnormal becomes the smallest, 1 / 512; 3.5 is a tie and becomes 4
        ([7 / 1024, 1 / 512], [4 / 512, 1 / 512]),
        # exactly half the smallest subnormal becomes 0, and so does the block
        ([6 / 1024, -6 / 1024], [0, 0]),
        ([0], [0]),
    ]
    x = torch.stack([torch.tensor([*a, *[0.0] * (16 - len(a))]) for a, _ in blocks])
    y = torch.stack([torch.tensor([*b, *[0.0] * (16 - len(b))]) for _, b in blocks])
    assert torch.equal(quantise(x, "nvfp4"), y)
    assert torch.equal(quantise(x.reshape(-1), "nvfp4"), y.reshape(-1))
    assert torch.equal(quantise(x / 1024, "nvfp4"), y / 1024)  # the tensor scale takes up a common factor


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bit_blocks_hold_at_most_15_values(name: str) -> None:
    """Within a block only the 15 distinct E2M1 values times one scale occur."""
    size = Format(name).group_size
    assert size is not None
    for block in quantise(normal(64, size), name):
        assert len(set(block.abs().tolist())) <= 8


@pytest.mark.parametrize(
    ("name", "sd", "expected", "within"),
    [("mxfp4", 1.0, 18.8, 0.3), ("nvfp4", 1.0, 20.44, 0.15), ("nvfp4", 0.02, 20.44, 0.15)],
)
def test_signal_to_noise_on_gaussian_values(name: str, sd: float, expected: float, within: float) -> None:
    """On Gaussian values MXFP4 keeps about 18.8 dB and NVFP4 about 20.4 dB, whatever the standard deviation."""
    x = normal(512, 2048) * sd
    assert sqnr_db(x, quantise(x, name)) == pytest.approx(expected, abs=within)


# ---- scales and granularity ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4"])
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**31), group=st.integers(1, 40), width=st.integers(1, 70), exponent=st.integers(-60, 60))
def test_integer_error_is_at_most_half_a_step(name: str, seed: int, group: int, width: int, exponent: int) -> None:
    """In every group, a shorter last one included, the error is at most half of absmax / Q."""
    x = normal(3, width, seed=seed) * 2.0**exponent
    error = (quantise(x, Format(name, "group", group)) - x).abs()
    top = 127 if name == "int8" else 7
    for start in range(0, width, group):
        step = x[:, start : start + group].abs().amax(-1, keepdim=True) / top
        assert (error[:, start : start + group] <= step * (0.5 + 1e-4)).all()


def test_integers_round_half_to_even() -> None:
    """With scale 1, halves go to the even integer on both sides of zero and the range is symmetric."""
    x = torch.tensor([7.0, 0.5, 1.5, 2.5, 3.5, -0.5, -1.5, -2.5, -7.0])
    assert quantise(x, "int4").tolist() == [7, 0, 2, 2, 4, 0, -2, -2, -7]
    x = torch.tensor([-127.0, 126.5, 125.5, 3.49])
    assert quantise(x, "int8").tolist() == [-127, 126, 126, 3]


def test_each_granularity_shares_its_scale_along_its_own_axis() -> None:
    """Formats applied slice by slice, one scale per slice, give the same as the granularity applied at once."""
    x = normal(2, 3, 10) * torch.logspace(-3, 3, 10)

    def one(part: torch.Tensor) -> torch.Tensor:
        return quantise(part, Format("int4", "tensor"))

    token = torch.stack([one(row) for row in x.reshape(6, 10)]).reshape(2, 3, 10)
    channel = torch.stack([one(x[..., i]) for i in range(10)], -1)
    group = torch.cat([torch.stack([one(p) for p in x[..., i : i + 4].reshape(6, -1)]) for i in (0, 4, 8)], -1)
    assert torch.equal(quantise(x, Format("int4", "token")), token)
    assert torch.equal(quantise(x, Format("int4", "channel")), channel)
    assert torch.equal(quantise(x, Format("int4", "channel"), weight=True), token)
    assert torch.equal(quantise(x, Format("int4", "group", 4)), group.reshape(2, 3, 10))
    assert torch.equal(quantise(x[0, 0], Format("int4", "channel"), weight=True), one(x[0, 0]))
    assert torch.equal(quantise(x[0, 0], Format("int4", "token")), one(x[0, 0]))


def test_the_draw_says_whether_a_tensor_is_a_weight() -> None:
    """A call with a draw takes channels by row for weights, by last index for inputs, outputs and unknown draws."""
    x, fmt = normal(5, 7) * torch.logspace(-2, 2, 7), Format("int8", "channel")
    assert torch.equal(fmt(x, SimpleNamespace(tensor="weight")), quantise(x, fmt, weight=True))
    for draw in (SimpleNamespace(tensor="output"), SimpleNamespace(tensor="input"), None):
        assert torch.equal(fmt(x, draw), quantise(x, fmt))
    assert not torch.equal(quantise(x, fmt), quantise(x, fmt, weight=True))


@pytest.mark.parametrize(("name", "top"), [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_scaled_fp8_maps_absmax_to_the_largest_value(name: str, top: float) -> None:
    """With a granularity, fp8 is the cast of x / (absmax / max), so values beyond the plain range survive."""
    x = torch.tensor([[2.0**20, 3.0, -(2.0**18)], [2.0**-20, 0.0, 2.0**-22]])
    scale = x.abs().amax(-1, keepdim=True) / top
    expected = quantise(x / scale, name) * scale
    y = quantise(x, Format(name, "token"))
    assert torch.equal(y, expected)
    assert torch.allclose(y[:, 0], x[:, 0], rtol=1e-6, atol=0)


@by_family(SCALED)
def test_a_short_last_group_is_as_if_padded_with_zeros(formats: list[Format]) -> None:
    """A width that is no multiple of the group gives what the same values with zeros behind them give."""
    x = normal(3, 37)
    padded = torch.nn.functional.pad(x, (0, 240 * 2 - 37))
    for fmt in formats:
        assert torch.equal(quantise(x, fmt), quantise(padded, fmt)[:, :37]), fmt


def test_a_group_wider_than_a_row_is_the_row() -> None:
    """Rows are not padded to the group's size, which would take memory without end."""
    x = normal(3, 37)
    assert torch.equal(quantise(x, Format("int4", "group", 10**15)), quantise(x, Format("int4", "token")))


# ---- properties of every format --------------------------------------------------------------------------------------


@by_family(EVERY)
def test_shape_dtype_and_input_are_kept(formats: list[Format]) -> None:
    """The result is a new tensor of the given shape, dtype and device; the input is not written to."""
    shapes = ((), (1,), (5,), (3, 50), (2, 3, 33), (0,), (2, 0), (0, 4))
    for fmt, dtype, shape in itertools.product(formats, DTYPES, shapes):
        x = normal(*shape).to(dtype)
        before = x.clone()
        y = quantise(x, fmt)
        assert (y.shape, y.dtype, y.device) == (x.shape, dtype, x.device), fmt
        assert torch.equal(x, before), fmt
        assert x.numel() == 0 or y.data_ptr() != x.data_ptr(), fmt
        assert y.isfinite().all(), fmt


@by_family(EVERY)
def test_no_value_is_read_by_the_host(formats: list[Format]) -> None:
    """The maths runs on meta tensors, which hold no values: nothing waits for the device."""
    x = torch.empty(2, 3, 50, device="meta", dtype=torch.bfloat16)
    for fmt in formats:
        y = quantise(x, fmt)
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device), fmt


@by_family(EVERY)
def test_layout_does_not_matter(formats: list[Format]) -> None:
    """A transposed, strided or expanded view gives what its contiguous copy gives."""
    base = normal(40, 60)
    for fmt, x in itertools.product(formats, (base.T, base[::2, ::3], base[:1].expand(4, 60))):
        assert not x.is_contiguous()
        assert torch.equal(quantise(x, fmt), quantise(x.contiguous(), fmt)), fmt


@by_family(EVERY)
def test_sign_symmetry_and_determinism(formats: list[Format]) -> None:
    """Q(-x) = -Q(x), and the same input gives the same result."""
    x = normal(8, 100)
    for fmt in formats:
        y = quantise(x, fmt)
        assert torch.equal(quantise(-x, fmt), -y), fmt
        assert torch.equal(quantise(x, fmt), y), fmt


@by_family(EVERY)
def test_idempotence(formats: list[Format]) -> None:
    """Quantising twice is quantising once: exactly with power-of-two or no scales, else up to float rounding."""
    x = normal(8, 100)
    for fmt in formats:
        once = quantise(x, fmt)
        twice = quantise(once, fmt)
        if fmt in PLAIN or fmt.name == "mxfp4":
            assert torch.equal(twice, once), fmt
        else:
            assert torch.allclose(twice, once, rtol=1e-6, atol=0), fmt


@by_family(EVERY)
def test_zero_blocks_stay_zero(formats: list[Format]) -> None:
    """All-zero tensors, and zero blocks beside others, stay exactly zero."""
    x = normal(4, 96)
    x[1], x[:, 48:] = 0, 0
    for fmt in formats:
        assert torch.equal(quantise(torch.zeros(4, 96), fmt), torch.zeros(4, 96)), fmt
        assert (quantise(x, fmt)[x == 0] == 0).all(), fmt


@by_family(EVERY)
def test_nan_stays_nan_alone(formats: list[Format]) -> None:
    """NaN stays NaN, and every other value is what it is with 0 in NaN's place."""
    x = normal(4, 96)
    x[2, 5] = NAN
    for fmt in formats:
        y, without = quantise(x, fmt), quantise(x.nan_to_num(nan=0.0), fmt)
        assert y[2, 5].isnan() and y.isnan().sum() == 1, fmt
        assert torch.equal(y.nan_to_num(nan=0.0), without), fmt


@by_family(SATURATING)
def test_inf_saturates_and_does_not_set_the_scale(formats: list[Format]) -> None:
    """Inf becomes a finite value of its sign, at least as large as its block's others, which do not change."""
    x = normal(4, 96)
    x[2, 5], x[3, 7] = INF, -INF
    finite = x.isfinite()
    for fmt in formats:
        y, without = quantise(x, fmt), quantise(x.nan_to_num(posinf=0.0, neginf=0.0), fmt)
        assert y.isfinite().all() and y[2, 5] > 0 and y[3, 7] < 0, fmt
        assert torch.equal(y[finite], without[finite]), fmt
        if fmt.granularity == "token":
            assert y[2, 5] == y[2].abs().max() and y[3, 7] == -y[3].abs().max(), fmt
        for special in (INF, -INF, NAN):  # nothing finite in the block: finite (or NaN), and no error
            alone = quantise(torch.full((3, 40), special), fmt)
            assert alone.isnan().all() if math.isnan(special) else alone.isfinite().all(), fmt


@by_family(SATURATING)
def test_extreme_magnitudes_stay_finite(formats: list[Format]) -> None:
    """The largest, smallest normal and smallest subnormal values of a dtype give finite, bounded results."""
    for fmt, dtype in itertools.product(formats, DTYPES):
        info = torch.finfo(dtype)
        for top in (info.max, info.tiny, info.smallest_normal * info.eps):
            x = torch.tensor([top, -top, top / 3, 0.0], dtype=dtype).repeat(3, 10)
            y = quantise(x, fmt)
            assert y.isfinite().all() and (y[x == 0] == 0).all(), (fmt, dtype, top)
            assert (y.abs().double() <= 2 * x.abs().amax().double()).all(), (fmt, dtype, top)


@by_family(SCALED)
@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=60))
def test_any_float32_values_give_bounded_results(formats: list[Format], values: list[float]) -> None:
    """For any float32 values the result is finite, of the same sign or zero, and at most twice the largest finite."""
    x = torch.tensor(values)
    # A scale is at least the smallest normal float32, so Inf with no finite company may reach 57344 * 2^-126.
    largest = x.nan_to_num(posinf=0.0, neginf=0.0).abs().max().double().clamp_min(1e-33)
    for fmt in formats:
        y = quantise(x, fmt)
        assert y.isfinite().all() and (y * x.sign() >= 0).all(), fmt
        assert (y.abs().double() <= 2 * largest).all(), fmt


def test_global_default_dtype_has_no_say() -> None:
    """Results do not depend on torch's default dtype."""
    x = normal(4, 96)
    expected = [quantise(x, fmt) for fmt in EVERY]
    torch.set_default_dtype(torch.float64)
    try:
        got = [quantise(x, fmt) for fmt in EVERY]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_tensors_that_require_grad_are_accepted() -> None:
    """A parameter can be quantised without switching gradients off."""
    x = torch.nn.Parameter(normal(4, 96))
    for fmt in EVERY:
        assert torch.equal(quantise(x, fmt), quantise(x.detach(), fmt))


# ---- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_name", "canonical"),
    [
        ("BFloat16", "bf16"),
        ("float16", "fp16"),
        ("half", "fp16"),
        ("fp8", "fp8_e4m3"),
        ("E4M3", "fp8_e4m3"),
        ("e4m3fn", "fp8_e4m3"),
        ("FP8-E4M3", "fp8_e4m3"),
        ("float8_e4m3fn", "fp8_e4m3"),
        ("e5m2", "fp8_e5m2"),
        ("float8_e5m2", "fp8_e5m2"),
        ("INT8", "int8"),
        ("Int4", "int4"),
        ("MXFP4", "mxfp4"),
        (" NVFP4 ", "nvfp4"),
    ],
)
def test_aliases_become_canonical(given_name: str, canonical: str) -> None:
    """Aliases in any case are stored under the canonical name, so equal formats compare and hash equal."""
    fmt = Format(given_name)
    assert fmt.name == canonical
    assert fmt == Format(canonical) and hash(fmt) == hash(Format(canonical))


def test_defaults_are_filled_in() -> None:
    """The fields hold the granularity and group size in force, and a format rebuilt from its fields is the same."""
    assert Format("int8") == Format("int8", "tensor")
    assert Format("int4", "group") == Format("int4", "group", 128)
    assert Format("mxfp4") == Format("mxfp4", "group", 32)
    assert Format("nvfp4") == Format("nvfp4", group_size=16)
    assert Format("fp8").granularity is None
    assert all(Format(f.name, f.granularity, f.group_size) == f for f in EVERY)


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        (Format("bf16"), 16.0),
        (Format("fp16"), 16.0),
        (Format("fp8_e4m3"), 8.0),
        (Format("fp8_e5m2", "token"), 8.0),
        (Format("int8"), 8.0),
        (Format("int4", "group"), 4.125),
        (Format("int4", "group", 32), 4.5),
        (Format("mxfp4"), 4.25),
        (Format("nvfp4"), 4.5),
    ],
)
def test_bits(fmt: Format, bits: float) -> None:
    """Bits per value count the scales where their share is fixed."""
    assert fmt.bits() == bits


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("mxfp5",), r"unknown format 'mxfp5'.*[Aa]llowed: bf16, .*nvfp4.*[Dd]id you mean 'mxfp4'"),
        (("zzzzzz",), r"unknown format 'zzzzzz'.*nvfp4\.?$"),
        ((8,), r"unknown format 8.*[Aa]llowed"),
        (("int8", "tokn"), r"unknown granularity 'tokn'.*[Aa]llowed: tensor, .*[Dd]id you mean 'token'"),
        (("int8", 3), r"unknown granularity 3"),
        (("bf16", "tensor"), r"bf16 is a plain cast without a scale.*'tensor'"),
        (("mxfp4", "token"), r"mxfp4 has fixed blocks of 32.*'token'"),
        (("nvfp4", "group", 32), r"nvfp4 has fixed blocks of 16.*32"),
        (("int8", "token", 64), r"group_size requires granularity 'group', got 64"),
        (("fp8", None, 64), r"group_size requires granularity 'group', got 64"),
        (("int4", "group", 0), r"group_size must be an integer of at least 1, got 0"),
        (("int4", "group", 1.5), r"group_size must be an integer.*1\.5"),
        (("int4", "group", True), r"group_size must be an integer.*True"),
    ],
)
def test_wrong_arguments_are_refused(args: tuple[str, str, int], words: str) -> None:
    """A wrong format is refused by a message that says what came and what is allowed."""
    with pytest.raises(InvalidInput, match=words):
        Format(*args)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_tensors_without_floating_point_are_refused(dtype: torch.dtype) -> None:
    """Integer, bool and complex tensors are refused by name of their dtype, by every format."""
    for fmt in EVERY:
        with pytest.raises(InvalidInput, match=f"floating-point tensor, got dtype {dtype}"):
            quantise(torch.zeros(4).to(dtype), fmt)


# -- zero points, and scales that belong to one token


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_asymmetric_integers_by_the_plain_formula(bits):
    """Group by group in a loop: s = (h - l) / (2^b - 1), z = round(-l / s), 0 inside the range."""
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(5, 24, generator=generator) + torch.tensor([3.0, -3.0, 0.0, 0.1, 0.0])[:, None]
    x[4] = 0.0
    found = quantise(x, Format(f"int{bits}", "group", 8, asymmetric=True))
    for row in range(5):
        for start in range(0, 24, 8):
            group = x[row, start : start + 8].double()
            low, high = min(float(group.min()), 0.0), max(float(group.max()), 0.0)
            scale = (high - low) / (2**bits - 1) or 1.0
            zero = round(-low / scale)
            q = [min(max(round(float(v) / scale) + zero, 0), 2**bits - 1) for v in group]
            wanted = torch.tensor([(one - zero) * scale for one in q])
            torch.testing.assert_close(found[row, start : start + 8], wanted, rtol=1e-5, atol=1e-6)


def test_a_zero_point_helps_where_values_lean_to_one_side():
    x = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) + 0.5
    symmetric, leaning = (quantise(x, Format("int4", "group", 64, asymmetric=a)) - x for a in (False, True))
    assert leaning.square().mean() < symmetric.square().mean()
    assert Format("int4", "group", 64, asymmetric=True).bits() == 4 + (16 + 4) / 64
    with pytest.raises(InvalidInput, match="no zero point"):
        Format("fp8_e4m3", "token", asymmetric=True)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp4", "nvfp4", "bf16"])
@pytest.mark.parametrize("on", ["activations", "kv-cache"])
def test_a_token_is_rounded_alike_in_every_batch(name, on):
    fmt = format_on(name, on)
    x = torch.randn(3, 7, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-2, 2, 3)[:, None, None]
    together = quantise(x, fmt)
    assert all(torch.equal(together[i, t], quantise(x[i, t], fmt)) for i in range(3) for t in range(7))


def test_the_scales_that_a_format_gets_by_default():
    assert format_on("int4", "weights") == Format("int4", "group", 64)
    assert format_on("fp8_e4m3", "weights") == Format("fp8_e4m3", "channel")
    assert format_on("nvfp4", "weights") == Format("nvfp4") != format_on("nvfp4", "kv-cache")
    assert format_on("int8", "activations", asymmetric=True) == Format("int8", "token", asymmetric=True)
    assert format_on("fp8_e4m3", "kv-cache") == Format("fp8_e4m3") and format_on("bf16", "weights") == Format("bf16")
    assert format_on("fp8_e4m3", "kv-cache", group_size=64) == Format("fp8_e4m3", "group", 64)


@pytest.mark.parametrize("asymmetric", [False, True])
def test_clipped_integers_have_the_range_of_least_error(asymmetric):
    """Group by group the best of eight ranges, by hand; never worse than the whole range, better with an outlier."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(3)) ** 3
    whole = quantise(x, Format("int4", "group", 64, asymmetric=asymmetric))
    found = quantise(x, Format("int4", "group", 64, asymmetric=asymmetric, clipped=True))
    errors = []
    for part in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65):
        low, high = part * x.amin(1, keepdim=True), part * x.amax(1, keepdim=True)
        if asymmetric:
            scale = (high - low) / 15
            zero = (-low / scale).round()
            rounded = ((x / scale).round() + zero).clamp(0, 15).sub(zero) * scale
        else:
            scale = part * x.abs().amax(1, keepdim=True) / 7
            rounded = (x / scale).round().clamp(-7, 7) * scale
        errors.append((rounded - x).square().sum(1))
    least = torch.stack(errors).amin(0)
    torch.testing.assert_close((found - x).square().sum(1), least, rtol=1e-4, atol=0)
    assert float(least.sum()) < float((whole - x).square().sum())
    broken = x.clone()
    broken[0, 0] = torch.nan
    assert torch.equal(quantise(broken, Format("int4", "group", 64, clipped=True)).isnan(), broken.isnan())
    with pytest.raises(InvalidInput, match="has no range to choose: clipping is for int8, int4, int3"):
        Format("fp8_e4m3", "token", clipped=True)


def test_a_range_is_chosen_for_the_errors_that_count():
    """The largest value is kept where it counts, and gives way to the others where it does not."""
    x = torch.randn(8, 70, generator=torch.Generator().manual_seed(3))
    x[:, 5] = 6.0
    fmt = Format("int4", "group", 35, asymmetric=True, clipped=True)
    alike, others = torch.ones(70), torch.ones(70)
    kept = alike.clone()
    kept[5], others[5] = 1e6, 0.0
    errors = [(quantise(x, fmt, weight=True, importance=counts) - x).abs() for counts in (kept, alike, others)]
    largest = [float(error[:, 5].mean()) for error in errors]
    rest = [float(error[:, torch.arange(70) != 5].square().mean()) for error in errors]
    assert largest[0] < largest[2] / 3 and largest == sorted(largest) and rest == sorted(rest, reverse=True)
    assert torch.equal(quantise(x, fmt, weight=True, importance=alike), quantise(x, fmt, weight=True))
