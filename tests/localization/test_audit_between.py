"""What lies between operators is found by form, and looked at bit for bit."""

from __future__ import annotations

import types

import pytest
import torch
import transformers

import noisescope as ns
from noisescope.localization.audit import _angles, audit
from noisescope.localization.data_flow_checks import DataFlowChecks, words
from noisescope.model.anatomy import Unit
from noisescope.sites import Site
from noisescope.testing import tiny_model


def first_of(verdict):
    assert verdict.verdict == "faulty", verdict.notes
    return verdict.suspects[0]


def altered_product(model, layer, change):
    """The block multiplies gate and up in its own way."""

    def forward(self, x):
        return self.down_proj(change(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))

    mlp = model.model.layers[layer].mlp
    mlp.forward = types.MethodType(forward, mlp)


def one_ulp(x):
    x = x.clone()
    x[0, 3, 5] = torch.nextafter(x[0, 3, 5], torch.tensor(torch.inf, dtype=x.dtype))
    return x


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi3", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_input_of_healthy_models_is_explained(kind, dtype):
    """Copies, parts of fused projections, products, rotations and norms of heads: nothing is left over."""
    verdict = audit(tiny_model(kind, layers=3).to(dtype))
    assert verdict.verdict == "healthy"
    assert verdict.smallest_visible["between operators"]["sites"] >= 3 * 8
    assert not [note for note in verdict.notes if "between operators" in note]


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_one_element_of_a_product_off_by_one_ulp(layer):
    """Also where the first block is the faulty one, whose form is known only afterwards."""
    model = tiny_model("llama", layers=4)
    altered_product(model, layer, one_ulp)
    suspect = first_of(audit(model))
    assert (suspect.site.place, suspect.site.operator, suspect.site.tensor) == (layer, "linear", "input")
    assert suspect.site.module.endswith("mlp.down_proj")
    assert "mlp.act_fn x mlp.up_proj" in suspect.evidence


def test_angles_of_one_block_are_wrong():
    """Queries and keys of a block that turns them otherwise are named, and nothing behind them."""
    model = tiny_model("llama", layers=4)
    attention = model.model.layers[1].self_attn
    original = attention.forward

    def forward(hidden_states, position_embeddings, **others):
        cos, sin = position_embeddings
        return original(hidden_states=hidden_states, position_embeddings=(cos * 1.001, sin), **others)

    attention.forward = forward
    verdict = audit(model)
    assert {(s.site.place, s.site.module, s.site.tensor) for s in verdict.suspects} == {
        (1, "model.layers.1.self_attn", "input")
    }
    # query and key, not value, of the fused call; and the query again where attention was taken apart
    assert [(s.site.operator, s.site.occurrence) for s in verdict.suspects] == [("attention", 0), ("matmul", 0)]
    fused = verdict.suspects[0].evidence
    assert "self_attn query" in fused and "self_attn key" in fused and "self_attn value" not in fused


def test_noise_of_a_scope_inside_attention_is_seen():
    """An `inject` scope acts behind the probabilities that the audit hears, and before the product that gets them."""
    model = tiny_model("llama", layers=4)
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"softmax"}, layers={2})):
        suspect = first_of(audit(model))
    assert (suspect.site.place, suspect.site.operator, suspect.site.tensor) == (2, "matmul", "input")


def test_what_a_hook_changes_is_seen_behind_it():
    """A forward hook acts after its operator: the operator is right, what the next one gets is not."""
    model = tiny_model("llama", layers=4)
    with torch.no_grad():
        hook = model.model.layers[2].mlp.gate_proj.register_forward_hook(lambda module, args, y: y * 1.01)
        suspect = first_of(audit(model))
        hook.remove()
    assert suspect.site.module == "model.layers.2.mlp.act_fn"
    assert (suspect.site.tensor, suspect.fault_class) == ("input", "gain")
    assert audit(model).verdict == "healthy"


def test_a_product_that_is_wrong_in_every_block_is_no_healthy_one():
    """No block shows the right form bit for bit, so that nobody can be blamed, but the verdict is not healthy."""
    model = tiny_model("llama", layers=3)
    for layer in range(3):
        altered_product(model, layer, lambda x: x * (1 + 2**-12))
    verdict = audit(model)
    assert verdict.verdict == "undecided"
    assert any("nearly mlp.act_fn x mlp.up_proj" in note for note in verdict.notes)
    assert any(site.tensor == "input" for site in verdict.unseen)


def test_a_model_that_scales_its_queries_is_only_noted():
    """OPT scales queries before attention: not judged, reported so, and no reason for doubt."""
    verdict = audit(tiny_model("opt", layers=3))
    assert verdict.verdict == "healthy"
    assert any("what lies before self_attn query" in note for note in verdict.notes)


