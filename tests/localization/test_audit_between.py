"""What lies between operators, from the token ids to the logits: the host's code makes it again, bit for bit."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import transformers

import noisescope as ns
from noisescope.localization.audit import audit
from noisescope.testing import tiny_inputs, tiny_model


def first_of(verdict):
    assert verdict.verdict == "faulty", verdict.notes
    return verdict.suspects[0]


def quick(model, inputs=None):
    return audit(model, inputs, quick=True)


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


@pytest.mark.parametrize("layer", [0, 2])
def test_one_element_of_a_product_off_by_one_ulp(layer):
    """Nothing else of the forward is touched by it, in the first block as in another."""
    model = tiny_model("llama", layers=3)
    altered_product(model, layer, one_ulp)
    (suspect,) = quick(model).suspects
    assert str(suspect.site) == f"input of linear at block {layer} (model.layers.{layer}.mlp.down_proj)"
    assert "1 of 4096 elements differ" in suspect.evidence and suspect.rows == ((0, 3),)
    assert f"as LlamaMLP computes it after model.layers.{layer}.mlp.up_proj" in suspect.evidence


def dead_zone(y):
    """Small numbers of the first tensor are lost."""
    if isinstance(y, tuple):
        return (dead_zone(y[0]), *y[1:])
    if isinstance(y, dict):
        y = copy.copy(y)
        name = next(iter(y))
        y[name] = dead_zone(y[name])
        return y
    return torch.where(y.abs() < 0.1 * y.square().mean().sqrt(), 0.0, y)


HOOKS = {
    "model.embed_tokens": "input of residual at block 0 (model.layers.0)",
    "model.rotary_emb": "input of residual at block 0 (model.layers.0)",
    "model.layers.0": "input of residual at block 1 (model.layers.1)",
    "model.layers.1": "input of norm at final_norm (model.norm)",
    "model.layers.1.input_layernorm": "input of attention at block 1 (model.layers.1.self_attn)",
    "model.layers.1.self_attn": "input of norm at block 1 (model.layers.1.post_attention_layernorm)",
    "model.layers.1.mlp": "residual at block 1 (model.layers.1)",
    "model.layers.1.mlp.gate_proj": "input of silu at block 1 (model.layers.1.mlp.act_fn)",
    "model.norm": "input of residual at final_norm (model)",
    "model": "input of linear at lm_head (lm_head)",
    "lm_head": "input of residual at lm_head ()",
    "": "residual at lm_head ()",
}


@pytest.mark.parametrize("module", HOOKS)
def test_what_a_hook_changes_is_seen_behind_it(module):
    """A forward hook acts after its module, which is right: what the next call gets, or the caller, is not."""
    model = tiny_model("llama", layers=2)
    hook = model.get_submodule(module).register_forward_hook(lambda module, args, y: dead_zone(y))
    suspect = first_of(quick(model))
    assert str(suspect.site) == HOOKS[module]
    if module not in ("model.layers.1.self_attn", "model.layers.1.mlp"):  # there it is one term of a sum
        assert suspect.fault_class == "dead zone"
    hook.remove()
    assert quick(model).verdict == "healthy"


def test_the_call_that_gave_what_belongs_there_is_named():
    """The module is right, and whoever gets its output is as well: the way from one to the other is not."""
    model = tiny_model("llama", layers=3)
    model.model.layers[0].register_forward_hook(lambda module, args, y: 1.01 * y)
    suspect = first_of(quick(model))
    assert "expected: input of model.layers.1 as LlamaModel computes it, which is the output of model.layers.0" in (
        suspect.evidence
    )
    assert suspect.fault_class == "gain" and "in prefill 2 x 32 tokens" in suspect.evidence


def test_a_hook_before_a_module_is_no_code_of_its_parent():
    """What the module is given is not what the parent's code made."""
    model = tiny_model("llama", layers=2)
    model.model.layers[1].mlp.register_forward_pre_hook(lambda module, args: (1.01 * args[0],))
    (suspect,) = quick(model).suspects
    assert str(suspect.site) == "input of residual at block 1 (model.layers.1.mlp)"


