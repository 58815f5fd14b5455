"""What should not change a result, bit for bit: row order, batch size, layout, repetition; and linear laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from noisescope.passports.probe_products import Widths
from noisescope.passports.shared_tools import (
    Array,
    Product,
    attempt,
    format_of,
    item,
    nonsense,
    rounded,
    scattered,
    values,
)

ROWS, INNER, COLUMNS = 48, 1024, 64
BATCH_SIZES = (1, 8, 9, 33)
REPEATS = {"quick": 20, "full": 100}


@np.errstate(all="ignore")
def invariance(product: Product, widths: Widths, *, quick: bool) -> dict[str, dict[str, Any]]:
    """All lines about one product. `value` is whether results are equal bit for bit; `worst` how far apart they are."""
    precision = format_of(product.dtype).precision
    x = product.place(scattered((ROWS, INNER), 11, precision))
    w = product.place(scattered((INNER, COLUMNS), 12, precision))
    whole = values(product.call(x, w))
    rows, columns, inner = (_order(n, seed) for n, seed in ((ROWS, 13), (COLUMNS, 14), (INNER, 15)))

    def at(tensor: torch.Tensor, order: Array, dim: int) -> torch.Tensor:
        """Reordered on the host, through bits where the dtype knows no indexing; contiguous."""
        index = torch.from_numpy(order)
        host = tensor.cpu()
        if host.element_size() == 1:
            return host.view(torch.uint8).index_select(dim, index).view(host.dtype).to(product.device)
        return host.index_select(dim, index).to(product.device)

    def by_columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.t().contiguous().t()

    def batch_sizes() -> dict[str, Any]:
        how = (
            f"only the first n of {ROWS} rows, n = {', '.join(map(str, BATCH_SIZES))}: the sizes at which results "
            f"differ"
        )
        reference, _, bound = widths.expected(values(x), values(w))
        differing, worst, wrong = [], 0.0, []
        for n in BATCH_SIZES:
            got = values(product.call(x[:n].contiguous(), w))
            if not (np.abs(got - reference[:n]) <= bound[:n]).all():
                wrong.append(n)
            if not np.array_equal(got, whole[:n]):
                differing.append(n)
                worst = max(worst, _apart(got, whole[:n]))
        if wrong:
            return nonsense(
                f"wrong by more than its own precision for {', '.join(map(str, wrong))} rows", how, wrong_sizes=wrong
            )
        return item(differing, how, worst=rounded(worst))

    def repeats() -> dict[str, Any]:
        count = REPEATS["quick" if quick else "full"]
        how = (
            f"the same product {count} times, with another product in between now and then: how often the result "
            f"differed"
        )
        other, different, worst = at(x, rows, 0), 0, 0.0
        for i in range(count):
            if i % 10 == 0:  # a stale buffer would show then
                product.call(other, w)
            again = values(product.call(x, w))
            if not np.array_equal(again, whole):
                different, worst = different + 1, max(worst, _apart(again, whole))
        return item(different, how, worst=rounded(worst), repeats=count)

    lines = {
        "repeats": repeats,
        "batch_sizes": batch_sizes,
        "row_order": lambda: _equal(values(product.call(at(x, rows, 0), w)), whole[rows], "rows of x reordered"),
        "column_order": lambda: _equal(
            values(product.call(x, at(w, columns, 1))), whole[:, columns], "columns of w reordered"
        ),
        "inner_order": lambda: _equal(
            values(product.call(at(x, inner, 1), at(w, inner, 0))),
            whole,
            "inner dimension reordered: equality is not expected",
        ),
        "layout": lambda: _equal(
            values(product.call(by_columns(x), by_columns(w))), whole, "x and w stored by columns"
        ),
    }
    return {name: attempt(probe) for name, probe in lines.items()}


@np.errstate(all="ignore")
def batched(product: Product) -> dict[str, Any]:
    """Batched products [8, 32, 256] x [8, 256, 32]: reordered as a batch, and one at a time."""
    precision = format_of(product.dtype).precision
    x = product.place(scattered((8, 32, 256), 16, precision))
    w = product.place(scattered((8, 256, 32), 17, precision))
    order = torch.from_numpy(_order(8, 18))

    def reordered() -> dict[str, Any]:
        there = order.to(product.device)
        got = values(product.call(x[there], w[there]))
        return _equal(got, values(product.call(x, w))[order.numpy()], "a batch of 8 products reordered")

    def alone() -> dict[str, Any]:
        got = np.stack([values(product.call(x[i : i + 1], w[i : i + 1]))[0] for i in range(8)])
        return _equal(got, values(product.call(x, w)), "8 products one at a time")

    return {"batch_order": attempt(reordered), "batch_of_one": attempt(alone)}


@np.errstate(all="ignore")
def linear_laws(product: Product, widths: Widths) -> dict[str, dict[str, Any]]:
    """f(0) = 0, f(-x) = -f(x), f(2x) = 2 f(x), and a one-hot row reads a row of w back: exact in healthy arithmetic.

    The numbers have no more bits than the product was found to keep; short operands or sums are reported elsewhere.
    """
    precision = widths.carried(format_of(product.dtype).precision)
    smallest = format_of(product.result_dtype).smallest_normal
    x = scattered((ROWS, 256), 21, precision)
    w = scattered((256, 64), 22, precision)
    x = x / 2  # 2x stays below 1

    def doubled() -> bool:
        once = product(x, w)
        return np.array_equal(product(2 * x, w)[normal := np.abs(once) >= smallest], 2 * once[normal])

    laws: dict[str, tuple[str, Callable[[], bool]]] = {
        "zero": ("f(0) = 0", lambda: not product(np.zeros_like(x), w).any()),
        "odd": ("f(-x) = -f(x)", lambda: np.array_equal(product(-x, w), -product(x, w))),
        "doubling": ("f(2x) = 2 f(x) where results are normal numbers", doubled),
        "one_hot": ("unit rows read w back", lambda: np.array_equal(product(np.eye(256), w), w)),
    }
    return {name: attempt(lambda how=how, holds=holds: item(bool(holds()), how)) for name, (how, holds) in laws.items()}  # type: ignore[misc]


def _order(n: int, seed: int) -> Array:
    """A fixed permutation."""
    return np.argsort(scattered((n,), seed, 40), kind="stable")


def _apart(a: Array, b: Array) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-300))


def _equal(got: Array, expected: Array, how: str) -> dict[str, Any]:
    same = np.array_equal(got, expected, equal_nan=True)
    return item(same, how, worst=0.0 if same else rounded(_apart(got, expected)))
