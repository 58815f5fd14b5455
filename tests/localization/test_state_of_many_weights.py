"""Memory in which many weights, or the config, are not the checkpoint's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
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


def test_a_module_that_stands_in_two_places(folder: Path) -> None:
    """Its one weight is the file's in one of them; only what the class ties may be stored with other numbers."""
    subject = ns.load(folder)
    layers = subject.model.model.layers
    layers[2].mlp.up_proj = layers[1].mlp.up_proj
    (suspect,) = check_state(subject).suspects
    assert "up_proj" in suspect.site.module and "holds the numbers of model.layers.1.mlp.up_proj" in suspect.evidence


def test_layers_that_were_taken_out_are_there_once(folder: Path) -> None:
    """Those behind them hold the numbers that the checkpoint has under the next name."""
    subject = ns.load(folder)
    del subject.model.model.layers[0]
    subject.model.config.num_hidden_layers = 3
    report = check_state(subject)
    assert not report.suspects
    assert any("trained or edited" in note for note in report.notes)


def test_attributes_that_are_lists_or_functions() -> None:
    """A limit with two ends, and an activation that is no module."""
    conv = transformers.Mamba2ForCausalLM(
        transformers.Mamba2Config(
            hidden_size=32, state_size=8, num_heads=8, head_dim=8, n_groups=2, num_hidden_layers=2
        )
    )
    assert not check_state(ns.wrap(conv)).suspects
    conv.backbone.layers[1].mixer.time_step_limit = (0.0, 0.01)
    (suspect,) = check_state(ns.wrap(conv)).suspects
    assert "time_step_limit is (0.0, 0.01); the config gives (0.0, inf)" in suspect.evidence
    own = [torch.nn.TransformerEncoderLayer(32, 4, 64) for _ in range(4)]
    own[2].activation = torch.nn.functional.gelu
    (doubt,) = check_state(torch.nn.ModuleDict({"layers": torch.nn.ModuleList(own)})).doubtful
    assert "activation is 'gelu'; in the other 3 blocks 'relu'" in doubt.evidence


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
