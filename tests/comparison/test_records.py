"""Reading records: numpy gives what torch wrote, and what is broken or not comparable is refused with the reason."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import noisescope as ns
from noisescope.comparison.records import VERSION, read_record
from noisescope.comparison.safetensors_reader import TensorFile
from noisescope.errors import InvalidInput
from noisescope.testing import tiny_model

PROMPTS = [list(range(3, 23)), list(range(20, 40))]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records") / "a"
    ns.record(ns.wrap(tiny_model("llama")), output=folder, prompts=PROMPTS)
    return folder


@pytest.fixture
def copy(recorded, tmp_path):
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


def rewritten(folder: Path, **changes) -> None:
    file = folder / "record.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@given(
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 99),
)
def test_numpy_reads_what_torch_wrote(tmp_path_factory, dtype, shape, seed):
    """Any shape, also empty, in any dtype, NaN and infinities included."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 100
    if values.numel() > 1:
        values.view(-1)[:2] = torch.tensor([torch.nan, -torch.inf]) if dtype.is_floating_point else 3.0
    tensor = values.to(dtype)
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    save_file({"first": torch.ones(3), "x": tensor}, path)
    found = TensorFile(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()).read("x")
    assert found is not None
    assert np.array_equal(found.values.astype(np.float64), tensor.double().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, '"x" has the dtype "F99"'),
        ({"x": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, '"x" lies outside the file'),
        ({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, '"x" lies outside the file'),
        ({"x": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, '"x" lies outside the file'),
        ({"x": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}, "header.entries.x.shape: a list was expected"),
        ({"__metadata__": {"same": '{"y": 1}'}}, "header.same.y: text was expected"),
        ([], "an object was expected, got []"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path, header, reason):
    """Whatever its checksum says: no number is read from outside the file."""
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"1234")
    with pytest.raises(InvalidInput, match=f"is not a valid tensor file: .*{re.escape(reason)}"):
        TensorFile(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())


def test_reading_needs_no_torch(recorded):
    """A record is read and compared where torch is not installed."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from noisescope.comparison.compare import compare_records\n"
        "from noisescope.comparison.records import read_record\n"
        f"a, b = read_record({str(recorded)!r}), read_record({str(recorded)!r})\n"
        "assert compare_records(a, b).verdict == 'identical'"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env={"PYTHONPATH": "src"})


def test_a_truncated_file_is_refused(copy):
    """So is one with a flipped bit, and one that is missing."""
    file = copy / "0000.safetensors"
    content = bytearray(file.read_bytes())
    file.write_bytes(content[:-7])
    with pytest.raises(InvalidInput, match=r"it has .* bytes, .* truncated or damaged"):
        ns.compare(copy, copy)
    content[-9] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidInput, match="checksum"):
        ns.compare(copy, copy)
    file.unlink()
    with pytest.raises(InvalidInput, match=r"lacks 0000\.safetensors"):
        ns.compare(copy, copy)


@given(cut=st.floats(0, 0.999))
def test_a_truncated_description_is_refused(recorded, tmp_path_factory, cut):
    """Wherever it ends."""
    folder = Path(shutil.copytree(recorded, tmp_path_factory.mktemp("cut") / "x"))
    text = (folder / "record.json").read_text().strip()
    (folder / "record.json").write_text(text[: int(cut * len(text))])
    with pytest.raises(InvalidInput, match="truncated or damaged"):
        read_record(folder)


def test_what_is_no_record_is_refused(copy, tmp_path):
    """An unfinished record, another file, another version, a part missing."""
    with pytest.raises(InvalidInput, match="`noisescope record` writes one"):
        read_record(tmp_path)
    for version in (1, VERSION + 1, None):
        rewritten(copy, version=version)
        with pytest.raises(InvalidInput, match=f"version {version} of the format; this noisescope reads {VERSION}"):
            read_record(copy)
    rewritten(copy, version=VERSION, sites=None)
    with pytest.raises(
        InvalidInput, match=r"record\.sites: a list was expected, got null\. It is truncated or damaged"
    ):
        read_record(copy)
    for part in ({"sites": [{"operator": "linear"}]}, {"sites": [], "batches": [{"first": 0, "files": [{}]}]}):
        rewritten(copy, **part)
        with pytest.raises(
            InvalidInput, match=r"record\.(sites|batches)\[0\] has no '\w+'\. It is truncated or damaged"
        ):
            read_record(copy)
    rewritten(copy, format="another")
    with pytest.raises(InvalidInput, match="is not a noisescope record"):
        read_record(copy)
    (copy / "record.json").unlink()
    with pytest.raises(InvalidInput, match="never finished"):
        read_record(copy)


@pytest.mark.parametrize("change", [PROMPTS[:1], PROMPTS[::-1], [[*PROMPTS[0][:-1], 4], PROMPTS[1]], []])
def test_an_altered_list_of_prompts_is_refused(copy, change):
    """One left out, another order, one token changed, none left: each fails the checksum."""
    rewritten(copy, prompts=change)
    with pytest.raises(InvalidInput, match="the prompts do not match their checksum"):
        read_record(copy)


@pytest.fixture(scope="module")
def kept_whole(tmp_path_factory):
    """Two batches, of 12 and of 20 tokens, with whole tensors of block 1."""
    folder = tmp_path_factory.mktemp("records") / "whole"
    ns.record(ns.wrap(tiny_model("llama")), output=folder, prompts=[*PROMPTS, PROMPTS[0][:12]], full_layers={1})
    return folder


def _of_batch(**changes):
    return lambda about: about["batches"][1].update(changes)


def _of_file(**changes):
    return lambda about: about["batches"][1]["files"][0].update(changes)


INCONSISTENT = {
    "begins with prompt 0, expected 1": _of_batch(first=0),
    "batches have 2 prompts, expected 3": _of_batch(count=1),
    r"prompts of batch 1 have \[\] tokens": _of_batch(count=-1),
    r"have \[20\] tokens, not 16": _of_batch(length=16),
    r"batches\[1\].count: a whole number was expected, got 2.0": _of_batch(count=2.0),
    "batch 2 begins with prompt 1, expected 3": lambda about: about["batches"].append(about["batches"][1]),
    "batches have 0 prompts": lambda about: about["batches"].clear(),
    "can't have a file '../copy/0001.safetensors'": _of_file(name="../copy/0001.safetensors"),
    "can't have a file '/tmp/0001.safetensors'": _of_file(name="/tmp/0001.safetensors"),
    "can't have a file '0000.safetensors'": _of_file(name="0000.safetensors"),
    r"batches\[1\].files\[0\].bytes: a whole number was expected, got null": _of_file(bytes=None),
    "has 0 files of sketches": lambda about: about["batches"][0]["files"].pop(0),
    "has whole tensors of none, by detail and full_layers of 1": lambda about: about["batches"][0]["files"].pop(),
    "has whole tensors of 1, by detail and full_layers of none": lambda about: about.update(full_layers=[]),
    "of 1, by detail and full_layers of 0, 1": lambda about: about.update(full_layers=[0, 1]),
    "no site is in the full_layers 9": lambda about: about.update(full_layers=[1, 9]),
    "has whole tensors of 1, by detail and full_layers of 0, 1, embed": lambda about: about.update(detail="full"),
    "detail: 'sketch' or 'full' was expected": lambda about: about.update(detail="some"),
    "notes: a list was expected, got null": lambda about: about.update(notes=None),
    r"sites\[3\]: an object was expected": lambda about: about["sites"].__setitem__(3, "x"),
    r"sites\[3\].place: text was expected, got \[\]": lambda about: about["sites"][3].update(place=[]),
    r"prompts\[0\]\[0\]: a whole number was expected": lambda about: about.update(prompts=[["a"]]),
    'record has "note", which this version does not know': lambda about: about.update(note="x"),
    r"has sketches of \d+ sites and 1 prompts": lambda about: about["sites"].pop(),
    r"prompts, but record.json lists \d+ and 1": lambda about: about["sites"].append(about["sites"][3]),
}


@pytest.mark.parametrize(("reason", "change"), INCONSISTENT.items(), ids=INCONSISTENT)
def test_a_description_that_contradicts_itself_is_refused(kept_whole, tmp_path, reason, change):
    """Batches, files, detail, sites: whatever was changed is named, and no file outside the folder is read."""
    folder = Path(shutil.copytree(kept_whole, tmp_path / "copy"))
    about = json.loads((folder / "record.json").read_text())
    assert ns.compare(kept_whole, folder).verdict == "identical"
    change(about)
    (folder / "record.json").write_text(json.dumps(about))
    with pytest.raises(InvalidInput, match=reason):
        ns.compare(kept_whole, folder)


def test_two_dtypes_and_two_checkpoints_are_compared_without_a_round_off_verdict(recorded, tmp_path):
    """What differs is measured; neither a divergence nor round-off explains other weights or another dtype."""
    for model, words in (
        (tiny_model("llama", seed=1), r"The weights or configs differ \(fingerprints"),
        (tiny_model("llama").bfloat16(), r"different dtypes \(float32 and bfloat16\)"),
    ):
        other = ns.record(ns.wrap(model), output=tmp_path / str(model.dtype), prompts=PROMPTS)
        found = ns.compare(recorded, other)
        assert (found.verdict, found.first, found.outcome) == ("compared", None, "pass")
        assert re.search(
            f"{words}.*can't conclude that the difference is round-off. The largest relative L2 is", found.words
        )
        assert found.logits.kl > 0 and any(row.relative_l2 for row in found.sites)


def test_records_of_different_things_are_not_subtracted(recorded, copy, tmp_path):
    """Other prompts, other sketches: each with its reason."""
    other = ns.record(ns.wrap(tiny_model("llama")), output=tmp_path / "prompts", prompts=PROMPTS[:1])
    with pytest.raises(InvalidInput, match="on different prompts"):
        ns.compare(recorded, other)
    rewritten(copy, sketch={"seed": 0, "version": 99})
    with pytest.raises(InvalidInput, match="sketches of version 99"):
        ns.compare(recorded, copy)
