"""The pattern of errors names the fault: each class on a product, an activation or a norm, and what is not one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from noisescope.localization.classify import classify, is_stale
from noisescope.localization.error_pattern import Evidence
from noisescope.localization.host_operators import recompute
from noisescope.localization.host_products import Rows
from noisescope.localization.judge import judge

ROWS, INNER, WIDTH = 64, 96, 128


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def evidence(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> Evidence:
    recomputed = recompute("linear", F.linear, (x, w), {}, y, Rows(ROWS, 0))
    return Evidence.of("linear", recomputed, judge(recomputed.y, recomputed.reference))


def named(change, dtype: torch.dtype = torch.bfloat16):
    """The pattern of a linear whose output is `change(y)`, or `change(y, x, w)`."""
    x, w = drawn(ROWS, INNER, dtype=dtype), drawn(WIDTH, INNER, seed=1, dtype=dtype)
    y = F.linear(x, w)
    try:
        wrong = change(y.clone(), x, w)
    except TypeError:
        wrong = change(y.clone())
    return classify(evidence(wrong.to(dtype), x, w))


def put(y: torch.Tensor, where, value) -> torch.Tensor:
    y[where] = value
    return y


def bits(y: torch.Tensor) -> torch.Tensor:
    return y.view({2: torch.int16, 4: torch.int32}[y.dtype.itemsize])


def swapped(y: torch.Tensor) -> torch.Tensor:
    return y[:, [1, 0, *range(2, 64), 65, 64, *range(66, WIDTH)]]


def toward_zero(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    exact = x.double() @ w.double().T
    near = exact.to(y.dtype)
    return torch.where(near.double().abs() > exact.abs(), (bits(near) - 1).view(y.dtype), near)


def short_sums(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(y.shape)
    for at in range(0, INNER, 8):
        total = (total + x[:, at : at + 8].float() @ w[:, at : at + 8].float().T).bfloat16().float()
    return total.to(y.dtype)


def without_lanes(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    kept = x.clone()
    kept[:, 5::32] = 0
    return F.linear(kept, w)


PATTERNS = {
    "dead zone": lambda y: y.masked_fill(y.abs() < 0.3 * y.abs().max(), 0),
    "flush to zero": lambda y: torch.where(y.abs() < 1.0, torch.copysign(torch.zeros_like(y), y), y),
    "saturation": lambda y: y.clamp(-12, 12),
    "dead lane": lambda y: put(y, (slice(None), slice(3, None, 32)), 0),
    "bias": lambda y: y + 2,
    "gain": lambda y: y * 1.01,
    "stuck bit": lambda y: (bits(y) | 8).view(y.dtype),
    "swapped channels": swapped,
    "truncation": lambda y: (bits(y) & -8).view(y.dtype),
    "rounding mode": toward_zero,
    "accumulation": short_sums,
    "dead input lane": without_lanes,
    "block scale": lambda y: put(y, (slice(None), slice(32, 64)), y[:, 32:64] * 2),
    "spike": lambda y: put(y, (torch.tensor([3, 40]), torch.tensor([7, 90])), 400.0),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_each_class_of_a_linear(name, dtype):
    """The class of each fault, dense, in a 16-bit linear."""
    assert named(PATTERNS[name], dtype).fault_class == name


@pytest.mark.parametrize("name", [n for n in PATTERNS if n not in ("rounding mode", "stuck bit", "spike")])
def test_each_class_in_float32(name):
    """Float32 results are judged by the error of their sums; faults larger than that have the same patterns."""
    change = PATTERNS[name]
    if name == "truncation":
        assert named(lambda y: (bits(y) & -(1 << 14)).view(y.dtype), torch.float32).fault_class == name
    else:
        assert named(change, torch.float32).fault_class == name


def on_lanes(change):
    """The same fault on every 16th channel from the 3rd."""

    def sparse(y, x, w):
        try:
            wrong = change(y.clone(), x, w)
        except TypeError:
            wrong = change(y.clone())
        return put(y, (slice(None), slice(3, None, 16)), wrong.to(y.dtype)[:, 3::16])

    return sparse


@pytest.mark.parametrize(
    "name", ["saturation", "dead zone", "bias", "gain", "stuck bit", "truncation", "rounding mode", "accumulation"]
)
def test_a_lane_is_named_with_its_period(name):
    """A fault on every 16th channel keeps its class, and channels and stride are reported."""
    found = named(on_lanes(PATTERNS[name]))
    assert found.fault_class == name
    assert found.period == 16
    assert set(found.channels) <= set(range(3, WIDTH, 16))


def test_the_lost_lanes_of_the_inner_dimension_are_named():
    """Which inputs were not summed comes out of least squares."""
    assert named(without_lanes).details["input_lanes"] == tuple(range(5, INNER, 32))


def test_a_block_of_inputs_with_a_wrong_scale():
    """A shared exponent off by one along the inner dimension."""

    def scaled(y, x, w):
        x = x.clone()
        x[:, 32:64] *= 2
        return F.linear(x, w)

    assert named(scaled).fault_class == "block scale"


def test_operands_cut_short_are_distinguished_from_short_sums():
    """TF32-like operands: float32 numbers with 10 bits of mantissa, cut toward zero."""

    def tf32(y, x, w):
        return F.linear((bits(x) & -(1 << 13)).view(x.dtype), (bits(w) & -(1 << 13)).view(w.dtype))

    found = named(tf32, torch.float32)
    assert found.fault_class == "truncation"
    assert found.details["keep"] == 10


def test_operands_cut_short_in_sixteen_bits():
    """bfloat16 numbers with 4 bits of mantissa; sums that were kept short stay distinguished from them (above)."""

    def short(y, x, w):
        return F.linear((bits(x) & -8).view(x.dtype), (bits(w) & -8).view(w.dtype))

    found = named(short)
    assert found.fault_class == "truncation"
    assert found.details["keep"] == 4


def test_which_bit_is_stuck():
    """Bit and value are part of the answer; the sign bit too."""
    assert named(lambda y: (bits(y) | 16).view(y.dtype)).details == {"bit": 4, "value": 1}
    assert named(lambda y: y.abs()).details == {"bit": 15, "value": 0}


def test_a_number_where_nan_belongs():
    """NaN that became 0 and Inf that became the largest number."""
    x, w = drawn(ROWS, INNER), drawn(WIDTH, INNER, seed=1)
    x[3] = torch.nan
    y = F.linear(x, w).nan_to_num(0.0)
    assert classify(evidence(y, x, w)).fault_class == "nan to zero"


@pytest.mark.parametrize(
    ("operator", "callee", "change", "expected"),
    [
        ("silu", F.silu, lambda y: torch.where(y > 2, y * 1.02, y), "function table"),
        ("silu", F.silu, lambda y: torch.where(y < -0.27, 0.0, y), "function table"),
        ("softmax", F.softmax, lambda y: y * 1.01, "gain"),
        ("softmax", F.softmax, lambda y: y * (1 + 0.02 * drawn(ROWS, 1, seed=3, dtype=torch.float32)), "accumulation"),
        ("softmax", F.softmax, lambda y: y * (1 + 0.01 * torch.sin(40 * y)), "function table"),
    ],
)
def test_functions(operator, callee, change, expected):
    """Errors that are a function of the input, a factor of all, and a factor of each row."""
    x = drawn(ROWS, INNER, dtype=torch.float32) * 3
    args = (x, -1) if operator == "softmax" else (x,)
    y = change(callee(*args))
    recomputed = recompute(operator, callee, args, {}, y, Rows(ROWS, 0))
    found = classify(Evidence.of(operator, recomputed, judge(recomputed.y, recomputed.reference)))
    assert found.fault_class == expected


def test_old_data_is_known_from_the_other_call():
    """A tile that holds what belongs to the call before is stale; a dead lane, the same in both calls, is not."""
    w = drawn(WIDTH, INNER, seed=1)
    first, second = drawn(ROWS, INNER, seed=2), drawn(ROWS, INNER, seed=3)
    right, stale = F.linear(first, w), F.linear(second, w)
    stale[:16, :32] = right[:16, :32]
    assert is_stale(evidence(stale, second, w), evidence(right, first, w))
    dead = [evidence(put(F.linear(x, w), (slice(None), 4), 0.0), x, w) for x in (first, second)]
    assert not is_stale(dead[0], dead[1])
    assert not is_stale(dead[1], dead[0])


# -- rows


def in_sequences(change, dtype: torch.dtype = torch.bfloat16):
    """The pattern of a linear on [2, 32] tokens whose output [2, 32, WIDTH] is changed."""
    x, w = drawn(2, 32, INNER, dtype=dtype), drawn(WIDTH, INNER, seed=1, dtype=dtype)
    y = change(F.linear(x, w).clone()).to(dtype)
    recomputed = recompute("linear", F.linear, (x, w), {}, y, Rows(ROWS, 0))
    return classify(Evidence.of("linear", recomputed, judge(recomputed.y, recomputed.reference)))


def times(where, factor: float):
    return lambda y: put(y, where, y[where] * factor)


TILE = (0, slice(8, 16), slice(16, 32))
PLACED = {
    "a tile times 1.3": (times(TILE, 1.3), "tile", "gain", "channels 16 to 31 of tokens 8 to 15 of sequence 0"),
    "a tile of zeros": (times(TILE, 0), "tile", "dead lane", "channels 16 to 31 of tokens 8 to 15 of sequence 0"),
    "a tile of NaN": (times(TILE, float("nan")), "tile", None, "channels 16 to 31 of tokens 8 to 15 of sequence 0"),
    "the second sequence": (times((1,), 1.1), "batch", "gain", "sequence 1 of 2, all tokens"),
    "a token": (lambda y: put(y, (0, 9), y[0, 9] + 2), "rows", "bias", "token 9 of sequence 0"),
    "the last tokens": (times((slice(None), slice(-3, None)), 0), "tail", "dead lane", "tokens 29 to 31 of every"),
    "the last elements": (times((1, 31, slice(-5, None)), 0), "tail", "dead lane", "channels 123 to 127 of token 31"),
    "rows one late": (lambda y: torch.cat([y[:, :1], y[:, :-1]], 1), "stale data", "rows", "tokens 1 to 31 of every"),
    "the wrong sequence": (lambda y: y[[0, 0]], "stale data", "rows", "sequence 1 of 2"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", PLACED)
def test_wrong_rows(name, dtype):
    """Where it is wrong names the fault, and what happens there is told beside it."""
    change, kind, also, words = PLACED[name]
    found = in_sequences(change, dtype)
    assert (found.fault_class, found.details.get("also")) == (kind, also), found.text
    assert found.row_words.startswith(words) and found.confidence >= 0.8
    if name in ("a token", "a tile of zeros"):
        assert found.rows == (((0, 9),) if name == "a token" else tuple((0, token) for token in range(8, 16)))


@pytest.mark.parametrize("name", ["gain", "bias", "stuck bit", "rounding mode", "swapped channels", "truncation"])
def test_what_is_wrong_everywhere_has_no_rows(name):
    """A fault of all rows is named as ever, and lists none."""
    found = named(PATTERNS[name])
    assert (found.fault_class, found.rows, found.row_words) == (name, (), "")


def test_a_lost_addend_in_the_last_channels_is_a_tail():
    """Other numbers, in the last channels of all rows."""
    found = in_sequences(lambda y: put(y, (..., slice(-8, None)), drawn(2, 32, 8, seed=9) * 9))
    assert found.fault_class == "tail" and found.channels == tuple(range(WIDTH - 8, WIDTH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda y: y - drawn(1, WIDTH, seed=8, dtype=y.dtype), "bias", "each channel is off by its own constant"),
        (
            lambda y: y * (1 + drawn(1, WIDTH, seed=8, dtype=y.dtype) / 4),
            "gain",
            "each channel is multiplied by its own",
        ),
    ],
    ids=["bias", "scales"],
)
def test_channels_with_constants_of_their_own(change, kind, words, dtype):
    """A lost bias vector and wrong scales by channel are no low-precision sums."""
    found = named(change, dtype)
    assert found.fault_class == kind and words in found.text


def test_rows_with_factors_of_their_own_are_not_named_by_the_few_that_show():
    """A coarse rsqrt: the factors of some rows are right by chance."""
    x = drawn(ROWS, INNER, dtype=torch.float32)
    factor = 1 + 1e-3 * drawn(ROWS, 1, seed=3, dtype=torch.float32) * (drawn(ROWS, 1, seed=4) > 0)
    y = F.rms_norm(x, (INNER,), eps=1e-6) * factor
    recomputed = recompute("norm", F.rms_norm, (x, (INNER,)), {"eps": 1e-6}, y, Rows(ROWS, 0))
    found = classify(Evidence.of("norm", recomputed, judge(recomputed.y, recomputed.reference)))
    assert found.fault_class == "function table" and found.row_words


def test_rows_of_a_sample_keep_their_numbers():
    """Of 1000 rows some are computed again: the wrong one is named by its own index, in both calls of a stale pair."""
    x, w = drawn(2, 500, INNER), drawn(WIDTH, INNER, seed=1)
    other = drawn(2, 500, INNER, seed=4)
    y = F.linear(x, w)
    y[1, 321] = F.linear(other, w)[1, 321]
    found = []
    for given, out in ((x, y), (other, F.linear(other, w))):
        recomputed = recompute("linear", F.linear, (given, w), {}, out, Rows(ROWS, 0))
        found.append(Evidence.of("linear", recomputed, judge(recomputed.y, recomputed.reference)))
    assert classify(found[0]).rows == ((1, 321),)
    assert not is_stale(found[0], found[1])  # row 821 was not computed again in the other call


@pytest.mark.parametrize(("low", "high", "words"), [(None, 12, "to +12"), (-9, 12, "to +12 and -9"), (-12, 12, "+-12")])
def test_values_clipped_on_one_side_or_two(low, high, words):
    pattern = named(lambda y: y.clamp(low, high))
    assert pattern.fault_class == "saturation" and pattern.text.endswith(words)
