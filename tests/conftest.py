"""Fixtures shared by all tests: tiny random models, fixed tokens, one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from noisescope.testing import tiny_model

hypothesis.settings.register_profile("here", deadline=None, max_examples=50)  # a busy machine is no failure
hypothesis.settings.load_profile("here")


# A file is one process's work: a long one that begins last would leave the other core idle.
LONGEST = (
    "test_docs.py",
    "cli/test_demo.py",
    "runs/test_ray_executor.py",
    "test_api.py",
    "training/test_phases_experiment.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, whatever order the others come in."""
    order = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny models: more threads only wait for each other, worst on a busy machine


@pytest.fixture
def llama() -> Any:
    """A fresh tiny Llama with three blocks."""
    return tiny_model("llama", layers=3)


@pytest.fixture
def conclusions() -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """What a report says, whenever and wherever it was made: all of it but the facts of the run."""
    return lambda report: {name: part for name, part in report.items() if name != "run"}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.arange(1, 13).reshape(2, 6)


@pytest.fixture
def logits() -> Callable[..., torch.Tensor]:
    """Call a model without gradients and return its logits."""

    def call(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        with torch.no_grad():
            out = model(*args, **kwargs)
        return out.logits if hasattr(out, "logits") else out

    return call
