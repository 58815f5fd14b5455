"""Gradients with blocks computed again: the same numbers, the same noise, and memory that blocks hardly add to."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from noisescope.injection import Injection
from noisescope.measures import fisher
from noisescope.measures.curvature import gradient_norms
from noisescope.measures.fisher import GradientScreen, Screen
from noisescope.measures.format_costs import WEIGHT_FORMATS, FormatScreen
from noisescope.measures.format_screen import QuestionScreen
from noisescope.probe.formats import Format
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.probe.recomputation import Recomputing
from noisescope.testing import tiny_model

TOKENS = torch.randint(1, 60, (6, 16), generator=torch.Generator().manual_seed(3))
INT4 = Format("int4")
SCREENS = {
    "noise": lambda model: Screen(model, Injection(Gaussian(1.0), phases={"forward"})),
    "formats": lambda model: FormatScreen(model, {"int4": WEIGHT_FORMATS["int4"]}),
    "weights": lambda model: QuestionScreen(model, Injection(INT4, operators={"linear"}, tensor="weight")),
    "activations": lambda model: QuestionScreen(model, Injection(INT4, operators={"linear"}, tensor="input")),
    "kv cache": lambda model: QuestionScreen(model, Injection(Format("fp8_e4m3"), operators={"kv_cache"})),
}


class PeakMemory(TorchDispatchMode):
    """The most bytes that results of operations took at once; views of weights take none."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
        self._alive: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._weights:
                    self._alive[StorageWeakRef(storage)] = storage.nbytes()
        self._alive = {ref: size for ref, size in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._alive.values()))
        return out


def run(model: Any, screen: GradientScreen, *, draws: int = 2) -> Any:
    with screen, torch.enable_grad():
        screen.samples = torch.arange(len(TOKENS))
        logits = model(TOKENS, use_cache=False).logits.flatten(0, 1)
        rows = torch.arange(len(logits))
        screen.score(logits, rows, rows * 7919, draws=draws, seed=0)
    return screen.sums  # type: ignore[attr-defined]


def numbers(sums: Any) -> dict[str, list[Tensor]]:
    found = {}
    for site, value in sums.items():
        samples = value.samples if hasattr(value, "samples") else value
        found[str(site)] = [torch.as_tensor(samples[name]).double() for name in sorted(samples)]
        found[str(site)] += [value.channels] if hasattr(value, "channels") else []
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("kind", SCREENS)
def test_every_screen_is_the_same_to_the_bit(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block too, whose two backwards follow each other."""
    for layers in (1, 2):
        model = tiny_model(name, layers=layers)
        recomputed = numbers(run(model, SCREENS[kind](model)))
        with monkeypatch.context() as patched:
            patched.setattr(fisher, "Recomputing", lambda *_: contextlib.nullcontext())
            plain = numbers(run(model, SCREENS[kind](model)))
        assert recomputed.keys() == plain.keys() and plain
        for site, values in plain.items():
            assert all(torch.equal(a, b) for a, b in zip(values, recomputed[site], strict=True)), site


@pytest.mark.parametrize("kind", SCREENS)
def test_a_block_adds_its_input_and_no_more(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak grows by a hidden state per block (and by the sums of its sites), not by its activations."""

    def growth() -> float:
        peaks = {}
        for layers in (3, 7):
            model = tiny_model("llama", layers=layers)
            with PeakMemory(model) as memory:
                run(model, SCREENS[kind](model))
            peaks[layers] = memory.peak
        return (peaks[7] - peaks[3]) / 4 / (TOKENS.numel() * 32 * 4)

    assert growth() < 2.5
    monkeypatch.setattr(fisher, "Recomputing", lambda *_: contextlib.nullcontext())
    assert growth() > 10  # what it would be


def norms(model: Any, *, recompute: bool) -> tuple[dict[str, float], Any, int]:
    """Gradient norms under noise in both phases, what was counted, and the peak."""
    groups = {str(i): list(layer.parameters()) for i, layer in enumerate(model.model.layers)}

    def loss(model: Any) -> Tensor:
        found: Tensor = model(TOKENS, labels=TOKENS, use_cache=False).loss
        return found

    probe = inject(model, Injection(Gaussian(0.1), seed=3))
    scope = Recomputing(model) if recompute else contextlib.nullcontext()
    with PeakMemory(model) as memory, probe as tally, scope:
        probe.rows(range(len(TOKENS)))
        found = gradient_norms(model, loss, groups)
    return found, {place: (count.forward, count.backward) for place, count in tally.per_layer.items()}, memory.peak


def test_noise_is_drawn_once_and_the_same_in_the_second_forward() -> None:
    model = tiny_model("llama", layers=3)
    plain, counted, _ = norms(model, recompute=False)
    again, counted_again, _ = norms(model, recompute=True)
    assert again == plain
    assert counted_again == counted


def test_gradients_are_let_go_block_by_block() -> None:
    """Neither the activations nor the gradients of 4 more blocks are held: a block's weights are 50 KB here."""
    peaks = {n: norms(tiny_model("llama", layers=n), recompute=True)[2] for n in (3, 7)}
    hidden = TOKENS.numel() * 32 * 4
    assert (peaks[7] - peaks[3]) / 4 < 1.5 * hidden
    model = tiny_model("llama", layers=2)
    model.lm_head.weight.grad = before = torch.ones_like(model.lm_head.weight)
    gradient_norms(model, lambda model: model(TOKENS, labels=TOKENS).loss, {"head": [model.lm_head.weight]})
    assert model.lm_head.weight.grad is before and not model.lm_head.weight._post_accumulate_grad_hooks


def test_without_gradients_a_block_runs_once() -> None:
    model, calls = tiny_model("llama"), []
    own = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda *args: calls.append(1) or own(*args)
    with Recomputing(model), torch.no_grad():
        model(TOKENS)
    assert len(calls) == 1
    with Recomputing(model):
        model(TOKENS).logits.sum().backward()
    assert len(calls) == 3
