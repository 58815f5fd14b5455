"""Records of engines, and systems given in other ways than by name."""

from __future__ import annotations

import pytest

import noisescope as ns
from noisescope.api.systems import record_engine
from noisescope.data.dataset import built_in
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.options.device_commands import RecordOptions


@pytest.fixture(scope="module")
def subject():
    return ns.load("demo")


def test_an_engines_record_is_that_of_the_same_model(subject, tmp_path, monkeypatch):
    """transformers as an engine beside `record`: the same prompts, and at common sites the same sketches."""
    opened = []
    monkeypatch.setattr(
        "noisescope.api.systems.open_engine", lambda *given: opened.append(given) or TransformersEngine(subject)
    )
    few = {"samples": 3, "max_tokens": 40}
    options = RecordOptions(
        model="demo", engine="vllm", dtype="float32", full_layers=(2,), output=tmp_path / "e", **few
    )
    found = record_engine(options)
    assert opened == [("vllm", "demo", {"dtype": "float32"})]
    other = ns.record(subject, None, tmp_path / "r", batch=1, full_layers={2}, **few)
    assert found.prompts == other.prompts and found.model == ""
    compared = ns.compare(other, found)
    assert compared.verdict == "identical" and len(compared.sites) > 100
    assert {site.operator for site in compared.uncompared} <= {"silu", "attention"}


def test_data_of_systems(subject):
    """A data set from Python; other objects are refused."""
    found = ns.compare(subject, TransformersEngine(subject), data=built_in(), samples=2, max_tokens=16)
    assert found.verdict == "identical" and found.prompts == 2
    with pytest.raises(ns.InvalidInput, match="data is a file or a DataSet, got list"):
        ns.compare(subject, subject, data=[1])
