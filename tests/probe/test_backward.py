"""Backward noise: on the gradients of inputs and weights, in the layer whose forward made them."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import noisescope as ns
from noisescope.errors import NoiseRoundsAway, UnsupportedModel
from noisescope.testing import tiny_model

PER_BLOCK = 14  # 7 linears, 2 products, softmax, silu, 2 norms, residual


def train_step(model, tokens, times: int = 1) -> dict[str, torch.Tensor]:
    """Gradients after some accumulated steps."""
    for _ in range(times):
        model(tokens, labels=tokens).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_backward_noise_stays_in_its_layer(tokens, layer):
    """Aimed at one block, backward noise is tallied there, and leaves the gradients of later blocks bit-equal."""
    runs = []
    for scale in (0.0, 0.05):  # scale 0: the same decomposed attention, no noise
        model = tiny_model("llama", layers=3)
        with ns.inject(model, ns.Injection(ns.Gaussian(scale), layers={layer}, phases={"backward"})) as tally:
            runs.append(train_step(model, tokens))
    clean, noisy = runs
    assert {p: (c.forward, c.backward) for p, c in tally.per_layer.items()} == {layer: (0, PER_BLOCK)}
    for name in clean:
        above = name.startswith("lm_head") or any(name.startswith(f"model.layers.{i}.") for i in range(layer + 1, 3))
        below = any(name.startswith(f"model.layers.{i}.") for i in range(layer + 1))
        if above:
            assert torch.equal(clean[name], noisy[name]), name
        if below:
            assert not torch.equal(clean[name], noisy[name]), name


def test_backward_noise_has_the_asked_size_on_weights_and_inputs(tokens):
    """The gradient of a linear's weight is g (1 + s z); so is what flows back through its input."""
    layer = torch.nn.Linear(64, 48, bias=False)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([_Block(layer)])
    model.forward = lambda x: model.layers[0](x)
    x = torch.randn(40, 50, 64, requires_grad=True)
    grads = []
    for scope in (
        None,
        ns.inject(model, ns.Injection(ns.Gaussian(0.1), modules=["layers.0.first"], phases={"backward"})),
    ):
        layer.weight.grad = x.grad = None
        if scope is None:
            model(x).square().sum().backward()
        else:
            with scope as tally:
                model(x).square().sum().backward()
        grads.append((layer.weight.grad.clone(), x.grad.clone()))
    for clean, noisy in zip(*grads, strict=True):
        ratio = noisy / clean - 1
        assert ratio.std() == pytest.approx(0.1, rel=0.05)
    assert tally.backward == 1, "one linear, one backward: counted once, not once per tensor"


class _Block(torch.nn.Module):
    """A block of two linears, of which the second passes everything on unchanged in sign and size."""

    def __init__(self, first: torch.nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = torch.nn.Linear(first.out_features, first.out_features, bias=False)
        torch.nn.init.eye_(self.second.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_the_forward_is_clean_when_only_backward_is_noisy(llama, tokens):
    """Backward-only noise leaves the loss bit-equal."""
    clean = llama(tokens, labels=tokens).loss
    injection = ns.Injection(ns.Gaussian(0.05), operators={"linear", "norm"}, phases={"backward"})
    with ns.inject(llama, injection) as tally:
        noisy = llama(tokens, labels=tokens).loss
        noisy.backward()
    assert torch.equal(clean, noisy) and tally.forward == 0 and tally.backward == 29


def test_forward_noise_is_straight_through(tokens):
    """The derivative passes forward noise unchanged: the gradient of sum(y + e) is that of sum(y)."""
    layer = torch.nn.Linear(8, 8, bias=False)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([_Block(layer)])
    model.forward = lambda x: model.layers[0](x)
    x = torch.randn(2, 3, 8)
    model(x).sum().backward()
    clean = layer.weight.grad.clone()
    layer.weight.grad = None
    with ns.inject(model, ns.Injection(ns.Gaussian(0.5), modules=["layers.0.first"], phases={"forward"})):
        model(x).sum().backward()
    assert torch.equal(clean, layer.weight.grad)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_gradient_checkpointing_recomputes_the_same_noise(tokens, reentrant, name):
    """Both kinds of checkpointing give the gradients and the tally of a run without it."""
    runs = []
    for checkpointing in (False, True):
        model = tiny_model(name).train()
        model.config.use_cache = False
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with ns.inject(model, ns.Injection(ns.Gaussian(0.05))) as tally:
            gradients = train_step(model, tokens, times=2)
        runs.append((gradients, {p: (c.forward, c.backward) for p, c in tally.per_layer.items()}))
    (plain, plain_tally), (recomputed, recomputed_tally) = runs
    assert plain_tally == recomputed_tally
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_belongs_to_its_own_forward(tokens, reentrant):
    """Two forwards before two backwards, in either order: each recomputation finds its own noise."""
    gradients = []
    for checkpointing, order in ((False, (0, 1)), (True, (0, 1)), (True, (1, 0))):
        model = tiny_model("llama").train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with ns.inject(model, ns.Injection(ns.Gaussian(0.05), phases={"forward"})):
            losses = [model(tokens, labels=tokens).loss, model(tokens.flip(1), labels=tokens.flip(1)).loss]
            for which in order:
                losses[which].backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    plain, forwards, backwards = gradients
    assert all(torch.equal(plain[n], forwards[n]) for n in plain)
    assert all(torch.allclose(plain[n], backwards[n], atol=1e-6) for n in plain), "sums in another order"


def test_checkpointing_a_part_of_a_block(tokens):
    """A user who checkpoints the MLP alone gets the same noise again too, and no double count."""
    runs = []
    for part in (False, True):
        model = tiny_model("llama").train()
        if part:
            for block in model.model.layers:
                mlp_forward = block.mlp.forward
                block.mlp.forward = lambda x, f=mlp_forward: checkpoint(f, x, use_reentrant=False)
        with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"linear", "silu"})) as tally:
            runs.append((train_step(model, tokens), tally.forward, tally.backward))
    (plain, *counts), (partly, *part_counts) = runs
    assert counts == part_counts
    assert all(torch.equal(plain[n], partly[n]) for n in plain)


