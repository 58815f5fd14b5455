"""Batches follow the memory that is allowed, and results do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3Config, Gemma3TextConfig

from noisescope.data.tokens import Encoded, Sequence
from noisescope.injection import Injection
from noisescope.model.anatomy import dissect
from noisescope.model.loading import wrap
from noisescope.model.streaming import stream_blocks
from noisescope.probe.noise import Gaussian
from noisescope.runs import measures
from noisescope.runs.batches import GIB, GRADIENTS, Material, Room, footprint, free_memory
from noisescope.runs.trial_runner import TrialRunner, conditions
from noisescope.testing import tiny_model
from noisescope.trials import Slice, Trial

TOKENS = torch.randint(1, 60, (12, 16), generator=torch.Generator().manual_seed(1))
GROUPS = tuple((Sequence(i, tuple(row.tolist()), 1, 1),) for i, row in enumerate(TOKENS))
DATA = Material(Encoded(GROUPS, 0, TOKENS.numel()), "text")
CPU = torch.device("cpu")


def run(measure: str, memory: float | None, **settings: Any) -> tuple[Any, TrialRunner]:
    subject = wrap(tiny_model("llama", layers=3))
    where = Injection(Gaussian(0.05), operators={"linear"}, phases={"forward"})
    asked = Trial(conditions(subject), measure, Slice(DATA.fingerprint, 0, 12), where, settings)
    with TrialRunner(subject, [DATA], memory=memory) as runner:
        result = runner.run(asked)
    assert not result.error
    return result, runner


def test_shapes_give_the_footprint() -> None:
    """hidden 32, 4 heads, inner 64, 64 tokens, float32: 4 linears of attention and 3 of the MLP."""
    model = tiny_model("llama", layers=3)
    found = footprint(model, dissect(model))
    assert (found.logits, found.hidden, found.blocks, found.heads, found.element) == (64 * 4, 32 * 4, 3, 4, 4)
    assert found.widths == 4 * 32 + 3 * 64 and found.streamed == 0
    assert found.kept(10) == 10 * (256 + 3 * 128)
    assert found.gradients(16) > found.forward(16) > 0
    model.config = Gemma3Config(text_config=Gemma3TextConfig(num_attention_heads=4))  # of a model that sees images, too
    assert footprint(model, dissect(model)).heads == 4
    streamed = footprint(stream_blocks(model, CPU), dissect(model))
    assert streamed.streamed == 3 * sum(p.numel() * 4 for p in model.model.layers[0].parameters())


def test_samples_by_memory() -> None:
    model = tiny_model("llama", layers=3)
    room = Room.on(model, dissect(model), CPU, 1.0)
    each = room.needs.gradients(16)
    assert room.bytes == GIB
    assert room.gradients(16, 0) == GIB // each and room.gradients(16, GIB // 2) == GIB // 2 // each
    assert Room(100 * GIB, room.needs).gradients(16, 0) == GRADIENTS // each  # no more than is useful
    assert Room(None, room.needs).gradients(16, 0) is None
    assert Room(1, room.needs).forwards(16, 0) == 1  # one sample is tried whatever the estimate says
    free = free_memory(CPU)
    assert free is not None and free > 0
    default = Room.on(model, dissect(model), CPU, None).bytes
    assert default is not None and 0.5 * free < default < free


@pytest.mark.parametrize(("measure", "settings"), [("score", {}), ("screen", {"draws": 1, "seed": 0}), ("capture", {})])
def test_a_smaller_memory_gives_smaller_batches_and_the_same_numbers(
    measure: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measures, "SCREEN_PARTS", 1)
    plenty, first = run(measure, None, **settings)
    scarce, second = run(measure, 1e-4, **settings)  # 107 KB
    assert not [note for note in first.notes if "GiB" in note]
    if measure != "capture":
        assert [note for note in second.notes if "allowed beside the weights" in note]
    for name, values in plenty.values.items():
        np.testing.assert_allclose(scarce.values[name], values, rtol=1e-4, atol=1e-9)
    for name, array in plenty.arrays.items():
        np.testing.assert_allclose(scarce.arrays[name], array, rtol=1e-3, atol=1e-9)


def test_prefixes_that_do_not_fit_are_not_kept() -> None:
    _, runner = run("score", 1e-5)
    assert runner.reuse is False and any("clean prefixes are not cached" in note for note in runner.notes)