def heads(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def seen(*, wrong=()):
    """Four blocks with a projection of two kv heads that are rotated in pairs and repeated three times."""
    data_flow = DataFlowChecks()
    angles = torch.linspace(0, 2, 5 * 4).reshape(1, 5, 4).repeat_interleave(2, -1)
    for index in range(4):
        x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(index))
        site = Site("attention", index, f"layers.{index}.attn", "attention", "input")
        data_flow.begin_block()
        data_flow.gave("k_proj", x)
        key = heads(x, 2)
        across = torch.stack([-key[..., 1::2], key[..., ::2]], -1).flatten(-2)
        key = key * angles.cos()[:, None] + across * angles.sin()[:, None]
        key = key.repeat_interleave(3, 1).clone()
        if index in wrong:
            key[1, 4, 2, 6] += 1
        data_flow.got("attn key", site, index, key, heads=True)
        unit = Unit(f"layers.{index}", "module", index, "", ("residual",))
        data_flow.end_block(unit, x, (angles.cos(), angles.sin()))
    return data_flow


def test_pairs_turned_and_heads_repeated():
    """The other style of rotation, and keys repeated for groups of queries."""
    data_flow = seen()
    assert data_flow.forms == {"attn key": {("heads", ("k_proj", 0), "pairs", 3): {0, 1, 2, 3}}}
    assert words(next(iter(data_flow.forms["attn key"]))) == "k_proj, rotated by its position, each head 3 times"
    assert not data_flow.unexplained() and not list(data_flow.failures())


def test_most_blocks_decide_here_too():
    """One wrong block is a failure, three of four are no form."""
    assert [block.unit.place for block, *_ in seen(wrong={2}).failures()] == [2]
    assert not list(seen(wrong={0, 1, 2}).failures())


def test_a_fault_at_an_operator_is_not_blamed_on_what_follows_it():
    """The next operator gets exactly what the faulty one gave."""
    model = tiny_model("llama", layers=4)
    with ns.faulty(model, "gain:0.05@2/linear/up_proj"):
        verdict = audit(model)
    assert [suspect.site.tensor for suspect in verdict.suspects] == ["output"]


def altered_block(layer):
    """Ways in which one block of a Llama is made otherwise than the rest."""

    def without_residual(self, x, **others):
        h = x + self.self_attn(self.input_layernorm(x), **others)[0]
        return self.mlp(self.post_attention_layernorm(h))

    def without_mlp(self, x, **others):
        h = x + self.self_attn(self.input_layernorm(x), **others)[0]
        self.mlp(self.post_attention_layernorm(h))
        return h

    def louder(self, x, **others):
        h = x + self.self_attn(self.input_layernorm(x), **others)[0]
        return h + 1.02 * self.mlp(self.post_attention_layernorm(h))

    return {"without_residual": without_residual, "without_mlp": without_mlp, "louder": louder}[layer]


@pytest.mark.parametrize("way", ["without_residual", "without_mlp", "louder"])
@pytest.mark.parametrize("method", ["audit", "auto"])
def test_a_block_that_is_made_otherwise_is_not_healthy(way, method):
    """A lost add is a sum too, of fewer terms: a block that goes its own way is blamed, or left open."""
    model = tiny_model("llama", layers=5)
    block = model.model.layers[2]
    block.forward = types.MethodType(altered_block(way), block)
    verdict = ns.locate(model, method=method)
    assert verdict.verdict != "healthy"
    named = [site.place for site in verdict.unseen] + [suspect.site.place for suspect in verdict.suspects]
    assert 2 in named


def test_a_rotation_left_out_in_one_block_is_not_healthy():
    """Queries as they came from their projection are no failure of a copy, but no other block has them so."""
    model = tiny_model("llama", layers=5)
    attention = model.model.layers[3].self_attn
    original = attention.forward

    def forward(hidden_states, position_embeddings, **others):
        cos, sin = position_embeddings
        still = (torch.ones_like(cos), torch.zeros_like(sin))
        return original(hidden_states=hidden_states, position_embeddings=still, **others)

    attention.forward = forward
    verdict = audit(model)
    assert verdict.verdict == "undecided"
    assert {site.place for site in verdict.unseen} == {3}


def test_a_pattern_of_two_kinds_of_blocks_is_healthy():
    """Every other block without rotation, by design: two forms, each in several blocks, are no reason for doubt."""
    model = tiny_model("llama", layers=6)
    for layer in model.model.layers[::2]:
        original = layer.self_attn.forward

        def forward(hidden_states, position_embeddings, original=original, **others):
            cos, sin = position_embeddings
            still = (torch.ones_like(cos), torch.zeros_like(sin))
            return original(hidden_states=hidden_states, position_embeddings=still, **others)

        layer.self_attn.forward = forward
    assert audit(model).verdict == "healthy"


