"""Records of outputs: what goes in comes out, and what is not a record of this model and these prompts is refused."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import faulty
from noisescope.locators.outputs import OutputRecord, load_outputs, record_outputs
from noisescope.locators.prompts import last_logits, prompt_ids
from noisescope.testing import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=3)


@pytest.fixture(scope="module")
def record(model) -> OutputRecord:
    return record_outputs(model, count=3, length=5)


@pytest.fixture
def saved(record, tmp_path):
    path = tmp_path / "good.npz"
    record.save(path)
    return path


def rewritten(path, change) -> None:
    """The file again, with its two arrays passed through `change`."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    change(arrays)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    path.write_bytes(buffer.getvalue())


def with_about(**changes):
    """A change of the description alone."""

    def change(arrays):
        about = json.loads(arrays["about"].tobytes()) | changes
        arrays["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)

    return change


def test_a_record_is_read_back_as_it_was(model, record, saved):
    """Logits bit for bit, prompts and names; and it is accepted as one of this model."""
    again = load_outputs(saved, subject=model, like=record)
    assert again.logits.dtype == np.float32
    assert np.array_equal(again.logits, record.logits)
    assert (again.prompts, again.model, again.dtype, again.device) == (
        record.prompts,
        record.model,
        record.dtype,
        record.device,
    )
    assert again.prompts_hash == record.prompts_hash
    assert not list(saved.parent.glob("*.unfinished"))


def test_logits_are_those_of_the_last_token(model, record):
    """One forward of each prompt by itself gives the recorded rows."""
    for prompt, row in zip(record.prompts, record.logits, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0, -1]
        assert torch.allclose(torch.from_numpy(row), expected, atol=1e-6)


def test_prompts_of_different_lengths_keep_their_order(model):
    """Prompts are grouped by length to be run, and the rows come back in the caller's order."""
    prompts = ([5, 6, 7], [8, 9], [10, 11, 12], [13])
    logits, forwards = last_logits(model, tuple(map(tuple, prompts)))
    assert forwards == 3
    for prompt, row in zip(prompts, logits, strict=True):
        with torch.no_grad():
            assert torch.allclose(row, model(torch.tensor([prompt])).logits[0, -1], atol=1e-6)


def test_a_fault_that_is_open_is_in_the_record(model, record):
    """The caller's scope acts on the forward that is recorded, and the model is still known as the same."""
    with faulty(model, "bias:0.3@1"):
        broken = record_outputs(model, count=3, length=5)
    assert broken.model == record.model
    assert not np.array_equal(broken.logits, record.logits)


def test_the_built_in_prompts_need_no_data_and_depend_on_the_seed(model):
    """Text where there is a tokenizer, ids inside the vocabulary elsewhere; the same seed gives the same prompts."""
    demo = ns.load("demo")
    texts = prompt_ids(demo.model, demo.tokenizer, None, seed=0, count=4, length=6)
    assert demo.tokenizer.decode(texts[0]).strip()
    assert len({*texts}) == 4
    assert {len(ids) for ids in texts} == {6}
    for which in (0, 1):
        ids = prompt_ids(model, None, None, seed=which, count=4, length=6)
        assert ids == prompt_ids(model, None, None, seed=which, count=4, length=6)
        assert max(map(max, ids)) < model.config.vocab_size
    assert ids != prompt_ids(model, None, None, seed=0, count=4, length=6)


def test_sixteen_bit_logits_lose_nothing(tmp_path):
    """A bfloat16 model's logits are kept exactly."""
    model = tiny_model("llama").to(torch.bfloat16)
    record = record_outputs(model, prompts=[[3, 4, 5]])
    with torch.no_grad():
        expected = model(torch.tensor([[3, 4, 5]])).logits[0, -1]
    record.save(tmp_path / "x")
    assert torch.equal(torch.from_numpy(load_outputs(tmp_path / "x").logits[0]).to(torch.bfloat16), expected)
    assert record.dtype == "bfloat16"


def test_the_record_of_another_model_is_refused(saved):
    """Other weights, another architecture, or another dtype: each is said."""
    with pytest.raises(InvalidInput, match=r"another model .*weights or config differ"):
        load_outputs(saved, subject=tiny_model("llama", layers=3, seed=1))
    with pytest.raises(InvalidInput, match="another model"):
        load_outputs(saved, subject=tiny_model("gpt2", layers=3))
    with pytest.raises(InvalidInput, match=r"recorded in float32, but the model here computes in bfloat16"):
        load_outputs(saved, subject=tiny_model("llama", layers=3).to(torch.bfloat16))


def test_other_prompts_are_refused(model, record, saved):
    """Two records are subtracted only where they are about the same prompts, in the same order."""
    other = record_outputs(model, prompts=[list(prompt) for prompt in reversed(record.prompts)])
    with pytest.raises(InvalidInput, match="other prompts"):
        load_outputs(saved, like=other)


@given(kept=st.floats(0.0, 0.999))
def test_a_truncated_file_is_refused(record, tmp_path_factory, kept):
    """Cut off anywhere, it is never read as a shorter record."""
    path = tmp_path_factory.mktemp("cut") / "cut.npz"
    record.save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(InvalidInput, match=r"truncated or damaged|no record of outputs"):
        load_outputs(path)


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_changes_the_numbers(record, tmp_path_factory, at, bit):
    """A damaged file is refused, or the bit was in none of the content."""
    path = tmp_path_factory.mktemp("flip") / "flip.npz"
    record.save(path)
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(bytes(content))
    try:
        again = load_outputs(path)
    except InvalidInput:
        return
    assert np.array_equal(again.logits, record.logits)
    assert again.prompts == record.prompts


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda arrays: arrays.update(about=arrays["about"][:-4]), "no JSON"),
        (lambda arrays: arrays.update(about=np.frombuffer(b"[1, 2]", np.uint8)), "no record of outputs"),
        (lambda arrays: arrays.pop("about"), "no record of outputs"),
        (with_about(format="another"), "no record of outputs"),
        (with_about(version=2), "version 2 of the format"),
        (with_about(model=None), "'model' is missing"),
        (with_about(prompts=[["a"]]), "no list of lists of token ids"),
        (with_about(prompts=[[1, 2], [3], [4]]), "do not fit their hash"),
        (lambda arrays: arrays.update(logits=arrays["logits"][:2]), "float32 .3 prompts"),
        (lambda arrays: arrays.update(logits=arrays["logits"] + 1), "checksum"),
        (lambda arrays: arrays.update(logits=arrays["logits"].astype(np.float64)), "damaged"),
        (lambda arrays: arrays.update(logits=np.array([{"a": 1}], dtype=object)), "truncated or damaged"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(saved, change, reason):
    """Corrupt JSON, missing parts, other types, changed numbers, and a pickle."""
    rewritten(saved, change)
    with pytest.raises(InvalidInput, match=reason):
        load_outputs(saved)


def test_files_that_are_no_records(tmp_path):
    """A missing file, a text, and a folder."""
    (tmp_path / "text").write_text("hello")
    for name, reason in (("missing", "can't be read"), ("text", "no record of outputs"), (".", "is no record")):
        with pytest.raises(InvalidInput, match=reason):
            load_outputs(tmp_path / name)


def test_prompts_that_are_none(model):
    """Texts without a tokenizer, no tokens, no list, no prompts, and a model that takes no tokens."""
    for prompts, reason in (
        (["hello"], "no tokenizer"),
        ([[]], "no tokens"),
        ([3], "list of token ids"),
        ([], "list of"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            record_outputs(model, prompts=prompts)
    with pytest.raises(InvalidInput, match="can't be made up"):
        record_outputs(tiny_model("vit"))
    with pytest.raises(InvalidInput, match="at least one prompt"):
        record_outputs(model, count=0)


def test_nothing_is_left_behind(model):
    """Modes, gradients, hooks and the caller's random state are as they were."""
    model.train()
    state, before = torch.get_rng_state(), {name: dict(m.__dict__) for name, m in model.named_modules()}
    record_outputs(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: dict(m.__dict__) for name, m in model.named_modules()} == before
    assert all(module.training for module in model.modules())
    model.eval()


def test_the_folder_of_a_record_will_do(model, tmp_path):
    """What `noisescope record` wrote on the suspect system holds the same logits, bit for bit."""
    folder = ns.record(ns.wrap(model), output=tmp_path / "x.record", prompts=[[3, 4, 5, 6], [5, 6, 7, 8]]).path
    found = load_outputs(folder, subject=model)
    assert found.prompts == ((3, 4, 5, 6), (5, 6, 7, 8))
    assert np.array_equal(found.logits, record_outputs(model, prompts=found.prompts).logits)
    assert load_outputs(folder, like=record_outputs(model, prompts=found.prompts)).model == found.model
