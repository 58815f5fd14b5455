"""A streamed model gives the numbers of a loaded one, and has its weights on the host between calls."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope import api
from noisescope.errors import InvalidInput
from noisescope.model.fingerprint import model_fingerprint, source_of
from noisescope.model.streaming import StreamedForward, stream_blocks
from noisescope.testing import tiny_model

TOKENS = torch.randint(1, 60, (6, 16), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("streamed") / "llama"
    tiny_model("llama", layers=4).save_pretrained(found)
    return found


def diagnosed(subject: ns.Subject) -> Any:
    return api.diagnose(subject, [TOKENS], samples=6, metric="agreement", effort="standard", seeds=1)


@pytest.mark.parametrize("stream", ["host", "disk"])
def test_a_diagnosis_is_the_same(folder: Path, stream: str) -> None:
    """Screen, sweep, gradients, curvature and formats."""
    whole, streamed = (diagnosed(ns.load(folder, stream=where)) for where in (None, stream))
    for section in ("operator_analysis", "layer_analysis", "channel_analysis", "metrics"):
        assert whole[section] == streamed[section], section


@pytest.mark.parametrize("stream", ["host", "disk"])
def test_record_and_locate_work_on_it(folder: Path, stream: str, tmp_path: Path) -> None:
    subject = ns.load(folder, stream=stream)
    prompts = [TOKENS]
    a = ns.record(ns.load(folder), prompts, tmp_path / "a", samples=4)
    b = ns.record(subject, prompts, tmp_path / "b", samples=4)
    assert all(row.relative_l2 == 0 for row in ns.compare(a, b).sites)
    verdict = ns.locate(subject, quick=True)
    assert verdict.verdict == "healthy"
    with ns.faulty(subject.model, "dead_zone:0.3@2"):
        broken = ns.locate(subject, quick=True)
    assert broken.verdict == "faulty" and broken.suspects[0].site.place == 2


def test_weights_are_copied_while_a_block_runs_and_on_the_host_otherwise() -> None:
    model = stream_blocks(tiny_model("llama", layers=3), torch.device("cpu"))
    layer = model.model.layers[1]
    linear, host = layer.mlp.up_proj, layer.mlp.up_proj.weight
    seen = []
    with ns.watch(model, lambda call: seen.append(call.callee.weight), modules=["*.1.mlp.up_proj"]):
        model(TOKENS)
    assert seen[0] is not host and seen[0].data_ptr() != host.data_ptr() and torch.equal(seen[0], host)
    assert linear.weight is host
    x = torch.ones(1, 32)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, host))  # called alone
    with pytest.raises(RuntimeError):
        layer(torch.ones(1, 3, 7))
    assert linear.weight is host


def test_the_next_block_is_fetched_and_a_changed_weight_is_fetched_again() -> None:
    model = stream_blocks(tiny_model("llama", layers=3), torch.device("cpu"))
    layers = model.model.layers
    first = model(TOKENS).logits
    with torch.no_grad():
        for layer in layers:
            layer.mlp.down_proj.weight.mul_(1.5)
    changed = model(TOKENS).logits
    whole = tiny_model("llama", layers=3)
    with torch.no_grad():
        assert torch.equal(whole(TOKENS).logits, first)
        for layer in whole.model.layers:
            layer.mlp.down_proj.weight.mul_(1.5)
        assert torch.equal(whole(TOKENS).logits, changed)
    weights = [layer.forward.weights for layer in layers]
    with torch.no_grad():
        states = torch.ones(1, 3, 32)
        angles = model.model.rotary_emb(states, torch.arange(3)[None])
        layers[0](states, position_embeddings=angles)
        assert [one._fetched is not None for one in weights] == [False, True, False]
        layers[2](states, position_embeddings=angles)
        layers[1](states, position_embeddings=angles)  # backwards, as recomputation goes
    assert [one._fetched is not None for one in weights] == [True, False, False]


def test_gradients_of_weights_arrive_on_the_host() -> None:
    whole, streamed = tiny_model("llama"), stream_blocks(tiny_model("llama"), torch.device("cpu"))
    for model in (whole, streamed):
        model(TOKENS, labels=TOKENS).loss.backward()
    for a, b in zip(whole.parameters(), streamed.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


def test_a_streamed_model_is_identified_copied_and_sent(folder: Path) -> None:
    subject = ns.load(folder, stream="disk")
    assert model_fingerprint(subject.model) == model_fingerprint(ns.load(folder).model)
    copied = copy.deepcopy(subject.model)
    assert not any(isinstance(vars(module).get("forward"), StreamedForward) for module in copied.modules())
    assert torch.equal(copied(TOKENS).logits, subject.model(TOKENS).logits)
    source = source_of(subject, "", lambda: folder)
    assert source.loading["stream"] == "disk" and source.load().loading == subject.loading


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("stream", ["host", "disk"])
def test_on_a_gpu_the_same_numbers_come_from_weights_on_the_host(folder: Path, stream: str) -> None:
    whole, streamed = (ns.load(folder, device="cuda", stream=where) for where in (None, stream))
    ids = TOKENS.to("cuda")
    with torch.no_grad():
        assert torch.equal(whole.model(ids).logits, streamed.model(ids).logits)
    assert streamed.model.model.layers[0].mlp.up_proj.weight.device.type == "cpu"
    first, second = (diagnosed(subject) for subject in (whole, streamed))
    for section in ("operator_analysis", "layer_analysis"):
        assert first[section] == second[section], section
    assert ns.locate(streamed, quick=True).verdict == "healthy"


def test_weights_converted_on_loading_are_noted(folder: Path, tmp_path: Path) -> None:
    """They are no longer in the checkpoint's files: in another dtype, or experts packed into one tensor."""
    tiny_model("mixtral").save_pretrained(tmp_path)
    assert not ns.load(folder, stream="disk").anatomy.notes
    for given in ({"source": folder, "dtype": "float64"}, {"source": tmp_path}):
        [note] = ns.load(stream="disk", **given).anatomy.notes
        assert "of the weights to stream are in the host's memory" in note


def test_what_can_not_be_streamed_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInput, match="host, disk"):
        ns.load(folder, stream="tape")
    with pytest.raises(InvalidInput, match="device_map"):
        ns.load(folder, stream="host", device_map="cpu")