def test_auto_does_not_acquit_what_lies_between_operators():
    """Laws of modules may well hold there, for the modules are right: the verdict is never healthy."""
    model = tiny_model("llama", layers=3)
    for layer in range(3):
        altered_product(model, layer, lambda x: x * (1 + 2**-12))
    verdict = ns.locate(model)
    assert verdict.verdict != "healthy"
    assert any(site.tensor == "input" for site in verdict.unseen)


def test_weights_that_change_between_forwards_are_told():
    """The host computes with what it finds, so only a look at the weights themselves can tell."""
    model = tiny_model("llama", layers=3)
    weight = model.model.layers[1].mlp.up_proj.weight

    def drift(module, args):
        with torch.no_grad():
            weight[3] += 0.5

    hook = model.register_forward_pre_hook(drift)
    verdict = audit(model)
    hook.remove()
    assert verdict.verdict == "undecided"
    assert [(site.place, site.tensor) for site in verdict.unseen] == [(1, "weight")]


def test_angles_that_leave_the_circle_are_told():
    """Cosines 2 % too large turn no vector: wrong for all blocks alike, so that no block differs from another."""
    model = tiny_model("llama", layers=3)
    original = model.model.rotary_emb.forward

    def forward(*args, **kwargs):
        cos, sin = original(*args, **kwargs)
        return 1.02 * cos, sin

    model.model.rotary_emb.forward = forward
    verdict = audit(model)
    assert verdict.verdict == "undecided"
    assert any("one circle" in note for note in verdict.notes)


def test_a_cache_that_is_given_does_not_grow():
    """Each forward gets its own copy, so that the repeated one has the same inputs."""
    from transformers import DynamicCache

    model, tokens = tiny_model("llama", layers=2), torch.arange(3, 19).reshape(2, 8)
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    verdict = audit(model, {"input_ids": tokens, "past_key_values": cache})
    assert verdict.verdict == "healthy" and cache.get_seq_length() == 8
    assert not any("same inputs twice" in note for note in verdict.notes)


def test_other_things_called_position_embeddings_are_left_alone():
    """Some models hand their blocks learned positions, angles for each axis or complex numbers under that name."""
    x, cos, sin = torch.zeros(2, 5, 16), torch.ones(1, 5, 8), torch.zeros(1, 5, 8)
    assert _angles((cos, sin), x) is not None
    others = [None, cos, cos + 1j * sin, (cos,), (cos[None], sin[None]), (cos[:, :3], sin[:, :3]), (cos + 0j, sin + 0j)]
    assert [_angles(other, x) for other in others] == [None] * len(others)
    assert _angles((cos, sin), x[0]) is None


class Packed(torch.Tensor):
    """A weight of another kind, as quantisers make them."""


@pytest.mark.parametrize("method", ["audit", "relations", "auto"])
def test_a_linear_with_a_weight_of_another_kind_is_left_open(method):
    """It rounds what it is given, by design: neither recomputed nor judged by laws of linear functions."""
    model = tiny_model("llama", layers=3)
    for layer in model.model.layers:
        linear = layer.mlp.down_proj
        plain = linear.weight.detach().clone()
        linear.weight = torch.nn.Parameter(plain.as_subclass(Packed), requires_grad=False)
        linear.forward = lambda x, plain=plain: torch.round(x * 16) / 16 @ plain.T
    verdict = ns.locate(model, method=method)
    assert verdict.verdict != "faulty", verdict.suspects
    assert any("Packed" in note or "kind" in note for note in verdict.notes)


def test_a_linear_that_is_given_two_tensors_is_no_linear():
    """An adapter that gets its base's result as well can't be called again with another input alone."""
    model = tiny_model("llama", layers=3)
    linear = model.model.layers[1].mlp.down_proj
    mlp, original = model.model.layers[1].mlp, linear.forward
    linear.forward = lambda x, base: original(x) + 0.5 * base
    mlp.forward = lambda x: linear(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x), x.square())
    verdict = ns.locate(model, method="relations")
    assert verdict.verdict != "faulty", verdict.suspects
    assert any("more than one tensor" in note for note in verdict.notes)


def family(stem: str, **own: float) -> torch.nn.Module:
    """A small random model of an architecture that is not among the tiny ones."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    config = getattr(transformers, f"{stem}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2, **own)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return getattr(transformers, f"{stem}ForCausalLM")(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("stem", "own"), [("Granite", {"residual_multiplier": 0.22}), ("Olmo2", {}), ("Cohere", {})])
def test_other_ways_to_add_and_to_turn_are_known(stem, own, dtype):
    """Granite scales what it adds, OLMo2 and Cohere turn in float32: healthy ones are, and what is not is named."""
    model = family(stem, **own).to(dtype)
    assert ns.locate(model, method="audit").verdict == "healthy"
    with ns.faulty(model, "bias", 2):
        assert ns.locate(model, method="audit").suspects[0].site.place == 2
