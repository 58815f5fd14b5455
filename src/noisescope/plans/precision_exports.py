"""Exports precision plans as configuration files for quantisation tools.

==============  ====================================================================================================
llm-compressor  a YAML recipe for `oneshot(recipe=...)`: a QuantizationModifier with one config group per format
modelopt        a YAML file for `modelopt.torch.quantization.quantize`: weight quantisers by module name
autoround       a JSON `layer_config` for AutoRound
torchao         a JSON file for `torchao.core.config.config_from_dict`, which makes a config for `quantize_`
llama.cpp       a text file for `llama-quantize --tensor-type-file`: one `tensor=type` a line, tensors by expressions
json            the plan as it is
==============  ====================================================================================================

Modules at 16 bits and lm_head stay as they are; for embeddings and lm_head llama-quantize has options of its own. The
integers of llm-compressor and torchao use one more level than ours (-8 to 7), and GPTQ or AWQ round better than to
nearest: the plan says which format, the tool how. `int4_clipped` is llm-compressor's observer "imatrix_mse", which
needs calibration data, and Q4_K of llama.cpp, which searches its scales, best with an importance matrix; AutoRound
clips where it tunes.

llama.cpp has groups of its own: 32 in Q8_0, Q4_0 and Q4_1 (8.5, 4.5 and 5 bits with scales); in Q4_K and Q3_K 32 and 16
within blocks of 256 (4.5 and 3.44), which the inputs of a tensor have to be a multiple of.

llm-compressor and torchao take whole groups alone. Where 64 does not divide the inputs of a linear, its integers get
the largest group that divides both (32 for 96 inputs): smaller groups round as well as planned, and have more scales.

GPT-2's linears are transformers' Conv1D, which keeps its weight as [in, out]. llm-compressor skips them silently, and
what torchao makes of them fails in the forward: these two and ModelOpt, which was not tried, are refused. AutoRound
takes them: of a tiny GPT-2 at int4 it moved the logits by 5.6 %, our own rounding by 5.9 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from noisescope.diagnosis.format_costs import GROUP, UNTOUCHED
from noisescope.errors import InvalidInput, unknown
from noisescope.jsonform import Json, to_json
from noisescope.options.fields import TOOLS
from noisescope.plans.precision import Module, Plan

SMALLEST_GROUP = 16  # in smaller ones scales would take more than a bit per weight
INTEGERS = {"int8": 8, "int4": 4, "int4_asymmetric": 4, "int4_clipped": 4, "int3": 3}
SYMMETRIC = {"int8": 8, "int4": 4, "int3": 3}
BLOCKS = {"mxfp4": 32, "nvfp4": 16}  # the format's own
TRANSPOSED = "Conv1D"
TRANSPOSING = ("autoround",)  # tools that take it
GGUF_TYPES = {"int8": "q8_0", "int4": "q4_0", "int4_asymmetric": "q4_1", "int4_clipped": "q4_k", "int3": "q3_k"}
GGUF_BLOCKS = {"q4_k": 256, "q3_k": 256}  # others: 32
GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate",
    "up_proj": "ffn_up", "down_proj": "ffn_down", "qkv_proj": "attn_qkv", "gate_up_proj": "ffn_up",
    "query_key_value": "attn_qkv", "dense_h_to_4h": "ffn_up", "dense_4h_to_h": "ffn_down",
}  # fmt: skip

GGUF_OTHERS = (
    "llama-quantize rounds embeddings and lm_head, which no plan covers, unless it gets --token-embedding-type bf16 "
    "--output-tensor-type bf16"
)


@dataclass(frozen=True)
class Export:
    """The text of a tool's configuration file, and where it differs from the plan."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class RoundedModule:
    """A module that a tool should quantise, with its format as the tool spells it. `group` applies to integers only."""

    module: str
    inputs: int
    format: str
    group: int
    spelled: dict[str, Json]


def formats_of(tool: str) -> tuple[str, ...] | None:
    """The formats that a tool has; None where it has all."""
    if tool == "llama.cpp":
        return (UNTOUCHED, *GGUF_TYPES)
    found = _spellings(GROUP).get(tool)
    return None if found is None else (UNTOUCHED, *found)


