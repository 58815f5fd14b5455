"""The process-wide interface: what the original method notes promise of it, and that it leaves no trace."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import noisescope as ns
from noisescope import noisy_ops as no
from noisescope.compat.noisy_ops import environment
from noisescope.compat.noisy_ops.state import state
from noisescope.errors import InvalidInput, ModelHeld, NoiseRoundsAway, NothingInjected
from noisescope.testing import tiny_inputs, tiny_model

TOKENS = tiny_inputs("llama")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


def train_step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(**TOKENS, labels=TOKENS["input_ids"]).loss.backward()
    return [p.grad.clone() for p in model.parameters()]


# -- the four tests of the notes


def test_forward_only(model):
    """With the backward phase off, a training step is noised forward only."""
    no.set_noise_phases(forward=True, backward=False)
    no.enable_noisy_ops(error_scale=0.05)
    train_step(model)
    stats = no.disable_noisy_ops()
    assert stats["total_forward"] == 19 and stats["total_backward"] == 0


def test_backward_only(model):
    """With the forward phase off, outputs are clean and gradients are noised."""
    clean = train_step(model)
    no.set_noise_phases(forward=False, backward=True)
    no.enable_noisy_ops(error_scale=0.05)
    noisy = train_step(model)
    stats = no.disable_noisy_ops()
    assert stats["total_forward"] == 0 and stats["total_backward"] == 19
    assert not all(torch.equal(a, b) for a, b in zip(clean, noisy, strict=True))


@pytest.mark.parametrize("kind", ["relative_gaussian", "rms_gaussian", "uniform"])
def test_noise_magnitude(kind):
    """Noise of scale 0.05 is 5 % of the signal; the first call of a lone Linear is noised too."""
    layer = nn.Linear(64, 256)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    clean = layer(x)
    no.enable_noisy_ops(error_scale=0.05, error_type=kind, seed=3)
    ratios = [float(((layer(x) - clean).norm() / clean.norm()).detach()) for _ in range(3)]
    no.disable_noisy_ops()
    assert all(0.03 < ratio < 0.07 for ratio in ratios) and len(set(ratios)) == 3


def test_phase_persistence(model):
    """Phases, selections and scales outlive disable and enable."""
    no.set_noise_phases(forward=True, backward=False)
    no.disable_noisy_ops()
    no.enable_noisy_ops(error_scale=0.05)
    assert no.get_noise_phases() == {"forward": True, "backward": False}
    train_step(model)
    assert no.disable_noisy_ops()["total_backward"] == 0


# -- the notes' quick starts


def test_operator_quick_start(model):
    """Select softmax, enable, evaluate: only softmax fires, in every block."""
    clean = logits(model)
    no.set_selective_ops(["softmax"])
    no.enable_noisy_ops(error_scale=0.05, all_ops_mode=True)
    assert not torch.equal(clean, logits(model))
    assert no.get_operator_injection_stats() == {"softmax": {"forward": 2, "backward": 0}}
    no.disable_noisy_ops()
    assert torch.equal(clean, logits(model))


def test_layer_quick_start(model):
    """Register, select layers one after the other, read per-layer counts."""
    assert no.register_layer_hooks(model) == 2
    no.set_selective_layers([0])
    no.enable_noisy_ops(error_scale=0.05)
    logits(model)
    assert no.get_layer_injection_stats() == {0: {"forward": 9, "backward": 0}}
    no.set_selective_layers([1])
    logits(model)
    assert no.get_layer_injection_stats()[1] == {"forward": 9, "backward": 0}
    no.disable_noisy_ops()


# -- selections


def test_none_means_all_and_all_ops_mode_adds_the_rest(model):
    """Without all_ops_mode the products; with it softmax, silu and norm too; a selection wins over both."""
    seen = {}
    for name, mode, selected in (("products", False, None), ("all", True, None), ("norm", False, ["layernorm"])):
        no.set_selective_operators(selected)
        no.enable_noisy_ops(all_ops_mode=mode)
        logits(model)
        no.disable_noisy_ops()
        seen[name] = set(no.get_operator_injection_stats()) - {"gemm"}
        no.reset_injection_stats()
    products = {"linear", "matmul"}
    assert seen == {"products": products, "all": products | {"softmax", "silu", "norm"}, "norm": {"norm"}}


@pytest.mark.parametrize("select", [no.set_selective_operators, no.set_selective_layers])
def test_an_empty_selection_is_off_on_purpose(model, select):
    """[] switches noise off and raises nothing, also while enabled; switching on again does not repeat noise."""
    no.register_layer_hooks(model)
    clean = logits(model)
    no.enable_noisy_ops()
    first = logits(model)
    select([])
    assert torch.equal(clean, logits(model))
    select(None)
    assert not torch.equal(first, logits(model))
    select([])
    no.disable_noisy_ops()


def test_matmul_means_all_products(model):
    """In the notes "matmul" includes linears."""
    no.set_selective_operators(["matmul"])
    no.enable_noisy_ops()
    logits(model)
    assert no.get_operator_injection_stats()["gemm"]["forward"] == 19
    assert no.should_inject_for_operator("linear") and not no.should_inject_for_operator("softmax")
    assert no.get_selective_operators() == ["gemm"] and no.should_inject_for_layer(5)


def test_scales(model):
    """Operator scales are multipliers, layer scales are absolute."""
    no.register_layer_hooks(model)
    no.set_operator_noise_scales({"softmax": 0.2, "matmul": 0.5})
    no.set_per_layer_scales({1: 0.02})
    no.enable_noisy_ops(error_scale=0.1, all_ops_mode=True)
    logits(model)
    (probe,) = state.probes
    strength = lambda op, place: probe.injection.strength(ns.Site(op, place, "m"))  # noqa: E731
    assert strength("softmax", 0) == pytest.approx(0.02) and strength("linear", "lm_head") == pytest.approx(0.05)
    assert strength("norm", 1) == pytest.approx(0.02) and strength("linear", 1) == pytest.approx(0.01)


# -- zero is an error


def test_zero_raises(model):
    """No module called, an operator the model lacks, no backward, both phases off, a rounded-away scale: all raise."""
    no.enable_noisy_ops()
    torch.ones(2, 2) @ torch.ones(2, 2)
    with pytest.raises(NothingInjected, match="not into raw tensor calls outside modules"):
        no.disable_noisy_ops()
    no.set_selective_operators(["gelu"])
    no.enable_noisy_ops()
    logits(model)
    with pytest.raises(NothingInjected, match="nothing was injected"):
        no.disable_noisy_ops()
    no.set_selective_operators(["softmax", "bmm"])
    no.enable_noisy_ops()
    logits(model)
    with pytest.raises(NothingInjected, match="bmm never fired"):
        no.disable_noisy_ops()
    no.set_selective_operators(None)
    for phases in ({"forward": False, "backward": True}, {"forward": False, "backward": False}):
        no.set_noise_phases(**phases)
        no.enable_noisy_ops()
        logits(model)
        with pytest.raises(NothingInjected, match="no backward pass ran"):
            no.disable_noisy_ops()
    no.set_noise_phases()
    half = tiny_model("llama").to(torch.bfloat16)
    no.enable_noisy_ops(1e-4)
    logits(half)
    with pytest.raises(NoiseRoundsAway, match="is lost to rounding in bfloat16"):
        no.disable_noisy_ops()


def test_layers_need_a_registered_model(model):
    """Layer numbers mean nothing without a model, and must be within it."""
    no.set_selective_layers([1])
    with pytest.raises(InvalidInput, match="register_layer_hooks"):
        no.enable_noisy_ops()
    no.register_layer_hooks(model)
    no.enable_noisy_ops()
    with pytest.raises(InvalidInput, match="layer 7 is out of range"):
        no.set_selective_layers([7])
    assert no.get_selective_layers() == [1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: no.enable_noisy_ops(-1), "at least 0"),
        (lambda: no.enable_noisy_ops(error_type="relative_gausian"), "Did you mean 'relative_gaussian'"),
        (lambda: no.set_selective_operators(["sofmax"]), "Did you mean 'softmax'"),
        (lambda: no.set_selective_layers(["a"]), "block indices"),
        (lambda: no.set_per_layer_scales({-1: 0.1}), "negative"),
        (lambda: no.set_operator_noise_scales({"softmax": float("nan")}), "finite"),
    ],
)
def test_bad_values_are_refused_and_change_nothing(call, words):
    """One clear error each; the settings stay as they were."""
    before = state.settings
    with pytest.raises(InvalidInput, match=words):
        call()
    assert state.settings == before and state.call is None


# -- modules


def test_a_part_called_before_the_whole_is_not_noised_twice(model):
    """The larger module takes over from the part that was opened first; counts add up."""
    no.enable_noisy_ops(seed=1)
    with torch.no_grad():
        model.model(**TOKENS)
    logits(model)
    assert len(state.probes) == 1 and no.disable_noisy_ops()["total_forward"] == 18 + 19


def test_two_models_and_modules_without_targets(model):
    """Every outermost module is opened once; a loss or dropout called alone is left alone."""
    other = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    no.enable_noisy_ops()
    logits(model)
    other(torch.ones(2, 8))
    nn.Dropout()(nn.CrossEntropyLoss()(torch.ones(2, 3), torch.tensor([0, 1])))
    assert no.disable_noisy_ops()["total_forward"] == 21


@pytest.mark.parametrize("reentrant", [True, False])
def test_backward_and_checkpointing(reentrant):
    """Backward noise is attributed to its layer; recomputation in backward repeats the noise and is not counted."""
    runs = []
    for checkpointing in (False, True):
        model = tiny_model("llama").train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        no.enable_noisy_ops(seed=2)
        gradients = train_step(model)
        no.disable_noisy_ops()
        runs.append((gradients, no.get_layer_injection_stats()))
    (plain, layers), (again, layers_again) = runs
    assert layers == layers_again == {n: {"forward": 9, "backward": 9} for n in (0, 1)}
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_noise_is_that_of_inject_and_follows_the_seed(model):
    """The same scope, the same draws; without a seed torch's initial seed is read and left alone."""
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"gemm"}, seed=4)):
        expected = logits(model)
    no.enable_noisy_ops(seed=4)
    assert torch.equal(expected, logits(model))
    no.disable_noisy_ops()
    state_before = torch.random.get_rng_state()
    no.enable_noisy_ops()
    assert not torch.equal(expected, logits(model)) and state.settings.seed == torch.initial_seed()
    no.disable_noisy_ops()
    assert torch.equal(state_before, torch.random.get_rng_state())


