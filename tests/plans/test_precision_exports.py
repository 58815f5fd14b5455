"""Plans as files of other tools, applied for real where the tool is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.model.test_loading import write_gguf

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.measures.format_costs import plan_injection
from noisescope.plans.precision import Module, Plan
from noisescope.plans.precision_exports import GGUF_BLOCKS, GGUF_TYPES, TOOLS, Export, export_plan
from noisescope.testing import tiny_inputs, tiny_model

FORMATS = ("int4", "int8", "int3", "fp8_e4m3", "bf16", "int4_asymmetric")
TOKENS = tiny_inputs("llama")["input_ids"]


def model(width: int = 64) -> Any:
    return tiny_model("llama", hidden_size=width, intermediate_size=128)  # of 64: groups fit; of 96: they do not


def linears(width: int = 64) -> dict[str, torch.nn.Linear]:
    found = model(width).named_modules()
    return {name: m for name, m in found if isinstance(m, torch.nn.Linear) and name != "lm_head"}


def exported(wanted: Plan, tool: str, width: int = 64) -> Export:
    modules = [Module(name, 0, m.weight.numel(), {}, m.in_features, "Linear") for name, m in linears(width).items()]
    return export_plan(wanted, tool, modules)


def text(wanted: Plan, tool: str) -> str:
    return exported(wanted, tool).text


def plan(*formats: str) -> Plan:
    names = linears()
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
    wanted = plan(*FORMATS[:-1])  # ModelOpt has no zero points
    rounded = {name for name, fmt in wanted.assignment.items() if fmt != "bf16"}
    recipe = yaml.safe_load(text(wanted, "llm-compressor"))["quant_stage"]["quant_modifiers"]
    groups = recipe["QuantizationModifier"]["config_groups"]
    assert {name: fmt for fmt, group in groups.items() for name in group["targets"]} == {
        name: fmt for name, fmt in wanted.assignment.items() if fmt != "bf16"
    }
    assert set(recipe["QuantizationModifier"]["ignore"]) == {"lm_head", *(wanted.assignment.keys() - rounded)}
    rules = yaml.safe_load(text(wanted, "modelopt"))["quant_cfg"]
    assert rules[0] == {"quantizer_name": "*", "enable": False}
    assert {rule["quantizer_name"].removesuffix(".weight_quantizer") for rule in rules[1:]} == rounded
    assert all(-1 in rule["cfg"].get("block_sizes", {-1: 0}) for rule in rules[1:])  # an integer, through YAML too
    layers = json.loads(text(wanted, "autoround"))
    assert {name: row["bits"] for name, row in layers.items()} == {
        name: {"int3": 3, "int4": 4, "bf16": 16}.get(fmt, 8) for name, fmt in wanted.assignment.items()
    }
    assert all(row["act_bits"] == 16 for row in layers.values())  # AutoRound's scheme may round activations
    assert json.loads(text(wanted, "torchao"))["_data"]["fqn_to_config"].keys() == rounded
    assert json.loads(text(wanted, "json"))["assignment"] == wanted.assignment


def test_what_a_tool_lacks_is_told() -> None:
    """A format without a counterpart, and a tool that is not known."""
    with pytest.raises(InvalidInput, match="torchao has no weight-only nvfp4: plan with --formats bf16,int8"):
        text(plan("nvfp4"), "torchao")
    with pytest.raises(InvalidInput, match="torchao has no weight-only int4_clipped"):
        text(plan("int4_clipped"), "torchao")
    with pytest.raises(InvalidInput, match="'gguf'"):
        text(plan("int4"), "gguf")
    assert all(text(plan("int4", "bf16"), tool) for tool in TOOLS)


def test_llama_cpp_gets_a_type_for_every_tensor() -> None:
    """Expressions that match one tensor each, by the names and types of llama.cpp's own package."""
    gguf = pytest.importorskip("gguf")
    formats = ("int8", "int4", "int4_asymmetric", "bf16")
    wanted = plan(*formats)
    modules = [Module(n, int(n.split(".")[2]), 1, {}, m.in_features) for n, m in linears().items()]
    lines = export_plan(wanted, "llama.cpp", modules).text.splitlines()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    tensors = {f"{names.get_name(module)}.weight": fmt for module, fmt in wanted.assignment.items()}
    expected = {"int8": "Q8_0", "int4": "Q4_0", "int4_asymmetric": "Q4_1", "bf16": "BF16"}
    found = {}
    for line in lines:
        expression, _, kind = line.partition("=")
        [tensor] = [name for name in tensors if re.search(expression, name)]
        found[tensor] = gguf.GGMLQuantizationType[kind.upper()].name
    assert found == {tensor: expected[fmt] for tensor, fmt in tensors.items()}
    blocks = {gguf.GGMLQuantizationType[kind.upper()]: GGUF_BLOCKS.get(kind, 32) for kind in GGUF_TYPES.values()}
    assert blocks == {kind: gguf.GGML_QUANT_SIZES[kind][0] for kind in blocks}


