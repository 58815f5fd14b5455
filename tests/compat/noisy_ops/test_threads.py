"""Threads under the process-wide interface: each its own model, one model one thread at a time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import noisescope as ns
from noisescope import noisy_ops as no
from noisescope.errors import ModelHeld
from noisescope.testing import tiny_inputs, tiny_model

TOKENS = tiny_inputs("llama")


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**TOKENS).logits


def loss_of(model: nn.Module) -> Tensor:
    return model(**TOKENS, labels=TOKENS["input_ids"]).loss


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def elsewhere(work: Callable[[], Any]) -> Any:
    """The result of a function in another thread, or its error."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@contextlib.contextmanager
def stopped_inside(model: nn.Module, work: Callable[[], Any]) -> Iterator[Future[Any]]:
    """Another thread runs `work` and waits inside the model's second block until the `with` block ends."""
    inside, go_on, first = threading.Event(), threading.Event(), threading.Lock()

    def wait(*_: Any) -> None:
        if first.acquire(blocking=False):
            inside.set()
            assert go_on.wait(60)

    handle = model.model.layers[1].register_forward_pre_hook(wait)
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(work)
            assert inside.wait(60)
            try:
                yield running
            finally:
                go_on.set()
    finally:
        handle.remove()


def test_each_thread_has_its_own_model():
    """Three threads at once: each model gets the noise it would get alone, and all of it is counted."""
    models = [tiny_model("llama", seed=seed) for seed in range(3)]
    no.enable_noisy_ops(seed=1)
    alone = [[logits(model) for _ in range(8)] for model in models]
    no.disable_noisy_ops()
    start = threading.Barrier(3)

    def work(model: nn.Module) -> list[Tensor]:
        start.wait(60)
        return [logits(model) for _ in range(8)]

    no.enable_noisy_ops(seed=1)
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(work, models))
    assert no.disable_noisy_ops()["total_forward"] == 3 * 8 * 19
    for mine, theirs in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_a_model_may_move_to_another_thread(model):
    """Opened in one thread and called in another, then here again: noised as if one thread had made all calls."""
    no.enable_noisy_ops(seed=1)
    here = [logits(model) for _ in range(3)]
    no.disable_noisy_ops()
    no.enable_noisy_ops(seed=1)
    moved = [logits(model), elsewhere(lambda: logits(model)), logits(model)]
    assert no.disable_noisy_ops()["total_forward"] == 3 * 19
    assert all(torch.equal(a, b) for a, b in zip(here, moved, strict=True))


def test_one_model_in_two_threads_at_once_raises_in_the_second(model):
    """The second gets an error; the first gets what it would have got; afterwards the second may."""
    no.enable_noisy_ops(seed=1)
    first, second = logits(model), logits(model)
    no.disable_noisy_ops()
    no.enable_noisy_ops(seed=1)
    with stopped_inside(model, lambda: logits(model)) as running:
        for part in (model, model.model, model.model.layers[0]):
            with (
                pytest.raises(ModelHeld, match="two threads use this LlamaForCausalLM"),
                torch.no_grad(),
            ):
                part(torch.zeros(1, 2, 32)) if part is model.model.layers[0] else part(**TOKENS)
    assert torch.equal(running.result(), first) and torch.equal(logits(model), second)
    assert no.disable_noisy_ops()["total_forward"] == 2 * 19


def test_a_shared_part_in_two_threads_at_once(model):
    """Two wrappers around one body: the second thread is refused before anything is closed under the first."""

    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model.model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs)

    no.enable_noisy_ops()
    with stopped_inside(model, lambda: logits(model)), pytest.raises(ModelHeld, match="shares modules with a Llama"):
        Wrapper(model)(**TOKENS)
    assert no.disable_noisy_ops()["total_forward"] == 19


def test_scopes_and_threads(model):
    """A scope may be opened where another thread only called the model; then that thread is refused."""
    no.enable_noisy_ops()
    elsewhere(lambda: logits(model))
    with ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"softmax"})) as tally:
        logits(model)
        with pytest.raises(ModelHeld, match="in use by a noisescope scope of another thread"):
            elsewhere(lambda: logits(model))
    assert tally.forward == 2 and no.disable_noisy_ops()["total_forward"] == 2 * 19
    no.enable_noisy_ops()
    with (
        stopped_inside(model, lambda: logits(model)),
        pytest.raises(ModelHeld, match="another thread or coroutine has a scope open"),
    ):
        ns.inject(model, ns.Injection(ns.Gaussian(0.1))).__enter__()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_belongs_to_its_forward_in_any_thread(reentrant):
    """Forward here, backward and its recomputations there: the gradients and counts of one thread."""
    runs = []
    for backward in (lambda work: work(), elsewhere):
        model = tiny_model("llama").train()
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        no.enable_noisy_ops(seed=2)
        loss = loss_of(model)
        runs.append((backward(lambda model=model, loss=loss: gradients(model, loss)), no.disable_noisy_ops()))
    (here, counts), (there, counts_there) = runs
    assert counts == counts_there == {"total_forward": 19, "total_backward": 19}
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def test_a_recomputation_beside_a_forward_is_refused():
    """It would run the same modules at once; without recomputation a backward disturbs nobody."""
    for checkpointing in (False, True):
        model = tiny_model("llama").train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable()
        no.enable_noisy_ops(seed=2)
        loss = loss_of(model)
        with stopped_inside(model, lambda model=model: logits(model)):
            if checkpointing:
                with pytest.raises(ModelHeld, match="two threads use this"):
                    loss.backward()
            else:
                loss.backward()
        no.disable_noisy_ops()


def test_settings_change_while_other_threads_run():
    """Switching operators, phases and scales in one thread while others run raises nowhere and leaves no trace."""
    models = [tiny_model("llama", seed=seed) for seed in range(2)]
    clean = [logits(model) for model in models]
    no.enable_noisy_ops(all_ops_mode=True)

    def work(model: nn.Module) -> None:
        for _ in range(15):
            logits(model)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(work, model) for model in models]
        for turn in range(60):
            no.set_selective_operators([["softmax"], ["matmul", "norm"], None, ["silu"]][turn % 4])
            no.set_operator_noise_scales({"softmax": 0.1 * (turn % 3)})
            no.get_layer_injection_stats()
        for one in running:
            one.result()
    no.set_selective_operators([])
    no.disable_noisy_ops()
    assert all(torch.equal(a, logits(model)) for a, model in zip(clean, models, strict=True))
