"""Products with operands cut to TF32: no fault where the user's settings allow them, a fault where they do not."""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from noisescope.localization.audit import audit as full_audit
from noisescope.localization.relations import relations
from noisescope.localization.roundoff_floors import Shortening, operand_bits, product_roundoff, shortened
from noisescope.testing import tiny_model

audit = functools.partial(full_audit, quick=True)


def cut(t: Tensor) -> Tensor:
    """The lowest 13 of 23 bits dropped, without rounding."""
    return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@contextlib.contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class CutAttention(TorchFunctionMode):
    """Fused attention whose operands are cut: queries, keys, probabilities and values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args[:3]
        if kwargs.get("enable_gqa") or k.shape[-3] != q.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
        scale = kwargs.get("scale") or 1 / math.sqrt(q.shape[-1])
        scores = cut(q) @ cut(k).transpose(-1, -2) * scale
        mask = kwargs.get("attn_mask")
        if kwargs.get("is_causal"):
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        return cut(scores.softmax(-1)) @ cut(v)


def with_cut_linears(name: str) -> nn.Module:
    """Every instance's forward replaced."""
    model = tiny_model(name, seed=8)
    for module in model.modules():
        if isinstance(module, nn.Linear):

            def forward(x: Tensor, own: nn.Linear = module) -> Tensor:
                y = cut(x) @ cut(own.weight).T
                return y if own.bias is None else y + own.bias

            module.forward = forward  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize("name", ["llama", "opt"])
@pytest.mark.parametrize("method", [audit, relations])
def test_cut_linears(name, method):
    with precision("high"):
        verdict = method(with_cut_linears(name))
        assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]
    verdict = method(with_cut_linears(name))
    assert {suspect.site.operator for suspect in verdict.suspects} == {"linear"}


@pytest.mark.parametrize("method", [audit, relations])
def test_cut_attention(method):
    model = tiny_model("llama", seed=9)
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.q_proj.weight.mul_(8)  # scores large enough for probabilities to differ
    with precision("high"), CutAttention():
        verdict = method(model)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]
    with CutAttention():
        assert method(model).verdict == "faulty"


def test_a_gain_is_still_found_where_operands_may_be_cut():
    model = tiny_model("llama", seed=8)
    module = model.model.layers[1].mlp.up_proj
    module.forward = lambda x: F.linear(x, module.weight) * 1.02
    with precision("high"):
        assert audit(model).suspects[0].site.module == "model.layers.1.mlp.up_proj"


def test_settings_by_backend_are_read(monkeypatch):
    """torch refuses to answer the older question once the newer settings are used."""

    def refuse() -> str:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    for setting, bits in (("tf32", 11), ("bf16", 8), ("ieee", 24)):
        monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(fp32_precision=setting))
        assert operand_bits() == bits
    monkeypatch.setattr(torch.backends.cuda, "matmul", types.SimpleNamespace(fp32_precision="tf32"))
    assert shortened(torch.float32, "cuda") == Shortening(math.sqrt(2) * 2**-11, 2**-10)
    assert product_roundoff(torch.float32) == 2**-10
    assert product_roundoff(torch.bfloat16) == 2**-24