def test_llama_cpp_counts_blocks_of_the_text_model() -> None:
    """Behind an image tower of 27 blocks, the text model's first block has place 27 and is llama.cpp's block 0."""
    name = "model.language_model.layers.0.mlp.up_proj"
    found = export_plan(Plan("", {name: "int4"}, 0, 0, 0, 0), "llama.cpp", [Module(name, 27, 1, {}, 64)])
    assert found.text == "blk\\.0\\.ffn_up\\.weight=q4_0\n"


def test_llama_cpp_names_shared_experts_apart() -> None:
    """They are other tensors than the MLP of a dense block; what no plan covers is left to options of the tool."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2MOE, 1)
    modules = [Module(f"model.layers.0.mlp.shared_expert.{kind}_proj", 0, 1, {}, 64) for kind in ("gate", "up", "down")]
    found = export_plan(Plan("", {module.name: "int4" for module in modules}, 0, 0, 0, 0), "llama.cpp", modules)
    expected = [rf"{names.get_name(module.name)}.weight=q4_0".replace(".", r"\.") for module in modules]
    assert found.text.splitlines() == expected
    assert "--token-embedding-type bf16" in found.notes[0]


@pytest.mark.skipif(shutil.which("llama-quantize") is None, reason="llama.cpp is not installed by pip")
def test_llama_quantize_carries_a_plan_out(tmp_path: Path) -> None:
    """It reads the file, and each tensor of the new model has the type of the plan."""
    gguf = pytest.importorskip("gguf")
    write_gguf(tmp_path / "f32.gguf", tokenizer=True, kind="F32")
    wanted = plan("int8", "int4", "int4_asymmetric", "bf16")
    modules = [Module(n, int(n.split(".")[2]), 1, {}, m.in_features) for n, m in linears().items()]
    (tmp_path / "types.txt").write_text(export_plan(wanted, "llama.cpp", modules).text)
    files = [tmp_path / name for name in ("types.txt", "f32.gguf", "out.gguf")]
    command = ["llama-quantize", "--tensor-type-file", *map(str, files), "Q8_0", "1"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    found = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    expected = {"int8": "Q8_0", "int4": "Q4_0", "int4_asymmetric": "Q4_1", "bf16": "BF16"}
    for module, fmt in wanted.assignment.items():
        assert found[f"{names.get_name(module)}.weight"] == expected[fmt]


def test_llama_cpp_refuses_what_it_would_change() -> None:
    """Super-blocks that do not fit, formats and modules without a name of its own."""
    with pytest.raises(InvalidInput, match=r"q_proj has 64 inputs, not a multiple of the 256 that llama.cpp's Q4_K"):
        exported(plan("int4_clipped"), "llama.cpp")
    with pytest.raises(InvalidInput, match=r"llama.cpp has no tensor type for fp8_e4m3: plan with --formats bf16,int8"):
        exported(plan("fp8_e4m3"), "llama.cpp")
    with pytest.raises(InvalidInput, match=r"llama.cpp's name of a.wq is not known"):
        export_plan(Plan("", {"a.wq": "int4"}, 0, 0, 0, 0), "llama.cpp", [Module("a.wq", 0, 64, {}, 64)])


@pytest.mark.parametrize("tool", ["llm-compressor", "modelopt", "autoround", "torchao"])
def test_groups_divide_the_inputs(tool: str) -> None:
    """96 inputs get groups of 32 and a note that names module, width and group; those of 128 keep 64."""
    found = exported(plan("int4"), tool, 96)
    assert found.notes == (
        "model.layers.0.self_attn.q_proj and 11 more: 96 inputs are not a multiple of 64, so the file uses groups "
        "of 32 "
        "there (0.5 bits of scales per weight)",
    )
    assert ": 32" in found.text and ": 64" in found.text
    assert exported(plan("int4"), tool).notes == () and ": 32" not in text(plan("int4"), tool)


def test_widths_without_a_group_are_refused() -> None:
    """No group of 16 or more, a fixed block that does not divide, a plan without widths; FP8 has no groups."""
    with pytest.raises(
        InvalidInput,
        match=r"q_proj has 72 inputs, not a multiple of the group size 64 "
        r"\(int4\).*fp8_e4m3",
    ):
        exported(plan("int4"), "torchao", 72)
    with pytest.raises(InvalidInput, match=r"q_proj has 80 inputs, not a multiple of the group size 32 \(mxfp4\)"):
        exported(plan("mxfp4"), "llm-compressor", 80)
    with pytest.raises(InvalidInput, match="a was planned without its number of inputs"):
        export_plan(Plan("", {"a": "int4"}, 0, 0, 0, 0), "torchao", [Module("a", 0, 64, {})])
    assert not exported(plan("fp8_e4m3"), "torchao", 72).notes


def test_transposed_linears_are_refused_where_a_tool_skips_them() -> None:
    """GPT-2's Conv1D: AutoRound takes it, the others would leave it as it is."""
    transposed, wanted = [Module("a", 0, 64, {}, 64, "Conv1D")], Plan("", {"a": "int4"}, 0, 0, 0, 0)
    for tool in ("torchao", "llm-compressor", "modelopt"):
        with pytest.raises(InvalidInput, match=f"{tool} does not quantise a, which is a Conv1D.*autoround"):
            export_plan(wanted, tool, transposed)
    assert '"bits": 4' in export_plan(wanted, "autoround", transposed).text


