"""Starting a forward behind its clean blocks gives the very numbers of the whole forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noisescope.injection import Injection
from noisescope.model.anatomy import dissect
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.probe.prefix import Prefix, first_noisy_block
from noisescope.testing import MODELS, tiny_inputs, tiny_model

CAUSAL = [name for name in MODELS if name not in ("bert", "vit", "t5", "transformer_encoder")]


def noise(**target: Any) -> Injection:
    return Injection(Gaussian(0.1), phases={"forward"}, seed=5, **target)


def test_the_first_noisy_block() -> None:
    """Blocks count from 0; noise before the blocks starts at 0, noise behind them after the last."""
    anatomy = dissect(tiny_model("llama", layers=4))
    assert first_noisy_block(noise(layers={2, 3}), anatomy) == 2
    assert first_noisy_block(noise(operators={"softmax"}), anatomy) == 0
    assert first_noisy_block(noise(places={"lm_head"}), anatomy) == 4
    assert first_noisy_block(noise(places={"final_norm", 3}), anatomy) == 3
    assert first_noisy_block(noise(places={"embed", 3}), anatomy) == 0
    assert first_noisy_block(noise(places={"rotary"}), anatomy) == 0


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("start", [1, 2, 3])
def test_a_short_forward_is_the_whole_one(name: str, start: int, logits: Any) -> None:
    """In every causal architecture, for a clean and a noisy forward, bit for bit."""
    model = tiny_model(name, layers=3)
    inputs = {**tiny_inputs(name), "use_cache": False}
    clean = logits(model, **inputs)
    injection = noise(layers={start} if start < 3 else None, places={"lm_head"})
    with inject(model, injection):
        whole = logits(model, **inputs)
    runs = _count_calls(model)
    with Prefix(model) as prefix:
        with prefix.recording("batch"):
            assert torch.equal(logits(model, **inputs), clean)
        assert prefix.usable("batch") and prefix.kept_bytes() > 0
        runs.clear()
        with prefix.starting_at(start, "batch"):
            assert torch.equal(logits(model, **inputs), clean)
            assert runs == list(range(start, 3))  # blocks before it were not computed
        with prefix.starting_at(start, "batch"), inject(model, injection) as tally:
            assert torch.equal(logits(model, **inputs), whole)
        assert tally.forward and not torch.equal(whole, clean)
        assert torch.equal(logits(model, **inputs), clean)  # outside the scope everything runs again
    assert torch.equal(logits(model, **inputs), clean)
    assert not [m for m in model.modules() if "forward" in m.__dict__]


def _count_calls(model: torch.nn.Module) -> list[int]:
    """Which blocks compute: their first norm or linear is called."""
    runs: list[int] = []
    modules = dict(model.named_modules())
    for index, block in enumerate(dissect(model).blocks):
        leaf = next(
            m
            for n, m in modules.items()
            if n.startswith(f"{block}.") and not list(m.children()) and list(m.parameters())
        )
        leaf.register_forward_pre_hook(lambda module, args, index=index: runs.append(index))
    return runs


def test_an_unknown_batch_runs_whole(llama: Any, tokens: torch.Tensor, logits: Any) -> None:
    """Nothing kept, nothing passed by; forgetting frees what was kept."""
    clean = logits(llama, tokens)
    with Prefix(llama) as prefix:
        with prefix.starting_at(2, "never seen"):
            assert torch.equal(logits(llama, tokens), clean)
        with prefix.recording(0):
            logits(llama, tokens)
        prefix.forget()
        assert not prefix.usable(0) and prefix.kept_bytes() == 0


def test_batches_are_kept_apart(llama: Any, tokens: torch.Tensor, logits: Any) -> None:
    """Each batch starts from its own hidden states."""
    other = tokens + 20
    clean = [logits(llama, tokens), logits(llama, other)]
    with Prefix(llama) as prefix:
        for number, batch in enumerate((tokens, other)):
            with prefix.recording(number):
                logits(llama, batch)
        for number, batch in reversed(list(enumerate((tokens, other)))):
            with prefix.starting_at(2, number):
                assert torch.equal(logits(llama, batch), clean[number])


@pytest.mark.parametrize("start", [1, 2, 3])
def test_an_encoder_and_a_decoder(start: int) -> None:
    """T5's blocks hand on position biases, and its decoder looks at the encoder: both are as they were."""
    model, inputs = tiny_model("t5", layers=2), {**tiny_inputs("t5"), "use_cache": False}
    with Prefix(model) as prefix, torch.no_grad():
        with prefix.recording(0):
            clean = model(**inputs).logits
        with prefix.starting_at(start, 0):
            assert torch.equal(model(**inputs).logits, clean)


def test_a_block_that_runs_twice_is_not_passed_by(llama: Any, tokens: torch.Tensor) -> None:
    """Which of its two outputs is meant can't be told."""
    with Prefix(llama) as prefix, torch.no_grad():
        with prefix.recording(0):
            llama(tokens)
            llama(tokens)
        assert not prefix.usable(0)
