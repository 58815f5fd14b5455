"""Vector-Jacobian products of linears, products, embeddings and fused attention on the host, in float64.

    y = x W^T + b:     dx = g W      dW = g^T x      db = sum of g over rows
    y = a b:           da = g b^T    db = a^T g
    y = table[ids]:    dtable[i] = sum of g over the tokens with id i
    attention:         dv = p^T g    ds = p (g v^T - sum of g y)    dq = scale ds k    dk = scale ds^T q

Each is a sum of products like the forward, so its floor is the forward's (roundoff_floors.py). A weight may have
several uses in one backward: its gradient is the sum of theirs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization import host_products
from noisescope.localization.call_tree import Node
from noisescope.localization.formula_recognition import linear_formula
from noisescope.localization.gradient_calls import INPUT, OUTPUT, GradientCalls
from noisescope.localization.gradient_rounding import Expected, as_rows, expected_gradients, moved
from noisescope.localization.host_operators import given_one_tensor
from noisescope.localization.host_products import Recomputed, Rows, as_multiplied
from noisescope.localization.roundoff_floors import (
    SLACK,
    WORK_ROUNDOFF,
    Z_ELEMENT,
    narrower,
    number_format,
    rounded_once,
    shortened,
    sum_spread,
)
from noisescope.probe.functions import argument, first_tensor
from noisescope.probe.unfused_attention import AttentionArguments

_NAMES = ("query", "key", "value")
_ATTENTION_PATHS = {f"0.{at}": name for at, name in enumerate(_NAMES)} | {f"1.{name}": name for name in _NAMES}
_MOST_ELEMENTS = 1 << 22  # of a weight all of whose rows are judged, where it has several uses


@dataclass(frozen=True)
class Rounding:
    """The dtypes that a device rounds to when it computes a gradient."""

    dtype: torch.dtype
    device: str = "cpu"


@dataclass(frozen=True)
class WeightUse:
    """One use of a parameter in a backward: its contribution to the parameter's gradient."""

    at: Callable[[Tensor, Rounding], tuple[Tensor, Tensor]]  # of these rows the values, and how far they may be off
    alone: Callable[[Tensor, Rows], Recomputed] | None = None  # the whole gradient judged as a product
    rows: Tensor | None = None  # that this use adds to, where they are few
    dtype: torch.dtype | None = None  # that it is computed in, where not the parameter's: under autocast


# -- linears


@dataclass(frozen=True)
class LinearCall:
    """A call of a module that computes x W^T + b, with what the host needs to differentiate it.

    Under autocast, operands and gradients are rounded to the output's dtype.
    """

    x: Tensor  # [R, K], as it was multiplied
    gradient: Tensor  # [R, N], of its output
    weight: nn.Parameter
    bias: nn.Parameter | None
    transposed: bool  # the weight is stored [K, N]

    @classmethod
    def of(cls, node: Node, calls: GradientCalls) -> LinearCall | None:
        """None if the module computes something else, or its output has no gradient."""
        module: Any = node.callee
        if node.operator != "linear" or not node.is_module or not given_one_tensor(node.args, node.kwargs):
            return None
        weight, x = module._parameters.get("weight"), first_tensor(node.args, node.kwargs)
        if type(weight) is not nn.Parameter or weight.dim() != 2 or weight.is_meta or not weight.is_floating_point():
            return None
        formula, gradient = linear_formula(module), calls.sole_gradient(node, OUTPUT)
        if formula is None or gradient is None or x is None:
            return None
        bias = module._parameters.get("bias") if formula.bias else None
        x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
        return cls(as_multiplied(x, gradient), gradient, weight, bias, formula.transposed)

    def input_gradient(self, got: Tensor, rows: Rows) -> Recomputed:
        weight, got = self.weight.detach(), as_multiplied(got, self.gradient)
        return host_products.linear(self.gradient, weight if self.transposed else weight.T, None, got, rows)

    def weight_use(self) -> WeightUse:
        left, right = (self.x, self.gradient) if self.transposed else (self.gradient, self.x)

        def alone(got: Tensor, rows: Rows) -> Recomputed:
            return host_products.linear(left.T, right.T, None, as_multiplied(got, self.gradient), rows)

        def at(rows: Tensor, to: Rounding) -> tuple[Tensor, Tensor]:
            a, b = left.T[rows].double(), right.double()
            return _sum_with_limit(a @ b, a.square() @ b.square(), len(b), to)

        return WeightUse(at, alone, dtype=self.gradient.dtype)

    def bias_use(self) -> WeightUse:
        def at(rows: Tensor, to: Rounding) -> tuple[Tensor, Tensor]:
            g = self.gradient.double()[:, rows]
            return _sum_with_limit(g.sum(0), g.square().sum(0), len(g), to)

        return WeightUse(at, dtype=self.gradient.dtype)