@pytest.mark.slow
def test_torchao_carries_a_plan_out() -> None:
    """Its own reader takes the file; every weight becomes of its format, and the outputs move as far as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
        from torchao.core.config import config_from_dict

        here, wanted = model(), plan(*FORMATS)
        config = config_from_dict(json.loads(text(wanted, "torchao")))
        quantization.quantize_(here, config, filter_fn=None)
        kinds = {name: type(m.weight).__name__ for name, m in here.named_modules() if isinstance(m, torch.nn.Linear)}
        moved = error(here(TOKENS).logits)
    expected = {"bf16": "Parameter", "fp8_e4m3": "Float8Tensor"}
    assert kinds.pop("lm_head") == "Parameter"
    assert kinds == {name: expected.get(fmt, "IntxUnpackedToInt8Tensor") for name, fmt in wanted.assignment.items()}
    assert moved == pytest.approx(our_error(wanted), rel=0.3)


@pytest.mark.slow
def test_torchao_takes_other_widths() -> None:
    """96 inputs: it refuses groups of 64 there, and takes the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantization = pytest.importorskip("torchao.quantization")
        from torchao.core.config import config_from_dict

        here = model(96)
        file = exported(plan("int4"), "torchao", 96).text
        quantization.quantize_(here, config_from_dict(json.loads(file)), filter_fn=None)
        assert here(TOKENS).logits.isfinite().all()


@pytest.mark.slow
def test_llm_compressor_carries_a_plan_out(tmp_path: Path) -> None:
    """`oneshot` takes the recipe; every linear gets its scheme, and the outputs move as far as ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor, datasets = pytest.importorskip("llmcompressor"), pytest.importorskip("datasets")
        wanted = plan(*FORMATS, "int4_clipped")
        model().save_pretrained(tmp_path / "model")
        here = type(model()).from_pretrained(tmp_path / "model")
        found = exported(wanted, "llm-compressor")
        assert found.notes == (
            "int4_clipped: call oneshot with a dataset, whose activations its observer counts errors by",
        )
        (tmp_path / "recipe.yaml").write_text(found.text)
        rows = datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()})
        compressor.oneshot(
            model=here,
            recipe=str(tmp_path / "recipe.yaml"),
            dataset=rows,
            pipeline="basic",
            processor=ns.load("demo").tokenizer,
        )
        got = {n: m.quantization_scheme.weights for n, m in here.named_modules() if hasattr(m, "quantization_scheme")}
        moved = error(here(TOKENS).logits)
    bits = {"int3": 3, "int4": 4, "int4_asymmetric": 4, "int4_clipped": 4, "int8": 8, "fp8_e4m3": 8}
    assert {name: (args.num_bits, args.type) for name, args in got.items()} == {
        name: (bits[fmt], "float" if fmt == "fp8_e4m3" else "int")
        for name, fmt in wanted.assignment.items()
        if fmt != "bf16"
    }
    assert moved == pytest.approx(our_error(wanted), rel=0.3)


@pytest.mark.slow
def test_llm_compressor_takes_other_widths(tmp_path: Path) -> None:
    """96 inputs: it refuses groups of 64 there, and takes the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor = pytest.importorskip("llmcompressor")
        model(96).save_pretrained(tmp_path / "model")
        here = type(model()).from_pretrained(tmp_path / "model")
        (tmp_path / "recipe.yaml").write_text(exported(plan("int4"), "llm-compressor", 96).text)
        compressor.oneshot(model=here, recipe=str(tmp_path / "recipe.yaml"))
        sizes = {
            m.in_features: m.quantization_scheme.weights.group_size
            for m in here.modules()
            if hasattr(m, "quantization_scheme")
        }
    assert sizes == {96: 32, 128: 64}
