"""Evaluation mode is a scope: whatever runs, fails or nests inside, every module has its own mode back afterwards."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import noisescope
from noisescope import api
from noisescope.api.preparation import prepare_diagnosis
from noisescope.data import tokens
from noisescope.demo.experiment_tasks import arithmetic
from noisescope.diagnostic import capture_layer_output
from noisescope.errors import ModelHeld
from noisescope.injection import Injection
from noisescope.localization.locate import locate
from noisescope.measures.curvature import gradient_norms, hessian_traces, parameter_fisher
from noisescope.measures.fisher import Screen
from noisescope.measures.smoothquant import rounded_kl, smooth
from noisescope.model.forwards import evaluating, stepwise_logits
from noisescope.model.loading import wrap
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.runs.batches import Material
from noisescope.runs.trial_runner import TrialRunner
from noisescope.testing import tiny_model
from noisescope.training import gradient_pretest
from noisescope.trials import Slice

SOURCE = Path(noisescope.__file__).parent
TOKENS = torch.arange(1, 9)[None]
BATCHES = [TOKENS, TOKENS + 8]


def mixed_modes(name: str = "gpt2", **changes: Any) -> nn.Module:
    """A model with dropout in train mode, with some modules in eval mode in the middle of it."""
    model = tiny_model(name, layers=2, **changes).train()
    for index, module in enumerate(model.modules()):
        module.training = index % 3 != 1
    assert model.training and len({module.training for module in model.modules()}) == 2
    return model


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


class Stubborn(nn.Module):
    """Refuses to leave train mode."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training" and value is False:
            raise RuntimeError("this module stays in train mode")
        super().__setattr__(name, value)


def test_every_module_gets_its_own_mode_back() -> None:
    """After a plain exit, after an exception, and nested."""
    model = mixed_modes()
    before = modes(model)
    with evaluating(model):
        assert not any(modes(model))
        with evaluating(model):
            assert not any(modes(model))
        assert not any(modes(model))
    assert modes(model) == before
    with pytest.raises(ValueError, match="inside"), evaluating(model):
        raise ValueError("inside")
    assert modes(model) == before


def test_entering_that_fails_half_way_changes_nothing() -> None:
    """Modules before the one that fails are in their own mode again, and the error comes through."""
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2).eval(), Stubborn(), nn.Dropout())
    before = modes(model)
    with pytest.raises(RuntimeError, match="stays in train mode"), evaluating(model):
        raise AssertionError("never reached")
    assert modes(model) == before == [True, True, False, True, True]


def test_gradient_mode_is_left_to_the_caller() -> None:
    with evaluating(nn.Dropout()):
        assert torch.is_grad_enabled()
    with torch.no_grad(), evaluating(nn.Dropout()):
        assert not torch.is_grad_enabled()


def runner_of(model: nn.Module) -> tuple[TrialRunner, Slice]:
    data = Material(tokens.from_batches(BATCHES), "text")
    return TrialRunner(wrap(model), [data]), Slice(data.fingerprint, 0, 2)


def test_a_model_with_dropout_in_train_mode_is_causal() -> None:
    """GPT-2's dropout moves every position from one forward to the next, which is no look at later tokens."""
    model = tiny_model("gpt2").train()
    runner, part = runner_of(model)
    runner.check_causal(part)
    assert all(modes(model))


def test_a_diagnosis_of_a_model_in_train_mode() -> None:
    """It runs, gives what the model in eval mode gives, and leaves every module in its own mode."""
    asked: dict[str, Any] = {"samples": 2, "seeds": 1, "levels": ("operator",), "calibration_samples": 0}
    quiet = api.diagnose(wrap(tiny_model("gpt2")), BATCHES, **asked)
    model = mixed_modes()
    before = modes(model)
    report = api.diagnose(wrap(model), BATCHES, **asked)
    assert modes(model) == before
    assert report["operator_analysis"] == quiet["operator_analysis"]
    prepared = prepare_diagnosis(wrap(model), BATCHES, **asked)
    assert modes(model) == before and prepared.materials


def test_a_bench_restores_every_mode() -> None:
    model = mixed_modes()
    before = modes(model)
    runner, _ = runner_of(model)
    with runner:
        assert not any(modes(model))
    assert modes(model) == before
    with pytest.raises(KeyError), runner:
        raise KeyError
    assert modes(model) == before