def test_a_hook_before_the_model_changes_what_the_caller_gave():
    """No module's code shows it: all of them use the tokens that the model received."""
    model = tiny_model("llama", layers=2)

    def shortened(module, args, kwargs):
        kwargs["input_ids"][:, 16:] = 3
        return args, kwargs

    model.register_forward_pre_hook(shortened, with_kwargs=True)
    suspect = first_of(quick(model))
    assert str(suspect.site) == "input of residual at embed ()"
    assert "expected: input_ids of the model as its caller gave it" in suspect.evidence


def test_what_a_hook_before_the_model_adds_is_open():
    """The caller gave no positions, so nothing says what they should be."""
    model = tiny_model("bert", layers=2)
    ids = {"position_ids": torch.arange(32)[None] + 1}
    model.register_forward_pre_hook(lambda module, args, kwargs: (args, {**kwargs, **ids}), with_kwargs=True)
    verdict = quick(model)
    assert verdict.verdict == "undecided"
    assert any("position_ids comes from a hook on the model" in note for note in verdict.notes)


@pytest.mark.parametrize("removed", [{}, {"attention_mask": None}], ids=["left out", "None"])
def test_what_a_hook_before_the_model_removes_is_open(removed):
    """Without its mask a padded batch is another one, which the model then computes without a fault."""
    model = tiny_model("llama", layers=2)

    def hook(module, args, kwargs):
        return args, {name: x for name, x in kwargs.items() if name != "attention_mask"} | removed

    model.register_forward_pre_hook(hook, with_kwargs=True)
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    verdict = audit(model, {"input_ids": torch.arange(16).reshape(2, 8), "attention_mask": mask})
    assert verdict.verdict == "undecided"
    assert any("attention_mask was given by the caller, and a hook" in note for note in verdict.notes)


def test_positions_that_are_one_off_are_no_stale_data():
    model = tiny_model("llama", layers=2)
    model.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "position_ids": kwargs["position_ids"] + 1}), with_kwargs=True
    )
    suspect = first_of(quick(model))
    assert (suspect.site.place, suspect.site.tensor, suspect.fault_class) == ("rotary", "input", "position")


def test_what_comes_before_the_blocks_is_at_the_embedding():
    model = tiny_model("vit")
    model.vit.embeddings.patch_embeddings.register_forward_hook(lambda module, args, y: y.flip(1))
    assert str(first_of(quick(model)).site) == "input of residual at embed (vit.embeddings.dropout)"


def test_indices_that_are_wrong_in_every_run_are_no_noise():
    """Zeros of every shape have one hash."""
    model = tiny_model("bert")
    ones = {"token_type_ids": torch.ones(1, dtype=torch.long)}
    model.bert.embeddings.token_type_embeddings.register_forward_pre_hook(
        lambda module, args: (ones["token_type_ids"].expand_as(args[0]),)
    )
    assert first_of(audit(model)).fault_class == "unknown"


def test_logits_changed_after_the_head():
    """By code in the model's own forward."""
    model = tiny_model("llama", layers=2)
    right = model.forward

    def forward(*args, **kwargs):
        output = right(*args, **kwargs)
        output.logits = output.logits * 1.01
        return output

    model.forward = forward
    (suspect,) = quick(model).suspects
    assert (suspect.site.place, suspect.site.module, suspect.fault_class) == ("lm_head", "", "gain")
    assert "which is the output of lm_head" in suspect.evidence


def without_residual(self, x, **others):
    h = self.self_attn(self.input_layernorm(x), **others)[0]
    return h + self.mlp(self.post_attention_layernorm(h))


def without_mlp(self, x, **others):
    h = x + self.self_attn(self.input_layernorm(x), **others)[0]
    self.mlp(self.post_attention_layernorm(h))
    return h


