"""Weights that differ are grouped by what explains them."""

from __future__ import annotations

import pytest
import torch

from noisescope.engines.state import Mended, find_state, lacking_layers


def names(a, b):
    return [cause.name for cause in find_state(a, b)[0]]


def test_kinds_of_difference(tiny):
    """One tensor damaged, the head stale, tensors of another shape or name: each its own cause, or a note."""
    a, b = tiny(), tiny()
    weight = b.model.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[3] = 0
        b.model.lm_head.weight += 0.1 * torch.randn(b.model.lm_head.weight.shape, generator=torch.Generator())
    causes, notes = find_state(a, b)
    assert [cause.name for cause in causes] == ["damaged weight", "stale weights"] and not notes
    assert "has 1 rows of zeros (3), unlike the reference" in causes[0].words and causes[0].layers == (1,)
    assert "outside the blocks" in causes[1].words
    b.model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(weight[:8].detach().clone())
    b.model.register_buffer("more", torch.ones(1))
    notes = find_state(a, b)[1]
    assert any("is (64, 32) in a and (8, 32) in b: not compared" in note for note in notes)
    assert any("a lacks 1 tensors, which were not compared (more)" in note for note in notes)


def test_a_table_that_is_no_power_of_one_base_has_no_base_in_words(tiny):
    a, b = tiny(), tiny()
    b.model.model.rotary_emb.inv_freq.add_(0.5)
    (cause,) = find_state(a, b)[0]
    assert cause.words == "model.rotary_emb.inv_freq differs"


def test_scaled_rotary_frequencies_have_their_factor_in_words(tiny):
    a, b = tiny(), tiny()
    b.model.model.rotary_emb.inv_freq.div_(4)
    assert "b's is a's times 0.25" in find_state(a, b)[0][0].words


def test_weights_exchanged_within_a_layer_are_named(tiny):
    a, b = tiny(), tiny()
    mlp = b.model.model.layers[1].mlp
    mlp.gate_proj.weight, mlp.up_proj.weight = mlp.up_proj.weight, mlp.gate_proj.weight
    (cause,) = find_state(a, b)[0]
    gate, up = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))
    assert cause.words == f"{gate}, {up} hold the numbers of {up}, {gate}"


@pytest.mark.parametrize("tied", [0, 1])
def test_a_head_that_is_tied_on_one_side(tiny, prompts, tied):
    """The tied side's embedding stays as it is; both compute the same afterwards."""
    pair = [tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=True)]
    assert find_state(*pair) == ((), ())
    head = pair[1 - tied].model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach() + 0.1 * torch.randn(head.weight.shape))
    (cause,), notes = find_state(*pair)
    assert cause.tensors == ("lm_head.weight",) and not notes
    assert ("holds the numbers of model.embed_tokens.weight" if tied else "different numbers") in cause.words
    mended = Mended()
    mended.mend(*pair, cause)
    assert torch.equal(*(one.logits(prompts[0]) for one in pair))
    mended.restore()
    assert find_state(*pair)[0] == (cause,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_wider_side_is_the_one_that_is_written(tiny, dtype):
    """Both directions: the narrow side holds rounded numbers, which the wide side can hold."""
    for narrow, wide in ((0, 1), (1, 0)):
        pair = [tiny(), tiny()]
        pair[narrow].model.to(dtype)
        kept = [{name: x.clone() for name, x in one.tensors()} for one in pair]
        causes, _ = find_state(*pair)
        assert {cause.name for cause in causes} == {"cast"}
        mended = Mended()
        for cause in causes:
            mended.mend(pair[0], pair[1], cause)
        weights = [dict(one.tensors())["lm_head.weight"] for one in pair]
        assert torch.equal(weights[wide], weights[narrow].float())
        assert torch.equal(weights[narrow], kept[narrow]["lm_head.weight"])
        mended.restore()
        for one, before in zip(pair, kept, strict=True):
            assert all(torch.equal(x, before[name]) for name, x in one.tensors())


def test_the_sign_of_a_zero_is_no_damage(tiny):
    """vLLM packs weights, and reading them back by unit vectors loses it."""
    a, b = tiny(), tiny()
    for engine, zero in ((a, -0.0), (b, 0.0)):
        engine.model.model.layers[0].mlp.down_proj.weight.data[0, :4] = zero
    assert not find_state(a, b)[0]
    b.model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 1e-3
    assert [cause.name for cause in find_state(a, b)[0]] == ["damaged weight"]


def eight_bits(weight):
    step = weight.abs().amax(1, keepdim=True) / 127
    return (weight / step).round() * step


def fp8(weight):
    step = weight.abs().max() / 448
    return (weight / step).to(torch.float8_e4m3fn).float() * step


@pytest.mark.parametrize("through", [eight_bits, fp8])
def test_one_quantised_matrix_is_not_stale(tiny, through):
    """A row has hardly more elements than int8 has levels, so their number alone does not show it."""
    a, b = tiny(), tiny()
    with torch.no_grad():
        weight = b.model.model.layers[1].mlp.down_proj.weight
        weight.copy_(through(weight))
    (cause,) = find_state(a, b)[0]
    assert cause.name == "quantised weights" and cause.words.startswith("1 tensor of layer 1 holds different numbers")


def test_a_stale_layer_includes_norms_that_changed_in_few_elements(tiny):
    a, b = tiny(), tiny()
    with torch.no_grad():
        layer = b.model.model.layers[1]
        for module in layer.mlp.children():
            for parameter in module.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        layer.input_layernorm.weight[3] += 0.01
    (cause,) = find_state(a, b)[0]
    assert cause.name == "stale layer" and "model.layers.1.input_layernorm.weight" in cause.tensors


def test_a_tied_head_is_not_named_again(tiny):
    a, b = tiny(tie_word_embeddings=True), tiny(tie_word_embeddings=True)
    with torch.no_grad():
        b.model.model.embed_tokens.weight[5] *= 1.5
    (cause,) = find_state(a, b)[0]
    assert cause.tensors == ("model.embed_tokens.weight",)


def test_a_config_value_joins_the_modules_it_was_given_to(tiny):
    a, b = tiny(), tiny(rms_norm_eps=1e-3)
    (cause,) = find_state(a, b)[0]
    assert cause.name == "setting variance_epsilon" and cause.settings[0] == "config.rms_norm_eps"


def test_layers_that_one_side_lacks(tiny):
    a, b = tiny(), tiny()
    del b.model.model.layers[2]
    assert list(lacking_layers(a, b)) == ["b has 2 layers and the other side 3: it lacks 1 (2)"]
    assert list(lacking_layers(b, a)) == ["a has 2 layers and the other side 3: it lacks 1 (2)"]
