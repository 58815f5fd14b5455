"""Records: what is written, in which order, without touching the model, and what is refused."""

from __future__ import annotations

import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.measures import sketches
from noisescope.runs import device_record_writer
from noisescope.testing import tiny_model

PROMPTS = [list(range(3, 23)), list(range(20, 40)), list(range(5, 25)), list(range(3, 15))]


@pytest.fixture(scope="module")
def subject():
    return ns.wrap(tiny_model("llama", layers=3).bfloat16())


def test_a_record_tells_what_it_is(subject, tmp_path):
    """Model, prompts, sketch, versions; sites in the order they ran, the fused attention call among them."""
    found = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS)
    about = json.loads((tmp_path / "x" / "record.json").read_text())
    assert about["dtype"] == "bfloat16" and about["sketch"] == {"seed": sketches.SEED, "version": sketches.VERSION}
    assert about["model"]["fingerprint"] == found.model and len(found.model) == 64
    assert {"torch", "noisescope", "transformers"} <= set(about["versions"])
    assert found.prompts == tuple(sorted(map(tuple, PROMPTS), key=len))
    operators = [(site.place, site.operator) for site in found.sites]
    assert operators[0] == ("embed", "embedding") and operators[-1] == ("lm_head", "linear")
    block = [operator for place, operator in operators if place == 1]
    assert block.count("linear") == 7 and "attention" in block and block[-1] == "residual"
    assert [(batch.first, batch.count, batch.length) for batch in found.batches] == [(0, 1, 12), (1, 3, 20)]


def test_sketches_and_logits_are_those_of_the_model(subject, tmp_path):
    """Each number comes out of the output that a hook sees."""
    found = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS)
    seen = {}
    name = "model.layers.1.mlp.down_proj"
    hook = subject.model.get_submodule(name).register_forward_hook(lambda module, args, y: seen.update(y=y))
    with torch.no_grad():
        logits = subject.model(torch.tensor(found.prompts[1:])).logits
    hook.remove()
    number = next(at for at, site in enumerate(found.sites) if site.module == name)
    sketched = found.sketches()
    assert sketched is not None
    assert np.allclose(sketched[number, 1:, : sketches.SHORT], sketches.sketch(seen["y"], 1).numpy())
    assert np.allclose(found.sizes()[number, 1:], seen["y"].double().flatten(1).norm(dim=1).numpy())
    assert np.array_equal(found.logits()[1:], logits[:, -1].double().numpy())


def test_the_largest_channel_of_each_token_is_told(subject, tmp_path):
    """Its number and its size, as they are in the blocks' whole outputs."""
    found = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, full_layers={1})
    number = next(at for at, site in enumerate(found.sites) if site.place == 1 and site.operator == "residual")
    size = np.abs(found.whole(number, 1).values[0])
    assert np.array_equal(found.by_token("channel")[1][1], size.argmax(-1))
    assert np.array_equal(found.by_token("max")[1][1], size.max(-1))


def test_whole_tensors_keep_their_bits(subject, tmp_path):
    """Outputs and inputs of chosen blocks, in bfloat16; an input that is another's output is stored once."""
    found = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, full_layers={1})
    files = sorted(path.name for path in (tmp_path / "x").glob("*.safetensors"))
    assert files == [f"000{n}{part}.safetensors" for n in (0, 1) for part in ("-000-1", "")]
    stored = load_file(tmp_path / "x" / "0001-000-1.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in stored.values())
    at = {site.module.removeprefix("model.layers.1."): n for n, site in enumerate(found.sites) if site.place == 1}
    norm, query, up = at["input_layernorm"], at["self_attn.q_proj"], at["mlp.up_proj"]
    assert f"{query}.input" not in stored
    given, gave = found.whole(query, 1, 3, "input"), found.whole(norm, 1, 3)
    assert np.array_equal(given.values, gave.values) and given.dtype == "bfloat16"
    weight = subject.model.get_submodule("model.layers.1.mlp.up_proj").weight
    x = torch.tensor(found.whole(up, 1, 3, "input").values).bfloat16()
    assert torch.equal(torch.nn.functional.linear(x, weight), stored[f"{up}.output"])
    assert found.whole(0, 0) is None


def test_files_come_batch_by_batch(subject, tmp_path):
    """No more than one batch waits for the disk while another runs, and record.json comes last."""
    seen = []
    hook = subject.model.register_forward_pre_hook(lambda *_: seen.append(sorted(p.name for p in tmp_path.glob("x/*"))))
    ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, batch=1)
    hook.remove()
    for count, files in enumerate(seen):
        assert {f"{n:04d}.safetensors" for n in range(count - 1)} <= set(files) and "record.json" not in files
    assert len(seen) == 4 and (tmp_path / "x" / "record.json").exists()


