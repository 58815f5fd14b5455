"""Numbers as bits, against Python's own integers and fractions, in every dtype."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noisescope.errors import InvalidInput
from noisescope.faults import bit_patterns

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2]
NARROW = [torch.float32, torch.bfloat16, torch.float16]
SIGNS = {torch.float32: 31, torch.bfloat16: 15, torch.float16: 15, torch.float8_e4m3fn: 7, torch.float8_e5m2: 7}


def some(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.randn(50, generator=generator, dtype=torch.float64) * 3).to(dtype)


def pattern(x: torch.Tensor) -> list[int]:
    """The bits of each element, read from memory byte by byte."""
    raw = bytes(x.view(torch.uint8).tolist()) if x.dtype.itemsize == 1 else x.view(torch.uint8).numpy().tobytes()
    size = x.dtype.itemsize
    return [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_can_stick_and_flip(dtype):
    """Bit by bit, from the lowest of the mantissa to the sign: only that bit of each element changes."""
    x = some(dtype)
    before = pattern(x)
    for bit in range(8 * dtype.itemsize):
        assert pattern(bit_patterns.stick_bit(x, bit, 1)) == [b | 1 << bit for b in before]
        assert pattern(bit_patterns.stick_bit(x, bit, 0)) == [b & ~(1 << bit) for b in before]
        assert pattern(bit_patterns.flip_bits(x, bit)) == [b ^ 1 << bit for b in before]
    assert pattern(x) == before


@pytest.mark.parametrize("dtype", SIGNS, ids=str)
def test_the_highest_bit_is_the_sign(dtype):
    """Flipping it negates."""
    x = some(dtype)
    assert torch.equal(bit_patterns.flip_bits(x, SIGNS[dtype]).float(), -x.float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_element_may_have_its_own_bit(dtype):
    """A tensor of bit numbers flips another bit in each element."""
    x = some(dtype)
    which = torch.arange(len(x)) % (8 * dtype.itemsize)
    expected = [b ^ 1 << int(bit) for b, bit in zip(pattern(x), which, strict=True)]
    assert pattern(bit_patterns.flip_bits(x, which)) == expected


def test_a_bit_that_the_dtype_has_not_is_refused():
    """The error names the dtype's bits."""
    with pytest.raises(InvalidInput, match=r"bit 20 does not exist in bfloat16: .* 15 \(sign\).* starts at 7"):
        bit_patterns.stick_bit(some(torch.bfloat16), 20, 1)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, 52), (torch.float32, 23), (torch.bfloat16, 7), (torch.float16, 10), (torch.float8_e4m3fn, 3)],
)
def test_mantissa_bits(dtype, expected):
    """Stored bits, without the hidden one."""
    assert bit_patterns.mantissa_bits(dtype) == expected


@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(1, 23))
def test_cutting_rounds_toward_zero(value, cut):
    """The result is the largest number of the shorter mantissa that is not larger in size."""
    x = torch.tensor([value], dtype=torch.float32)
    got = float(bit_patterns.cut_mantissa(x, cut))
    (before,) = struct.unpack("<I", struct.pack("<f", float(x)))
    (after,) = struct.unpack("<I", struct.pack("<f", got))
    assert after == before & ~((1 << cut) - 1)
    assert abs(got) <= abs(float(x)) and math.copysign(1, got) == math.copysign(1, float(x))


def test_cutting_keeps_nan_and_infinity_and_never_reaches_the_exponent():
    """A NaN whose payload is cut is still a NaN; more bits than the mantissa has cut only the mantissa."""
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.9], dtype=torch.bfloat16)
    got = bit_patterns.cut_mantissa(x, 52)
    assert got[0].isnan() and got[1:].tolist() == [math.inf, -math.inf, 1.0]


@given(st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300), st.integers(1, 51))
def test_rounding_to_a_number_of_bits(value, keep):
    """To nearest, ties to even, by exact fractions."""
    got = float(bit_patterns.round_mantissa(torch.tensor([value], dtype=torch.float64), keep))
    exponent = max(math.frexp(value)[1] - 1, -1022) if value else 0
    step = Fraction(2) ** (exponent - keep)
    assert Fraction(got) == round(Fraction(value) / step) * step  # Python rounds ties to even, too


def test_rounding_to_the_bits_of_a_dtype_is_its_cast():
    """23 bits of a float64 within float32's range are float32's own."""
    x = some(torch.float64)
    assert torch.equal(bit_patterns.round_mantissa(x, 23), x.float().double())
    assert torch.equal(bit_patterns.round_mantissa(x, 52), x)
    assert bit_patterns.round_mantissa(torch.tensor([math.inf], dtype=torch.float64), 3).item() == math.inf


REAL = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e30, max_value=1e30)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("mode", ["toward_zero", "down", "up"])
@given(value=REAL)
def test_directed_rounding(dtype, mode, value):
    """The result is on the right side, and there is no nearer number of the dtype on that side."""
    x = torch.tensor([value], dtype=torch.float64)
    got = bit_patterns.round_towards(x, dtype, mode)
    seen = float(got.double())
    down = mode == "down" or (mode == "toward_zero" and value > 0)
    if value == 0 or seen == value:
        assert seen == value
        return
    assert (seen <= value) if down else (seen >= value)
    nearer = step(got, up=down)
    assert (nearer > value) if down else (nearer < value)


def step(x: torch.Tensor, *, up: bool) -> float:
    """The next number of x's dtype, by counting patterns."""
    (now,) = pattern(x)
    sign = 1 << (8 * x.dtype.itemsize - 1)
    ordered = now if now < sign else sign - 1 - (now - sign) - (sign - 1)  # 0, 1, 2 ...; -0 and below count down
    ordered += 1 if up else -1
    if now == sign and up:
        ordered = 1  # from -0 upwards
    back = ordered if ordered >= 0 else sign - ordered
    kind = {2: torch.int16, 4: torch.int32}[x.dtype.itemsize]
    signed = back - 2 * sign if back >= sign else back
    return float(torch.tensor([signed], dtype=kind).view(x.dtype).double())


def test_directed_rounding_at_the_edges():
    """Overflow toward zero stops at the largest number; tiny values go to the smallest on their side."""
    top, tiny = torch.finfo(torch.float16).max, 2.0**-24
    x = torch.tensor([1e9, -1e9, 1e-12, -1e-12], dtype=torch.float64)
    assert bit_patterns.round_towards(x, torch.float16, "toward_zero").tolist() == [top, -top, 0.0, -0.0]
    assert bit_patterns.round_towards(x, torch.float16, "down").tolist() == [top, -math.inf, 0.0, -tiny]
    assert bit_patterns.round_towards(x, torch.float16, "up").tolist() == [math.inf, -top, tiny, -0.0]
    assert bit_patterns.round_towards(torch.tensor([math.nan], dtype=torch.float64), torch.float16, "up").isnan().all()


def test_differ_looks_at_bits():
    """0 and -0 differ, a NaN equals itself."""
    a = torch.tensor([0.0, math.nan, 1.0, 2.0])
    b = torch.tensor([-0.0, math.nan, 1.0, 3.0])
    assert bit_patterns.differ(a, b).tolist() == [True, False, False, True]
    assert bit_patterns.differ(a.to(torch.float8_e5m2), b.to(torch.float8_e5m2)).tolist() == [True, False, False, True]