def test_no_trace_and_compiled_models(model):
    """After disable the model and torch are as before; a compiled model is noised, not silently clean."""
    compiled = torch.compile(model, backend="eager")
    logits(compiled)
    clean, keys = logits(model), {n: set(m.__dict__) for n, m in model.named_modules()}
    no.enable_noisy_ops()
    first, second = logits(compiled), logits(compiled)
    stats = no.disable_noisy_ops()
    assert stats["total_forward"] == 38 and not torch.equal(first, second)
    assert torch.equal(clean, logits(model)) and keys == {n: set(m.__dict__) for n, m in model.named_modules()}


def test_context(model, capsys):
    """The context disables on leaving, never masks an exception, and refuses to nest."""
    with no.noisy_ops_context(0.05):
        logits(model)
        with pytest.raises(InvalidInput, match="already enabled"), no.noisy_ops_context():
            pass
    assert no.get_injection_stats() == {"total_forward": 19, "total_backward": 0}
    with pytest.raises(ZeroDivisionError), no.noisy_ops_context():
        raise ZeroDivisionError
    with no.noisy_ops_context():
        logits(model)
    no.print_injection_summary()
    assert "linear" in capsys.readouterr().out


def test_validation_in_between_and_counts_after_a_reset(model):
    """Off for a validation, on again, disabled without another call: no false alarm; closed roots keep their counts."""
    no.enable_noisy_ops()
    other = nn.Linear(4, 4)
    logits(model)
    other(torch.ones(1, 4))
    no.reset_injection_stats()
    other(torch.ones(1, 4))
    no.set_selective_operators([])
    logits(model)
    no.set_selective_operators(None)
    assert no.disable_noisy_ops()["total_forward"] == 1


