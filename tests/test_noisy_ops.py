"""The process-wide interface: what the original method notes promise of it, and that it leaves no trace."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import noisescope
from noisescope import noisy_ops as no
from noisescope.errors import InvalidInput, ModelHeld, NoiseRoundsAway, NothingInjected
from noisescope.testing import tiny_inputs, tiny_model

MODULE_CALL = nn.Module.__call__
TOKENS = tiny_inputs("llama")


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own global state, and leaves torch as it was."""
    monkeypatch.setattr(no, "_state", no._State())
    yield
    no._state.stop(check=False)
    assert nn.Module.__call__ is MODULE_CALL
    assert not torch.nn.modules.module._global_forward_pre_hooks


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


def train_step(model: nn.Module) -> None:
    model.zero_grad()
    model(**TOKENS, labels=TOKENS["input_ids"]).loss.backward()


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


X = torch.linspace(-2, 2, 64).reshape(4, 16)


# -- the four tests of the notes


def test_forward_only() -> None:
    """With the backward phase off, a training step is noised forward only, in every layer."""
    model = tiny_model("llama")
    no.set_noise_phases(forward=True, backward=False)
    no.enable_noisy_ops(error_scale=0.05)
    train_step(model)
    stats = no.get_injection_stats()
    assert stats["total_forward"] > 0
    assert stats["total_backward"] == 0
    assert all(counts["backward"] == 0 for counts in no.get_layer_injection_stats().values())


def test_backward_only() -> None:
    """With the forward phase off, the outputs are the clean ones (opened attention rounds) and gradients are noised."""
    model = tiny_model("llama")
    clean = logits(model)
    train_step(model)
    clean_gradients = gradients(model)
    no.set_noise_phases(forward=False, backward=True)
    no.enable_noisy_ops(error_scale=0.05)
    assert torch.allclose(logits(model), clean, atol=1e-6)
    train_step(model)
    stats = no.get_injection_stats()
    assert stats["total_forward"] == 0
    assert stats["total_backward"] > 0
    assert not all(torch.equal(a, b) for a, b in zip(gradients(model), clean_gradients, strict=True))


def test_the_notes_two_phase_tests_in_a_row_without_reset_or_disable() -> None:
    """A second enable starts the counts from zero, so that the notes' tests hold one after the other as written."""
    model = tiny_model("llama")
    no.set_noise_phases(forward=True, backward=False)
    no.enable_noisy_ops(error_scale=0.05)
    train_step(model)
    no.set_noise_phases(forward=False, backward=True)
    no.enable_noisy_ops(error_scale=0.05)
    train_step(model)
    stats = no.disable_noisy_ops()
    assert stats["total_forward"] == 0
    assert stats["total_backward"] > 0


@pytest.mark.parametrize("kind", ["relative_gaussian", "rms_gaussian", "uniform"])
def test_noise_magnitude(kind: str) -> None:
    """Noise of scale 0.05 is 5 % of the signal's norm, over several runs."""
    layer = nn.Linear(64, 256)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    clean = layer(x)
    no.enable_noisy_ops(error_scale=0.05, error_type=kind, seed=3)
    ratios = [((layer(x) - clean).norm() / clean.norm()).item() for _ in range(5)]
    no.disable_noisy_ops()
    assert all(0.03 < ratio < 0.07 for ratio in ratios)
    assert sum(ratios) / 5 == pytest.approx(0.05, rel=0.03)
    assert len(set(ratios)) == 5


def test_phase_persistence() -> None:
    """Phases, selections and scales survive any number of enable and disable."""
    model = tiny_model("llama")
    no.set_noise_phases(forward=True, backward=False)
    no.set_selective_operators(["softmax"])
    no.disable_noisy_ops()
    for _ in range(2):
        no.enable_noisy_ops(error_scale=0.05)
        train_step(model)
        stats = no.disable_noisy_ops()
        assert no.get_noise_phases() == {"forward": True, "backward": False}
        assert no.get_selective_operators() == ["softmax"]
        assert stats["total_forward"] == 2
        assert stats["total_backward"] == 0


# -- the notes' snippets


def test_operator_quick_start() -> None:
    """The notes' operator loop: each operator alone, selected after enabling, reset in between, fires alone."""
    model = tiny_model("llama")
    clean = logits(model)
    expected = {"matmul": {"matmul", "linear"}, "softmax": {"softmax"}, "silu": {"silu"}, "layernorm": {"norm"}}
    for name, fired in expected.items():
        no.enable_noisy_ops(error_scale=0.05, all_ops_mode=True)
        no.set_selective_ops([name])
        assert not torch.equal(logits(model), clean)
        assert set(no.get_operator_injection_stats()) == fired
        no.set_selective_ops(None)
    no.disable_noisy_ops()


def test_layer_quick_start() -> None:
    """The notes' sliding window: each window fires in its own layers only."""
    model = tiny_model("llama", layers=4)
    assert no.register_layer_hooks(model) == 4
    for start in range(3):
        window = [start, start + 1]
        no.set_selective_layers(window)
        no.enable_noisy_ops(error_scale=0.05)
        logits(model)
        stats = no.get_layer_injection_stats()
        assert list(stats) == window
        assert stats[start] == {"forward": 9, "backward": 0}
        assert no.get_injection_stats()["outside_forward"] == 0
        no.set_selective_layers(None)
        no.reset_layer_injection_stats()
        assert no.get_layer_injection_stats() == {}
    no.disable_noisy_ops()