def _sum_with_limit(
    values: Tensor, squares: Tensor, terms: int, to: Rounding, u: float = WORK_ROUNDOFF
) -> tuple[Tensor, Tensor]:
    """P^2 of a sum in any order is at most about S^2 where terms have random signs, and y^2 where they have one."""
    short = shortened(to.dtype, to.device).spread
    spread = sum_spread(terms, 2 * squares, values, u) + short * squares.sqrt()
    return values, SLACK * rounded_once(values, to.dtype) + Z_ELEMENT * spread


# -- embeddings


def embedding_use(node: Node, calls: GradientCalls) -> WeightUse | None:
    """The table rows that tokens looked up; None for a class that does more than look them up."""
    module: Any = node.callee
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        return None
    ids, gradient = first_tensor(node.args, node.kwargs), calls.sole_gradient(node, OUTPUT)
    if ids is None or gradient is None or module.scale_grad_by_freq or module.max_norm is not None:
        return None
    flat, g = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1]).double()
    if module.padding_idx is not None:
        g = g * (flat != module.padding_idx)[:, None]
    used, places, counts = torch.unique(flat, return_inverse=True, return_counts=True)
    values, squares = (torch.zeros(len(used), g.shape[1], dtype=torch.float64) for _ in range(2))
    values.index_add_(0, places, g)
    squares.index_add_(0, places, g.square())

    def at(rows: Tensor, to: Rounding) -> tuple[Tensor, Tensor]:
        # Some kernels add up in the table's own dtype, one token after the other.
        form = number_format(to.dtype)
        here, limits = _sum_with_limit(values, squares, int(counts.max()), to, form.u)
        where = torch.searchsorted(used, rows).clamp_max(len(used) - 1)
        known = (used[where] == rows)[:, None]
        return torch.where(known, here[where], 0.0), torch.where(known, limits[where], form.flushed)

    return WeightUse(at, rows=used)


# -- parameters


