"""Engines by name, and their arguments as words."""

from __future__ import annotations

import sys

import pytest

from noisescope.comparison.system_comparison import Sampling
from noisescope.engines.protocol import open_engine, read_arguments
from noisescope.errors import InvalidInput, MissingExtra


def test_arguments_are_of_both_sides_or_one():
    words = ("dtype=float32", "b.temperature=0.7", "a.max_num_seqs=8", "b.enforce=true", "b.x=none")
    assert read_arguments(words, "a") == {"dtype": "float32", "max_num_seqs": 8}
    assert read_arguments(words, "b") == {"dtype": "float32", "temperature": 0.7, "enforce": True, "x": None}
    for wrong in ("dtype", "=1", "c.dtype=float32"):
        with pytest.raises(InvalidInput, match="an engine argument must be NAME=VALUE"):
            read_arguments((wrong,))


def test_sampling_settings_say_what_is_reported():
    engine = open_engine("transformers", "tiny:llama", {"temperature": 0.5, "top_k": 3})
    assert engine.facts.sampling == Sampling(0.5, 1.0, 3, processed=True)
    assert engine.facts.engine == "transformers" and engine.facts.attention == "sdpa"
    with pytest.raises(InvalidInput, match="temperature, top_p and top_k must be numbers"):
        open_engine("transformers", "tiny:llama", {"temperature": "warm"})


def test_what_is_unknown_or_not_installed_is_one_line(monkeypatch):
    with pytest.raises(InvalidInput, match=r"unknown engine 'vlm'. Allowed: transformers, vllm. Did you mean 'vllm'"):
        open_engine("vlm", "demo")
    with pytest.raises(InvalidInput, match="unknown argument of the engine transformers 'dtyp'"):
        open_engine("transformers", "tiny:llama", {"dtyp": "float32"})
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"the engine vllm is not installed .*: pip install vllm"):
        open_engine("vllm", "demo")


def test_settings_that_are_not_there_are_refused():
    engine = open_engine("transformers", "tiny:llama")
    with pytest.raises(InvalidInput, match="has no attribute scalling"):
        engine.set("model.layers.0.self_attn.scalling", 1.0)
