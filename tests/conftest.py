"""Fixtures shared by all tests: tiny random models, fixed tokens, one thread."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tests.network import Network

NETWORK = Network()  # before anything else is imported: libraries may ask then

import torch  # noqa: E402

from noisescope.testing import tiny_model  # noqa: E402

hypothesis.settings.register_profile("here", deadline=None, max_examples=50)  # a busy machine is no failure
hypothesis.settings.load_profile("here")


# A file is one process's work: a long one that begins last would leave the other core idle.
LONGEST = (
    "localization/test_audit.py",
    "runs/test_broken_runs.py",
    "cli/test_demo.py",
    "runs/test_ray_executor.py",
    "localization/test_relations.py",
    "test_api.py",
    "training/test_phases_experiment.py",
    "localization/test_relations_faults.py",
    "localization/test_audit_code.py",
    "localization/test_audit_between.py",
    "localization/test_block_scans.py",
    "engines/test_compare.py",
    "reports/test_browser.py",
    "cli/test_records.py",
    "cli/test_plan.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, whatever order the others come in."""
    order = {Path(__file__).parent / name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish() -> None:
    """What imports have made stays: the garbage collector need not go through it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny models: more threads only wait for each other, worst on a busy machine


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From the first fixture of a test to the last."""
    NETWORK.allowed = item.get_closest_marker("ray") is not None
    return (yield)


@pytest.fixture(autouse=True)
def network() -> Iterator[Network]:
    """What this process asked of the network, which is nothing: who asked and went on without an answer fails here."""
    yield NETWORK
    refused, NETWORK.refused = NETWORK.refused, []
    assert not refused


@pytest.fixture(scope="module")
def benchmark_module() -> Iterator[Callable[[str], Any]]:
    """Import a script of benchmarks/ by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module


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