def _gradients(model, run) -> tuple[dict, tuple[int, int]]:
    with ns.inject(model, ns.Injection(ns.Gaussian(0.3), operators={"linear"})) as tally:
        run(model)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, (
        tally.forward,
        tally.backward,
    )


def _states(model, tokens):
    return model.get_input_embeddings()(tokens).detach().requires_grad_()


def whole_model(model, tokens, reentrant):
    states = _states(model, tokens)
    call = lambda x: model(inputs_embeds=x, use_cache=False).logits  # noqa: E731
    out = call(states) if reentrant is None else checkpoint(call, states, use_reentrant=reentrant)
    out.square().sum().backward()


def two_blocks_a_segment(model, tokens, reentrant):
    rotation = model.model.rotary_emb(_states(model, tokens), torch.arange(6)[None])
    blocks = list(model.model.layers)

    class Body(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model.model.layers

        def forward(self, x):
            step = lambda x, part: [x := b(x, position_embeddings=rotation) for b in part][-1]  # noqa: E731
            for part in (blocks[:2], blocks[2:]):
                x = step(x, part) if reentrant is None else checkpoint(step, x, part, use_reentrant=reentrant)
            return x

    body = Body()
    with ns.inject(body, ns.Injection(ns.Gaussian(0.3), operators={"linear"})) as tally:
        body(_states(model, tokens)).square().sum().backward()
    assert (tally.forward, tally.backward) == (28, 28)


def part_that_starts_without_an_aim(model, tokens, reentrant):
    for block in model.model.layers:
        mlp, norm = block.mlp.forward, block.post_attention_layernorm
        part = lambda x, mlp=mlp, norm=norm: mlp(norm(x) * 1.0)  # noqa: E731
        if reentrant is None:
            block.mlp.forward = part
        else:
            block.mlp.forward = lambda x, part=part: checkpoint(part, x, use_reentrant=reentrant)
    model(tokens, labels=tokens).loss.backward()


def one_input_in_two_forwards(model, tokens, reentrant):
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    states = _states(model, tokens)
    outs = [model(inputs_embeds=states, use_cache=False).logits.square().sum() for _ in range(2)]
    (outs[0] + 2 * outs[1]).backward()


def copied_saved_tensors(model, tokens, reentrant):
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        model(tokens, labels=tokens, use_cache=False).loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    "run",
    [
        whole_model,
        two_blocks_a_segment,
        part_that_starts_without_an_aim,
        one_input_in_two_forwards,
        copied_saved_tensors,
    ],
)
def test_checkpointing_of_every_shape(tokens, run, reentrant):
    """The whole model, several blocks at once, parts of a block, shared or copied inputs: all repeat their noise."""
    results = []
    for mode in (None, reentrant):
        model = tiny_model("llama", layers=4).train()
        if run is two_blocks_a_segment:
            run(model, tokens, mode)
            results.append(({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, None))
        else:
            results.append(_gradients(model, lambda m, mode=mode: run(m, tokens, mode)))
    (plain, counts), (again, counts_again) = results
    assert counts == counts_again
    assert all(torch.allclose(plain[n], again[n], rtol=1e-4, atol=1e-5) for n in plain)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_a_checkpoint_inside_the_class_forward(tokens, reentrant, nested):
    """transformers from 5.23 on: the recomputation does not call the block, but what its class's forward does."""

    class Layer(LlamaDecoderLayer):
        def forward(self, *args, **kwargs):
            return self._gradient_checkpointing_func(functools.partial(super().forward, **kwargs), *args)

    def run(model):
        outer = ns.watch(model, lambda call: None) if nested else contextlib.nullcontext()
        with outer:
            one_input_in_two_forwards(model, tokens, None)

    results = []
    for mode in (None, reentrant):
        model = tiny_model("llama", layers=4).train()
        own = functools.partial(checkpoint, use_reentrant=mode)
        for layer in model.model.layers if mode is not None else ():
            layer.__class__, layer._gradient_checkpointing_func = Layer, own
        results.append(_gradients(model, run))
        assert all(layer.__dict__.get("_gradient_checkpointing_func", own) is own for layer in model.model.layers)
    (plain, counts), (again, counts_again) = results
    assert counts == counts_again
    assert all(torch.allclose(plain[n], again[n], rtol=1e-4, atol=1e-5) for n in plain)


def test_a_part_whose_functions_are_watched_from_outside_is_refused(tokens):
    """F.gelu in a block, and only a part of the block recomputed: an error, not a clean recomputation."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            return checkpoint(lambda x: self.second(torch.nn.functional.gelu(self.first(x))), x, use_reentrant=False)

    model = torch.nn.Sequential(Block(), Block())
    with (
        pytest.raises(UnsupportedModel, match="checkpoint whole blocks instead"),
        ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"gelu"})),
    ):
        model(torch.randn(2, 8, requires_grad=True)).sum().backward()


def test_gradients_of_a_weight_alone_are_counted(llama, tokens):
    """autograd.grad for one weight never computes the input's gradient; the call is counted all the same."""
    name = "model.layers.0.self_attn.q_proj"
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), modules=[name], phases={"backward"})) as tally:
        torch.autograd.grad(llama(tokens, labels=tokens).loss, [llama.get_submodule(name).weight])
    assert tally.backward == 1