def test_layers_mean_the_registered_model(model):
    """With layers selected other models stay clean; layer scales need no registration and never touch a lone Linear."""
    other = tiny_model("llama", seed=1)
    no.register_layer_hooks(model)
    no.set_selective_layers([0])
    no.enable_noisy_ops()
    clean = logits(other)
    logits(model)
    assert no.disable_noisy_ops()["total_forward"] == 9 and torch.equal(clean, logits(other))
    state.__init__()
    no.set_per_layer_scales({0: 0.5})
    no.enable_noisy_ops(0.01)
    nn.Linear(4, 4)(torch.ones(1, 4))
    assert state.probes[0].injection.strength(ns.Site("linear", 0, "")) == pytest.approx(0.01)


def test_bodies_shared_by_two_models_are_noised_once(model):
    """Two wrappers around one body: the second takes over."""

    class Wrapper(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body = body

        def forward(self, **inputs):
            return self.body(**inputs)

    no.enable_noisy_ops()
    for wrapper in (Wrapper(model), Wrapper(model)):
        logits(wrapper)
    assert no.disable_noisy_ops()["total_forward"] == 38


def test_a_first_call_inside_a_scope_is_refused(model):
    """noisy_ops can't open a model that an inner scope holds: it says so."""
    no.enable_noisy_ops()
    with (
        pytest.raises(ModelHeld, match="call the model once before"),
        ns.inject(model, ns.Injection(ns.Gaussian(0.05))),
    ):
        logits(model)


def test_resets(model):
    """Counts start again from zero, per view or all."""
    no.enable_noisy_ops()
    logits(model)
    no.reset_layer_injection_stats()
    assert not any(c["forward"] for c in no.get_layer_injection_stats().values())
    assert no.get_injection_stats()["total_forward"] == 19
    no.reset_operator_injection_stats()
    no.reset_injection_stats()
    logits(model)
    assert no.get_injection_stats()["total_forward"] == 19
    assert no.get_layer_injection_stats()[0]["forward"] == 9


# -- the environment

SCRIPT = """
import torch, sys
from noisescope.testing import tiny_inputs, tiny_model
import noisescope
model = tiny_model("llama")
def train():
    model(**tiny_inputs("llama"), labels=tiny_inputs("llama")["input_ids"]).loss.backward()
train()
{after}
"""
READ = """
print(torch.nn.Module.__call__.__module__, 'noisescope.noisy_ops' in sys.modules)
from noisescope import noisy_ops
train()
stats = noisy_ops.get_injection_stats()
print(stats["total_forward"], stats["total_backward"], sorted(noisy_ops.get_layer_injection_stats()))
"""


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("NOISESCOPE", "VERL"))} | variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"NOISESCOPE_ENABLED": "1"}, (19, 19, [0, 1])),
        (
            {"VERL_NOISY_OPS_ENABLED": "1", "VERL_NOISY_OPS_SCALE": "0.1", "VERL_NOISY_OPS_ALL_OPS": "1"},
            (28, 28, [0, 1]),
        ),
        ({"NOISESCOPE_ENABLED": "1", "NOISESCOPE_FORWARD_ONLY": "1"}, (19, 0, [0, 1])),
        (
            {"NOISESCOPE_ENABLED": "1", "NOISESCOPE_FORWARD_ONLY": "1", "NOISESCOPE_BACKWARD_ONLY": "1"},
            (19, 19, [0, 1]),
        ),
        ({"NOISESCOPE_ENABLED": "1", "NOISESCOPE_LAYERS": "1", "NOISESCOPE_OPERATORS": "softmax"}, (1, 1, [1])),
        ({}, (0, 0, [])),
    ],
)
def test_environment(monkeypatch, model, variables, counts):
    """Variables and their aliases set what the functions would."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment.read_environment()
    train_step(model)
    stats = no.get_injection_stats()
    assert (stats["total_forward"], stats["total_backward"], sorted(no.get_layer_injection_stats())) == counts


@pytest.mark.slow
def test_environment_activates_on_import_of_noisy_ops_alone():
    """In a worker process, importing noisy_ops is enough, and `import noisescope` alone never noises anything."""
    done = run("-c", SCRIPT.format(after=READ), VERL_NOISY_OPS_ENABLED="1")
    assert done.stdout.splitlines() == ["torch.nn.modules.module False", "19 19 [0, 1]"], done.stderr


@pytest.mark.slow
def test_run_a_script(tmp_path, capsys, monkeypatch):
    """python -m noisescope.noisy_ops runs a script under noise and prints the counts to stderr; zero is exit code 2."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(after="print(sys.argv[1:])"))
    done = run("-m", "noisescope.noisy_ops", str(script), "a", "--b")
    assert done.returncode == 0 and done.stdout.strip() == "['a', '--b']"
    assert "injections   forward       19 backward       19" in done.stderr
    script.write_text("print('no model here')")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert environment.run_script([str(script)]) == 2 and "nothing was injected" in capsys.readouterr().err
    assert environment.run_script([str(tmp_path / "missing.py")]) == 2 and "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NOISESCOPE_SCALE", "five", "NOISESCOPE_SCALE='five'"),
        ("VERL_NOISY_OPS_SCALE", "-1", "at least 0"),
        ("NOISESCOPE_TYPE", "gauss", "unknown error type 'gauss'"),
        ("NOISESCOPE_ENABLED", "maybe", "allowed: 1, true"),
        ("NOISESCOPE_LAYERS", "1-x", "expected block numbers"),
        ("NOISESCOPE_OPERATORS", "conv", "unknown operator 'conv'"),
        ("NOISESCOPE_SEED", "x", "NOISESCOPE_SEED='x'"),
    ],
)
def test_bad_environment_values(monkeypatch, name, value, words):
    """A value that can't be read is refused with the variable's name."""
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=words):
        environment.read_environment()


def test_a_refused_model_is_refused_again(model):
    """Who catches the error and calls again must not get a clean forward for a noisy one."""
    no.enable_noisy_ops(error_scale=0.05)
    with ns.inject(model, ns.Injection(ns.Gaussian(0.0), operators={"softmax"})) as tally:
        for _ in range(2):
            with pytest.raises(ModelHeld, match="call the model once before"):
                logits(model)
        state.stop(check=False)
        logits(model)
    assert tally.forward
