"""Tiny models, and their own answers as data, on which their clean accuracy is 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import noisescope as ns
from noisescope.model import Subject
from noisescope.testing import tiny_model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products gain nothing from two threads, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def _answered_by(model: Any, rows: int = 20) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (rows, 6), generator=torch.Generator().manual_seed(0))
    answers = model(ids).logits[:, -1:].argmax(-1)
    return {"input_ids": torch.cat([ids, answers], 1), "labels": torch.cat([torch.full_like(ids, -100), answers], 1)}


@pytest.fixture(scope="session")
def answered_by() -> Callable[..., dict[str, Tensor]]:
    """Random prompts with the model's own answer of one token, which alone is scored."""
    return _answered_by


@pytest.fixture(scope="session")
def subject() -> Subject:
    return ns.load("tiny:llama")


@pytest.fixture(scope="session")
def answered(subject: Subject) -> list[dict[str, Tensor]]:
    return [_answered_by(subject.model)]


@pytest.fixture
def random_batches() -> list[dict[str, Tensor]]:
    """Tokens that no model can predict."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 64, (4, 12), generator=generator)} for _ in range(2)]


@pytest.fixture(scope="session")
def hot_layer() -> tuple[Any, list[dict[str, Tensor]]]:
    """Six blocks of which only block 2 says anything, and what they answer."""
    model = tiny_model("llama", layers=6)
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            for last in (block.self_attn.o_proj, block.mlp.down_proj):
                last.weight *= 10 if index == 2 else 0.02
    return model, [_answered_by(model)]


@pytest.fixture(scope="session")
def outlier() -> Any:
    """A model whose block 1 has one massive channel, 5, in the output of down_proj. The head does not look at it."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5] *= 500
        model.lm_head.weight[:, 5] = 0
    return model
