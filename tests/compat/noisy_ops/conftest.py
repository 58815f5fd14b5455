"""The global state as it is at first, before and after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import nn

from noisescope.compat.noisy_ops.state import state
from noisescope.testing import tiny_model

MODULE_CALL = nn.Module.__call__


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """Each test starts from the initial global state and leaves torch as it was."""
    state.__init__()
    yield
    state.stop(check=False)
    assert nn.Module.__call__ is MODULE_CALL


@pytest.fixture
def model() -> nn.Module:
    return tiny_model("llama")