# -- selections


def test_none_means_all_subject_to_all_ops_mode() -> None:
    """None is the matrix products without all_ops_mode and the notes' set with it; never embedding or residual."""
    model = tiny_model("llama")
    no.enable_noisy_ops()
    logits(model)
    assert set(no.get_operator_injection_stats()) == {"matmul", "linear"}
    no.enable_noisy_ops(all_ops_mode=True)
    logits(model)
    assert set(no.get_operator_injection_stats()) == {"matmul", "linear", "softmax", "silu", "norm"}
    no.disable_noisy_ops()


def test_a_selected_operator_fires_whatever_all_ops_mode_says() -> None:
    """Embedding is in no default set and fires when named, without all_ops_mode."""
    model = tiny_model("llama")
    no.set_selective_operators("embedding")
    no.enable_noisy_ops(all_ops_mode=False)
    logits(model)
    assert no.get_operator_injection_stats() == {"embedding": {"forward": 1, "backward": 0}}


@pytest.mark.parametrize("select", [no.set_selective_operators, no.set_selective_layers])
def test_an_empty_selection_is_off_on_purpose(select: object) -> None:
    """[] means no noise and no complaint."""
    model = tiny_model("llama")
    clean = logits(model)
    select([])  # type: ignore[operator]
    no.enable_noisy_ops()
    assert torch.equal(logits(model), clean)
    assert no.disable_noisy_ops() == dict.fromkeys(
        ["total_forward", "total_backward", "outside_forward", "outside_backward"], 0
    )


def test_switching_off_and_on_while_enabled_does_not_repeat_noise() -> None:
    """[] around a validation gives clean outputs there, and the noise goes on afterwards instead of starting over."""
    model = tiny_model("llama")
    clean = logits(model)
    no.enable_noisy_ops(seed=1)
    first = logits(model)
    no.set_selective_operators([])
    assert torch.equal(logits(model), clean)
    assert "forward" not in model.__dict__
    no.set_selective_operators(None)
    second = logits(model)
    assert not torch.equal(second, clean)
    assert not torch.equal(second, first)
    no.disable_noisy_ops()


def test_should_inject() -> None:
    """The two questions follow the selections; "matmul" asks for any matrix product."""
    assert no.should_inject_for_layer(3)
    assert no.should_inject_for_operator("softmax")
    no.set_selective_layers([3])
    no.set_selective_operators(["linear", "layernorm"])
    assert no.should_inject_for_layer(3)
    assert not no.should_inject_for_layer(2)
    assert [no.should_inject_for_operator(name) for name in ("matmul", "rms_norm", "softmax", "bmm")] == [
        True,
        True,
        False,
        False,
    ]
    assert no.get_selective_layers() == [3]
    assert no.get_selective_operators() == ["linear", "norm"]
    no.set_selective_layers(None)
    no.set_selective_operators(None)
    no.enable_noisy_ops()
    assert no.should_inject_for_operator("matmul")
    assert not no.should_inject_for_operator("softmax")
    assert no.get_selective_layers() is None
    assert no.get_selective_operators() is None


# -- nothing injected


def test_no_call_raises() -> None:
    """Enabled and disabled with nothing in between is an error that names raw tensor calls."""
    no.enable_noisy_ops()
    _ = torch.ones(2, 2) @ torch.ones(2, 2)
    with pytest.raises(NothingInjected, match=r"no module was called.*raw tensor calls"):
        no.disable_noisy_ops()
    assert no.disable_noisy_ops()["total_forward"] == 0  # disabled all the same, and disabling twice is fine


def test_an_absent_operator_raises() -> None:
    """Llama has no gelu: selecting it is no proof of robustness, even if other operators were noised before."""
    model = tiny_model("llama")
    no.enable_noisy_ops()
    logits(model)
    no.set_selective_operators(["gelu"])
    logits(model)
    no.set_selective_operators(None)
    logits(model)
    with pytest.raises(NothingInjected, match=r"gelu never fired in the modules called \(.*LlamaForCausalLM"):
        no.disable_noisy_ops()


def test_one_absent_operator_among_several_raises() -> None:
    """Selecting softmax and gelu noises softmax, and says that gelu never fired."""
    model = tiny_model("llama")
    no.set_selective_operators(["softmax", "gelu"])
    no.enable_noisy_ops()
    logits(model)
    assert set(no.get_operator_injection_stats()) == {"softmax"}
    with pytest.raises(NothingInjected, match="injected: gelu never fired"):
        no.disable_noisy_ops()


def test_backward_only_without_backward_raises() -> None:
    """Backward noise without a backward pass is nothing."""
    no.set_noise_phases(forward=False, backward=True)
    no.enable_noisy_ops()
    logits(tiny_model("llama"))
    with pytest.raises(NothingInjected, match="no backward pass ran"):
        no.disable_noisy_ops()