@pytest.fixture
def reads(monkeypatch):
    """How many outputs each launch reads; this device has launches to save."""
    monkeypatch.setattr(device_record_writer, "_LAUNCHING", ("cpu",))
    counts = []
    together = sketches.read_together

    def counting(outputs, first, **how):
        counts.append(len(outputs))
        return together(outputs, first, **how)

    monkeypatch.setattr(sketches, "read_together", counting)
    return counts


def stored_in(folder):
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def same_files(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[file][name], b[file][name]) for file in a for name in a[file])


def test_outputs_of_a_block_are_read_together(subject, tmp_path, reads, monkeypatch):
    """After the first batch, and with the same result; outputs that wait for it are bounded in bytes."""
    found = ns.record(subject, output=tmp_path / "together", prompts=PROMPTS)
    assert sum(reads[-4:]) == len(found.sites)  # three blocks, the first with the embedding, and what follows them
    monkeypatch.setattr(device_record_writer, "_MOST_UNREAD", 1)
    reads.clear()
    ns.record(subject, output=tmp_path / "apart", prompts=PROMPTS)
    assert [count for count in reads if count][-len(found.sites) :] == [1] * len(found.sites)
    monkeypatch.setattr(device_record_writer, "_LAUNCHING", ())
    ns.record(subject, output=tmp_path / "at_once", prompts=PROMPTS)
    at_once = stored_in(tmp_path / "at_once")
    assert same_files(stored_in(tmp_path / "together"), at_once) and same_files(stored_in(tmp_path / "apart"), at_once)


def test_outputs_that_a_model_overwrites_are_read_at_once(tmp_path, reads, monkeypatch):
    """As a fused kernel does that rotates queries in place: nobody counts that."""
    model = tiny_model("llama", layers=3)
    attention = model.model.layers[1].self_attn
    project = attention.o_proj.forward
    queries = []
    attention.q_proj.register_forward_hook(lambda module, args, y: queries.append(y))

    def overwriting(x):
        queries.pop().numpy()[...] = 0
        return project(x)

    attention.o_proj.forward = overwriting
    subject = ns.wrap(model)
    ns.record(subject, output=tmp_path / "a", prompts=PROMPTS)
    assert len(reads) > 60 and reads[-1] <= 1  # the last batch has nothing left to read
    monkeypatch.setattr(device_record_writer, "_LAUNCHING", ())
    ns.record(subject, output=tmp_path / "b", prompts=PROMPTS)
    assert same_files(stored_in(tmp_path / "a"), stored_in(tmp_path / "b"))


def test_a_smaller_batch_waits_no_longer_than_the_one_that_was_compared(tmp_path, reads, monkeypatch):
    """Memory bounds what waits: a large batch is read before the model overwrites it, a small one would not be."""
    monkeypatch.setattr(device_record_writer, "_MOST_UNREAD", 60_000)  # two outputs of 16 prompts, a block's of one
    model = tiny_model("llama", layers=3)
    attention = model.model.layers[1].self_attn
    project, queries = attention.o_proj.forward, []
    attention.q_proj.register_forward_hook(lambda module, args, y: queries.append(y))

    def overwriting(x):
        queries.pop().numpy()[...] = 0
        return project(x)

    attention.o_proj.forward = overwriting
    subject, prompts = ns.wrap(model), [list(range(3 + at, 23 + at)) for at in range(17)]
    ns.record(subject, output=tmp_path / "a", prompts=prompts, batch=16)
    monkeypatch.setattr(device_record_writer, "_LAUNCHING", ())
    ns.record(subject, output=tmp_path / "b", prompts=prompts, batch=16)
    assert same_files(stored_in(tmp_path / "a"), stored_in(tmp_path / "b"))


