"""Memory in which many weights, or the config, are not the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

import noisescope as ns
from noisescope.localization.state import check_state
from noisescope.testing import tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", layers=4, initializer_range=0.2).save_pretrained(path)
    return path


def test_a_layer_that_is_there_twice(folder: Path) -> None:
    """Though it is more than a quarter of the matrices: training gives no weight another layer's numbers."""
    subject = ns.load(folder)
    for number in (1, 2):
        subject.model.model.layers[number].load_state_dict(subject.model.model.layers[3].state_dict())
    report = check_state(subject)
    assert {s.site.place for s in report.suspects} == {1, 2}
    assert any("holds the numbers of model.layers.3.mlp.up_proj.weight" in s.evidence for s in report.suspects)


def test_layers_that_were_taken_out_are_there_once(folder: Path) -> None:
    """Those behind them hold the numbers that the checkpoint has under the next name."""
    subject = ns.load(folder)
    del subject.model.model.layers[0]
    subject.model.config.num_hidden_layers = 3
    report = check_state(subject)
    assert not report.suspects
    assert any("trained or edited" in note for note in report.notes)


def test_the_config_in_memory_is_compared_with_the_checkpoints(folder: Path) -> None:
    """A forward reads values from it, such as a window."""
    subject = ns.load(folder)
    subject.model.config.rope_parameters["rope_theta"] = 5e5
    subject.model.config.use_cache = False  # the caller's choice
    words = "the config's rope_parameters.rope_theta is 500000.0; in the checkpoint's config 10000.0"
    assert [s.evidence for s in check_state(subject).suspects if "config's" in s.evidence] == [words]
    model = transformers.LlamaForCausalLM.from_pretrained(folder, rms_norm_eps=1e-5)
    report = check_state(ns.wrap(model))
    assert not report.suspects
    assert "rms_norm_eps is 1e-05" in report.doubtful[0].evidence
    assert "on purpose, or damaged: weight of module at lm_head ()" in ns.locate(model, quick=True).headline