def test_both_phases_off_raises() -> None:
    """Both phases off is no empty selection: a forgotten set_noise_phases(False, False) must not look robust."""
    no.set_noise_phases(forward=False, backward=False)
    no.enable_noisy_ops()
    logits(tiny_model("llama"))
    with pytest.raises(NothingInjected, match="both phases off"):
        no.disable_noisy_ops()


def test_modules_without_targets_are_ignored() -> None:
    """A loss and a dropout called alone neither fire nor disturb; alone they are nothing."""
    loss, dropout, layer = nn.MSELoss(), nn.Dropout(0.5), nn.Linear(16, 4)
    no.enable_noisy_ops()
    dropout(X)
    loss(layer(X), torch.zeros(4, 4))
    assert no.disable_noisy_ops()["total_forward"] == 1
    no.enable_noisy_ops()
    loss(X, X)
    nn.Sequential(nn.ReLU(), dropout)(X)
    with pytest.raises(NothingInjected):
        no.disable_noisy_ops()


def test_noise_that_rounds_away_raises() -> None:
    """1e-5 in bfloat16 changes nothing, which is nothing injected; a later scale that survives counts."""
    layer = nn.Linear(16, 4).bfloat16()
    no.enable_noisy_ops(error_scale=1e-5)
    layer(X.bfloat16())
    with pytest.raises(NoiseRoundsAway, match="bfloat16"):
        no.disable_noisy_ops()
    no.enable_noisy_ops(error_scale=0.05)
    layer(X.bfloat16())
    no.disable_noisy_ops()


def test_zero_scale_is_a_control() -> None:
    """error_scale 0 fires, changes nothing and is no error; one layer may still have a scale of its own."""
    model = tiny_model("llama")
    clean = logits(model)
    no.enable_noisy_ops(error_scale=0.0)
    assert torch.allclose(logits(model), clean, atol=1e-6)
    no.set_per_layer_scales({1: 0.05})
    assert not torch.allclose(logits(model), clean, atol=1e-4)
    no.disable_noisy_ops()


# -- bad input


def test_layers_without_registration_raise() -> None:
    """Layer numbers mean nothing until a model is registered: at enable, and when selecting while enabled."""
    no.set_selective_layers([0])
    with pytest.raises(InvalidInput, match="register_layer_hooks"):
        no.enable_noisy_ops()
    assert nn.Module.__call__ is MODULE_CALL
    no.set_selective_layers(None)
    no.enable_noisy_ops()
    with pytest.raises(InvalidInput, match="register_layer_hooks"):
        no.set_selective_layers([0])
    assert no.get_selective_layers() is None


def test_layers_out_of_range_raise() -> None:
    """Layers and per-layer scales are checked against the registered model."""
    model = tiny_model("llama")
    no.register_layer_hooks(model)
    with pytest.raises(InvalidInput, match=r"layer 2 is out of range.*2 blocks, 0 to 1"):
        no.set_selective_layers([0, 2])
    with pytest.raises(InvalidInput, match="layer 7 is out of range"):
        no.set_per_layer_scales({7: 0.1})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: no.set_selective_operators(["sotfmax"]), "unknown operator 'sotfmax'.*Did you mean 'softmax'"),
        (lambda: no.set_operator_noise_scales({"conv": 1.0}), "unknown operator 'conv'"),
        (lambda: no.set_operator_noise_scales({"softmax": -1.0}), "at least 0"),
        (lambda: no.set_per_layer_scales({0: float("nan")}), "finite"),
        (lambda: no.set_per_layer_scales({-1: 0.1}), "negative"),
        (lambda: no.set_selective_layers(["0"]), "block indices"),
        (lambda: no.set_selective_layers(-1), "negative"),
        (
            lambda: no.enable_noisy_ops(error_type="gaussian"),
            "unknown error type 'gaussian'.*Allowed: rel",
        ),
        (lambda: no.enable_noisy_ops(error_scale=-0.1), "at least 0"),
        (lambda: no.enable_noisy_ops(error_scale="0.1"), "number"),
        (lambda: no.enable_noisy_ops(seed="0"), "seed must be an int"),
    ],
)
def test_bad_values_are_refused_and_change_nothing(call: object, message: str) -> None:
    """What came, what is allowed; the settings stay."""
    before = no._state.settings
    with pytest.raises(InvalidInput, match=message):
        call()  # type: ignore[operator]
    assert no._state.settings == before
    assert nn.Module.__call__ is MODULE_CALL


def test_a_registered_part_with_other_numbers_raises() -> None:
    """Registering T5's decoder and calling the whole would shift the numbers: that is refused."""
    model = tiny_model("t5")
    no.register_layer_hooks(model.decoder)
    no.set_selective_layers([0])
    no.enable_noisy_ops()
    with pytest.raises(InvalidInput, match="counts them otherwise"):
        model(**tiny_inputs("t5"))


# -- scales


def spread(layer: nn.Module, clean: Tensor) -> float:
    return ((layer(X) - clean).norm() / clean.norm()).item()


