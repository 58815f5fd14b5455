"""One owner: the thread and the coroutine that opened a scope. All others are refused and change nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.errors import ModelHeld
from noisescope.probe.prefix import Prefix

NOISE = ns.Injection(ns.Gaussian(0.1), operators={"linear", "softmax"}, phases={"forward"}, seed=3)


def outcome(work: Callable[[], Any]) -> Any:
    """What a call gives, or the words it is refused with."""
    try:
        return work()
    except ModelHeld as error:
        return str(error)


def in_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(outcome(work)))
    thread.start()
    thread.join()
    return found[0]


def noisy_calls(model: Any, tokens: Any, logits: Any, count: int) -> list[torch.Tensor]:
    with ns.inject(model, NOISE):
        return [logits(model, tokens) for _ in range(count)]


@pytest.mark.parametrize("calls", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_calls_from_a_second_thread(calls: int, llama: Any, tokens: Any, logits: Any) -> None:
    """All are refused, while every forward of the holder gives what it gives alone."""
    expected = noisy_calls(llama, tokens, logits, 20)
    refused, wrong, done = [0], [0], threading.Event()

    def intrude() -> None:
        for _ in range(calls):
            try:
                logits(llama, tokens)
                wrong[0] += 1
            except ModelHeld:
                refused[0] += 1
        done.set()

    mine = 0
    with ns.inject(llama, NOISE) as tally:
        thread = threading.Thread(target=intrude)
        thread.start()
        while not done.is_set() or mine < 20:
            ours = logits(llama, tokens)
            wrong[0] += mine < 20 and not torch.equal(ours, expected[mine])
            mine += 1
        thread.join()
    assert refused[0] == calls and wrong[0] == 0 and tally.per_layer[0].forward * 1.0 % mine == 0


def test_parts_of_a_held_model_are_held_too(llama: Any, tokens: Any, logits: Any) -> None:
    """A block, the inner model, a linear: also where they would be passed by, or the scope sleeps in this call."""
    hidden = torch.randn(1, 4, llama.config.hidden_size)
    with torch.no_grad(), Prefix(llama) as prefix:
        with prefix.recording(0):
            logits(llama, tokens)
        with prefix.starting_at(1, 0):
            for part in (llama.model.layers[0], llama.model.layers[1]):
                assert "another thread" in in_thread(lambda part=part: part(hidden))
    probe = ns.inject(llama, NOISE)
    probe.gradients_only = True
    with probe:
        logits(llama, tokens)
        llama(tokens)
        for part, x in ((llama.model, tokens), (llama.model.layers[0].self_attn.q_proj, hidden)):
            with torch.no_grad():
                assert "another thread" in in_thread(lambda part=part, x=x: part(x))


def test_a_coroutine_that_did_not_open_the_scope_is_refused(llama: Any, tokens: Any, logits: Any) -> None:
    """The owner awaits inside its scope; no other task can call the model or open it, not even its children."""
    clean, expected = logits(llama, tokens), noisy_calls(llama, tokens, logits, 2)

    async def intruder() -> list[Any]:
        return [outcome(lambda: logits(llama, tokens)), outcome(lambda: noisy_calls(llama, tokens, logits, 1))]

    async def owner() -> list[Any]:
        with ns.inject(llama, NOISE):
            first = logits(llama, tokens)
            refused = await asyncio.create_task(intruder())
            refused.append(await asyncio.to_thread(outcome, lambda: logits(llama, tokens)))
            helped = await helper()  # awaited, not scheduled: this is the owner's own task
            return [first, helped, *refused]

    async def helper() -> Any:
        await asyncio.sleep(0)
        return logits(llama, tokens)

    async def both() -> list[Any]:
        return (await asyncio.gather(owner(), later()))[0]

    async def later() -> None:
        await asyncio.sleep(0)
        assert isinstance(outcome(lambda: logits(llama, tokens)), str)

    first, helped, called, opened, threaded = asyncio.run(both())
    assert torch.equal(first, expected[0]) and torch.equal(helped, expected[1])
    assert "another coroutine: open the scope in the coroutine (asyncio task) that calls" in called
    assert "another thread or coroutine has a scope open" in opened and "another thread (" in threaded
    assert torch.equal(logits(llama, tokens), clean)
    with ns.inject(llama, NOISE):
        assert "another coroutine" in asyncio.run(intruder())[0]
        assert torch.equal(logits(llama, tokens), expected[0])


def test_tasks_take_turns(llama: Any, tokens: Any, logits: Any) -> None:
    """A scope that is left before the task waits belongs to nobody afterwards."""
    expected = noisy_calls(llama, tokens, logits, 1)[0]

    async def turn() -> Any:
        found = noisy_calls(llama, tokens, logits, 1)[0]
        await asyncio.sleep(0)
        return found

    async def all_turns() -> list[Any]:
        return await asyncio.gather(*(turn() for _ in range(5)))

    assert all(torch.equal(found, expected) for found in asyncio.run(all_turns()))


class Calls(torch.autograd.Function):
    """A backward that calls something of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, work: Callable[[], Any]) -> torch.Tensor:
        ctx.work = work
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.work()
        return gradient, None


def test_a_backward_pass_of_another_thread_is_no_way_in(llama: Any, tokens: Any, logits: Any) -> None:
    """Only what repeats a part of the owner's forward is a recomputation; a new call inside any backward is not."""
    found: list[Any] = []

    def intrude() -> None:
        x = torch.ones(1, requires_grad=True)
        Calls.apply(x, lambda: found.append(outcome(lambda: logits(llama, tokens.clone())))).sum().backward()

    with ns.inject(llama, NOISE):
        logits(llama, tokens)
        in_thread(intrude)
    assert "another thread" in found[0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_another_thread_passes(reentrant: bool, llama: Any, tokens: Any) -> None:
    """backward() of the owner's graph, called elsewhere, repeats the owner's noise."""
    both = ns.Injection(ns.Gaussian(0.1), operators={"linear"}, seed=3)

    llama.train()
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def loss() -> Any:
        return llama(tokens, labels=tokens, use_cache=False).loss

    def gradients(run: Callable[[Callable[[], Any]], Any]) -> tuple[list[torch.Tensor], int]:
        llama.zero_grad()
        with ns.inject(llama, both) as tally:
            run(loss().backward)
        return [p.grad.clone() for p in llama.parameters() if p.grad is not None], tally.backward

    here, there = gradients(lambda work: work()), gradients(in_thread)
    assert here[1] == there[1] > 0 and len(here[0]) > 5
    assert all(torch.equal(a, b) for a, b in zip(here[0], there[0], strict=True))


def test_a_hundred_nested_scopes_are_refused_by_name(llama: Any, tokens: Any, logits: Any) -> None:
    """16 work, each with its own tally; the next is refused before anything is altered."""
    clean = logits(llama, tokens)
    with ExitStack() as scopes:
        tallies = []
        with pytest.raises(ModelHeld, match=r"16 noisescope scopes are already open on this Llama.*recursion"):
            for seed in range(100):
                noise = ns.Injection(ns.Gaussian(0.01), phases={"forward"}, seed=seed)
                tallies.append(scopes.enter_context(ns.inject(llama, noise)))
        assert len(tallies) == 16
        logits(llama, tokens)
        assert len({tally.forward for tally in tallies}) == 1 and tallies[0].forward > 0
    assert torch.equal(logits(llama, tokens), clean)
    assert not any("forward" in module.__dict__ for module in llama.modules())
