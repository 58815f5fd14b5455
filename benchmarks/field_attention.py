"""Attention in plain torch, tile by tile with a running maximum, each with one mistake; keys and values in pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of scaled_dot_product_attention: q [B, H, T, D], k and v [B, H or fewer, S, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionCall:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        q, k = given["query"], given["key"]
        scale = given.get("scale")
        return cls(
            q,
            k,
            given["value"],
            given.get("attn_mask"),
            bool(given.get("is_causal", False)),
            q.shape[-1] ** -0.5 if scale is None else float(scale),
        )

    @property
    def bias(self) -> Tensor:
        """What is added to the scores, [.., T, S]."""
        rows, keys = self.q.shape[-2], self.k.shape[-2]
        if self.mask is not None:
            mask = self.mask
            added = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask.float()
            return added.expand(*added.shape[:-2], rows, keys)
        allowed = torch.ones(rows, keys, dtype=torch.bool)
        return torch.zeros(rows, keys).masked_fill(~(allowed.tril() if self.causal else allowed), -math.inf)


Change = Callable[[AttentionCall], AttentionCall]
Function = Callable[[Tensor], Tensor]


def grouped(x: Tensor, heads: int) -> Tensor:
    """Key heads repeated for their group of query heads."""
    return x.repeat_interleave(heads // x.shape[1], 1)


def mixed_heads(x: Tensor, heads: int) -> Tensor:
    """The wrong mapping: key head h modulo the number of key heads."""
    return x.repeat(1, heads // x.shape[1], 1, 1)


@dataclass(frozen=True)
class Flash:
    """Online softmax over tiles of keys. The defaults are right."""

    step: int = 8
    exp: Function = torch.exp
    rescale_output: bool = True  # when the running maximum grows
    rescale_sum: bool = True
    lose_tail: bool = False  # keys after the last whole tile
    twice: int | None = None  # a tile that is counted twice
    lost: int | None = None  # a tile that is not counted in the sum of probabilities
    short_sum: bool = False  # the sum of probabilities kept in bfloat16
    short_scores: torch.dtype | None = None
    spread: Callable[[Tensor, int], Tensor] = grouped

    def __call__(self, call: AttentionCall) -> Tensor:
        q, heads = call.q.float(), call.q.shape[1]
        k, v = self.spread(call.k, heads).float(), self.spread(call.v, heads).float()
        bias, keys = call.bias, call.k.shape[-2]
        top = torch.full((*q.shape[:-1], 1), -1e30)
        total, output = torch.zeros_like(top), torch.zeros_like(q[..., :1]).expand(*q.shape[:-1], v.shape[-1]).clone()
        starts = list(
            range(0, keys // self.step * self.step if self.lose_tail and keys > self.step else keys, self.step)
        )
        for index, start in enumerate(starts):
            tile = slice(start, start + self.step)
            scores = q @ k[..., tile, :].transpose(-1, -2) * call.scale
            if self.short_scores is not None:
                scores = scores.to(self.short_scores).float()
            scores = scores + bias[..., tile]
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights = self.exp(scores - new) * (2.0 if self.twice == index else 1.0)
            factor = self.exp(top - new)
            total = total * (factor if self.rescale_sum else 1.0)
            total = total + (0.0 if self.lost == index and index else weights.sum(-1, keepdim=True))
            total = total.bfloat16().float() if self.short_sum else total
            output = output * (factor if self.rescale_output else 1.0) + weights @ v[..., tile, :]
            top = new
        return (output / total.clamp_min(1e-30)).to(call.q.dtype)


def kernel(flash: Flash, *changes: Change) -> Any:
    """For `intercepted`: scaled_dot_product_attention by this kernel on changed arguments."""

    def instead(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        call = AttentionCall.of(args, kwargs)
        for change in changes:
            call = change(call)
        return flash(call)

    return instead


# -- changes of the arguments


def with_bias(edit: Callable[[Tensor], Tensor]) -> Change:
    """The mask edited as numbers: -inf is hidden, 0 is seen."""

    def change(call: AttentionCall) -> AttentionCall:
        return dataclasses.replace(call, mask=edit(call.bias.clone()), causal=False)

    return change


def sees_one_more(bias: Tensor) -> Tensor:
    """Each row sees the key after the last it may see."""
    return torch.maximum(bias, torch.roll(bias, 1, -1)) if bias.shape[-2] > 1 else bias


def misses_itself(bias: Tensor) -> Tensor:
    """Each row but the first misses its last key."""
    if bias.shape[-2] == 1:
        bias[..., -1] = -math.inf if bias.shape[-1] > 1 else 0.0
        return bias
    bias[..., 1:, :] = torch.minimum(bias[..., 1:, :], bias[..., :-1, :])
    return bias


def leak_at_borders(step: int) -> Callable[[Tensor], Tensor]:
    """The last row of each tile sees the first key of the next one."""

    def edit(bias: Tensor) -> Tensor:
        for row in range(step - 1, min(bias.shape[-2], bias.shape[-1]) - 1, step):
            bias[..., row, row + 1] = 0.0
        return bias

    return edit


def misses_tile_start(step: int) -> Callable[[Tensor], Tensor]:
    """The first row of each tile misses its own key."""

    def edit(bias: Tensor) -> Tensor:
        for row in range(step, min(bias.shape[-2], bias.shape[-1]), step):
            bias[..., row, row] = -math.inf
        return bias

    return edit


def wider_window(bias: Tensor) -> Tensor:
    """Each row sees one key more at the far end of its window."""
    return torch.maximum(bias, torch.roll(bias, -1, -1).tril(-1) + _above(bias)) if bias.shape[-2] > 1 else bias


def _above(bias: Tensor) -> Tensor:
    square = torch.ones(bias.shape[-2:], dtype=torch.bool)
    return torch.zeros(bias.shape[-2:]).masked_fill(square.triu(0), -math.inf)


def ignores_padding(bias: Tensor) -> Tensor:
    """Keys that padding hides are seen, as if only the causal rule were there."""
    rows, keys = bias.shape[-2:]
    causal = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    return torch.zeros(rows, keys).masked_fill(~causal, -math.inf).expand_as(bias)


def keys(edit: Callable[[Tensor], Tensor]) -> Change:
    return lambda call: dataclasses.replace(call, k=edit(call.k))


def values(edit: Callable[[Tensor], Tensor]) -> Change:
    return lambda call: dataclasses.replace(call, v=edit(call.v))


def scale(factor: float) -> Change:
    return lambda call: dataclasses.replace(call, scale=call.scale * factor)


def decode_only(change: Change) -> Change:
    return lambda call: change(call) if call.q.shape[-2] == 1 else call


# -- pages and slots of a cache, [B, H, S, D]


def swapped_pages(size: int, one: int, other: int) -> Callable[[Tensor], Tensor]:
    def edit(x: Tensor) -> Tensor:
        if x.shape[-2] < (max(one, other) + 1) * size:
            return x
        a, b = slice(one * size, (one + 1) * size), slice(other * size, (other + 1) * size)
        new = x.clone()
        new[..., a, :], new[..., b, :] = x[..., b, :], x[..., a, :]
        return new

    return edit


def slot_before(slot: int) -> Callable[[Tensor], Tensor]:
    """One slot holds what belongs to the slot before."""

    def edit(x: Tensor) -> Tensor:
        new = x.clone()
        if x.shape[-2] > slot:
            new[..., slot, :] = x[..., slot - 1, :]
        return new

    return edit


def shifted(x: Tensor) -> Tensor:
    return torch.cat([x[..., :1, :], x[..., :-1, :]], -2)


def last_lost(x: Tensor) -> Tensor:
    """The newest slot was not written: it holds 0."""
    return torch.cat([x[..., :-1, :], torch.zeros_like(x[..., -1:, :])], -2)


def in_float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def other_sequence(x: Tensor) -> Tensor:
    """Sequences of a batch get each other's slots."""
    return x.flip(0)
