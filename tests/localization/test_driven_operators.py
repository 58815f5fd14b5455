"""16-bit norms, softmax and attention driven with made-up inputs: faults below one rounding, and healthy controls."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import noisescope as ns
from noisescope.localization.audit import audit
from noisescope.localization.driven_operators import drive, input_alone
from noisescope.testing import tiny_inputs, tiny_model

SDPA = torch._C._nn.scaled_dot_product_attention


def rms_in_its_dtype(module, x):
    return module.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon))


def layer_norm_in_its_dtype(module, x):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + module.eps) * module.weight + module.bias


def rms_with_a_short_root(module, x):
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).to(x.dtype)
    return module.weight * (wide * root.float()).to(x.dtype)


def one_newton_step(v):
    guess = (0x5F3759DF - (v.contiguous().view(torch.int32) >> 1)).view(torch.float32)
    return guess * (1.5 - 0.5 * v * guess * guess)


def cubic_exp(x):
    """2^n times a cubic on one octave."""
    scaled = (x * math.log2(math.e)).clamp(-120, 120)
    whole = scaled.floor()
    rest = (scaled - whole) * math.log(2)
    return torch.ldexp(1 + rest * (1 + rest * (1 / 2 + rest / 6)), whole.int())


def attention_by(exp):
    """Attention in float32 with another exponential."""

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        q, k, v = (t.float() for t in (query, key, value))
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
        seen = seen.tril() if is_causal else seen if attn_mask is None else attn_mask
        scores = scores.masked_fill(~seen, -math.inf)
        top = scores.amax(-1, keepdim=True).clamp_min(-1e30)
        weights = torch.where(seen, exp(scores - top), 0.0)
        return (weights @ v / weights.sum(-1, keepdim=True).clamp_min(1e-30)).to(query.dtype)

    return attend


def located(model):
    """The audit with one shape, which is enough for what is driven."""
    return audit(model, tokens=12, batch=2, decode=0)


class Instead(TorchFunctionMode):
    """Another function in the place of one, in all modules."""

    def __init__(self, function, other):
        super().__init__()
        self.function, self.other = function, other

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not self.function or args[0].dtype == torch.float64:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self.other(*args, **(kwargs or {}))


@contextlib.contextmanager
def forward(module, function):
    def own(x):
        with torch._C.DisableTorchFunction():
            return function(module, x)

    module.forward = own
    try:
        yield
    finally:
        del module.forward


NORMS = [
    ("llama", torch.bfloat16, "model.layers.1.input_layernorm", rms_in_its_dtype, "accumulation"),
    ("qwen3", torch.bfloat16, "model.layers.0.self_attn.q_norm", rms_in_its_dtype, "accumulation"),
    ("mixtral", torch.float16, "model.layers.0.post_attention_layernorm", rms_in_its_dtype, "accumulation"),
    ("phi3", torch.bfloat16, "model.norm", rms_with_a_short_root, "accumulation"),
    ("gpt_neox", torch.bfloat16, "gpt_neox.layers.1.input_layernorm", layer_norm_in_its_dtype, None),
]


@pytest.mark.parametrize(("name", "dtype", "path", "function", "kind"), NORMS)
def test_a_norm_that_never_goes_to_float32_is_named(name, dtype, path, function, kind):
    model = tiny_model(name, initializer_range=0.15, biases=0.1).to(dtype)
    with forward(model.get_submodule(path), function):
        verdict = located(model)
    first = verdict.suspects[0]
    assert verdict.verdict == "faulty" and len(verdict.suspects) == 1
    assert (first.site.operator, first.site.module) == ("norm", path)
    assert kind is None or (first.fault_class == kind and "synthetic rows" in first.evidence)


@pytest.mark.parametrize("how", ["mode", "patched"])
def test_a_poor_reciprocal_root_is_named_in_all_norms(monkeypatch, how):
    """Where torch.rsqrt itself was replaced, the host does not use the replacement."""
    model = tiny_model("qwen2").bfloat16()
    original = torch.rsqrt
    scope = contextlib.nullcontext() if how == "patched" else Instead(original, one_newton_step)
    if how == "patched":
        monkeypatch.setattr(torch, "rsqrt", lambda v: one_newton_step(v) if v.dtype == torch.float32 else original(v))
    with scope:
        verdict = located(model)
    first = verdict.suspects[0]
    assert (first.site.operator, first.fault_class) == ("norm", "function table")
    assert len({first.site.module, *(site.module for site in first.also)}) >= 4


@pytest.mark.parametrize(("name", "how"), [("llama", "mode"), ("bert", "mode"), ("gpt2", "patched")])
def test_a_cubic_exponential_in_fused_attention_is_named(monkeypatch, name, how):
    model = tiny_model(name).bfloat16()
    scope = contextlib.nullcontext() if how == "patched" else Instead(SDPA, attention_by(cubic_exp))
    if how == "patched":
        monkeypatch.setattr(F, "scaled_dot_product_attention", attention_by(cubic_exp))
    with scope:
        verdict = located(model)
    first = verdict.suspects[0]
    assert (first.site.operator, first.fault_class) == ("attention", "function table"), first
    assert "exp is inaccurate" in first.evidence


def test_a_poor_exponential_in_softmax_is_named():
    """Of a router, whose softmax is a function of its own."""
    model = tiny_model("llama", attn_implementation="eager").bfloat16()

    def softmax(x, dim=-1, dtype=None, **other):
        exp = cubic_exp(x.float() - x.float().amax(dim, keepdim=True))
        return (exp / exp.sum(dim, keepdim=True)).to(dtype or x.dtype)

    with Instead(F.softmax, softmax):
        verdict = located(model)
    assert verdict.suspects[0].site.operator == "softmax"


def test_another_healthy_attention_kernel_is_healthy():
    model = tiny_model("mistral").bfloat16()
    with Instead(SDPA, attention_by(torch.exp)):
        verdict = located(model)
    assert verdict.verdict == "healthy", verdict.suspects


class ShortNorm(nn.Module):
    """A norm whose own code computes in the dtype of its input."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))
        self.eps = 1e-6

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class ShortFactorNorm(nn.Module):
    """Only the row's factor is rounded, which random rounding in float32 does not move."""

    def __init__(self, width):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


