"""The passport: known truths of this CPU, and emulated devices whose oddities must be named right."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noisescope.errors import InvalidInput
from noisescope.passports.diff import SAME, Difference, diff, say
from noisescope.passports.measure import examine, take_passport
from noisescope.passports.probe_functions import attention, elementwise, functions
from noisescope.passports.probe_invariance import invariance, linear_laws
from noisescope.passports.probe_products import Widths, accumulation_rounding, accumulator, products, result_rounding
from noisescope.passports.probe_specials import product_specials
from noisescope.passports.shared_tools import (
    Operations,
    Product,
    format_of,
    in_ulps,
    name_rounding,
    power_of_two,
    scattered,
)

Call = Callable[..., torch.Tensor]
CPU = torch.device("cpu")
CUTS: dict[str, Call] = {
    "nearest, ties to even": torch.round,
    "toward zero": torch.trunc,
    "up": torch.ceil,
    "down": torch.floor,
    "away from zero": lambda x: torch.sign(x) * torch.ceil(x.abs()),
    "nearest, ties away from zero": lambda x: torch.sign(x) * torch.floor(x.abs() + 0.5),
    "stochastic": lambda x: torch.floor(x + torch.rand(x.shape, dtype=x.dtype, generator=_LOT)),
}
_LOT = torch.Generator().manual_seed(3)


def cut(x: torch.Tensor, bits: int, how: str) -> torch.Tensor:
    """float64 numbers rounded to `bits` significant bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(CUTS[how](torch.ldexp(mantissa, torch.tensor(bits))), exponent - bits)


def summing(bits: int, how: str) -> Call:
    """A product that adds term by term and keeps `bits` bits of the running sum."""

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
        for k in range(x.shape[1]):
            if x[:, k].any():
                total = cut(total + x[:, k : k + 1].double() * w[k : k + 1].double(), bits, how)
        return total.to(x.dtype)

    return call