def test_operator_scales_are_multipliers() -> None:
    """{"matmul": 0.5} halves the noise of a linear, adds to what was set before, and None undoes it."""
    layer = nn.Linear(16, 512)
    clean = layer(X)
    no.enable_noisy_ops(error_scale=0.1, seed=0)
    full = spread(layer, clean)
    no.set_operator_noise_scales({"softmax": 0.2})
    no.set_operator_noise_scales({"matmul": 0.5})
    assert no._state.settings.operator_scales == {"softmax": 0.2, "gemm": 0.5}
    assert spread(layer, clean) == pytest.approx(full / 2, rel=0.1)
    no.set_operator_noise_scales(None)
    assert spread(layer, clean) == pytest.approx(full, rel=0.1)


def test_per_layer_scales_are_absolute() -> None:
    """A layer in the dict has its own scale and the others keep error_scale; a lone linear has no layer number."""
    model = nn.Sequential()
    model.stack = nn.ModuleList(nn.Sequential(nn.Linear(16, 512), nn.Linear(512, 16)) for _ in range(2))
    first, second = (block[0] for block in model.stack)
    clean = first(X), second(X)

    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return first(x), second(x)

    model.forward = forward  # type: ignore[method-assign]
    no.set_per_layer_scales({1: 0.02})
    no.enable_noisy_ops(error_scale=0.1, seed=0)
    sizes = [((y - c).norm() / c.norm()).item() for y, c in zip(model(X), clean, strict=True)]
    assert sizes == [pytest.approx(0.1, rel=0.1), pytest.approx(0.02, rel=0.1)]
    no.set_per_layer_scales({0: 0.02})
    lone = nn.Linear(16, 512)
    no.set_selective_operators([])
    clean_lone = lone(X)
    no.set_selective_operators(None)
    assert spread(lone, clean_lone) == pytest.approx(0.1, rel=0.1)


# -- which module is opened


def test_the_first_call_of_a_plain_linear_is_noised() -> None:
    """A module that is an operator itself is noised from its first call on, and every call anew."""
    layer = nn.Linear(16, 8)
    clean = layer(X)
    no.enable_noisy_ops()
    first, second = layer(X), layer(X)
    assert not torch.equal(first, clean)
    assert not torch.equal(first, second)
    assert no.get_layer_injection_stats() == {}
    assert no.disable_noisy_ops() == {
        "total_forward": 2,
        "total_backward": 0,
        "outside_forward": 2,
        "outside_backward": 0,
    }


def test_sequential_mlp() -> None:
    """A model without blocks works: linears and its GELU, forward and backward."""
    model = mlp()
    no.enable_noisy_ops(all_ops_mode=True)
    model(X).sum().backward()
    no.disable_noisy_ops()
    assert no.get_operator_injection_stats() == {
        "gelu": {"forward": 1, "backward": 1},
        "linear": {"forward": 2, "backward": 2},
        "matmul": {"forward": 2, "backward": 2},
    }


def test_products_in_a_custom_module() -> None:
    """`@` and softmax inside a module's own forward are seen; modules made on the fly there are part of it."""

    class Mix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.Softmax(-1)(x @ x.T) @ x

    mix = Mix()
    clean = mix(X)
    no.enable_noisy_ops(all_ops_mode=True)
    assert not torch.equal(mix(X), clean)
    no.disable_noisy_ops()
    assert no.get_operator_injection_stats() == {
        "matmul": {"forward": 2, "backward": 0},
        "softmax": {"forward": 1, "backward": 0},
    }


def test_a_part_called_before_the_whole() -> None:
    """The part is closed when the whole opens: noise falls once, and both counts are kept."""
    model = tiny_model("llama")
    no.enable_noisy_ops(seed=1)
    model.lm_head(torch.randn(2, 32))
    model.model(**TOKENS)
    assert no.get_injection_stats()["total_forward"] == 1 + 18
    whole = logits(model)
    assert no.get_injection_stats()["total_forward"] == 1 + 18 + 19
    model.lm_head(torch.randn(2, 32))  # inside the whole now: no door of its own
    assert len(no._state._doors()) == 1
    assert no.disable_noisy_ops()["total_forward"] == 1 + 18 + 19 + 1
    no.enable_noisy_ops(seed=1)
    assert torch.equal(logits(model), whole)


def test_two_models() -> None:
    """Each outermost model has its own door; without registration both count as layers."""
    one, two = tiny_model("llama"), tiny_model("gpt2", layers=3)
    no.enable_noisy_ops()
    logits(one)
    logits(two)
    logits(one)
    assert len(no._state._doors()) == 2
    layers = no.get_layer_injection_stats()
    assert list(layers) == [0, 1, 2]
    assert layers[2]["forward"] == 6  # GPT-2: c_attn, c_proj, c_fc, c_proj, two products
    assert layers[0]["forward"] == 2 * 9 + 6
    no.disable_noisy_ops()


def test_layers_select_the_registered_model_only() -> None:
    """With layers selected, a model that is not registered runs clean, and its blocks never count as layers."""
    one, two = tiny_model("llama"), tiny_model("gpt2")
    clean = logits(two)
    no.register_layer_hooks(one)
    no.set_selective_layers([1])
    no.enable_noisy_ops()
    logits(one)
    assert torch.equal(logits(two), clean)
    assert no.get_layer_injection_stats() == {1: {"forward": 9, "backward": 0}}
    no.set_selective_layers(None)
    logits(two)
    assert no.get_layer_injection_stats() == {1: {"forward": 9, "backward": 0}}
    no.disable_noisy_ops()


