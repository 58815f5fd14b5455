"""`locate(backward=True)`: gradients against the host's; faults are hooks and autograd functions of one's own."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.localization import backward
from noisescope.localization.backward import audit_backward
from noisescope.localization.backward_verdict import with_backward
from noisescope.localization.coverage import Coverage, Phase, Share
from noisescope.localization.verdict import Verdict
from noisescope.reports.locate_report import as_text, verdict_lines
from noisescope.testing import tiny_model

DOWN, UP = "model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"


def verdict_on(model: nn.Module) -> Verdict:
    """The backward's part of a verdict, as if the forward were right."""
    return with_backward(Verdict("healthy", "audit"), audit_backward(model))


def differentiated(forward, gradient):
    """A function with a gradient of its own, gradient(g, *tensors)."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return forward(*tensors)

        @staticmethod
        def backward(ctx, g):
            return gradient(g, *ctx.saved_tensors)

    return Own.apply


def linear_with(module, gradient):
    """A linear's forward whose gradient(g, x, w) gives those of x and w."""
    own = differentiated(F.linear, gradient)
    module.forward = lambda x: own(x, module.weight)


def right(g, x, w):
    return g @ w, g.flatten(0, -2).T @ x.flatten(0, -2)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama/eager", "float32"), ("gpt2", "bfloat16"), ("falcon", "float32"), ("mixtral", "bfloat16")],
)
def test_healthy_gradients_raise_no_alarm(name, dtype):
    """Gated and plain MLPs, both norms, fused and eager attention, Conv1D, tied heads, experts: all of it judged."""
    name, _, attention = name.partition("/")
    given = {"attn_implementation": attention} if attention else {}
    verdict = verdict_on(tiny_model(name, layers=1, biases=0.1, **given).to(getattr(torch, dtype)))
    assert not verdict.suspects
    covered = verdict.coverage.backward
    assert (covered.modules.share, covered.parameters.share) == (1, 1)


def test_the_verdict_names_the_backward_apart():
    """In the headline, in what ran, in the picture, in the limits and in JSON."""
    model = tiny_model("llama", layers=1)
    verdict = ns.locate(model, quick=True, state=False, backward=True)
    assert verdict.headline.startswith("healthy: no fault in prefill (2 x 32) and backward; ")
    assert "in backward 100 % of modules and 100 % of parameters judged" in verdict.headline
    lines = list(verdict_lines(verdict))
    assert "  backward 2 x 32 tokens, 2 micro-batches" in lines
    assert any(line.startswith("  linear, backward: element") for line in lines)
    found = json.loads(json.dumps(verdict.to_dict()))
    assert found["coverage"]["backward"] == {"modules": 1.0, "parameters": 1.0, "not_judged": []}
    assert "norm, backward" in as_text(verdict, ".html")
    assert ns.locate(model, quick=True, state=False).coverage.backward is None


def _scaled(model):
    linear_with(model.get_submodule(DOWN), lambda g, x, w: (1.01 * (g @ w), right(g, x, w)[1]))


def _bfloat16_sums(model):
    def gradient(g, x, w):
        total = torch.zeros_like(w, dtype=torch.bfloat16)
        for row, given in zip(g.flatten(0, -2), x.flatten(0, -2), strict=True):
            total += torch.outer(row, given).bfloat16()
        return g @ w, total.to(w.dtype)

    linear_with(model.get_submodule(DOWN), gradient)


def _module_hook(model):
    model.get_submodule(DOWN).register_full_backward_hook(lambda module, given, _: (0.5 * given[0],))


def _pre_hook(model):
    model.get_submodule(UP).register_full_backward_pre_hook(lambda module, given: (given[0] * 1.001,))


def _block_hook(model):
    model.model.layers[1].register_forward_hook(lambda m, a, y: y.register_hook(lambda g: 1.001 * g) and None)


def _projection_missing(model):
    norm = model.model.layers[1].input_layernorm

    def forward(x, w):
        return w * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()

    def gradient(g, x, w):
        root = (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        return g * w * root, (g * x * root).flatten(0, -2).sum(0)

    own = differentiated(forward, gradient)
    norm.forward = lambda x: own(x, norm.weight)


def _repeated_tokens_lost(model):
    table = model.model.embed_tokens

    def forward(ids):
        def gradient(g, w):
            found = torch.zeros_like(w)
            for row, at in zip(g.flatten(0, -2), ids.flatten().tolist(), strict=True):
                found[at] = row
            return found

        return differentiated(lambda w: F.embedding(ids, w), gradient)(table.weight)

    table.forward = forward


def _silu_slope(model):
    module = model.model.layers[0].mlp.act_fn
    module.forward = differentiated(F.silu, lambda g, x: g * torch.sigmoid(x))


def _residual_lost(model):
    block = model.model.layers[1]

    def forward(hidden_states, **kwargs):
        y = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **kwargs)[0]
        hidden = hidden_states.detach() + y
        return hidden + block.mlp(block.post_attention_layernorm(hidden))

    block.forward = forward


def _dropped_micro_batch(model):
    count = []

    def hook(g):
        count.append(g)
        return torch.zeros_like(g) if len(count) % 2 == 0 else g

    model.get_parameter(f"{DOWN}.weight").register_hook(hook)