def export_plan(plan: Plan, tool: str, modules: Sequence[Module]) -> Export:
    """A file for that tool: YAML if block sizes have integer keys or people edit it, else JSON.

    `modules` are those that were planned: their widths decide on groups.
    """
    import yaml

    class WithoutAnchors(yaml.SafeDumper):
        """Writes a format that many modules share in full for each, as people would."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    if tool == "json":
        return Export(json.dumps(to_json(plan), indent=1) + "\n")
    if tool == "llama.cpp":
        return Export("".join(f"{line}\n" for line in _tensor_types(plan, modules)), (GGUF_OTHERS,))
    if tool not in _WRITERS:
        raise unknown("export", tool, TOOLS)
    rounded = _rounded(plan, tool, modules)
    found, notes = _WRITERS[tool](plan, rounded), _notes(tool, rounded)
    if tool in ("llm-compressor", "modelopt"):
        return Export(yaml.dump(found, Dumper=WithoutAnchors, sort_keys=False), notes)
    return Export(json.dumps(found, indent=1) + "\n", notes)


def _rounded(plan: Plan, tool: str, modules: Sequence[Module]) -> list[RoundedModule]:
    """The modules that a tool is to round, with groups that divide their inputs."""
    found = []
    for module in modules:
        name = plan.assignment[module.name]
        if name == UNTOUCHED:
            continue
        if name not in (offered := _spellings(GROUP)[tool]):
            raise InvalidInput(
                f"{tool} has no weight-only {name}: plan with --formats {','.join((UNTOUCHED, *offered))}"
            )
        if module.kind.endswith("Experts"):
            raise InvalidInput(f"{module.name} holds the experts of a block in one tensor, which {tool} takes by other "
                               f"names: export llama.cpp or json")  # fmt: skip
        if module.kind == TRANSPOSED and tool not in TRANSPOSING:
            raise InvalidInput(
                f"{tool} does not quantise {module.name}, which is a {TRANSPOSED}, not a torch.nn.Linear: export for "
                f"{' or '.join(TRANSPOSING)}, or export json"
            )
        if module.inputs is None:
            raise InvalidInput(
                f"{module.name} was planned without its number of inputs, which determines the groups: create the "
                f"plan from a report"
            )
        wanted = BLOCKS.get(name, GROUP)
        group = math.gcd(wanted, module.inputs)  # the largest up to ours that divides them
        if (name in BLOCKS and group < wanted) or (name in INTEGERS and group < SMALLEST_GROUP):
            raise InvalidInput(
                f"{module.name} has {module.inputs} inputs, not a multiple of the group size {wanted} ({name}), and "
                f"the tools accept only whole groups: plan with --formats bf16,fp8_e4m3, which have no groups, or "
                f"export json"
            )
        found.append(RoundedModule(module.name, module.inputs, name, group, _spellings(group)[tool][name]))
    return found


def _spellings(group: int) -> dict[str, dict[str, dict[str, Json]]]:
    """Each tool's formats as it spells them, integers in groups of that size."""
    to_int = {"type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    to_float = {"type": "float", "symmetric": True}
    fp4_scales = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    mx_scales = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    granularity = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}}

    def intx(name: str, mapping: str = "SYMMETRIC") -> dict[str, Json]:
        data = {"weight_dtype": {"_type": "torch.dtype", "_data": name}, "granularity": granularity}
        data |= {"mapping_type": {"_type": "MappingType", "_data": mapping}}
        return {"_type": "IntxWeightOnlyConfig", "_version": 2, "_data": data}

    def blocks(size: int, scale_bits: list[int]) -> dict[str, Json]:
        return {"num_bits": [2, 1], "block_sizes": {-1: size, "type": "dynamic", "scale_bits": scale_bits}}

    to_asymmetric = {"num_bits": 4, **to_int, "symmetric": False}
    return {
        "llm-compressor": {  # compressed-tensors' quantization arguments of a weight
            **{name: {"num_bits": bits, **to_int} for name, bits in SYMMETRIC.items()},
            "int4_asymmetric": to_asymmetric,
            "int4_clipped": {**to_asymmetric, "observer": "imatrix_mse"},
            "fp8_e4m3": {"num_bits": 8, **to_float, "strategy": "channel"},
            "nvfp4": {"num_bits": 4, **to_float, "strategy": "tensor_group", "group_size": 16, **fp4_scales},
            "mxfp4": {"num_bits": 4, **to_float, "strategy": "group", "group_size": 32, **mx_scales},
        },
        "modelopt": {
            **{n: {"num_bits": bits, "block_sizes": {-1: group, "type": "static"}} for n, bits in SYMMETRIC.items()},
            "fp8_e4m3": {"num_bits": [4, 3], "axis": 0},
            "nvfp4": blocks(16, [4, 3]),
            "mxfp4": blocks(32, [8, 0]),
        },
        "autoround": {
            **{n: {**_weights("int", b, n in SYMMETRIC), "group_size": group} for n, b in INTEGERS.items()},
            "fp8_e4m3": {**_weights("fp8", 8), "group_size": -1},
            "nvfp4": {**_weights("nv_fp4", 4), "group_size": 16},
            "mxfp4": {**_weights("mx_fp", 4), "group_size": 32},
        },
        "torchao": {  # as torchao.core.config writes its configs
            **{name: intx(name) for name in SYMMETRIC},
            "int4_asymmetric": intx("int4", "ASYMMETRIC"),
            "fp8_e4m3": {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}},
        },
    }


