"""Subnormal numbers, overflow and NaN: in products and element by element."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from noisescope.passports.shared_tools import (
    INTEGERS,
    Format,
    Operation,
    Product,
    attempt,
    bits_of,
    format_of,
    item,
    nonsense,
    power_of_two,
    values,
)

KEPT, FLUSHED = "kept", "flushed to zero"
Call = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # two tensors of one number -> one number


def one_term(product: Product) -> Call:
    """a x b as a product of matrices with one term; the rest of the inner dimension is zero."""

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        bits = INTEGERS[product.dtype.itemsize]  # written as bits: 8-bit floats can't be assigned everywhere
        x, w = (torch.zeros(shape, dtype=bits, device="cpu") for shape in ((16, 64), (64, 16)))
        x[:, 3], w[3] = a.view(bits), b.view(bits)
        return product.raw(x.view(product.dtype), w.view(product.dtype))[:1, 0]

    return call


def _subnormal(result: torch.Tensor, expected: torch.Tensor, how: str) -> dict[str, Any]:
    got, wanted = int(bits_of(result).ravel()[0]), int(bits_of(expected).ravel()[0])
    if got == wanted:
        return item(KEPT, how)
    if got == 0:
        return item(FLUSHED, how)
    return nonsense(f"the result is {values(result).ravel()[0]:g}, expected 2^n or 0", how)


def subnormals(multiply: Call, form: Format, result: Format) -> dict[str, dict[str, Any]]:
    """Subnormal operands (scaled up by the product) and subnormal results (of two normal operands)."""
    below, lift = form.emin - 2, 4 if form.precision < 5 else 10

    def operands() -> dict[str, Any]:
        how = f"2^{below} (subnormal) x 2^{lift}, read as bits"
        got = multiply(power_of_two(form, below), power_of_two(form, lift))
        return _subnormal(got, power_of_two(result, below + lift), how)

    def results() -> dict[str, Any]:
        how = f"2^{form.emin} x 2^-2, read as bits: subnormal"
        got = multiply(power_of_two(form, form.emin), power_of_two(form, -2))
        return _subnormal(got, power_of_two(result, below), how)

    lines = {"subnormal_operands": attempt(operands)}
    if form == result:
        lines["subnormal_results"] = attempt(results)
    return lines


def _overflow(result: torch.Tensor, largest: float, how: str) -> dict[str, Any]:
    """result: [2], of the positive and of the negative overflow."""
    got = values(result).ravel()
    if (got == [math.inf, -math.inf]).all():
        return item("infinity", how)
    if (got == [largest, -largest]).all():
        return item("saturates", how)
    if np.isnan(got).all():
        return item("NaN", how)
    return nonsense(f"overflow gives {got[0]:g} and {got[1]:g}", how)


def _number(form: Format, number: float) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.float64, device="cpu").to(form.dtype)


def overflow(multiply: Call, form: Format, result: Format) -> dict[str, Any]:
    how = "+-largest x 2"
    if form != result:
        return {"value": None, "skipped": f"the result is {result.name}, which holds it"}
    two = _number(form, 2.0)
    pair = [multiply(_number(form, sign * form.largest), two) for sign in (1.0, -1.0)]
    return _overflow(torch.cat([one.reshape(1) for one in pair]), form.largest, how)


def _undefined(result: torch.Tensor, others: Mapping[str, float], how: str) -> dict[str, Any]:
    got = float(values(result).ravel()[0])
    if math.isnan(got):
        return item("NaN", how)
    for name, number in others.items():
        if got == number:
            return item(name, how)
    return nonsense(f"the result is {got:g}", how)


@np.errstate(all="ignore")
def product_specials(product: Product) -> dict[str, dict[str, Any]]:
    form, result = format_of(product.dtype), format_of(product.result_dtype)
    multiply = one_term(product)

    def undefined(a: float, b: float, how: str) -> Callable[[], dict[str, Any]]:
        return lambda: _undefined(multiply(_number(form, a), _number(form, b)), {"0": 0.0, "infinity": math.inf}, how)

    def wide() -> dict[str, Any]:
        """Largest + largest - largest is finite if the running sum has a wider range than the format."""
        how = "largest + largest - largest in one sum"
        x, w = np.zeros((1, 64)), np.ones((64, 16))
        x[0, :3] = form.largest, form.largest, -form.largest
        got = float(product(x, w)[0, 0])
        if got == form.largest:
            return item("wider than the format", how)
        return item("that of the format", how) if not math.isfinite(got) else nonsense(f"the sum is {got:g}", how)

    lines = {
        **subnormals(multiply, form, result),
        "overflow": attempt(lambda: overflow(multiply, form, result)),
        "nan": attempt(undefined(math.nan, 1.0, "NaN x 1")),
    }
    if form == result:  # 8-bit formats have no infinity
        lines["infinity_times_zero"] = attempt(undefined(math.inf, 0.0, "infinity x 0"))
    if form == result and form.largest < 1e30:  # no running sum is wider than the range of float32
        lines["sum_range"] = attempt(wide)
    return lines


def elementwise_specials(table: Mapping[str, Operation], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The same, element by element, and NaN in maximum, minimum and relu."""
    form = format_of(dtype)

    def call(name: str, *tensors: torch.Tensor) -> torch.Tensor:
        # 16 copies: vector units, not only the scalar tail of a kernel
        return table[name](*(tensor.repeat(16).to(device) for tensor in tensors)).cpu()[:1]

    def gradual() -> dict[str, Any]:
        how = f"1.5 x 2^{form.emin} - 2^{form.emin}, read as bits: subnormal"
        got = call("add", _number(form, 1.5 * form.smallest_normal), _number(form, -form.smallest_normal))
        return _subnormal(got, power_of_two(form, form.emin - 1), how)

    def largest_of(name: str) -> Callable[[], dict[str, Any]]:
        how = f"{name}(NaN, 1)"
        nan, one = _number(form, math.nan), _number(form, 1.0)
        return lambda: _undefined(call(name, nan, one), {"the other operand": 1.0, "0": 0.0}, how)

    def exp_overflow() -> dict[str, Any]:
        """exp(largest) is beyond every format."""
        got = float(values(call("exp", _number(form, form.largest)))[0])
        if got in (math.inf, form.largest):
            return item("infinity" if math.isinf(got) else "saturates", "exp(largest)")
        return nonsense(f"exp({form.largest:g}) is {got:g}", "exp(largest)")

    def cast_overflow() -> dict[str, Any]:
        both = np.array([2.0 * form.largest, -2.0 * form.largest], dtype=np.float32)
        return _overflow(
            table["cast"](torch.from_numpy(both).to(device), dtype).cpu(),
            form.largest,
            "cast of +-2 x largest from float32",
        )

    lines = {
        **subnormals(lambda a, b: call("mul", a, b), form, form),
        "subnormal_sums": attempt(gradual),
        "overflow": attempt(lambda: overflow(lambda a, b: call("mul", a, b), form, form)),
        "exp_overflow": attempt(exp_overflow),
        "maximum_of_nan": attempt(largest_of("maximum")),
        "minimum_of_nan": attempt(largest_of("minimum")),
        "relu_of_nan": attempt(
            lambda: _undefined(call("relu", _number(form, math.nan)), {"0": 0.0}, "relu(NaN)"),
        ),
    }
    if form.largest < 1e30:  # float32 holds twice the largest number only for short ranges
        lines["cast_overflow"] = attempt(cast_overflow)
    return lines