def _halved_after_all_hooks(model):
    held = []

    def listen(module, args):
        for handle in held:
            handle.remove()
        held[:] = [module.weight.register_hook(lambda g: g / 2)] if module.weight.requires_grad else []

    model.get_submodule(DOWN).register_forward_pre_hook(listen)


@pytest.mark.parametrize(
    ("plant", "module", "tensor"),
    [
        (_scaled, DOWN, "input"),
        (_bfloat16_sums, DOWN, "weight"),
        (_module_hook, DOWN, "input"),
        (_pre_hook, UP, "output"),
        (_block_hook, "model.layers.1", "output"),
        (_projection_missing, "model.layers.1.input_layernorm", "input"),
        (_repeated_tokens_lost, "model.embed_tokens", "weight"),
        (_silu_slope, "model.layers.0.mlp.act_fn", "input"),
        (_residual_lost, "model.layers.1", "input"),
        (_dropped_micro_batch, DOWN, "weight"),
        (_halved_after_all_hooks, DOWN, "accumulated weight"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_named_where_it_is(plant, module, tensor):
    """The module and which of its gradients; nothing else is blamed."""
    model = tiny_model("llama")
    plant(model)
    verdict = verdict_on(model)
    assert verdict.verdict == "faulty"
    assert [(s.site.module, s.site.tensor, s.site.phase) for s in verdict.suspects] == [(module, tensor, "backward")]
    assert f"({module}): {tensor} gradient" in verdict.headline


def test_a_shared_weight_has_the_sum_of_its_uses():
    """The head uses the table of the embedding: without its part the sum is wrong, and both are named."""
    model = tiny_model("gpt2", layers=1)
    assert model.lm_head.weight is model.transformer.wte.weight
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.weight.detach())
    (suspect,) = verdict_on(model).suspects
    assert (suspect.site.module, suspect.site.tensor) == ("lm_head", "weight")
    assert "the sum of its uses in lm_head, transformer.wte" in suspect.evidence


def test_nothing_of_the_model_is_changed():
    """The caller's gradients, what requires one, modes, random state, hooks and forwards are what they were."""
    model, ran = tiny_model("llama"), []
    model.train()
    model.model.layers[0].eval()
    frozen, step = model.model.norm.weight.requires_grad_(False), model.lm_head.weight
    step.register_post_accumulate_grad_hook(lambda p: ran.append(p.add_(1)))
    q = model.model.layers[0].self_attn.q_proj.weight
    q.grad = held = torch.ones_like(q)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    random = torch.get_rng_state()
    found = audit_backward(model)
    assert not found.reason
    assert "a hook on weight runs after" in found.log.judged.reason("lm_head")
    assert q.grad is held and bool((held == 1).all()) and step.grad is None
    assert not frozen.requires_grad and q.requires_grad
    assert modes == [module.training for module in model.modules()]
    assert torch.equal(random, torch.get_rng_state())
    assert not ran and step._post_accumulate_grad_hooks
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(p._backward_hooks for p in model.parameters())


def test_little_memory_means_more_passes(monkeypatch):
    """One block at a time, with the same result."""
    model = tiny_model("llama", layers=3)
    _scaled(model)
    few = audit_backward(model)
    monkeypatch.setattr(backward, "_MOST_HELD", 1)
    many = audit_backward(model)
    assert (few.passes, many.passes) == (2 * 3, 2 * 4)  # outer, first block, the others | one by one
    assert list(few.log.alarms) == list(many.log.alarms)


class _Detached(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny_model("llama", layers=1)
        self.config = self.inner.config

    def forward(self, input_ids):
        return {"logits": self.inner(input_ids).logits.detach()}


class _Whole(nn.Module):
    """A linear that keeps whole numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)


def test_models_without_gradients_are_named_so():
    """In one line among what did not run; the forward's verdict stands."""
    verdict = verdict_on(_Detached())
    assert verdict.verdict == "healthy"
    assert verdict.coverage.not_run == ("backward: the output of _Detached has no gradient",)
    model = tiny_model("llama", layers=1)
    model.packed = _Whole()
    (line,) = verdict_on(model).coverage.not_run
    assert line == "backward: the weights are quantised (packed.weight is int8) and have no gradient"


def test_code_that_cannot_be_differentiated_is_not_judged(blocks_around):
    """It is named, with its reason, and the verdict is no plain healthy."""

    class Inner(nn.Module):
        def forward(self, x):
            x += 1
            return x

    found = audit_backward(blocks_around(Inner()), {"x": torch.randn(2, 3, 4)})
    reasons = found.log.judged.reasons["layers.0.inner"]
    assert "writes to its arguments" in next(iter(reasons.values()))


def test_coverage_of_gradients_counts():
    """Less than 95 % of the parameters' gradients is not healthy."""
    from noisescope.localization.coverage import BackwardCoverage

    every, half = Share(2, 2), Share(1, 2)
    one = Coverage((Phase("backward", 2, 8, 2),), (), every, every, every, backward=BackwardCoverage(every, half))
    assert not one.enough
    assert one.ran == "backward"
    assert one.excluded_rate == 1


def test_backward_is_an_option_of_the_audit():
    with pytest.raises(InvalidInput, match="backward is for the audit"):
        ns.locate(tiny_model("llama"), method="relations", backward=True)
