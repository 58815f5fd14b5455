"""The plugin of vLLM without vLLM: what it reads, how it names tokens, and a model with vLLM's kinds of modules."""

from __future__ import annotations

import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from noisescope.engines.vllm_modules import ModuleMap
from noisescope.engines.vllm_plugin import (
    FlatProbe,
    RolloutNoise,
    check_supported,
    noisy_forward,
    prompt_name,
    register,
)
from noisescope.errors import InvalidInput
from noisescope.training import launch
from noisescope.training.schedules import Constant

PROMPTS = {"one": [1, 2, 3], "two": [4, 5, 6, 7], "three": [1, 2, 9]}


class LinearBase(nn.Linear):
    def forward(self, x):
        return super().forward(x), None


class RMSNorm(nn.RMSNorm):
    pass


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = LinearBase(16, 16)

    def forward(self, x):
        return x + self.proj(x)[0]


class Model(nn.Module):
    """Two layers over a row of tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 16)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = RMSNorm(16)

    def forward(self, input_ids, positions):
        x = self.embed(input_ids) + positions[:, None] / 8
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def config(mode=0, ranks=1):
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=mode), parallel_config=SimpleNamespace(tensor_parallel_size=ranks)
    )


class Runner:
    """As vLLM's: requests, of which a forward runs some tokens each."""

    vllm_config = config()

    def __init__(self):
        self.model = Model()
        self.requests = {name: SimpleNamespace(prompt_token_ids=ids) for name, ids in PROMPTS.items()}

    def get_model(self):
        return self.model

    @torch.no_grad()
    def forward(self, input_ids=None, positions=None):
        return self.model(input_ids=input_ids, positions=positions)

    def run(self, forward, **tokens):
        """Tokens of each request as a range of positions; what the model gives for each of them."""
        self.input_batch = SimpleNamespace(req_ids=list(tokens))
        numbers = [number for number, part in enumerate(tokens.values()) for _ in part]
        self.req_indices = SimpleNamespace(np=np.array([*numbers, 0, 0]))
        ids = torch.tensor([PROMPTS[name][at] for name, part in tokens.items() for at in part])
        y = forward(self, input_ids=ids, positions=torch.tensor([at for part in tokens.values() for at in part]))
        keys = [(name, at) for name, part in tokens.items() for at in part]
        return dict(zip(keys, y, strict=True))


def noise(**changed):
    return RolloutNoise(**{"schedule": Constant(0.1), "operators": frozenset({"linear"}), **changed})


def test_draws_belong_to_prompt_and_position(tmp_path):
    """Whatever else runs in the batch, and in chunks; other prompts, seeds and steps draw other numbers."""
    runner = Runner()
    clean = runner.run(Runner.forward, one=range(3), two=range(4))
    forward = noisy_forward(Runner.forward, noise(tally=tmp_path))
    together = runner.run(forward, one=range(3), two=range(4), three=range(3))
    parts = [runner.run(forward, two=range(2)), runner.run(forward, three=range(1), two=range(2, 4))]
    for key, row in [pair for part in parts for pair in part.items()]:
        assert torch.allclose(row, together[key], rtol=1e-5, atol=1e-6)  # sums may be others in their last bit
    assert not any(torch.equal(clean[key], together[key]) for key in clean)
    assert not torch.equal(together["one", 0], together["three", 0])  # the same token in another prompt
    launch.set_step(tmp_path, 1)
    assert not torch.equal(runner.run(forward, one=range(3))["one", 0], together["one", 0])
    other = Runner().run(noisy_forward(Runner.forward, noise(seed=1)), one=range(3))
    assert not torch.equal(other["one", 0], together["one", 0])
    again = Runner().run(noisy_forward(Runner.forward, noise()), one=range(3))
    assert torch.allclose(again["one", 0], together["one", 0], rtol=1e-5, atol=1e-6)


def test_what_the_environment_asks_for(monkeypatch, tmp_path):
    given = launch.environment(0.02, schedule="linear", steps=11, tally=tmp_path, without_gradients=True, seed=5)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found = RolloutNoise.from_environment()
    assert found.operators == {"gemm"} and str(found.tally) == given["NOISESCOPE_TALLY"] and found.step() == 0
    launch.set_step(found.tally, 10)
    assert found.step() == 10 and found.injection(10).perturbation.scale == pytest.approx(0.0002)
    (found.tally / "step").write_text("soon", encoding="utf-8")
    with pytest.raises(InvalidInput, match="is not a valid step file"):
        found.step()
    assert found.injection(0).seed == 5 != found.injection(10).seed
    monkeypatch.setenv("NOISESCOPE_TRAINING_ONLY", "1")
    assert RolloutNoise.from_environment() is None
    monkeypatch.setenv("NOISESCOPE_ENABLED", "0")
    register()  # vLLM is not imported: there is none here


def test_the_forward_of_vllm_is_wrapped_once(monkeypatch):
    """With the names of the original method notes, too."""
    fake = types.ModuleType("vllm.v1.worker.gpu_model_runner")
    fake.GPUModelRunner = type("GPUModelRunner", (), {"_model_forward": Runner.forward})
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setenv("VERL_NOISY_OPS_ENABLED", "1")
    monkeypatch.setenv("VERL_NOISY_OPS_SCALE", "0.3")
    assert RolloutNoise.from_environment().schedule == Constant(0.3)
    register()
    first = fake.GPUModelRunner._model_forward
    register()
    assert first is fake.GPUModelRunner._model_forward is not Runner.forward


def test_what_noise_would_miss_is_refused(monkeypatch):
    with pytest.raises(InvalidInput, match="pass enforce_eager=True"):
        check_supported(config(mode=3))
    with pytest.raises(InvalidInput, match="tensor_parallel_size=1, got 2"):
        check_supported(config(ranks=2))
    with pytest.raises(InvalidInput, match="this prompt consists of embeddings"):
        prompt_name(None)
    model = Model()
    probe = FlatProbe(model, noise().injection(0), anatomy=ModuleMap.of(model).anatomy, check=False)
    probe.rows([1, 2], torch.tensor([0]))
    with probe, pytest.raises(InvalidInput, match="2 tokens are named"):
        model(torch.tensor([1, 2]), torch.tensor([0, 1]))


def test_schedules_and_steps_are_checked(tmp_path):
    with pytest.raises(InvalidInput, match="works only in rollout workers"):
        launch.environment(schedule="linear", steps=5, tally=tmp_path)
    with pytest.raises(InvalidInput, match="unknown schedule"):
        launch.environment(schedule="square")
    with pytest.raises(InvalidInput, match="a step must be an integer"):
        launch.set_step(tmp_path, -1)
