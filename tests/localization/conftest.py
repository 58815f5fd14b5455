"""The demo model with few blocks: trained weights at a fraction of the cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import noisescope as ns


@pytest.fixture(scope="session")
def shallow_demo() -> Callable[..., ns.Subject]:
    """The first blocks of the demo model and its outer parts; every operator is there, and text is tokenised."""

    def load(blocks: int, dtype: str = "float32") -> ns.Subject:
        subject = ns.load("demo", dtype=dtype)
        subject.model.model.layers = subject.model.model.layers[:blocks]
        subject.model.config.num_hidden_layers = blocks
        return ns.wrap(subject.model, subject.tokenizer)

    return load