def tensor_core(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """16 products and the running sum are aligned to the largest of them, cut with two bits to spare, and added."""
    total = torch.zeros(x.shape[0], w.shape[1], dtype=torch.float64)
    for k in range(0, x.shape[1], 16):
        terms = x[:, k : k + 16, None].double() * w[None, k : k + 16].double()
        terms = torch.cat([terms, total[:, None]], dim=1)
        quantum = torch.exp2(torch.frexp(terms.abs().amax(dim=1, keepdim=True)).exponent.double() - 26)
        total = cut((torch.trunc(terms / quantum) * quantum).sum(dim=1), 24, "toward zero")
    return total.to(x.dtype)


def short_operands(bits: int, how: str) -> Call:
    """Operands cut to `bits` bits after the leading one, then a healthy product."""
    return lambda x, w: cut(x.double(), bits + 1, how).to(x.dtype) @ cut(w.double(), bits + 1, how).to(x.dtype)


def rounded_result(dtype: torch.dtype, how: str) -> Call:
    """A float64 product whose result is rounded to the dtype in some way."""
    return lambda x, w: cut(x.double() @ w.double(), format_of(dtype).precision, how).to(dtype)


def flushed(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < torch.finfo(x.dtype).smallest_normal, 0.0, x)


def lines_of(call: Call, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return products(Product(call, dtype), (64, 256))[0]


# -- products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("bits", "how"), [(11, "nearest, ties to even"), (14, "toward zero"), (22, "toward zero")])
def test_a_short_running_sum_is_measured(bits: int, how: str, dtype: torch.dtype) -> None:
    """The width and the rounding of an emulated accumulator come out, whichever the operands' dtype."""
    product = Product(summing(bits, how), dtype)
    found = accumulator(product, (64, 256))
    assert found.bits == bits and found.line["value"] == bits and not found.line["at_least"]
    assert accumulation_rounding(product, found)["value"] == how


@pytest.mark.parametrize("how", ["up", "down", "away from zero", "nearest, ties away from zero", "stochastic"])
def test_other_roundings_of_the_running_sum_are_named(how: str) -> None:
    """Every way to round is told from the others."""
    product = Product(summing(16, how), torch.float32)
    found = accumulator(product, (64,))
    assert accumulation_rounding(product, found)["value"] == how


def test_a_tensor_core_is_described() -> None:
    """Aligned and cut terms: 24 bits across blocks, more within one, exact terms, sums cut toward zero."""
    lines = lines_of(tensor_core, torch.float16)
    assert lines["sum_bits"]["value"] == 24 and lines["sum_bits"]["most_in_an_arrangement"] > 24
    assert lines["sum_rounding"]["value"] == "toward zero"
    assert lines["terms"]["value"] == "exact" and lines["small_integers"]["value"] == "exact"
    assert lines["error"]["value"] < 1


def test_a_sum_without_loss_says_so() -> None:
    """A running sum wider than the probe reaches is "at least", and its rounding not visible."""

    def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = (torch.ldexp(t.double(), torch.tensor(12)).to(torch.int64) for t in (x, w))  # multiples of 2^-12
        return torch.ldexp((next(whole) @ next(whole)).double(), torch.tensor(-24)).to(x.dtype)

    product = Product(exact, torch.float16)
    found = accumulator(product, (64,))
    assert found.line["at_least"] and found.bits == 43
    assert accumulation_rounding(product, found)["value"] is None


@pytest.mark.parametrize(("bits", "name"), [(10, "TF32"), (7, "bfloat16"), (12, "")])
@pytest.mark.parametrize("how", ["nearest, ties to even", "toward zero"])
def test_cut_operands_are_measured(bits: int, name: str, how: str) -> None:
    """A TF32-like shortcut shows in the operands, while the sum still keeps its 24 bits."""
    lines = lines_of(short_operands(bits, how))
    assert lines["operand_bits"]["value"] == bits and name in lines["operand_bits"]["cut"]
    assert lines["operand_bits"]["rounding"] == how
    assert lines["sum_bits"]["value"] == 24 and lines["result_bits"]["value"] == 23
    assert "nonsense" not in lines["error"]  # its own bits explain its error


def test_a_short_sum_is_not_taken_for_cut_operands() -> None:
    """With 14 bits in the sum, nothing can be said about the operands, and nothing is."""
    lines = lines_of(summing(14, "toward zero"))
    assert lines["operand_bits"]["value"] is None and "hidden" in lines["operand_bits"]
    assert "cut" not in lines["operand_bits"] and "cut" not in lines["result_bits"]
    assert lines["result_rounding"]["value"] is None and "nonsense" not in lines["error"]


@pytest.mark.parametrize("how", [how for how in CUTS if how != "stochastic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_rounding_of_the_result_is_named(how: str, dtype: torch.dtype) -> None:
    """The cast after the sum, apart from the sum itself."""
    lines = lines_of(rounded_result(dtype, how), dtype)
    assert lines["result_rounding"]["value"] == how
    assert lines["sum_bits"]["value"] > 40 or lines["sum_bits"]["at_least"]


def test_stochastic_rounding_of_the_result_is_named() -> None:
    """Rounding by lot is seen over equal columns and two runs."""
    product = Product(rounded_result(torch.bfloat16, "stochastic"), torch.bfloat16)
    assert result_rounding(product, accumulator(product, (64,)))["value"] == "stochastic"


def test_a_result_stored_short_is_seen() -> None:
    """float32 results that pass through bfloat16 have 7 bits, and the operands are not blamed."""
    lines = lines_of(lambda x, w: (x @ w).bfloat16().float())
    assert lines["result_bits"]["value"] == 7 and "cut" in lines["result_bits"]
    assert "cut" not in lines["operand_bits"] and lines["sum_bits"]["value"] == 24


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda x, w: 0 * (x @ w), "sum_bits"),
        (lambda x, w: 1.01 * (x @ w), "error"),
        (lambda x, w: (x @ w) * (torch.arange(w.shape[1]) % 8 != 5), "small_integers"),
        (lambda x, w: x[:, : x.shape[1] // 32 * 31] @ w[: w.shape[0] // 32 * 31], "small_integers"),
        (lambda x, w: torch.full((x.shape[0], w.shape[1]), math.nan), "sum_bits"),
        (lambda x, w: (x @ w) + 1e-3, "sum_bits"),
        (lambda x, w: 1.0001 * (x @ w), "small_integers"),
        (lambda x, w: (y := x @ w) * torch.where((y > 7) & (y < 7.5), 1.001, 1.0), "error"),
    ],
    ids=["zeros", "gain", "dead columns", "dead inner lanes", "NaN", "offset", "small gain", "some data only"],
)
def test_nonsense_is_reported_as_such(call: Call, where: str) -> None:
    """What no rounding explains has no value but a text, and the passport stays valid JSON."""
    lines = lines_of(call)
    assert lines[where]["value"] is None and lines[where]["nonsense"]
    json.dumps(lines, allow_nan=False)


def test_a_product_wrong_from_nine_rows_on_is_seen() -> None:
    """A kernel that fails for some batch sizes is named with the sizes."""

    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        if 9 <= x.shape[0] < 40:
            y[8:] *= 1.5
        return y

    line = invariance(Product(call, torch.float32), Widths(None, 24, 24), quick=True)["batch_sizes"]
    assert line["value"] is None and line["wrong_sizes"] == [9, 33]


def test_noise_and_stale_results_break_repeats() -> None:
    """Random results differ in each run; a stale one right after another product."""
    kept: dict[tuple[int, int], torch.Tensor] = {}

    def stale(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x @ w
        before = kept.get(tuple(y.shape), y)  # type: ignore[arg-type]
        kept[tuple(y.shape)] = y.clone()  # type: ignore[index]
        return torch.cat([y[:-1], before[-1:]])

    def noisy(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w) * (1 + 1e-3 * torch.rand(w.shape[1], generator=_LOT))

    for call, least in ((stale, 2), (noisy, 20)):
        line = invariance(Product(call, torch.float32), Widths(None, 24, 24), quick=True)["repeats"]
        assert line["value"] >= least and line["worst"] > 0


def test_broken_laws_of_a_linear_map_are_named() -> None:
    """Offset, one-sided clip and saturation each break the law they should."""
    broken = {
        "zero": lambda x, w: x @ w + 1e-6,
        "odd": lambda x, w: (x @ w).clamp_max(1.0),
        "doubling": lambda x, w: (x @ w).clamp(-1.0, 1.0),
        "one_hot": lambda x, w: (x @ w).roll(1, dims=1),
    }
    whole = Widths(None, 24, 24)
    for law, call in broken.items():
        assert linear_laws(Product(call, torch.float32), whole)[law]["value"] is False, law
    healthy = linear_laws(Product(torch.matmul, torch.float32), whole)
    assert all(line["value"] is True for line in healthy.values())


@pytest.mark.parametrize("call", [short_operands(10, "toward zero"), summing(14, "nearest, ties to even"), tensor_core])
def test_short_arithmetic_breaks_no_law(call: Call) -> None:
    """TF32 operands, a short sum and a tensor core are described by their bits, not called faulty."""
    product = Product(call, torch.float32)
    lines, widths = products(product, (64,))
    assert all(line["value"] is True for line in linear_laws(product, widths).values())
    assert not any("nonsense" in line for line in lines.values())


# -- special numbers


def exact(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A product that keeps subnormals on every CPU: the bfloat16 instructions of some flush them."""
    return (x.double() @ w.double()).to(x.dtype)


def keeps_subnormals(dtype: torch.dtype) -> bool:
    """Whether this CPU's product of 16 rows keeps a subnormal result: by one product, read directly."""
    tiny = torch.finfo(dtype).tiny
    x, w = torch.full((16, 64), tiny, dtype=dtype), torch.zeros(64, 16, dtype=dtype)
    w[0] = 0.25
    return bool(((x @ w) != 0).all())


def test_flushing_is_seen_in_operands_and_results() -> None:
    """Denormals-are-zero and flush-to-zero are told apart, in products and element by element."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        daz = product_specials(Product(lambda x, w: exact(flushed(x), flushed(w)), dtype))
        ftz = product_specials(Product(lambda x, w: flushed(exact(x, w)), dtype))
        assert (daz["subnormal_operands"]["value"], daz["subnormal_results"]["value"]) == ("flushed to zero", "kept")
        assert (ftz["subnormal_operands"]["value"], ftz["subnormal_results"]["value"]) == ("kept", "flushed to zero")
        table = {**Operations().elementwise, "add": lambda a, b: flushed(a + b)}
        lines = elementwise(table, dtype, CPU)
        assert lines["subnormal_sums"]["value"] == "flushed to zero" and lines["subnormal_results"]["value"] == "kept"


def saturated(x: torch.Tensor) -> torch.Tensor:
    top = torch.finfo(x.dtype).max
    return torch.nan_to_num(x, nan=0.0, posinf=top, neginf=-top)


def test_saturation_and_lost_nan_are_named() -> None:
    """A device that saturates and turns NaN to 0 never shows Inf or NaN; the passport says so."""
    for dtype in (torch.float32, torch.float16):
        lines = product_specials(Product(lambda x, w: saturated(x @ w), dtype))
        assert lines["overflow"]["value"] == "saturates" and lines["nan"]["value"] == "0"
        assert lines["infinity_times_zero"]["value"] == "0"
        table = {name: lambda *a, f=f: saturated(f(*a)) for name, f in Operations().elementwise.items()}
        single = elementwise(table, dtype, CPU)
        assert single["overflow"]["value"] == single["exp_overflow"]["value"] == "saturates"
        assert single["relu_of_nan"]["value"] == single["maximum_of_nan"]["value"] == "0"
    assert single["cast_overflow"]["value"] == "saturates"
    fmax = elementwise({**Operations().elementwise, "maximum": torch.fmax}, torch.float32, CPU)
    assert fmax["maximum_of_nan"]["value"] == "the other operand"


def test_the_range_of_the_running_sum_is_seen() -> None:
    """float16 sums in float16 overflow on the way; in float32 they don't."""

    def narrow(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functools.reduce(torch.add, (x[:, k : k + 1] * w[k : k + 1] for k in range(x.shape[1])))

    assert product_specials(Product(narrow, torch.float16))["sum_range"]["value"] == "that of the format"
    assert product_specials(Product(torch.matmul, torch.float16))["sum_range"]["value"] == "wider than the format"


def test_elementwise_rounding_is_named() -> None:
    """A cast or a sum cut toward zero is told from a healthy one."""

    def cut_cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return cut(x.double(), format_of(dtype).precision, "toward zero").to(dtype)

    lines = elementwise({**Operations().elementwise, "cast": cut_cast}, torch.bfloat16, CPU)
    assert (
        lines["cast_rounding"]["value"] == "toward zero" and lines["add_rounding"]["value"] == "nearest, ties to even"
    )


# -- functions and attention


def test_a_table_error_of_exp_is_found_where_it_is() -> None:
    """An exp off by 0.5 % between 1.5 and 1.6 is named by its size and place, in float32."""

    def table(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x) * torch.where((x > 1.5) & (x < 1.6), 1.005, 1.0)

    line = functions({"exp": table}, torch.float32, CPU, quick=True)["exp"]
    assert 1.5 < line["at"] < 1.6 and 4e4 < line["value"] < 1e5 and line["bits_right"] == 7
    healthy = functions({"exp": torch.exp}, torch.float32, CPU, quick=True)["exp"]
    assert healthy["value"] < 1.1 and healthy["bits_right"] >= 23


def test_results_cut_toward_zero_show_as_a_bias() -> None:
    """The mean error along the sign is about -0.5 ulp for truncation, 0 for rounding to nearest."""
    lines = functions(
        {
            "sqrt": lambda x: cut(torch.sqrt(x.double()), 8, "toward zero").to(x.dtype),
            "log": torch.log,
        },
        torch.bfloat16,
        CPU,
        quick=True,
    )
    assert -0.55 < lines["sqrt"]["bias_ulp"] < -0.45 and 0.9 < lines["sqrt"]["value"] <= 1.0
    assert abs(lines["log"]["bias_ulp"]) < 0.02 and lines["log"]["value"] < 0.51


def test_flushing_is_not_taken_for_a_coarse_function() -> None:
    """Subnormal results are left out of the ulps: a device that flushes them has its own lines for that."""
    calls = {name: lambda *a, f=f: flushed(f(*a)) for name, f in Operations().functions.items()}
    plain = functions(Operations().functions, torch.float16, CPU, quick=True)
    assert functions(calls, torch.float16, CPU, quick=True) == plain


def test_functions_that_fail_are_nonsense() -> None:
    """NaN where a number is right, and a result without one right bit, have no value."""
    lines = functions(
        {"gelu_erf": lambda x: torch.where(x > 3, -8.0, x), "log": lambda x: torch.where(x > 9, math.nan, x.log())},
        torch.float32,
        CPU,
        quick=True,
    )
    assert lines["gelu_erf"]["value"] is None and "ulp" in lines["gelu_erf"]["nonsense"]
    assert "nan" in lines["log"]["nonsense"] and lines["log"]["at"] > 9
    json.dumps(lines, allow_nan=False)


def test_attention_that_loses_a_tile_or_clips_scores_is_seen() -> None:
    """A dropped tile shows in the error, a gain in the sum of rows, clipped scores in the key shift."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def clipped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax((q @ k.mT / math.sqrt(q.shape[-1])).clamp(-1.5, 1.5), -1) @ v

    def gained(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) * 1.01

    healthy = attention(sdpa, torch.float32, CPU)
    assert healthy["error"]["value"] < 16 and healthy["rows_sum"]["value"] < 16
    assert all(healthy[law]["value"] for law in ("zero", "odd", "doubling", "repeat"))
    assert healthy["single_key"]["value"] <= 2
    assert attention(clipped, torch.float32, CPU)["key_shift"]["value"] is None
    assert attention(gained, torch.float32, CPU)["rows_sum"]["value"] is None
    assert (
        attention(lambda q, k, v: sdpa(q, k[:, :, :-32], v[:, :, :-32]), torch.float32, CPU)["error"]["value"] is None
    )


# -- the whole passport


@pytest.fixture(scope="module")
def passport() -> dict[str, Any]:
    return take_passport("cpu", quick=True)


def all_lines(passport: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for dtype, sections in passport["dtypes"].items():
        for section, lines in sections.items():
            for op, table in lines.items() if section == "products" else [(section, lines)]:
                yield from ((f"{dtype} {op} {key}", line) for key, line in table.items())


def test_known_truths_of_a_cpu(passport: dict[str, Any]) -> None:
    """Sums in 24 bits, also of 16-bit numbers, to nearest; infinities and NaN kept; subnormals as this CPU has it."""
    dtypes = passport["dtypes"]
    assert dtypes["float64"]["products"]["matmul"]["sum_bits"]["value"] == 53
    for name in ("float32", "bfloat16", "float16"):
        for op in ("matmul", "linear"):
            lines = dtypes[name]["products"][op]
            assert lines["sum_bits"]["value"] == 24 and not lines["sum_bits"]["at_least"], (name, op)
            assert lines["sum_rounding"]["value"] == lines["result_rounding"]["value"] == "nearest, ties to even"
            kept = "kept" if keeps_subnormals(getattr(torch, name)) else "flushed to zero"
            assert lines["subnormal_operands"]["value"] == lines["subnormal_results"]["value"] == kept
            assert lines["overflow"]["value"] == "infinity" and lines["nan"]["value"] == "NaN"
            assert "cut" not in lines["operand_bits"] and lines["repeats"]["value"] == 0
        assert dtypes[name]["elementwise"]["add_rounding"]["value"] == "nearest, ties to even"
        assert dtypes[name]["functions"]["div"]["value"] <= 0.501
    assert dtypes["bfloat16"]["products"]["matmul"]["terms"]["value"] == "exact"


def test_a_healthy_cpu_gives_no_nonsense_and_skips_little(passport: dict[str, Any]) -> None:
    """Every probe answers here; what is skipped says why."""
    assert [name for name, line in all_lines(passport) if "nonsense" in line] == []
    skipped = {name for name, line in all_lines(passport) if "skipped" in line}
    assert all(line["skipped"] for _, line in all_lines(passport) if "skipped" in line)
    assert {name for name in skipped if "float8" not in name} <= {"float64 functions gelu_erf"}
    assert all(line["how"] for _, line in all_lines(passport) if "skipped" not in line)


def test_the_same_device_gives_the_same_passport(passport: dict[str, Any]) -> None:
    """All but `run` is equal, through JSON too, and the diff says "same"."""
    again = json.loads(json.dumps(take_passport("cpu", quick=True), allow_nan=False))
    assert {**again, "run": None} == {**json.loads(json.dumps(passport)), "run": None}
    assert diff(passport, again) == [] and say([]) == SAME


def test_nothing_is_changed_by_taking_it() -> None:
    """Random states, flags and gradient mode stay; the passport does not depend on them."""
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    flags = torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.get_default_dtype()
    examine(dataclasses.replace(Operations(), products={"matmul": torch.matmul}, scaled={}, functions={}), quick=True)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    assert flags == (torch.get_float32_matmul_precision(), torch.is_grad_enabled(), torch.get_default_dtype())


def test_flushing_on_this_cpu_changes_the_passport(passport: dict[str, Any]) -> None:
    """torch.set_flush_denormal(True) shows in float32, and the diff says what it means."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU can't flush denormals")
    try:
        flushing = take_passport("cpu", quick=True)
    finally:
        torch.set_flush_denormal(False)
    lines = flushing["dtypes"]["float32"]["elementwise"]
    assert lines["subnormal_results"]["value"] == lines["subnormal_operands"]["value"] == "flushed to zero"
    found = diff(passport, flushing)
    assert {difference.key for difference in found} <= {"subnormal_operands", "subnormal_results", "subnormal_sums"}
    one = next(d for d in found if d.key == "subnormal_results" and "elementwise" in d.sentence)
    assert "float32" in one.dtypes and "float16" not in one.dtypes  # float16 subnormals are normal in float32
    assert "kept on the first, flushed to zero on the second" in one.sentence
    assert "torch.set_flush_denormal" in one.sentence


@pytest.mark.slow
def test_the_whole_passport_takes_seconds() -> None:
    """On one thread of this CPU: whole 20 s, quick 5 s, of processor time (others may be using it too)."""
    for quick, limit in ((True, 5), (False, 20)):
        started = time.process_time()
        found = take_passport("cpu", quick=quick)
        assert time.process_time() - started < limit
        assert [name for name, line in all_lines(found) if "nonsense" in line] == []


@pytest.mark.parametrize("device", ["cud", "meta", "cuda:99", "nonsense:0"])
def test_a_device_that_can_not_be_had_is_refused(device: str) -> None:
    """The reason and the cure are said."""
    with pytest.raises(InvalidInput, match=r"cpu, cuda, cuda:1, mps"):
        take_passport(device)


# -- differences


def with_lines(passport: dict[str, Any], dtype: str, lines: dict[str, Any], **facts: Any) -> dict[str, Any]:
    """A passport as an emulated device would have it."""
    other = copy.deepcopy(passport)
    for op in ("matmul", "linear"):
        other["dtypes"][dtype]["products"][op].update(copy.deepcopy(lines))
    other["facts"].update(facts)
    return other


def only(found: list[Difference], key: str) -> Difference:
    matching = [difference for difference in found if difference.key == key]
    assert len(matching) == 1, [difference.sentence for difference in found]
    return matching[0]


def test_the_diff_explains_tf32(passport: dict[str, Any]) -> None:
    """Which device, how many bits, how far off, and the switch."""
    gpu = with_lines(
        passport, "float32", lines_of(short_operands(10, "nearest, ties to even")), name="X1", device="cuda"
    )
    one = only(diff(passport, gpu), "operand_bits")
    assert one.sentence.startswith("float32 (matmul, linear): X1 (cuda) keeps the operands of a product to 10 bits")
    for words in ("(TF32)", "keeps all 23", "up to 0.0005 of itself", "allow_tf32 = False"):
        assert words in one.sentence
    assert (one.first, one.second, one.kind) == (23, 10, "arithmetic")


def test_the_diff_explains_short_sums_and_rounding(passport: dict[str, Any]) -> None:
    """Bits kept, and the drift of a sum that is cut; one sentence for both operations."""
    npu = with_lines(passport, "bfloat16", lines_of(summing(14, "toward zero"), torch.bfloat16), name="N", device="npu")
    found = diff(npu, passport)
    bits, rounding = only(found, "sum_bits"), only(found, "sum_rounding")
    assert "sums keep 14 bits on N (npu), 24 on" in bits.sentence and "K x 2^-14" in bits.sentence
    assert (
        "rounded toward zero on N (npu), to nearest, ties to even on" in rounding.sentence
        and "drift in one direction" in rounding.sentence
    )
    assert bits.dtypes == ("bfloat16",) and "(matmul, linear)" in bits.sentence


def test_the_diff_explains_saturation_and_lost_nan(passport: dict[str, Any]) -> None:
    """Overflow and NaN: what to watch for instead."""
    lines = product_specials(Product(lambda x, w: saturated(x @ w), torch.float16))
    found = diff(passport, with_lines(passport, "float16", lines))
    assert "infinity on the first, the largest number on the second" in only(found, "overflow").sentence
    assert "NaN on the first, 0 on the second. A device that loses NaN" in only(found, "nan").sentence


def test_the_diff_names_a_coarse_function_and_lists_the_rest(passport: dict[str, Any]) -> None:
    """A table error has its own sentence with its place; small differences stand in one line."""
    other = copy.deepcopy(passport)
    table = other["dtypes"]["float32"]["functions"]
    table["exp"] |= {"value": 84000.0, "at": 1.55, "bits_right": 7}
    table["sin"]["value"] += 0.5
    found = diff(passport, other)
    exp, rest = only(found, "exp"), only(found, "functions")
    assert "84000 ulp, worst at 1.55" in exp.sentence and "coarse table" in exp.sentence
    assert "sin" in rest.sentence and "cos" not in rest.sentence and "not a fault" in rest.sentence
    table["sin"]["points"] += 1  # another grid: not compared that closely
    assert [difference.key for difference in diff(passport, other)] == ["exp"]


def test_nonsense_comes_first(passport: dict[str, Any]) -> None:
    """A device that computes wrongly is said before anything else, and where to go on."""
    broken = with_lines(passport, "float32", lines_of(lambda x, w: 1.01 * (x @ w)), torch="9.9")
    found = diff(passport, broken)
    assert found[0].kind == "health" and "noisescope locate" in found[0].sentence
    assert found[-1].kind == "settings" and "torch is" in found[-1].sentence
    assert say(found).startswith(f"{len(found)} differences:\n- float32")


def test_settings_alone_are_said_to_be_settings(passport: dict[str, Any]) -> None:
    """Another torch and another flag, the same arithmetic."""
    other = copy.deepcopy(passport)
    other["facts"]["torch"] = "9.9"
    other["facts"]["flags"]["float32_matmul_precision"] = "medium"
    text = say(diff(passport, other))
    assert text.startswith("same arithmetic; only settings differ:") and "float32_matmul_precision" in text


def test_a_dtype_on_one_device_only_is_said(passport: dict[str, Any]) -> None:
    """Missing float64 is no silent agreement."""
    other = copy.deepcopy(passport)
    other["dtypes"]["float64"] = {"skipped": "no float64 here"}
    (one,) = diff(passport, other)
    assert one.kind == "coverage" and "no float64 here" in one.sentence
    (back,) = diff(other, passport)
    assert "no float64 here" in back.sentence


ANY_JSON = (
    st.none()
    | st.booleans()
    | st.integers(-3, 99)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.just([])
    | st.just({})
)


@given(st.data())
def test_a_damaged_passport_is_refused_or_compared(passport: dict[str, Any], data: st.DataObject) -> None:
    """Whatever one value is replaced by, the diff answers or raises InvalidInput, nothing else."""
    other = copy.deepcopy(passport)
    node: Any = other
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not node[key] or not isinstance(node[key], dict | list) or data.draw(st.integers(0, 5)) == 0:
            break
        node = node[key]
    node[key] = data.draw(ANY_JSON)
    for pair in ((passport, other), (other, passport)):
        try:
            found = diff(*pair)
        except InvalidInput:
            continue
        assert all(difference.sentence for difference in found) and say(found)


# -- numbers


@given(st.integers(0, 40), st.integers(2, 53))
def test_scattered_numbers_fit_their_format(seed: int, bits: int) -> None:
    """In [-1, 1), multiples of 2^(1 - bits), the same each time, not all alike."""
    x = scattered((257,), seed, bits)
    assert (x >= -1).all() and (x < 1).all() and (np.ldexp(x, bits - 1) % 1 == 0).all()
    assert np.array_equal(x, scattered((257,), seed, bits)) and len(np.unique(x)) > 1


@given(st.floats(1e-30, 1e30), st.sampled_from([-1.0, 1.0]))
def test_ulps_are_those_of_the_format(x: float, sign: float) -> None:
    """Neighbours of a float32 number are one ulp away."""
    number = np.float32(sign * x)
    neighbour = np.nextafter(number, np.float32(math.inf * sign))
    one = in_ulps(np.array([float(neighbour) - float(number)]), np.array([float(number)]), format_of(torch.float32))
    assert one[0] * sign == 1.0


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
def test_powers_of_two_are_written_as_bits(dtype: torch.dtype) -> None:
    """Normal and subnormal powers, down to the smallest."""
    form = format_of(dtype)
    for exponent in (0, 3, form.emin, form.emin - 1, form.emin - form.precision + 1):
        assert float(power_of_two(form, exponent).double()) == 2.0**exponent


def test_an_odd_pattern_is_not_given_a_name() -> None:
    """No rounding is claimed where none fits."""
    assert name_rounding(np.full((24, 4), 12.0)) == "unclear" == name_rounding(np.full((24, 4), math.nan))
