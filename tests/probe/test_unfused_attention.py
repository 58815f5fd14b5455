"""Fused attention opened: the decomposed path is as exact as the kernel it stands in for."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

import noisescope as ns
from noisescope.probe import unfused_attention
from noisescope.testing import tiny_inputs, tiny_model

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def problem(dtype, *, batch=2, heads=4, kv=2, length=48, total=48, size=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = lambda h, t: torch.randn(batch, h, t, size, generator=generator).to(dtype)  # noqa: E731
    return shape(heads, length), shape(kv, total), shape(kv, total)


def relative(x, exact):
    return float((x.double() - exact).norm() / exact.norm())


CASES = {
    "causal": {"is_causal": True},
    "full": {},
    "bool mask": {"mask": "bool"},
    "float mask": {"mask": "float"},
    "scale": {"scale": 0.3, "is_causal": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_error_against_float64_is_that_of_the_fused_kernel(dtype, case):
    """Forward and gradients: at most 1.2 x the fused kernel's error, in every dtype."""
    errors = {"fused": [], "decomposed": []}
    for seed in range(4):
        q, k, v = problem(dtype, seed=seed)
        arguments = dict(case)
        kind = arguments.pop("mask", None)
        mask = None
        if kind:
            mask = torch.rand(2, 1, 48, 48, generator=torch.Generator().manual_seed(seed)) < 0.7
            mask |= torch.eye(48, dtype=torch.bool)
            if kind == "float":
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -3.0)

        def run(function, *tensors, mask=mask, arguments=arguments):
            leaves = [t.detach().requires_grad_() for t in tensors]
            m = mask if mask is None or mask.dtype == torch.bool else mask.to(tensors[0].dtype)
            out = function(*leaves, attn_mask=m, enable_gqa=True, **arguments)
            out.backward(torch.cos(torch.arange(out.numel()) % 97).to(out.dtype).reshape(out.shape))
            return [out.detach(), *(leaf.grad for leaf in leaves)]

        exact = run(F.scaled_dot_product_attention, q.double(), k.double(), v.double())
        for name, function in (
            ("fused", F.scaled_dot_product_attention),
            ("decomposed", unfused_attention.scaled_dot_product),
        ):
            errors[name].append([relative(a, b) for a, b in zip(run(function, q, k, v), exact, strict=True)])
    fused, decomposed = (torch.tensor(errors[name]).square().mean(0).sqrt() for name in ("fused", "decomposed"))
    assert (decomposed <= 1.2 * fused).all(), f"{decomposed / fused}"


def test_rows_that_may_look_nowhere_give_zero():
    """A fully masked row is 0, as in the fused kernel, not NaN."""
    q, k, v = problem(torch.float32, kv=4)
    mask = torch.ones(48, 48, dtype=torch.bool)
    mask[5] = False
    out = unfused_attention.scaled_dot_product(q, k, v, attn_mask=mask)
    assert torch.equal(out[:, :, 5], torch.zeros_like(out[:, :, 5]))
    assert torch.allclose(out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask), atol=1e-6)


def test_soft_cap_and_sinks_have_their_formula():
    """softcap tanh(s / c) c; a sink is one more column whose probability is dropped."""
    q, k, v = (x.double() for x in problem(torch.float32, kv=4, length=5, total=5))
    scores = q @ k.transpose(-1, -2) / math.sqrt(32)
    capped, _ = unfused_attention.attend(q, k, v, softcap=0.7)
    assert torch.allclose(capped, torch.softmax(torch.tanh(scores / 0.7) * 0.7, -1) @ v)
    sinks = torch.tensor([0.1, 1.0, -2.0, 3.0], dtype=torch.float64)
    out, _ = unfused_attention.attend(q, k, v, sinks=sinks)
    weights = scores.exp() / (scores.exp().sum(-1, keepdim=True) + sinks.exp().reshape(1, 4, 1, 1))
    assert torch.allclose(out, weights @ v)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral", "bert", "vit", "t5", "gpt2", "falcon"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_targeted_layer_computes_what_the_kernel_did(name, implementation, logits):
    """At scale 0 the opened model agrees with the closed one, masks, windows and biases included."""
    try:
        model = tiny_model(name, attn_implementation=implementation)
    except ValueError as error:  # transformers says so from 5.22 on: scores with soft caps have no fused kernel
        assert (name, implementation) == ("gemma2", "sdpa") and "does not support" in str(error)
        pytest.skip("this transformers has no such attention")
    inputs = tiny_inputs(name)
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][0, :3] = 0
    clean = logits(model, **inputs)
    with ns.inject(model, ns.Injection(ns.Gaussian(0.0), operators={"softmax"})) as tally:
        control = logits(model, **inputs)
    kept = slice(None) if "attention_mask" not in inputs else (1,)
    assert tally.forward > 0 and torch.allclose(clean[kept], control[kept], atol=1e-5)


