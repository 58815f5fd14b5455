"""Plans in other tools' words, applied for real where the tool is installed."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.plans.exports import TOOLS, export_plan
from noisescope.plans.precision import Plan
from noisescope.quantisation.fake import plan_injection
from noisescope.testing import tiny_inputs, tiny_model

FORMATS = ("int4", "int8", "int3", "fp8_e4m3", "bf16")
TOKENS = tiny_inputs("llama")["input_ids"]


def model() -> Any:
    return tiny_model("llama", hidden_size=64, intermediate_size=128)  # groups of 64 fit


def plan(*formats: str) -> Plan:
    names = [n for n, m in model().named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    return Plan("by hand", {name: formats[i % len(formats)] for i, name in enumerate(names)}, 0, 0, 0, 0)


def error(logits: torch.Tensor) -> float:
    clean = model()(TOKENS).logits
    return float(((logits - clean).norm() / clean.norm()).detach())


def our_error(wanted: Plan) -> float:
    here = model()
    with ns.inject(here, plan_injection(wanted.assignment)), torch.no_grad():  # type: ignore[arg-type]
        return error(here(TOKENS).logits)


def test_every_module_is_named_once() -> None:
    """Each tool is told of every module that is rounded, in the format of the plan; of the others that they are not."""
    wanted = plan(*FORMATS)
    rounded = {name for name, fmt in wanted.assignment.items() if fmt != "bf16"}
    recipe = yaml.safe_load(export_plan(wanted, "llm-compressor"))["quant_stage"]["quant_modifiers"]
    groups = recipe["QuantizationModifier"]["config_groups"]
    assert {name: fmt for fmt, group in groups.items() for name in group["targets"]} == {
        name: fmt for name, fmt in wanted.assignment.items() if fmt != "bf16"
    }
    assert set(recipe["QuantizationModifier"]["ignore"]) == {"lm_head", *(wanted.assignment.keys() - rounded)}
    rules = yaml.safe_load(export_plan(wanted, "modelopt"))["quant_cfg"]
    assert rules[0] == {"quantizer_name": "*", "enable": False}
    assert {rule["quantizer_name"].removesuffix(".weight_quantizer") for rule in rules[1:]} == rounded
    assert all(-1 in rule["cfg"].get("block_sizes", {-1: 0}) for rule in rules[1:])  # an integer, through YAML too
    layers = json.loads(export_plan(wanted, "autoround"))
    assert {name: row["bits"] for name, row in layers.items()} == {
        name: {"int3": 3, "int4": 4, "bf16": 16}.get(fmt, 8) for name, fmt in wanted.assignment.items()
    }
    assert json.loads(export_plan(wanted, "torchao"))["_data"]["fqn_to_config"].keys() == rounded
    assert json.loads(export_plan(wanted, "json"))["assignment"] == wanted.assignment


def test_what_a_tool_lacks_is_told() -> None:
    """A format without a counterpart, and a tool that is not known."""
    with pytest.raises(InvalidInput, match="torchao has no weight-only nvfp4: plan with --formats int8"):
        export_plan(plan("nvfp4"), "torchao")
    with pytest.raises(InvalidInput, match="'gguf'"):
        export_plan(plan("int4"), "gguf")
    assert all(export_plan(plan("int4", "bf16"), tool) for tool in TOOLS)


@pytest.mark.slow
def test_torchao_carries_a_plan_out() -> None:
    """Its own reader takes the file; every weight becomes of its format, and the outputs move as far as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
        from torchao.core.config import config_from_dict

        here, wanted = model(), plan(*FORMATS)
        config = config_from_dict(json.loads(export_plan(wanted, "torchao")))
        quantization.quantize_(here, config, filter_fn=None)
        kinds = {name: type(m.weight).__name__ for name, m in here.named_modules() if isinstance(m, torch.nn.Linear)}
        moved = error(here(TOKENS).logits)
    expected = {"bf16": "Parameter", "fp8_e4m3": "Float8Tensor"}
    assert kinds.pop("lm_head") == "Parameter"
    assert kinds == {name: expected.get(fmt, "IntxUnpackedToInt8Tensor") for name, fmt in wanted.assignment.items()}
    assert moved == pytest.approx(our_error(wanted), rel=0.3)


@pytest.mark.slow
def test_llm_compressor_carries_a_plan_out(tmp_path: Path) -> None:
    """`oneshot` takes the recipe; every linear gets its scheme, and the outputs move as far as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor = pytest.importorskip("llmcompressor")
        wanted = plan(*FORMATS)
        model().save_pretrained(tmp_path / "model")
        here = type(model()).from_pretrained(tmp_path / "model")
        (tmp_path / "recipe.yaml").write_text(export_plan(wanted, "llm-compressor"))
        compressor.oneshot(model=here, recipe=str(tmp_path / "recipe.yaml"))
        got = {n: m.quantization_scheme.weights for n, m in here.named_modules() if hasattr(m, "quantization_scheme")}
        moved = error(here(TOKENS).logits)
    bits = {"int3": 3, "int4": 4, "int8": 8, "fp8_e4m3": 8}
    assert {name: (args.num_bits, args.type) for name, args in got.items()} == {
        name: (bits[fmt], "float" if fmt == "fp8_e4m3" else "int")
        for name, fmt in wanted.assignment.items()
        if fmt != "bf16"
    }
    assert moved == pytest.approx(our_error(wanted), rel=0.3)