@pytest.mark.parametrize("own", [ShortNorm, ShortFactorNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_class_that_computes_in_16_bits_by_itself_is_healthy(own, dtype):
    """What the class's code gives on the host, also under random rounding, is allowed; a worse root still shows."""
    model = tiny_model("llama", hidden_size=128)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        for layer in model.model.layers:
            layer.input_layernorm = own(128)
    model = model.to(dtype)
    verdict = located(model)
    assert not verdict.suspects, verdict.suspects

    def poor(module, x):
        return 1.02 * own.forward(module, x)

    with forward(model.model.layers[1].input_layernorm, poor):
        assert located(model).suspects[0].site.module == "model.layers.1.input_layernorm"


def calls_of(model):
    inputs = tiny_inputs("llama")
    with torch.no_grad():
        return drive(model, ns.dissect(model), lambda: model(**inputs), seed=0)


def test_what_raises_for_other_inputs_is_not_tried():
    model = tiny_model("llama").bfloat16()
    norm = model.model.layers[0].input_layernorm
    own, length = norm.forward, tiny_inputs("llama")["input_ids"].shape[1]

    def picky(x):
        if x.shape[-2] != length:
            raise ValueError("another length")
        return own(x)

    norm.forward = picky
    driven = {call.site.module for call in calls_of(model).norms}
    assert "model.layers.0.input_layernorm" not in driven and "model.layers.1.input_layernorm" in driven


def test_every_norm_and_attention_call_is_driven_once_and_float32_is_not():
    short, wide = (calls_of(tiny_model("llama").to(dtype)) for dtype in (torch.bfloat16, torch.float32))
    assert len(short.norms) == 5 and len({call.site for call in short.norms}) == 5
    assert {call.given for call in short.weights} == {torch.bfloat16, torch.float32}
    assert len(short.weights) == 4  # two layers
    assert not wide.norms and not wide.weights


def test_quick_leaves_it_out():
    model = tiny_model("llama").bfloat16()
    with forward(model.model.layers[1].input_layernorm, rms_in_its_dtype):
        assert not any("made-up" in suspect.evidence for suspect in audit(model, quick=True).suspects)


def test_all_rows_of_a_table_are_looked_up_and_some_of_a_large_one():
    generator = torch.Generator()
    assert input_alone(nn.Embedding(6000, 8), ("embedding",), generator).flatten().tolist() == list(range(6000))
    assert input_alone(nn.Embedding(6000, 4096), ("embedding",), generator).numel() == 4096


class RoundedGainNorm(nn.Module):
    """1 + weight in the dtype of the weight: a gain that is rounded for all rows alike."""

    def __init__(self, width, seed):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x):
        return F.layer_norm(x, x.shape[-1:], 1 + self.weight)


def test_a_gain_that_the_code_rounds_is_healthy():
    model = tiny_model("llama", layers=6)
    for seed, layer in enumerate(model.model.layers):
        layer.input_layernorm = RoundedGainNorm(32, seed)
    model = model.bfloat16()
    assert not located(model).suspects
    norm = model.model.layers[1].input_layernorm
    with forward(norm, lambda module, x: 1.01 * RoundedGainNorm.forward(module, x)):
        assert located(model).suspects[0].site.module == "model.layers.1.input_layernorm"
