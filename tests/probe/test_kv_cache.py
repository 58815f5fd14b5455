"""Number formats on keys and values: against attention patched by hand, with and without a cache."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noisescope as ns
from noisescope.errors import InvalidInput, NothingInjected, UnsupportedModel
from noisescope.injection import Injection
from noisescope.probe.formats import Format, quantise
from noisescope.testing import tiny_model

TOKENS = torch.arange(24).reshape(2, 12) % 90
INT4 = Format("int4", "token")


def logits_by_hand(model, monkeypatch, fmt, layers=None, names=("keys", "values")):
    """Logits with the arguments of every fused attention call rounded, layer by layer in order of calls."""
    fused, calls = F.scaled_dot_product_attention, []

    def rounded(query, key, value, *args, **kwargs):
        calls.append(None)
        if layers is None or len(calls) - 1 in layers:
            key = quantise(key, fmt) if "keys" in names else key
            value = quantise(value, fmt) if "values" in names else value
        return fused(query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(F, "scaled_dot_product_attention", rounded)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", rounded)
        return model(TOKENS, use_cache=False).logits


def logits_of(model, fmt, **where):
    where.setdefault("operators", {"kv_cache"})
    with ns.inject(model, Injection(fmt, phases={"forward"}, **where)) as tally, torch.no_grad():
        found = model(TOKENS, use_cache=False).logits
    return found, tally


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("names", [("keys",), ("values",), ("keys", "values")])
def test_rounded_keys_and_values_are_those_rounded_by_hand(name, names, monkeypatch):
    model = tiny_model(name)
    found, tally = logits_of(model, INT4, operators=set(names), layers={1})
    assert torch.equal(found, logits_by_hand(model, monkeypatch, INT4, {1}, names))
    with torch.no_grad():
        assert not torch.equal(found, model(TOKENS, use_cache=False).logits)
    assert tally.forward == len(names) and set(tally.per_operator) == set(names)


def test_eager_attention_rounds_the_same(monkeypatch):
    """Written as two products, keys come transposed; the result is that of the fused path up to round-off."""
    model, eager = tiny_model("llama"), tiny_model("llama")
    eager.load_state_dict(model.state_dict())
    eager.set_attn_implementation("eager")
    by_hand = logits_by_hand(model, monkeypatch, INT4)
    torch.testing.assert_close(logits_of(eager, INT4)[0], by_hand, rtol=1e-4, atol=1e-5)


def test_what_a_cache_gives_back_is_rounded_as_in_prefill():
    """Token by token with a cache, every stored key and value is rounded as in one forward over all tokens."""
    model, ids = tiny_model("llama"), TOKENS[:1]
    with ns.inject(model, Injection(INT4, operators={"kv_cache"}, phases={"forward"})), torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache, steps = None, []
        for at in range(ids.shape[1]):
            out = model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)


def test_an_injection_into_everything_leaves_keys_and_values_alone():
    model = tiny_model("llama")
    with ns.inject(model, Injection(INT4, phases={"forward"})) as tally, torch.no_grad():
        model(TOKENS)
    assert not {"keys", "values"} & set(tally.per_operator)


def test_keys_take_number_formats_alone():
    with pytest.raises(InvalidInput, match="number format"):
        ns.inject(tiny_model("llama"), Injection(ns.Gaussian(0.05), operators={"keys"}))
    with pytest.raises(InvalidInput, match="have no input"):
        ns.inject(tiny_model("llama"), Injection(INT4, operators={"keys"}, tensor="input"))


def test_a_compressed_cache_is_refused_by_name():
    model = tiny_model("llama")
    attention = next(m for name, m in model.named_modules() if name.endswith("layers.1.self_attn"))
    attention.kv_lora_rank = 8
    with pytest.raises(UnsupportedModel, match=r"layers.1.self_attn .* caches a compressed latent"):
        ns.inject(model, Injection(INT4, operators={"kv_cache"}))


def test_a_model_without_attention_has_no_keys():
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    with pytest.raises(NothingInjected, match="'kv_cache' does not exist"):
        ns.inject(Mixer(), Injection(INT4, operators={"kv_cache"}))