def louder(self, x, **others):
    h = x + self.self_attn(self.input_layernorm(x), **others)[0]
    return 1.001 * h + self.mlp(self.post_attention_layernorm(h))


def other_order(self, x, **others):
    h = x + self.self_attn(self.input_layernorm(x), **others)[0]
    return h + self.mlp(self.input_layernorm(h))


@pytest.mark.parametrize(
    ("way", "site"),
    [
        (without_residual, "input of norm at block 1 (model.layers.1.post_attention_layernorm)"),
        (without_mlp, "residual at block 1 (model.layers.1)"),
        (louder, "residual at block 1 (model.layers.1)"),
    ],
)
def test_a_block_that_is_made_otherwise_is_named(way, site):
    """A lost or a scaled add, in one block."""
    model = tiny_model("llama", layers=3)
    block = model.model.layers[1]
    block.forward = types.MethodType(way, block)
    verdict = quick(model)
    assert {suspect.site.place for suspect in verdict.suspects} == {1}
    assert site in [str(suspect.site) for suspect in verdict.suspects]


def test_a_block_that_calls_another_norm_is_not_healthy():
    """The norm that the class's code calls was not called: there is nothing to compare it with."""
    model = tiny_model("llama", layers=3)
    block = model.model.layers[1]
    block.forward = types.MethodType(other_order, block)
    verdict = quick(model)
    assert verdict.verdict != "healthy"


def test_a_class_of_ones_own_is_what_the_model_is_meant_to_do():
    """The same code as a method of its class is no fault."""
    model = tiny_model("llama", layers=3)
    block = model.model.layers[1]
    block.__class__ = type("Louder", (type(block),), {"forward": louder})
    verdict = quick(model)
    assert verdict.verdict == "healthy" and not verdict.coverage.not_judged


def test_a_product_that_is_wrong_in_every_block_is_one_suspect():
    """No block is right, and none is needed to know how it should be."""
    model = tiny_model("llama", layers=3)
    for layer in range(3):
        altered_product(model, layer, lambda x: x * (1 + 2**-12))
    (suspect,) = quick(model).suspects
    assert str(suspect.site) == "input of linear at block 0 (model.layers.0.mlp.down_proj)"
    assert suspect.fault_class == "gain" and [site.place for site in suspect.also] == [1, 2]


def test_angles_that_leave_the_circle_are_named():
    """Cosines 2 % too large, for all blocks alike: the module that makes them, and no block."""
    model = tiny_model("llama", layers=2)
    right = model.model.rotary_emb.forward

    def forward(*args, **kwargs):
        cos, sin = right(*args, **kwargs)
        return 1.02 * cos, sin

    model.model.rotary_emb.forward = forward
    (suspect,) = quick(model).suspects
    assert (suspect.site.place, suspect.site.module) == ("rotary", "model.rotary_emb")


def test_noise_of_a_scope_inside_attention_is_seen():
    """An `inject` scope acts behind the probabilities that the audit hears, and before the product that gets them."""
    model = tiny_model("llama", layers=3, attn_implementation="eager")
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"softmax"}, layers={2})):
        suspect = first_of(quick(model))
    assert (suspect.site.place, suspect.site.operator, suspect.site.tensor) == (2, "matmul", "input")


