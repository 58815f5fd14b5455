"""What was replaced in memory is the device's: the host uses what torch and transformers ship."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import noisescope as ns
from noisescope.localization.shipped_functions import _from_package, replaced_functions, shipped_functions
from noisescope.testing import tiny_model


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama", layers=2)


def located(model: nn.Module) -> ns.Verdict:
    return ns.locate(ns.wrap(model), quick=True)


def test_nothing_is_replaced_by_importing_libraries() -> None:
    import lightning  # wraps torch.compile, which computes nothing
    import peft
    import torchao

    auto_round = {"Transpose.convert", "PreTrainedModel._init_weights"}  # which another test may have imported
    assert lightning and peft and torchao and {str(each) for each in replaced_functions()} <= auto_round


def test_functions_are_put_back_and_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = torch.rsqrt, torch.Tensor.exp, F.silu, nn.SiLU.forward
    mine = lambda *args, **kwargs: None  # noqa: E731
    monkeypatch.setattr(torch, "rsqrt", mine)
    monkeypatch.setattr(torch.Tensor, "exp", mine)
    monkeypatch.setattr(F, "silu", mine)
    monkeypatch.setattr(nn.SiLU, "forward", mine)
    with shipped_functions(), shipped_functions():
        assert (torch.rsqrt, torch.Tensor.exp, F.silu, nn.SiLU.forward) == shipped
    assert torch.rsqrt is torch.Tensor.exp is F.silu is nn.SiLU.forward is mine


def test_originals_of_what_was_replaced_before_the_import() -> None:
    """From torch's files where they are Python code, otherwise native."""
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    for owner, name, args in (
        (F, "softmax", (x, -1)),
        (F, "silu", (x,)),
        (F, "embedding", (torch.tensor([0, 2]), weight)),
        (F, "interpolate", (x[None], 8)),
        (F, "linear", (x, weight)),
        (torch, "einsum", ("ij,kj->ik", x, weight)),
        (torch, "rsqrt", (x.abs(),)),
        (torch.Tensor, "split", (x, 2)),
        (nn.Linear, "forward", (nn.Linear(4, 2), x)),
        (nn.Module, "__call__", (nn.Linear(4, 2), x)),
    ):
        original, shipped = _from_package(owner, name), getattr(owner, name)
        expected, found = shipped(*args), original(*args)
        assert all(map(torch.equal, found, expected)), name


@pytest.mark.parametrize("name", ["silu", "scaled_dot_product_attention"])
def test_a_function_replaced_in_memory_is_no_reference(model, monkeypatch, name) -> None:
    shipped = getattr(F, name)
    monkeypatch.setattr(F, name, lambda *args, **kwargs: shipped(*args, **kwargs) * 1.01)
    verdict = located(model)
    assert verdict.verdict == "faulty" and verdict.suspects[0].site.place == 0
    assert any(f"functional.{name}" in note for note in verdict.notes)


def test_rsqrt_and_the_call_of_modules_too(model, monkeypatch) -> None:
    shipped, call = torch.rsqrt, nn.Module.__call__
    with monkeypatch.context() as patch:
        patch.setattr(torch, "rsqrt", lambda x: shipped(x) * 1.001)
        assert located(model).suspects[0].site.operator == "norm"

    def wrong(self: nn.Module, *args: object, **kwargs: object) -> object:
        output = call(self, *args, **kwargs)
        return output * 1.01 if isinstance(self, nn.SiLU) or type(self).__name__ == "SiLUActivation" else output

    monkeypatch.setattr(nn.Module, "__call__", wrong)
    assert located(model).verdict == "faulty"


def test_methods_put_on_an_instance_are_the_devices(model) -> None:
    gemma = tiny_model("gemma2", layers=2)
    norm = gemma.model.layers[1].input_layernorm
    shipped = norm._norm
    norm._norm = lambda x: shipped(x) * 1.01
    suspect = located(gemma).suspects[0]
    assert (suspect.site.module, suspect.site.operator) == ("model.layers.1.input_layernorm", "norm")


@pytest.fixture
def registered() -> Iterator[str]:
    def warmer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **rest: object):
        rest["scaling"] = 0.9 * module.scaling
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    AttentionInterface.register("warmer", warmer)
    yield "warmer"
    del AttentionInterface._global_mapping["warmer"]


def test_attention_that_a_user_registered_is_the_model(registered) -> None:
    model = tiny_model("llama", layers=2, attn_implementation=registered)
    assert ns.locate(ns.wrap(model)).verdict == "healthy"
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * 1.01,))
    assert located(model).suspects[0].site.place == 1


def test_transformers_own_name_in_the_registry_is_transformers(model, monkeypatch) -> None:
    def wrong(*args: object, **kwargs: object):
        output, weights = sdpa_attention_forward(*args, **kwargs)
        return output * 1.01, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", wrong)
    assert located(model).verdict == "faulty"


def test_a_hook_on_all_modules_is_the_device(model) -> None:
    def wrong(module: nn.Module, args: object, output: object) -> object:
        return output * 1.01 if type(module).__name__ == "LlamaMLP" else None

    handle = nn.modules.module.register_module_forward_hook(wrong)
    try:
        verdict = located(model)
        with shipped_functions():
            assert not nn.modules.module._global_forward_hooks
        assert len(nn.modules.module._global_forward_hooks) == 1
    finally:
        handle.remove()
    assert verdict.verdict == "faulty" and verdict.suspects[0].site.place == 0


def test_a_dispatch_mode_of_the_callers_is_the_device(model) -> None:
    class Wrong(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            return output * 1.01 if func is torch.ops.aten.silu.default else output

    with Wrong():
        verdict = located(model)
    assert verdict.suspects[0].site.operator == "silu"


def test_a_forward_that_takes_anything_hides_no_phase(model) -> None:
    forward = model.forward
    model.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    verdict = ns.locate(ns.wrap(model))
    kinds = {(phase.kind, phase.padding) for phase in verdict.coverage.phases}
    assert verdict.verdict == "healthy" and ("decode", "") in kinds and ("prefill", "left") in kinds


def test_functions_in_place_of_modules_and_untied_heads_are_faults_of_state(model) -> None:
    tied = tiny_model("llama", layers=2, tie_word_embeddings=True)
    assert located(tied).verdict == "healthy"
    weight = tied.lm_head.weight.detach().clone()
    weight[9] *= 2
    tied.lm_head.weight = nn.Parameter(weight)
    suspect = located(tied).suspects[0]
    assert suspect.site.module == "lm_head" and suspect.channels == (9,)
    mlp = model.model.layers[1].mlp
    del mlp.act_fn
    mlp.act_fn = F.silu
    assert located(model).suspects[0].site.module == "model.layers.1.mlp"