def parameter_gradient(got: Tensor, uses: Sequence[WeightUse], rows: Rows) -> Recomputed:
    """Check a parameter's gradient against the sum of its uses; a single product is checked as such (`sums`)."""
    if len(uses) == 1 and uses[0].alone is not None:
        return dataclasses.replace(uses[0].alone(got, rows), lead=())
    chosen = _chosen_rows(got, uses, rows)
    dtypes = [narrower(got.dtype, use.dtype or got.dtype) for use in uses]
    found = [use.at(chosen, Rounding(dtype, rows.device)) for use, dtype in zip(uses, dtypes, strict=True)]
    values, limit = (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    limit = limit + (len(uses) - 1) * SLACK * rounded_once(values, functools.reduce(narrower, dtypes))
    return as_rows(got[chosen], Expected(values, limit, 0.0), tokens=False)


def wrong_use(got: Tensor, uses: Sequence[WeightUse], rows: Rows) -> int:
    """The use whose contribution is most like the error of the sum: a lost, partial or scaled one is along its own."""
    chosen = _chosen_rows(got, uses, rows)
    parts = [use.at(chosen, Rounding(got.dtype, rows.device))[0] for use in uses]
    error = got[chosen].double() - torch.stack(parts).sum(0)
    alike = [float((error * part).sum().abs() / part.norm().clamp_min(1e-300)) for part in parts]
    return max(range(len(uses)), key=lambda at: alike[at])


def _chosen_rows(got: Tensor, uses: Sequence[WeightUse], rows: Rows) -> Tensor:
    sampled = None if got.numel() <= _MOST_ELEMENTS else rows.choose(len(got))
    if sampled is None:
        return torch.arange(len(got))
    chosen: Tensor = torch.unique(torch.cat([sampled, *(use.rows for use in uses if use.rows is not None)]))
    return chosen


# -- products inside attention


def product_gradients(node: Node, calls: GradientCalls, rows: Rows) -> dict[str, Recomputed] | None:
    """By path, the gradients of both factors of a product; None if autograd has to differentiate it."""
    if node.is_module or node.operator not in ("matmul", "bmm") or getattr(node.callee, "__name__", "") == "einsum":
        return None
    a, b = argument(node.args, node.kwargs, 0, "input"), argument(node.args, node.kwargs, 1, "other", "mat2")
    gradient, tapped = calls.sole_gradient(node, OUTPUT), calls.tapped(node, INPUT)
    plain = all(isinstance(t, Tensor) and t.dim() > 1 for t in (a, b)) and len(node.args) == 2
    if gradient is None or not plain or a.shape[:-2] != b.shape[:-2] or "__r" in node.callee.__name__:
        return None
    if gradient.shape != (*a.shape[:-1], b.shape[-1]):
        return None
    a, b, found = as_multiplied(a, gradient), as_multiplied(b, gradient), {}
    for path, one, other in (("0.0", gradient, b.transpose(-1, -2)), ("0.1", a.transpose(-1, -2), gradient)):
        if path in tapped:
            got = as_multiplied(calls.arrived(node, INPUT, path), gradient)
            found[path] = host_products.batched(one, other, got, rows)
    return found


# -- fused attention


def attention_gradients(node: Node, calls: GradientCalls) -> dict[str, Expected] | None:
    """By path, the gradients of queries, keys and values of a fused call; None with dropout or a learned bias.

    Kernels round probabilities, scores' gradients and the output that they keep to the dtype of their inputs.
    """
    given = AttentionArguments.of(node.args, node.kwargs)
    tapped, gradient = calls.tapped(node, INPUT), calls.sole_gradient(node, OUTPUT)
    names = {path: name for path, name in _ATTENTION_PATHS.items() if path in tapped}
    if given.dropout_p or gradient is None or len(names) != len(tapped):
        return None
    dtype = narrower(given.query.dtype, gradient.dtype)
    q, k, v = (as_multiplied(x, gradient) for x in (given.query, given.key, given.value))
    given = dataclasses.replace(given, query=q, key=k, value=v)

    def named(found: dict[str, Tensor]) -> dict[str, Tensor | None]:
        return {path: found[name] for path, name in names.items()}

    exact = named(_attention_back(given, gradient, lambda x, own: x))

    def rounded(generator: torch.Generator) -> dict[str, Tensor | None]:
        return named(
            _attention_back(given, gradient, lambda x, own: moved(x, generator, dtype if own else torch.float32))
        )

    return expected_gradients(exact, {path: narrower(tapped[path].dtype, dtype) for path in names}, rounded)


def _attention_back(
    given: AttentionArguments, gradient: Tensor, move: Callable[[Tensor, bool], Tensor]
) -> dict[str, Tensor]:
    """In float64; `move(x, own)` rounds at random, in the inputs' own dtype or in float32."""
    q, k, v, g = (t.double() for t in (given.query, given.key, given.value, gradient))
    repeats = q.shape[-3] // k.shape[-3] if k.dim() > 2 else 1
    if repeats > 1:
        k, v = (t.repeat_interleave(repeats, -3) for t in (k, v))
    scale = given.effective_scale
    scores = move(q @ k.transpose(-1, -2) * scale, False)
    hidden = torch.zeros(scores.shape, dtype=torch.bool)
    if given.is_causal:
        hidden |= torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    if given.attn_mask is not None and given.attn_mask.dtype == torch.bool:
        hidden |= ~given.attn_mask
    elif given.attn_mask is not None:
        scores = scores + given.attn_mask.double()
    p = torch.softmax(scores.masked_fill(hidden, -math.inf), -1).nan_to_num(0.0)
    kept = move(p, True)
    y = move(kept @ v, True)
    from_values = move(g @ v.transpose(-1, -2), True)
    of_scores = move(kept * (from_values - (g * y).sum(-1, keepdim=True)), True) * scale
    found = {"query": of_scores @ k, "key": of_scores.transpose(-1, -2) @ q, "value": kept.transpose(-1, -2) @ g}
    found = {name: move(x, True) for name, x in found.items()}
    if repeats > 1:
        for name in ("key", "value"):
            shape = (*k.shape[:-3], -1, repeats, *k.shape[-2:-1], found[name].shape[-1])
            found[name] = found[name].reshape(shape).sum(-3)
    return found