def test_backward_noise_that_rounds_away_is_noticed_beside_forward_noise(tokens):
    """Each phase has its own scale, and its own check."""
    half = tiny_model("llama").to(torch.bfloat16)
    injection = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, phase_scales={"backward": 1e-6})
    with pytest.raises(NoiseRoundsAway, match="backward: noise of scale 1e-06"), ns.inject(half, injection):
        half(tokens, labels=tokens).loss.backward()


def test_a_plain_forward_after_training_is_no_recomputation(llama, tokens):
    """Memory is reused after a backward pass: an inference that follows is counted, and fresh."""
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05))) as tally:
        for step in range(4):
            llama(tokens, labels=tokens).loss.backward()
            with torch.no_grad():
                llama(tokens)
            assert tally.forward == 90 * (step + 1)


def test_phase_scales_act_per_phase(tokens):
    """A backward scale of its own changes gradients only, by its own size."""
    losses, gradients = [], []
    for backward in (0.0, 0.02, 0.2):
        model = tiny_model("llama")
        injection = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, phase_scales={"backward": backward})
        with ns.inject(model, injection):
            loss = model(tokens, labels=tokens).loss
            loss.backward()
        losses.append(loss.detach())
        gradients.append(model.model.layers[0].mlp.up_proj.weight.grad.clone())
    assert torch.equal(losses[0], losses[1]) and torch.equal(losses[0], losses[2])
    none, small, large = gradients
    assert 5 < (large - none).norm() / (small - none).norm() < 20


def test_frozen_weights_and_lora_style_training(tokens):
    """With frozen parameters, backward noise still falls on the gradients that flow through."""
    model = tiny_model("llama", layers=3)
    model.requires_grad_(False)
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layers={2})) as tally:
        model(tokens, labels=tokens).loss.backward()
    assert tally.per_layer[2].backward == 7


def test_tied_weights_get_noise_once_per_use(tokens):
    """Backward noise on the head's use of a tied weight is counted at the head, once, and never at the embedding."""
    model = tiny_model("gpt2", tie_word_embeddings=True)
    model(tokens, labels=tokens).loss.backward()
    clean = model.lm_head.weight.grad.clone()
    model.lm_head.weight.grad = None
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), places={"lm_head"}, phases={"backward"})) as tally:
        model(tokens, labels=tokens).loss.backward()
    assert {p: c.backward for p, c in tally.per_layer.items()} == {"lm_head": 1}
    assert not torch.equal(clean, model.lm_head.weight.grad)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_products_called_by_keyword(tokens):
    """BLOOM gives baddbmm its matrices by name: both products of a block get backward noise."""
    model = tiny_model("bloom")
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"bmm"})) as tally:
        model(tokens, labels=tokens).loss.backward()
    assert (tally.forward, tally.backward) == (4, 4)
