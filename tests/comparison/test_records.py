"""Reading records: numpy gives what torch wrote, and what is broken or not comparable is refused with the reason."""

from __future__ import annotations

import hashlib
import json
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
from noisescope.comparison.records import read_record
from noisescope.comparison.tensor_files import TensorFile
from noisescope.errors import InvalidInput
from noisescope.record_format import VERSION
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
    with pytest.raises(InvalidInput, match=r"truncated or damaged: it has .* bytes"):
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
    with pytest.raises(InvalidInput, match="'sites' is missing"):
        read_record(copy)
    for part in ({"sites": [{"operator": "linear"}]}, {"sites": [], "batches": [{"first": 0, "files": [{}]}]}):
        rewritten(copy, **part)
        with pytest.raises(InvalidInput, match=r"record.json is damaged"):
            read_record(copy)
    rewritten(copy, format="another")
    with pytest.raises(InvalidInput, match="is no record of noisescope"):
        read_record(copy)
    (copy / "record.json").unlink()
    with pytest.raises(InvalidInput, match="never finished"):
        read_record(copy)


@pytest.mark.parametrize("change", [PROMPTS[:1], PROMPTS[::-1], [[*PROMPTS[0][:-1], 4], PROMPTS[1]], [["a"]], []])
def test_an_altered_list_of_prompts_is_refused(copy, change):
    """One left out, another order, one token changed, no tokens at all: each fails the checksum."""
    rewritten(copy, prompts=change)
    with pytest.raises(InvalidInput, match="the prompts do not fit their checksum"):
        read_record(copy)


def test_records_of_different_things_are_not_subtracted(recorded, copy, tmp_path):
    """Another model, another dtype, other prompts, other sketches: each with its reason."""
    other = ns.record(ns.wrap(tiny_model("llama", seed=1)), output=tmp_path / "model", prompts=PROMPTS)
    with pytest.raises(InvalidInput, match=r"about another model .* weights or config differ"):
        ns.compare(recorded, other)
    other = ns.record(ns.wrap(tiny_model("llama").bfloat16()), output=tmp_path / "dtype", prompts=PROMPTS)
    with pytest.raises(InvalidInput, match="one computed in float32, the other in bfloat16"):
        ns.compare(recorded, other)
    other = ns.record(ns.wrap(tiny_model("llama")), output=tmp_path / "prompts", prompts=PROMPTS[:1])
    with pytest.raises(InvalidInput, match="on other prompts"):
        ns.compare(recorded, other)
    rewritten(copy, sketch={"seed": 0, "version": 99})
    with pytest.raises(InvalidInput, match="sketches of version 99"):
        ns.compare(recorded, copy)
