"""Engines of tiny models, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.testing import tiny_model


@pytest.fixture
def tiny() -> Callable[..., TransformersEngine]:
    """A Llama of three layers whose attention attends to something, in float32."""

    def make(name: str = "llama", sampling: Any = None, **settings: Any) -> TransformersEngine:
        model = tiny_model(name, layers=3, **settings)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 if parameter.dim() == 1 else 8
        return TransformersEngine(ns.wrap(model), sampling)

    return make


@pytest.fixture(scope="session")
def prompts() -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(tuple(torch.randint(3, 64, (12,), generator=generator).tolist()) for _ in range(4))
