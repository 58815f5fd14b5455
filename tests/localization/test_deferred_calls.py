"""Operators judged side by side: results in order, threads given back, the same verdict as one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import noisescope as ns
from noisescope.localization.deferred_calls import Computed, side_by_side
from noisescope.testing import tiny_model


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_results_come_in_order_from_other_threads_without_gradients() -> None:
    seen: set[str] = set()

    def task(number: int) -> Computed:
        seen.add(threading.current_thread().name)
        assert not torch.is_grad_enabled()
        return Computed(checksums=number)

    found = list(side_by_side([lambda number=number: task(number) for number in range(9)]))
    assert [each.checksums for each in found] == list(range(9))
    assert all(name.startswith("noisescope-audit") for name in seen) and torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_what_a_task_raises_is_raised_here_and_threads_are_given_back() -> None:
    def fails() -> Computed:
        raise OverflowError("no such number")

    with pytest.raises(OverflowError):
        list(side_by_side([Computed, fails, Computed]))
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("faulty", [False, True])
def test_the_verdict_is_that_of_one_thread(faulty: bool, request: pytest.FixtureRequest) -> None:
    model = tiny_model("llama", layers=2)
    if faulty:
        model.model.layers[1].mlp.down_proj.register_forward_hook(lambda _, args, y: y * 1.001)

    def located() -> dict[str, object]:
        found = ns.locate(ns.wrap(model)).to_dict()
        return {name: found[name] for name in ("verdict", "headline", "checked")}

    alone = located()
    request.getfixturevalue("two_threads")
    assert located() == alone and alone["verdict"] == ("faulty" if faulty else "healthy")
