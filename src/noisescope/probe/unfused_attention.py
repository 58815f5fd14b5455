"""Fused attention: the arguments of such a call, and the plain products and softmax that its kernel hides.

The functions that open it only call torch.matmul and F.softmax, so the function mode that watches the targeted layer
sees each of them as an operator. Sixteen-bit inputs are computed in float32 and rounded once at the end, which is what
fused kernels do; so the clean result is as near to exact as theirs.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INTERFACE_NAME = "noisescope_decomposed"
FUSED_FUNCTION = torch._C._nn.scaled_dot_product_attention  # F's, unless it was replaced
_BY_FUNCTION = ("sdpa", "eager", None)  # reached by watching functions; others go through the interface
_KERNELS = ("flash", "flex", "paged")  # of transformers' own names, those of kernels that no function of torch's shows


@dataclass(frozen=True)
class AttentionArguments:
    """The arguments of a fused attention call, by the names of F.scaled_dot_product_attention."""

    query: Tensor  # [..., H, T, D]
    key: Tensor  # [..., KV, S, D]
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None  # None: 1 / sqrt(D)
    enable_gqa: bool = False

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionArguments:
        return cls(*args, **kwargs)

    @property
    def effective_scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else float(self.scale)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(scale q k^T + mask) v, and the probabilities. query [..., H, T, D], key and value [..., KV, S, D].

    KV may divide H (grouped queries). A bool mask is True where a query attends; a float mask is added. `is_causal`
    aligns the triangle at the upper left, as scaled_dot_product_attention does. `sinks` [H] are learned extra columns.
    """
    dtype = query.dtype
    work = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    query, key, value = query.to(work), key.to(work), value.to(work)
    if key.dim() > 3 and key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = torch.matmul(query, key.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if is_causal:
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        mask = (
            causal
            if mask is None
            else (mask & causal if mask.dtype == torch.bool else mask.masked_fill(~causal, -math.inf))
        )
    empty = None
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
        empty = ~mask.any(-1, keepdim=True)  # a row that attends nowhere gives 0, as the fused kernels do, not NaN
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(work).reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        probabilities = F.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        probabilities = F.softmax(scores, -1)
    if empty is not None:
        probabilities = probabilities.masked_fill(empty, 0.0)
    if dropout_p > 0.0:
        probabilities = F.dropout(probabilities, dropout_p)
    return torch.matmul(probabilities, value).to(dtype), probabilities


def scaled_dot_product(*args: Any, **kwargs: Any) -> Tensor:
    """F.scaled_dot_product_attention with plain operators (grouped queries are recognised by shape)."""
    given = AttentionArguments.of(args, kwargs)
    return attend(
        given.query,
        given.key,
        given.value,
        given.attn_mask,
        dropout_p=given.dropout_p,
        is_causal=given.is_causal,
        scale=given.scale,
    )[0]


def interface_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The decomposed path in the form of transformers' attention interface, for any registered implementation."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = _dense_mask(attention_mask, query, key, causal=causal, window=sliding_window)
    if position_bias is not None:
        bias = position_bias.to(torch.promote_types(query.dtype, torch.float32))
        mask = (
            bias if mask is None else (bias.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else bias + mask)
        )
    output, probabilities = attend(
        query, key, value, mask, dropout_p=dropout, scale=scaling, softcap=softcap, sinks=s_aux
    )
    return output.transpose(1, 2).contiguous(), probabilities


def _dense_mask(mask: Any, query: Tensor, key: Tensor, *, causal: bool, window: int | None) -> Tensor | None:
    """Whatever mask an implementation was given, as [B or 1, 1, T, S]: None, [B, S] padding, 4-D, or a BlockMask."""
    length, total = query.shape[-2], key.shape[-2]
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return mask[..., :total]
    if mask is not None and not isinstance(mask, Tensor):  # flex attention's BlockMask
        from torch.nn.attention.flex_attention import create_mask

        return create_mask(mask.mask_mod, query.shape[0], query.shape[1], length, total, device=query.device.type)
    dense = None
    if causal and (length > 1 or window):
        row = torch.arange(total - length, total, device=query.device)[:, None]  # the cache comes first
        column = torch.arange(total, device=query.device)[None, :]
        dense = column <= row
        if window:
            dense = dense & (column > row - window)
        dense = dense[None, None]
    if isinstance(mask, Tensor):
        padding = mask.bool()[:, None, None, -total:]
        dense = padding if dense is None else dense & padding
    return dense


def decomposed_config(module: nn.Module) -> Any | None:
    """A copy of the attention module's config that routes it to `interface_attention`, or None where not needed."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "_attn_implementation") or config._attn_implementation in _BY_FUNCTION:
        return None
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(INTERFACE_NAME, interface_attention)  # one more name in a registry made for that
    routed = copy.copy(config)
    routed._attn_implementation_internal = INTERFACE_NAME
    return routed


def is_users_own(module: nn.Module) -> bool:
    """Whether attention goes through a function that a user has registered, which may compute anything."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name not in _BY_FUNCTION and not str(name).startswith(_KERNELS) and "/" not in str(name)


def multihead(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """nn.MultiheadAttention.forward with plain operators: it calls no module and no visible softmax of its own."""
    same = query is key and key is value
    batched = query.dim() == 3
    if not batched:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not module.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    batch, length, width = query.shape
    if module.in_proj_weight is not None and same:
        q, k, v = F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    else:
        if module.in_proj_weight is not None:
            weights = module.in_proj_weight.chunk(3)
        else:
            weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    if module.bias_k is not None and module.bias_v is not None:
        k = torch.cat([k, module.bias_k.expand(batch, 1, -1)], 1)
        v = torch.cat([v, module.bias_v.expand(batch, 1, -1)], 1)
    heads, size = module.num_heads, width // module.num_heads
    q, k, v = (x.reshape(batch, -1, heads, size).transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    if module.add_zero_attn:
        k, v = (torch.cat([x, x.new_zeros(batch, heads, 1, size)], 2) for x in (k, v))
    mask = _multihead_mask(attn_mask, key_padding_mask, batch, heads, k.shape[2], is_causal, q)
    dropout = module.dropout if module.training else 0.0
    context, probabilities = attend(q, k, v, mask, dropout_p=dropout)
    output = context.transpose(1, 2).reshape(batch, length, width)
    output = F.linear(output, module.out_proj.weight, module.out_proj.bias)
    if not batched:
        output = output.squeeze(0)
    elif not module.batch_first:
        output = output.transpose(0, 1)
    if not need_weights:
        return output, None
    weights_out = probabilities.to(output.dtype)
    weights_out = weights_out.mean(1) if average_attn_weights else weights_out
    return output, weights_out if batched else weights_out.squeeze(0)


def _multihead_mask(
    attn_mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, total: int, is_causal: bool, q: Tensor
) -> Tensor | None:
    """nn.MultiheadAttention's masks (True or -inf = do not attend) as one additive mask [B or 1, H or 1, T or 1, S]."""
    mask = None
    if is_causal and attn_mask is None:
        attn_mask = torch.ones(q.shape[2], total, dtype=torch.bool, device=q.device).triu(1)
    for given, shape in ((attn_mask, None), (padding, (batch, 1, 1, -1))):
        if given is None:
            continue
        part = (
            torch.zeros(given.shape, device=given.device).masked_fill(given, -math.inf)
            if given.dtype == torch.bool
            else given
        )
        part = F.pad(part, (0, total - part.shape[-1]))  # bias_k and add_zero_attn columns are always seen
        if shape is None:
            shape = (batch, heads, *part.shape[-2:]) if part.dim() == 3 else (1, 1, *part.shape[-2:])
        part = part.reshape(shape)
        mask = part if mask is None else mask + part
    return mask