def test_wrappers_and_bodies_of_the_registered_model() -> None:
    """A wrapper around the registered model, and its body called alone, have its layer numbers."""

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.norm, self.model = nn.LayerNorm(4), model

        def forward(self, **inputs: Tensor) -> object:
            return self.model(**inputs)

    model = tiny_model("llama", layers=3)
    no.register_layer_hooks(model)
    no.set_selective_layers([2])
    for called in (Wrapper(model), model.model, model):
        no.enable_noisy_ops(seed=0)
        called(**TOKENS)
        no.disable_noisy_ops()
        assert no.get_layer_injection_stats() == {2: {"forward": 9, "backward": 0}}


def test_models_that_share_modules_are_noised_once() -> None:
    """Two heads on one body: whichever is called has the door."""
    body = nn.Linear(16, 16)
    one, two = nn.Sequential(body, nn.Linear(16, 2)), nn.Sequential(body, nn.Linear(16, 3))
    no.enable_noisy_ops()
    for model in (one, two, one):
        model(X)
        assert len(no._state._doors()) == 1
    assert no.disable_noisy_ops()["total_forward"] == 6


def test_a_model_that_its_caller_does_not_hold_is_opened_too() -> None:
    """A reference model hidden in a list inside a running module is a module like any other."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.hidden = nn.Linear(16, 4), [nn.Linear(16, 4)]

        def forward(self, x: Tensor) -> Tensor:
            return self.policy(x) + self.hidden[0](x)

    no.enable_noisy_ops()
    Pair()(X)
    assert no.disable_noisy_ops()["total_forward"] == 2


def test_compiled_models() -> None:
    """A compiled model, and a compiled function that calls one, get the same noise as the plain model."""
    model = mlp()
    no.enable_noisy_ops(seed=2)
    plain = [model(X) for _ in range(2)]
    no.disable_noisy_ops()
    torch._dynamo.reset()
    clean = model(X)
    compiled = torch.compile(model, backend="eager")
    function = torch.compile(lambda x: model(x), backend="eager")  # to be compiled while enabled
    assert torch.equal(compiled(X), clean)
    for call in (compiled, function):
        no.enable_noisy_ops(seed=2)
        assert all(torch.equal(call(X), noisy) for noisy in plain)
        assert no.disable_noisy_ops()["total_forward"] == 4
        assert torch.equal(call(X), clean)


# -- attribution and recomputation


def test_backward_attribution_per_layer() -> None:
    """Backward counts belong to the layer of the forward; the gradient of a later, unselected layer stays clean."""
    model = tiny_model("llama", layers=3)
    train_step(model)
    clean = {name: p.grad.clone() for name, p in model.named_parameters()}
    no.register_layer_hooks(model)
    no.set_noise_phases(forward=False, backward=True)
    no.set_selective_layers([1])
    no.set_selective_operators(["linear"])  # opening attention would round the forward
    no.enable_noisy_ops()
    train_step(model)
    no.disable_noisy_ops()
    assert no.get_layer_injection_stats() == {1: {"forward": 0, "backward": 7}}
    same = {name: torch.equal(p.grad, clean[name]) for name, p in model.named_parameters()}
    assert all(value for name, value in same.items() if "layers.2" in name)
    assert not any(value for name, value in same.items() if "layers.0" in name or "layers.1.mlp" in name)


def test_lm_head_is_outside_the_blocks() -> None:
    """The head's noise is counted, and in no layer."""
    model = tiny_model("llama")
    no.enable_noisy_ops()
    logits(model)
    stats = no.disable_noisy_ops()
    layers = no.get_layer_injection_stats()
    assert list(layers) == [0, 1]
    assert stats["outside_forward"] == 1
    assert stats["total_forward"] == 1 + sum(counts["forward"] for counts in layers.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    """Recomputed blocks have the same noise and are counted once: gradients and counts as without checkpointing."""
    results = []
    for checkpointing in (False, True):
        model = tiny_model("llama", layers=3).train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            model.enable_input_require_grads()
        no.enable_noisy_ops(all_ops_mode=True, seed=4)
        train_step(model)
        no.disable_noisy_ops()
        results.append((gradients(model), no.get_layer_injection_stats()))
    (plain, counts), (recomputed, recounted) = results
    assert counts == recounted
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_a_backward_pass_has_the_settings_of_its_forward() -> None:
    """Backward after a change of phases is still the one its forward prepared."""
    model = mlp()
    no.enable_noisy_ops()
    loss = model(X).sum()
    no.set_noise_phases(forward=True, backward=False)
    loss.backward()
    assert no.disable_noisy_ops()["total_backward"] == 2


# -- reproducible


def test_same_seed_same_noise() -> None:
    """Two forwards differ; the same seed repeats both; another seed does not."""
    model = tiny_model("llama")
    runs = []
    for seed in (1, 1, 2):
        no.enable_noisy_ops(seed=seed)
        runs.append([logits(model), logits(model)])
        no.disable_noisy_ops()
    assert not torch.equal(runs[0][0], runs[0][1])
    assert torch.equal(runs[0][0], runs[1][0])
    assert torch.equal(runs[0][1], runs[1][1])
    assert not torch.equal(runs[0][0], runs[2][0])


def test_enabling_again_goes_on_unless_a_seed_is_given() -> None:
    """A training loop that calls enable in every step must not get the same noise in every step."""
    layer = nn.Linear(16, 8)
    no.enable_noisy_ops()
    first = layer(X)
    no.enable_noisy_ops()
    assert not torch.equal(layer(X), first)
    no.enable_noisy_ops(seed=5)
    second = layer(X)
    no.enable_noisy_ops(seed=5)
    assert torch.equal(layer(X), second)


def test_without_a_seed_torchs_is_read_and_left_alone() -> None:
    """torch.manual_seed decides the noise, and the caller's random numbers are those of a run without noise."""
    layer = nn.Linear(16, 8)
    outputs, drawn = [], []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        no.enable_noisy_ops()
        outputs.append(layer(X))
        no.disable_noisy_ops()
        drawn.append(torch.rand(3))
    torch.manual_seed(7)
    assert torch.equal(drawn[0], torch.rand(3))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_same_noise_as_inject() -> None:
    """It is the probe's noise: `inject` with the same seed and scale gives the same numbers."""
    model = tiny_model("llama")
    with noisescope.inject(model, noisescope.Injection(noisescope.Gaussian(0.05), operators={"gemm"}, seed=3)):
        expected = logits(model)
    no.enable_noisy_ops(0.05, seed=3)
    assert torch.equal(logits(model), expected)
    no.disable_noisy_ops()


@pytest.mark.parametrize(
    ("kind", "change"), [("systematic_bias", lambda y: y + 0.1 * y.sign()), ("absolute_gaussian", None)]
)
def test_error_types(kind: str, change: object) -> None:
    """A bias shifts every number away from zero by the scale; absolute noise does not depend on the size of numbers."""
    layer = nn.Linear(16, 64)
    clean = layer(X)
    no.enable_noisy_ops(error_scale=0.1, error_type=kind, seed=0)
    noisy = layer(X)
    if change is not None:
        assert torch.allclose(noisy, change(clean))  # type: ignore[operator]
    else:
        assert (noisy - clean).std().item() == pytest.approx(0.1, rel=0.2)


# -- counts


def test_counts_and_resets() -> None:
    """Counts reset on their own or all together and outlive disable; a reset is no zero injection."""
    model = tiny_model("llama")
    no.enable_noisy_ops()
    logits(model)
    no.reset_operator_injection_stats()
    assert no.get_operator_injection_stats() == {}
    assert no.get_injection_stats()["total_forward"] == 19
    assert no.get_layer_injection_stats()[0]["forward"] == 9
    no.reset_layer_injection_stats()
    logits(model)
    assert no.get_layer_injection_stats()[0]["forward"] == 9
    no.reset_injection_stats()
    assert no.disable_noisy_ops()["total_forward"] == 0
    assert no.get_layer_injection_stats() == {}


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """The summary names operators, layers and what lies outside them."""
    no.enable_noisy_ops()
    logits(tiny_model("llama"))
    no.print_injection_summary()
    out = capsys.readouterr().out
    assert "injections     forward       19 backward        0" in out
    assert all(word in out for word in ("linear", "matmul", "layer 0", "layer 1", "outside blocks"))


# -- nothing left behind


def test_no_trace() -> None:
    """After disabling, outputs are bit-equal, every `__dict__` is as it was, and torch has no hook and no wrapper."""
    model = tiny_model("llama")
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    clean = logits(model)
    for _ in range(2):
        no.enable_noisy_ops(all_ops_mode=True)
        assert not torch.equal(logits(model), clean)
        no.disable_noisy_ops()
        assert torch.equal(logits(model), clean)
        for name, module in model.named_modules():
            assert module.__dict__.keys() == before[name].keys()
            assert all(module.__dict__[key] is value for key, value in before[name].items())
    assert nn.Module.__call__ is MODULE_CALL


def test_only_weak_references() -> None:
    """A model dropped while enabled is freed, and its counts stay."""
    layer = nn.Linear(16, 4)
    no.enable_noisy_ops()
    layer(X)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    assert no.disable_noisy_ops()["total_forward"] == 1
    model = tiny_model("llama")
    no.register_layer_hooks(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_modules_made_in_every_step_do_not_pile_up() -> None:
    """A loss module made anew in each step leaves nothing behind in the state."""
    layer = nn.Linear(16, 4)
    no.enable_noisy_ops()
    for _ in range(20):
        nn.MSELoss()(layer(X), torch.zeros(4, 4))
        gc.collect()
    assert len(no._state.roots) <= 3
    assert no.disable_noisy_ops()["total_forward"] == 20


def test_context() -> None:
    """The context disables on leaving, complains about zero, and lets the caller's own exception through."""
    layer = nn.Linear(16, 4)
    with no.noisy_ops_context(error_scale=0.1):
        layer(X)
        with pytest.raises(InvalidInput, match="enabled already"), no.noisy_ops_context():
            pass
    assert no.get_injection_stats()["total_forward"] == 1
    with pytest.raises(NothingInjected), no.noisy_ops_context():
        pass
    with pytest.raises(KeyError), no.noisy_ops_context():
        raise KeyError
    assert nn.Module.__call__ is MODULE_CALL


def test_a_wrapper_put_on_while_enabled_survives() -> None:
    """If somebody else wrapped nn.Module.__call__ meanwhile, theirs stays and ours passes on from then."""
    layer = nn.Linear(16, 4)
    clean = layer(X)
    no.enable_noisy_ops()
    layer(X)
    ours = nn.Module.__call__

    def theirs(self: nn.Module, *args: object, **kwargs: object) -> object:
        return ours(self, *args, **kwargs)

    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        no.disable_noisy_ops()
        assert nn.Module.__call__ is theirs
        assert torch.equal(layer(X), clean)
        no.enable_noisy_ops()
        assert not torch.equal(layer(X), clean)
        assert no.disable_noisy_ops()["total_forward"] == 1
    finally:
        nn.Module.__call__ = MODULE_CALL  # type: ignore[method-assign]


def test_nests_with_inject() -> None:
    """A scope inside an opened model composes with it, and leaves it as it found it."""
    model = tiny_model("llama")
    no.enable_noisy_ops(seed=1)
    logits(model)
    with noisescope.inject(model, noisescope.Injection(noisescope.Gaussian(0.05), operators={"softmax"})) as tally:
        logits(model)
    assert tally.forward == 2
    assert no.disable_noisy_ops()["total_forward"] == 2 * 19


def test_a_first_call_inside_a_scope_is_refused() -> None:
    """Opening a model above an open scope would outlive it: refused, and the scope ends as if nothing had happened."""
    model = tiny_model("llama")
    before = logits(model)
    no.enable_noisy_ops()
    with noisescope.inject(model, noisescope.Injection(noisescope.Gaussian(0.05))):
        with pytest.raises(ModelHeld, match="call it once before that scope"):
            logits(model)
        no.set_selective_operators([])
        logits(model)
    assert no.disable_noisy_ops()["total_forward"] == 0
    assert torch.equal(logits(model), before)
    assert "forward" not in model.__dict__


# -- threads


def run_in_thread(work: object) -> list[BaseException]:
    errors: list[BaseException] = []

    def catching() -> None:
        try:
            work()  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=catching)
    thread.start()
    thread.join()
    return errors


def test_a_model_belongs_to_the_thread_that_called_it_first() -> None:
    """The same model from a second thread raises; its own model is fine there, and both are counted."""
    model, other = mlp(), mlp()
    no.enable_noisy_ops()
    model(X)
    (error,) = run_in_thread(lambda: model(X))
    assert isinstance(error, ModelHeld)
    (error,) = run_in_thread(lambda: nn.Sequential(model)(X))
    assert isinstance(error, ModelHeld)
    assert run_in_thread(lambda: other(X)) == []
    model(X)
    assert no.disable_noisy_ops()["total_forward"] == 6
    assert "forward" not in other.__dict__


def test_many_threads() -> None:
    """Threads with their own models, settings changed and counts read meanwhile: all is counted, nothing breaks."""
    errors: list[BaseException] = []

    def work() -> None:
        try:
            model = mlp()
            for _ in range(20):
                model(X)
        except BaseException as error:
            errors.append(error)

    no.enable_noisy_ops(seed=0)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for index in range(20):
        no.set_operator_noise_scales({"matmul": 1.0 + index})
        no.get_injection_stats()
    for thread in threads:
        thread.join()
    assert errors == []
    assert no.disable_noisy_ops()["total_forward"] == 4 * 20 * 2


# -- the environment

SCRIPT = """
import sys, torch
from torch import nn
torch.set_num_threads(1)
from noisescope import noisy_ops
layer = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
y = model(torch.randn(2, 4, 16))
(y * torch.linspace(0, 1, 16)).sum().backward()
settings = noisy_ops._state.settings
print(noisy_ops._state.watcher is not None, settings.scale, settings.kind, settings.seed)
print(noisy_ops.get_injection_stats()["total_forward"] > 0, noisy_ops.get_injection_stats()["total_backward"] > 0)
print(sorted(noisy_ops.get_operator_injection_stats()), list(noisy_ops.get_layer_injection_stats()))
"""


def run_python(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("NOISESCOPE_", "VERL_NOISY_OPS_"))}
    source = str(Path(noisescope.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**inherited, "PYTHONPATH": source, **variables},
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (
            {"NOISESCOPE_ENABLED": "1", "NOISESCOPE_ALL_OPS": "yes", "NOISESCOPE_SEED": "9"},
            [
                "True 0.05 relative_gaussian 9",
                "True True",
                "['gelu', 'linear', 'matmul', 'norm', 'softmax'] [0, 1, 2]",
            ],
        ),
        (
            {
                "NOISESCOPE_ENABLED": "true",
                "NOISESCOPE_SCALE": "0.1",
                "NOISESCOPE_TYPE": "uniform",
                "NOISESCOPE_OPERATORS": "softmax,layernorm",
                "NOISESCOPE_LAYERS": "0,2-2",
                "NOISESCOPE_SEED": "1",
                "NOISESCOPE_FORWARD_ONLY": "1",
                "NOISESCOPE_BACKWARD_ONLY": "1",
            },
            ["True 0.1 uniform 1", "True True", "['norm', 'softmax'] [0, 2]"],
        ),
        (
            {
                "VERL_NOISY_OPS_ENABLED": "1",
                "VERL_NOISY_OPS_SCALE": "0.2",
                "NOISESCOPE_SCALE": "0.3",
                "VERL_NOISY_OPS_TYPE": "rms_gaussian",
                "VERL_NOISY_OPS_BACKWARD_ONLY": "1",
                "NOISESCOPE_SEED": "1",
            },
            ["True 0.3 rms_gaussian 1", "False True", "['linear', 'matmul'] [0, 1, 2]"],
        ),
    ],
)
def test_environment_activates_on_import(variables: dict[str, str], expected: list[str]) -> None:
    """Importing the module reads NOISESCOPE_* and, behind them, VERL_NOISY_OPS_*."""
    done = run_python("-c", SCRIPT, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == expected
    assert done.stderr == ""


def test_importing_noisescope_reads_no_environment() -> None:
    """`import noisescope` neither activates noise nor looks at bad values."""
    code = "import noisescope, sys; noisescope.Injection; print('noisescope.noisy_ops' in sys.modules)"
    done = run_python("-c", code, NOISESCOPE_ENABLED="1", NOISESCOPE_SCALE="lots")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_environment_that_noises_nothing_says_so_at_exit() -> None:
    """Nobody disables a worker that the environment enabled, so it speaks up itself."""
    done = run_python("-c", "import noisescope.noisy_ops", NOISESCOPE_ENABLED="1")
    assert done.returncode == 0
    assert "nothing was injected: no module was called" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NOISESCOPE_ENABLED", "maybe", "NOISESCOPE_ENABLED='maybe': allowed: 1, true"),
        ("VERL_NOISY_OPS_ENABLED", "maybe", "VERL_NOISY_OPS_ENABLED='maybe'"),
        ("NOISESCOPE_SCALE", "lots", "NOISESCOPE_SCALE='lots': could not convert"),
        ("NOISESCOPE_SCALE", "-1", "NOISESCOPE_SCALE='-1': Gaussian's scale must be finite and at least 0"),
        ("NOISESCOPE_TYPE", "pink", "NOISESCOPE_TYPE='pink': unknown error type 'pink'"),
        ("NOISESCOPE_LAYERS", "one", "NOISESCOPE_LAYERS='one': expected block numbers such as 0,5,9-11"),
        ("NOISESCOPE_OPERATORS", "conv", "NOISESCOPE_OPERATORS='conv': unknown operator 'conv'"),
        ("NOISESCOPE_SEED", "x", "NOISESCOPE_SEED='x'"),
        ("NOISESCOPE_FORWARD_ONLY", "2", "NOISESCOPE_FORWARD_ONLY='2': allowed: 1, true"),
    ],
)
def test_bad_environment_values(monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str) -> None:
    """One InvalidInput that names the variable, its value and what is allowed."""
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput) as caught:
        no._read_environment()
    assert message in str(caught.value)
    assert nn.Module.__call__ is MODULE_CALL


