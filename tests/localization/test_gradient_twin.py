"""Gradients of code between modules: functions that were replaced, kernels of the host, caches, precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

from noisescope.localization.backward import BackwardAudit, audit_backward
from noisescope.localization.backward_verdict import with_backward
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.testing import tiny_model


def suspects(found: BackwardAudit) -> list[Suspect]:
    return list(with_backward(Verdict("healthy", "audit"), found).suspects)


def test_attention_replaced_in_memory_is_named_by_its_operator(monkeypatch):
    """Its gradients are judged as code between linears; the linears around it are not blamed."""
    shipped = F.scaled_dot_product_attention

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, others):
            ctx.save_for_backward(q, k, v)
            ctx.others = others
            return shipped(q, k, v, **others)

        @staticmethod
        def backward(ctx, g):
            with torch.enable_grad():
                given = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                q, k, v = torch.autograd.grad(shipped(*given, **ctx.others), given, g)
            return q, k, 1.02 * v, None

    def attention(q, k, v, **others):
        return Wrong.apply(q, k, v, others)

    model = tiny_model("llama")
    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)
    (suspect,) = suspects(audit_backward(model))
    assert suspect.site.operator == "attention"
    assert suspect.site.module.endswith("self_attn")
    assert "another function computes its attention" in suspect.evidence


@pytest.mark.filterwarnings("ignore:.*verrid")
def test_a_wrong_kernel_of_the_models_dtype_is_not_the_hosts_reference():
    """On a CPU, host runs in float32 call the kernel under test; only the host's float64 counts."""

    def gradient(g, y, dim, dtype):
        right = y * (g - (g * y).sum(dim, keepdim=True))
        return 1.01 * right if y.dtype == torch.float32 else right

    model = tiny_model("llama", layers=1, attn_implementation="eager")
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_softmax_backward_data", gradient, "CPU", allow_override=True)
        found = audit_backward(model)
    finally:
        library._destroy()
    (suspect,) = suspects(found)
    assert (suspect.site.operator, suspect.site.module) == ("softmax", "model.layers.0.self_attn")


def test_branches_that_are_exact_do_not_depend_on_rounding():
    """relu in 16 bits: its zeros stay zeros while other results move."""
    found = audit_backward(tiny_model("opt", layers=1).bfloat16())
    assert not found.log.judged.reasons


def test_a_gradient_that_passes_through_a_cache_is_not_judged():
    """Learned keys and values reach the blocks inside a cache object, where nothing listens."""
    from peft import PrefixTuningConfig, get_peft_model

    base = tiny_model("llama", layers=1)
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    found = audit_backward(model)
    assert not suspects(found)
    assert "cache" in next(iter(found.log.judged.reasons["prompt_encoder.default"].values()))


class _Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint.checkpoint(layer, x, use_reentrant=layer is self.layers[0])
        return x


def test_checkpointed_code_runs_once_and_is_judged():
    """Both kinds of torch's checkpointing; afterwards they recompute again."""
    own = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    found = audit_backward(_Checkpointed(), {"x": torch.randn(2, 3, 4)})
    assert not found.reason
    assert not suspects(found)
    assert not found.log.judged.reasons
    assert own == (checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator)


def test_a_model_that_autograd_refuses_is_not_run():
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            raise RuntimeError("no kernel for this gradient\nat length")

    model = tiny_model("llama", layers=1)
    model.model.norm.register_forward_hook(lambda module, given, y: Refusing.apply(y))
    assert audit_backward(model).reason == "LlamaForCausalLM can't be differentiated (no kernel for this gradient)"


def test_autocast_rounds_gradients_to_its_dtype():
    """Operands and gradients of linears and attention have 16 bits; a gain of 1 % shows all the same."""
    name = "model.layers.1.mlp.up_proj"
    for gain in (1.0, 1.01):
        model = tiny_model("llama", tie_word_embeddings=True)
        model.get_submodule(name).weight.register_hook(lambda g, gain=gain: g * gain)
        with torch.autocast("cpu", torch.bfloat16):
            found = suspects(audit_backward(model))
        assert [(s.site.module, s.site.tensor) for s in found] == ([] if gain == 1 else [(name, "weight")])


def test_a_lost_part_of_a_shared_weight_is_named_by_its_use():
    """Of the second sequence, the table of the embedding gets nothing; the head uses the same weight."""
    model = tiny_model("gpt2", layers=1)
    table = model.transformer.wte

    def forward(ids):
        return torch.cat([F.embedding(ids[:1], table.weight), F.embedding(ids[1:], table.weight.detach())])

    table.forward = forward
    (suspect,) = suspects(audit_backward(model))
    assert (suspect.site.operator, suspect.site.module) == ("embedding", "transformer.wte")