def test_multihead_attention_is_judged_inside():
    """torch's own attention is one function: its products are judged by formula, and a hook on it is seen."""
    inputs = tiny_inputs("transformer_encoder")
    model = tiny_model("transformer_encoder")
    model.layers[1].self_attn.register_forward_hook(lambda module, args, y: (1.01 * y[0], *y[1:]))
    (suspect,) = quick(model, inputs).suspects
    assert "which is the output of layers.1.self_attn" in suspect.evidence

    class Projection(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            return 1.1 * y if func is torch.nn.functional.linear and args[1].shape[0] == 96 else y

    with Projection(), torch.autocast("cpu", dtype=torch.bfloat16):
        (suspect,) = quick(tiny_model("transformer_encoder"), inputs).suspects
    assert (suspect.site.operator, suspect.site.module, suspect.fault_class) == ("linear", "layers.0.self_attn", "gain")


def test_a_fault_at_an_operator_is_not_blamed_on_what_follows_it():
    """The next operator gets exactly what the faulty one gave."""
    model = tiny_model("llama", layers=4)
    with ns.faulty(model, "gain:0.05@2/linear/up_proj"):
        verdict = quick(model)
    assert [suspect.site.tensor for suspect in verdict.suspects] == ["output"]


def test_weights_that_change_between_forwards_are_told():
    """The host computes with what it finds, so only a look at the weights themselves can tell."""
    model = tiny_model("llama", layers=3)
    weight = model.model.layers[1].mlp.up_proj.weight

    def drift(module, args):
        with torch.no_grad():
            weight[3] += 0.5

    hook = model.register_forward_pre_hook(drift)
    verdict = quick(model)
    hook.remove()
    assert verdict.verdict == "undecided"
    assert [(site.place, site.tensor) for site in verdict.unseen] == [(1, "weight")]


def test_a_cache_that_is_given_does_not_grow():
    """Each forward gets its own copy, so that the repeated one has the same inputs."""
    from transformers import DynamicCache

    model, tokens = tiny_model("llama", layers=2), torch.arange(3, 19).reshape(2, 8)
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    verdict = quick(model, {"input_ids": tokens, "past_key_values": cache})
    assert verdict.verdict == "healthy" and cache.get_seq_length() == 8
    assert not any("same inputs twice" in note for note in verdict.notes)


class Packed(torch.Tensor):
    """A weight of another kind, as quantisers make them."""


class PackedLinear(torch.nn.Linear):
    def forward(self, x):
        return torch.round(x * 16) / 16 @ self.weight.as_subclass(torch.Tensor).T


@pytest.mark.parametrize("method", ["audit", "relations"])
def test_a_linear_with_a_weight_of_another_kind_is_no_alarm(method):
    """It rounds what it is given, by design: judged by its own code, never by laws of linear functions."""
    model = tiny_model("llama", layers=3)
    for layer in model.model.layers:
        linear = layer.mlp.down_proj
        linear.__class__ = PackedLinear
        linear.weight = torch.nn.Parameter(linear.weight.detach().as_subclass(Packed), requires_grad=False)
    verdict = ns.locate(model, method=method, quick=method == "audit")
    assert verdict.verdict == ("healthy" if method == "audit" else "undecided"), verdict.suspects


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
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    config = getattr(transformers, f"{stem}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2, **own)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return getattr(transformers, f"{stem}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("stem", "own", "dtype"),
    [
        ("Granite", {"residual_multiplier": 0.22}, torch.bfloat16),
        ("Olmo2", {}, torch.float32),
        ("Cohere", {}, torch.bfloat16),
    ],
    ids=str,
)
def test_other_ways_to_add_and_to_turn_are_known(stem, own, dtype):
    """Granite scales what it adds, OLMo2 and Cohere turn in float32: healthy ones are, and what is not is named."""
    model = family(stem, **own).to(dtype)
    assert quick(model).verdict == "healthy"
    with ns.faulty(model, "bias", 2):
        assert quick(model).suspects[0].site.place == 2


def test_noise_between_modules_is_called_noise():
    """The same numbers should come each time, and other ones do."""
    model, draw = tiny_model("llama", layers=3), torch.Generator().manual_seed(3)

    def noisy(_, args, output):
        y = output[0] if isinstance(output, tuple) else output
        y = y + 0.05 * torch.randn(y.shape, generator=draw)
        return (y, *output[1:]) if isinstance(output, tuple) else y

    model.model.layers[1].register_forward_hook(noisy)
    suspect = audit(model, quick=True).suspects[0]
    assert suspect.fault_class == "noise" and suspect.site.place in (1, 2)