class Watch(TorchFunctionMode):
    """Counts torch functions by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_other_layers_keep_their_kernel(llama, tokens, logits):
    """Only the targeted layer is opened: the fused kernel still runs in the others."""
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"softmax"}, layers={1})), Watch() as watch:
        logits(llama, tokens)
    assert watch.seen["scaled_dot_product_attention"] == 2 and watch.seen["softmax"] == 1


@pytest.fixture
def registered():
    """An attention implementation of a user's own: fused, and not made of torch functions we watch."""

    def mine(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = (query[..., :, None, :] * key[..., None, :, :]).sum(-1) * scaling
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(key.shape[2] - query.shape[2])
        scores = scores.masked_fill(~causal, -math.inf)
        weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
        return (weights[..., None] * value[..., None, :, :]).sum(-2).transpose(1, 2).contiguous(), None

    AttentionInterface.register("mine", mine)
    yield "mine"
    del AttentionInterface._global_mapping["mine"]


def test_any_registered_implementation_is_opened(registered, tokens, logits):
    """A custom kernel is replaced in the targeted layer alone, its result kept, and put back."""
    model = tiny_model("llama", layers=3, attn_implementation=registered)
    clean = logits(model, tokens)
    config = model.model.layers[1].self_attn.config
    with ns.inject(model, ns.Injection(ns.Gaussian(0.0), operators={"softmax"}, layers={1})) as tally:
        control = logits(model, tokens)
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"softmax"}, layers={1})):
        noisy = logits(model, tokens)
    assert tally.per_layer[1].forward == 1
    assert torch.allclose(clean, control, atol=1e-5) and not torch.allclose(clean, noisy, atol=1e-5)
    assert model.model.layers[1].self_attn.config is config and torch.equal(clean, logits(model, tokens))


def test_the_interface_form_takes_every_kind_of_mask():
    """None, padding [B, S], dense 4-D and a window give what the plain formula gives, with a cache too."""
    q, k, v = problem(torch.float32, length=3, total=7)
    module = torch.nn.Module()
    row, column = torch.arange(4, 7)[:, None], torch.arange(7)[None]
    causal = column <= row
    padding = torch.ones(2, 7, dtype=torch.bool)
    padding[0, :2] = False
    cases = [
        (None, None, causal[None, None]),
        (padding.long(), None, causal[None, None] & padding[:, None, None]),
        (causal[None, None], None, causal[None, None]),
        (None, 2, (causal & (column > row - 2))[None, None]),
    ]
    for mask, window, dense in cases:
        out, _ = unfused_attention.interface_attention(module, q, k, v, mask, sliding_window=window)
        want = unfused_attention.scaled_dot_product(q, k, v, attn_mask=dense)
        assert torch.allclose(out, want.transpose(1, 2), atol=1e-6)


def test_multihead_attention_by_plain_operators():
    """nn.MultiheadAttention is recomputed exactly in all its forms."""
    generator = torch.Generator().manual_seed(0)
    forms = [
        ({}, False),
        ({"batch_first": True}, False),
        ({"bias": False}, True),
        ({"kdim": 16, "vdim": 24}, True),
        ({"add_bias_kv": True, "add_zero_attn": True}, False),
    ]
    for options, cross in forms:
        module = torch.nn.MultiheadAttention(32, 4, **options).eval()
        x = torch.randn(5, 3, 32, generator=generator)
        key = torch.randn(7 if cross else 5, 3, options.get("kdim", 32), generator=generator) if cross else x
        value = torch.randn(7, 3, options.get("vdim", 32), generator=generator) if cross else x
        batch = 5 if options.get("batch_first") else 3
        total = key.shape[1] if options.get("batch_first") else key.shape[0]
        length = x.shape[1] if options.get("batch_first") else x.shape[0]
        padding = torch.zeros(batch, total, dtype=torch.bool)
        padding[0, -1] = True
        mask = torch.zeros(length, total, dtype=torch.bool).masked_fill_(torch.ones(length, total).triu(2).bool(), True)
        for extra in ({}, {"key_padding_mask": padding}, {"attn_mask": mask}, {"average_attn_weights": False}):
            want, weights = module(x, key, value, **extra)
            out, got = unfused_attention.multihead(module, x, key, value, **extra)
            assert torch.allclose(out, want, atol=1e-5) and torch.allclose(got, weights, atol=1e-5), (options, extra)
    single = torch.nn.MultiheadAttention(32, 4).eval()
    x = torch.randn(5, 32, generator=generator)
    assert torch.allclose(unfused_attention.multihead(single, x, x, x)[0], single(x, x, x)[0], atol=1e-5)