def test_a_bench_that_can_not_be_entered_leaves_no_mode_behind() -> None:
    """Another thread holds the model: entering fails after the modes were set."""
    model = mixed_modes()
    before = modes(model)
    held, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with inject(model, Injection(Gaussian(0.1), operators={"linear"}), anatomy=None) as tally:
            held.set()
            leave.wait(60)
            model(TOKENS)
        assert tally.forward

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        with pytest.raises(ModelHeld, match="another thread"), runner_of(model)[0]:
            raise AssertionError("never reached")
        assert modes(model) == before
    finally:
        leave.set()
        thread.join()


def test_a_screen_that_can_not_be_entered_leaves_nothing_behind() -> None:
    """A parameter that is no leaf can't be frozen: the door is shut again, modes and other parameters are as before."""
    model = tiny_model("llama").train()
    del model.lm_head.weight
    model.lm_head.weight = torch.ones(96, 32, requires_grad=True) * 2  # type: ignore[assignment]
    late = nn.Parameter(torch.ones(2))
    model.register_parameter("late", late)
    model._parameters["broken"] = model.lm_head.weight  # type: ignore[assignment]
    learned = [p.requires_grad for p in model.parameters()]
    with pytest.raises(RuntimeError, match="leaf"), Screen(model, Injection(Gaussian(0.1))):
        raise AssertionError("never reached")
    assert [p.requires_grad for p in model.parameters()] == learned and all(modes(model))
    assert not [m for m in model.modules() if "forward" in m.__dict__]


def _screen(model: nn.Module) -> Any:
    with Screen(model, Injection(Gaussian(0.1))) as screen, torch.enable_grad():
        screen.samples = torch.arange(1)
        scored = torch.arange(8)
        screen.score(model(TOKENS).logits.flatten(0, 1), scored, scored, draws=1, seed=0)  # type: ignore[operator]
    return {str(site): sums.samples for site, sums in screen.sums.items()}


def _loss(model: Any, ids: Tensor = TOKENS) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def _head(model: Any) -> dict[str, list[nn.Parameter]]:
    return {"norm": list(model.transformer.ln_f.parameters())}


MEASUREMENTS: dict[str, Callable[[Any], Any]] = {
    "screen": _screen,
    "gradient_norms": lambda model: gradient_norms(model, _loss, _head(model)),
    "hessian_traces": lambda model: hessian_traces(model, _loss, _head(model), probes=2),
    "parameter_fisher": lambda model: parameter_fisher(model, [TOKENS], groups=_head(model)),
    "gradient_pretest": lambda model: gradient_pretest(model, _loss, BATCHES),
    "stepwise_logits": lambda model: stepwise_logits(model, TOKENS[0].tolist(), 4),
    "capture_layer_output": lambda model: capture_layer_output(model, 1, TOKENS),
    "smooth": lambda model: smooth(model, BATCHES).float_error,
    "rounded_kl": lambda model: rounded_kl(model, model, BATCHES),
    "locate": lambda model: locate(model, method="scans").to_dict(),
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_measurements_run_in_evaluation_mode(name: str) -> None:
    """On a model with dropout in mixed modes each gives what it gives in eval mode, and the modes stay."""
    model = mixed_modes()
    before = modes(model)
    noisy = MEASUREMENTS[name](model)
    assert modes(model) == before
    assert_same(noisy, MEASUREMENTS[name](tiny_model("gpt2")))


def assert_same(first: Any, second: Any) -> None:
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_same(first[key], second[key])
    elif isinstance(first, Tensor):
        assert torch.equal(first, second)
    else:
        assert first == second


def test_the_demo_task_is_asked_in_evaluation_mode() -> None:
    """A model in training is asked without dropout, and goes on training."""
    model = tiny_model("llama", vocab_size=512, max_position_embeddings=256).train()
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda module, args: seen.append(any(modes(module))))
    assert len(arithmetic("bundled", tests=4).right(model)) == 4
    assert seen == [False] and all(modes(model))


def test_no_other_code_sets_modes() -> None:
    """`evaluating` is the one place; besides it, models that were just made or loaded here, and trainers."""
    found = set()
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        candidate = any(word in text for word in ("eval", "train"))  # walking all trees takes seconds
        for node in ast.walk(ast.parse(text)) if candidate else ():
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if called and node.func.attr in ("eval", "train"):  # type: ignore[attr-defined]
                found.add(path.relative_to(SOURCE).as_posix())
            if isinstance(node, ast.Attribute) and node.attr == "training" and isinstance(node.ctx, ast.Store):
                found.add(path.relative_to(SOURCE).as_posix())
    assert found == {
        "model/forwards.py",
        "model/loading.py",
        "testing.py",
        "training/grpo.py",
        "training/tuning_task.py",
    }