def test_environment_layers_of_a_shallower_model_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers from the environment are checked against the first model with blocks that is called."""
    monkeypatch.setenv("NOISESCOPE_ENABLED", "1")
    monkeypatch.setenv("NOISESCOPE_LAYERS", "9-11")
    no._read_environment()
    with pytest.raises(InvalidInput, match=r"layer 9 is out of range.*2 blocks"):
        logits(tiny_model("llama"))


def test_run_a_script(tmp_path: Path) -> None:
    """`python -m noisescope.noisy_ops script.py args` runs it as __main__ with noise on, and prints the counts."""
    (tmp_path / "helper.py").write_text("WORD = 'helped'\n")
    (tmp_path / "script.py").write_text(
        "import sys, helper\n" + SCRIPT + "print(__name__, sys.argv[1:], helper.WORD)\nsys.exit(3)\n"
    )
    done = run_python("-m", "noisescope.noisy_ops", str(tmp_path / "script.py"), "--x", "1", NOISESCOPE_SEED="4")
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines()[0] == "True 0.05 relative_gaussian 4"
    assert done.stdout.splitlines()[-1] == "__main__ ['--x', '1'] helped"
    assert "noisescope: injections" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("script", "variables", "message"),
    [
        ("print(1)\n", {}, "nothing was injected: no module was called"),
        ("print(1)\n", {"NOISESCOPE_TYPE": "pink"}, "NOISESCOPE_TYPE='pink': unknown error type"),
        (None, {}, "usage: python -m noisescope.noisy_ops SCRIPT.py"),
    ],
)
def test_run_a_script_that_can_not_be_noised(
    tmp_path: Path, script: str | None, variables: dict[str, str], message: str
) -> None:
    """No injection, a bad variable and a missing script exit with 2 and one line, no traceback."""
    if script is not None:
        (tmp_path / "script.py").write_text(script)
    done = run_python("-m", "noisescope.noisy_ops", str(tmp_path / "script.py"), **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
