"""`noisescope inspect` and the frame of the command line: what is printed, and the exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import noisescope
from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.testing import MODELS, tiny_model


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_is_inspected(name: str) -> None:
    """Text, module list and JSON come out for each tiny model."""
    text = run("inspect", f"tiny:{name}", "--verbose")
    assert text.exit_code == 0 and "Operators in one forward, by place" in text.stdout
    machine = json.loads(run("inspect", f"tiny:{name}", "--json").stdout)
    assert machine["blocks"] == (4 if name == "t5" else 2)
    assert machine["parameters"] > 10_000 and machine["dtypes"] == ["float32"]


def test_the_text_says_what_is_fused_absent_and_left_alone() -> None:
    """One screen tells what can be aimed at and what can't."""
    lines = run("inspect", "tiny:mixtral").stdout.splitlines()
    assert lines[0] == "MixtralForCausalLM (mixtral)"
    assert "  blocks      2" in lines
    fused = "softmax and matmul run inside sdpa; a targeted layer is opened to a decomposed path"
    assert f"  attention   sdpa: {fused}" in lines
    assert "  experts     grouped_mm: one product for all experts" in lines
    assert "Left alone unless named: routers by modules=..., rotary angles by places={'rotary'}" in lines
    assert "Absent: bmm, gelu" in lines
    table = [line.split() for line in lines]
    assert ["place", "linear", "matmul", "softmax", "silu", "norm", "embedding", "residual"] in table
    assert ["0-1", "6", "2", "1", "1", "2", "1"] in table  # no embedding in a block
    assert ["rotary", "1"] in table and ["0-1", "1", "1"] in table


def test_json_says_the_same() -> None:
    """The machine form has the same facts, with places as values."""
    found = json.loads(run("inspect", "tiny:t5", "--json").stdout)
    assert [row["places"] for row in found["operators"]] == [["embed"], [0], [1], [2], [3], ["final_norm"], ["lm_head"]]
    assert found["operators"][4]["counts"] == {"linear": 10, "matmul": 4, "softmax": 2, "norm": 3, "residual": 1}
    assert found["left_alone"] == [] and found["possible"] == [] and found["absent"] == ["bmm", "silu", "gelu"]
    assert found["attention"] == {"implementation": "sdpa", "fused": True} and found["experts"] is None
    assert found["notes"] == ["shared: it only holds the table that the other embeddings share and is never called"]
    assert "modules" not in found


def test_verbose_lists_each_module_in_full() -> None:
    """A module's name is there to be copied into modules=..., so it is never cut."""
    rows = [line.split() for line in run("inspect", "tiny:llama", "--verbose").stdout.splitlines()]
    assert ["0", "model.layers.0.self_attn", "2", "matmul,", "softmax"] in rows
    assert ["1", "model.layers.1.post_attention_layernorm", "norm"] in rows
    assert ["rotary", "model.rotary_emb", "matmul", "only", "when", "named"] in rows


def test_options_reach_the_model() -> None:
    """--dtype and --attn-implementation are what is shown."""
    found = json.loads(
        run("inspect", "tiny:llama", "--dtype", "bf16", "--attn-implementation", "eager", "--json").stdout
    )
    assert found["dtypes"] == ["bfloat16"] and found["attention"] == {"implementation": "eager", "fused": False}
    text = run("inspect", "tiny:llama", "--attn-implementation", "eager").stdout
    assert "attention   eager: softmax and matmul are plain calls" in text


def test_a_folder_is_inspected_without_its_weights(tmp_path: Path) -> None:
    """Only the config is read: identical blocks fold, and a quantised checkpoint is announced."""
    model = tiny_model("llama", layers=12)
    model.config.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shown = run("inspect", str(tmp_path))
    assert shown.exit_code == 0, shown.stderr
    assert ["0-11", "7", "2", "1", "1", "2", "1"] in [line.split() for line in shown.stdout.splitlines()]
    assert "Note: the checkpoint is quantised (gptq): its linears are packed once loaded" in shown.stdout


def test_packed_and_uncertain_parts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """A packed linear, and a call that a block may or may not make, are said."""
    import torch
    from torch import nn

    from noisescope.api.inspection import anatomy_facts
    from noisescope.cli.inspect import print_anatomy

    class QuantLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("qweight", torch.zeros(4, 8, dtype=torch.int32))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.packed = nn.Linear(8, 16), nn.Linear(16, 8), QuantLinear()

    model = nn.Module()
    model.blocks = nn.ModuleList([Block()])
    found = anatomy_facts(noisescope.wrap(model), verbose=True)
    assert found["quantised"] == {"QuantLinear": 1} and found["possible"] == [
        "bmm",
        "gelu",
        "matmul",
        "norm",
        "silu",
        "softmax",
    ]
    print_anatomy(found)
    text = capsys.readouterr().out
    assert "Quantised: 1 x QuantLinear, packed; noise can fall on their output and input, not on their weight" in text
    assert "May be called by a block itself, seen only when it runs: bmm, gelu, matmul, norm, silu, softmax" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tiny:lama"], "error: unknown tiny model 'lama'. Allowed: "),
        (["/no/such/folder"], "error: there is no file or folder '/no/such/folder'. A model is "),
        (["tiny:llama", "--dtype", "int3"], "error: unknown dtype 'int3'. Allowed: "),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], words: str) -> None:
    """An error made for the user has no traceback."""
    result = run("inspect", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith(words) and result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--debug", "inspect", "tiny:lama"], ["inspect", "tiny:lama", "--debug"]])
def test_debug_shows_the_traceback(arguments: list[str]) -> None:
    """With --debug, before or after the command, the exception itself comes through."""
    assert isinstance(run(*arguments).exception, InvalidInput)


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--no-such-option", "x"], ["no-such-command"]])
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    """Usage errors have the same exit code as bad input."""
    assert run(*arguments).exit_code == 2


def test_version() -> None:
    """--version prints the version of the package."""
    result = run("--version")
    assert result.exit_code == 0 and result.stdout == f"noisescope {noisescope.__version__}\n"


def test_help_shows_worked_examples() -> None:
    """The examples that need no model on disk really run."""
    shown = run("inspect", "--help").stdout
    examples = [line.split() for line in shown.splitlines() if line.strip().startswith("noisescope inspect ")]
    assert len(examples) >= 4
    for example in examples:
        if example[2].startswith("tiny:"):
            assert run("inspect", example[2]).exit_code == 0