@contextmanager
def files_up_to(size):
    """A disk that takes no larger files, as a full one would not."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("detail", "last"),
    [
        ("sketch", "0000.safetensors"),  # the sketches of longer prompts come next
        ("full", "0000-000-embed.safetensors"),  # then the whole tensors of block 0
        ("sketch", "0003.safetensors"),  # then record.json
    ],
)
def test_what_could_not_be_written_is_no_record(subject, tmp_path, detail, last):
    """The disk's refusal, also in the thread that writes, is the user's to mend; the rest is left unfinished."""
    options = {"prompts": PROMPTS, "batch": 1, "detail": detail}
    good, folder = tmp_path / "good", tmp_path / "x"
    ns.record(subject, output=good, **options)
    limit = (good / last).stat().st_size
    with (
        files_up_to(limit),
        pytest.raises(InvalidInput, match=r"can't write into .*File too large.*folder with -o"),
    ):
        ns.record(subject, output=folder, **options)
    assert (folder / last).exists() and not (folder / "record.json").exists()
    assert not any("forward" in vars(module) for module in subject.model.modules())
    with pytest.raises(InvalidInput, match=r"holds an unfinished record: remove it, or choose another folder with -o"):
        ns.record(subject, output=folder, **options)


def test_recording_leaves_no_trace(subject, tmp_path):
    """Logits are bit-equal while it runs and afterwards, the mode stays, and nothing stands in for a module."""
    ids = torch.tensor(PROMPTS[:3])
    subject.model.train()
    found = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS[:3])
    assert all(module.training for module in subject.model.modules())
    subject.model.eval()
    with torch.no_grad():
        assert np.array_equal(found.logits(), subject.model(ids).logits[:, -1].double().numpy())
    assert not any("forward" in vars(module) for module in subject.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "bloom", "qwen3", "t5", "bert"])
def test_other_architectures(name, tmp_path):
    """Blocks' outputs are there, and what has no tokens as rows is reported as left out."""
    found = ns.record(ns.wrap(tiny_model(name)), output=tmp_path / "x", prompts=PROMPTS, detail="full")
    assert {"residual", "linear"} <= {site.operator for site in found.sites}
    assert np.isfinite(found.sketches()).all()
    assert bool(found.notes) == (name in ("mixtral", "t5"))


def test_data_is_cut_to_share_forwards(tmp_path):
    """The demo's problems become prompts of multiples of 16 tokens."""
    found = ns.record(ns.load("demo"), output=tmp_path / "x", samples=6)
    assert found.count == 6 and {len(prompt) % 16 for prompt in found.prompts} == {0}
    assert (found.data.source, found.data.samples) == ("demo", 6)


def test_what_is_refused(subject, tmp_path):
    """A folder in use, a layer that is not there, a detail that does not exist, no samples."""
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("")
    for more in ("0000.safetensors", "record.json", "model-00001-of-00002.safetensors"):
        with pytest.raises(InvalidInput, match="is not empty"):  # nobody is asked to remove what may be of use
            ns.record(subject, output=tmp_path / "used", prompts=PROMPTS)
        (tmp_path / "used" / more).write_text("")
    with pytest.raises(InvalidInput, match="blocks are 0 to 2"):
        ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, full_layers={3})
    with pytest.raises(InvalidInput, match="Did you mean 'full'"):
        ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, detail="ful")
    with pytest.raises(InvalidInput, match="samples must be at least 1"):
        ns.record(subject, output=tmp_path / "x", samples=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match="can't write into"):
        ns.record(subject, output=tmp_path / "file", prompts=PROMPTS)