def _weights(data_type: str, bits: int, symmetric: bool = True) -> dict[str, Json]:
    """AutoRound takes what a layer does not say from its scheme, and some of those round activations."""
    return {"bits": bits, "data_type": data_type, "sym": symmetric, "act_bits": 16}


def _notes(tool: str, rounded: Sequence[RoundedModule]) -> tuple[str, ...]:
    """One for each width that our groups do not divide, and one where the tool needs calibration data."""
    narrow: dict[tuple[int, int], list[str]] = {}
    for one in rounded:
        if one.format in INTEGERS and one.group != GROUP:
            narrow.setdefault((one.inputs, one.group), []).append(one.module)
    notes = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {width} inputs are not a multiple of "
        f"{GROUP}, so the file uses groups of {group} there ({16 / group:g} bits of scales per weight)"
        for (width, group), names in narrow.items()
    ]
    if tool == "llm-compressor" and any(one.format == "int4_clipped" for one in rounded):
        notes.append("int4_clipped: call oneshot with a dataset, whose activations its observer counts errors by")
    return tuple(notes)


def _recipe(plan: Plan, rounded: Sequence[RoundedModule]) -> dict[str, Json]:
    groups: dict[str, dict[str, Json]] = {}
    for one in rounded:
        key = one.format if one.group == GROUP or one.format not in INTEGERS else f"{one.format}_group_{one.group}"
        groups.setdefault(key, {"targets": [], "weights": one.spelled})
        groups[key]["targets"].append(one.module)
    kept = [module for module, name in plan.assignment.items() if name == UNTOUCHED]
    modifier = {"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head", *kept]}}
    return {"quant_stage": {"quant_modifiers": modifier}}


def _modelopt(plan: Plan, rounded: Sequence[RoundedModule]) -> dict[str, Json]:
    rules = [{"quantizer_name": f"{one.module}.weight_quantizer", "cfg": one.spelled} for one in rounded]
    return {"quant_cfg": [{"quantizer_name": "*", "enable": False}, *rules], "algorithm": "max"}


def _autoround(plan: Plan, rounded: Sequence[RoundedModule]) -> dict[str, Json]:
    kept = {module: _weights("float", 16) for module in plan.assignment}
    return {**kept, **{one.module: one.spelled for one in rounded}}


def _torchao(plan: Plan, rounded: Sequence[RoundedModule]) -> dict[str, Json]:
    configs = {one.module: one.spelled for one in rounded}
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}


def _tensor_types(plan: Plan, modules: Sequence[Module]) -> Iterator[str]:
    """`tensor=type` of each module, those at 16 bits included: llama-quantize rounds what is not named."""
    for module in modules:
        name, (*parents, kind) = plan.assignment[module.name], module.name.split(".")
        shared = "_shexp" if parents and parents[-1].startswith("shared_expert") else ""
        tensors = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps") if module.kind.endswith("Experts") else ()
        if kind not in GGUF_NAMES and not tensors:
            raise InvalidInput(f"llama.cpp's name of {module.name} is not known here: export json")
        if name not in (UNTOUCHED, *GGUF_TYPES):
            offered = ",".join(formats_of("llama.cpp") or ())
            raise InvalidInput(f"llama.cpp has no tensor type for {name}: plan with --formats {offered}")
        spelled = GGUF_TYPES.get(name, "bf16")
        block = 1 if name == UNTOUCHED else GGUF_BLOCKS.get(spelled, 32)
        if module.inputs is None or module.inputs % block:
            raise InvalidInput(
                f"{module.name} has {module.inputs} inputs, not a multiple of the {block} that llama.cpp's "
                f"{spelled.upper()} needs: plan without {name}, such as --formats bf16,int8,int4,int4_asymmetric"
            )
        layer = next((part for part in parents if part.isdigit()), module.place)  # places count an image tower's, too
        for tensor in tensors or (GGUF_NAMES[kind] + shared,):
            yield rf"blk\.{layer}\.{tensor}\.weight={spelled}"


_WRITERS = {"llm-compressor": _recipe, "modelopt": _modelopt, "autoround": _autoround, "torchao": _torchao}
