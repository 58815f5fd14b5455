"""Precision plans as configuration files of the tools that carry them out.

==============  ====================================================================================================
llm-compressor  a YAML recipe for `oneshot(recipe=...)`: a QuantizationModifier with one config group per format
modelopt        a YAML file for `modelopt.torch.quantization.quantize`: weight quantisers by module name
autoround       a JSON `layer_config` for AutoRound
torchao         a JSON file for `torchao.core.config.config_from_dict`, which makes a config for `quantize_`
json            the plan as it is
==============  ====================================================================================================

Modules at 16 bits and lm_head stay as they are. The integers of llm-compressor and torchao use one more level than ours
(-8 to 7), and GPTQ or AWQ round better than to nearest: the plan says which format, the tool how.

llm-compressor and torchao take whole groups alone. Where 64 does not divide the inputs of a linear, its integers get
the largest group that divides both (32 for 96 inputs): smaller groups round as well as planned, and have more scales.

GPT-2's linears are transformers' Conv1D, which keeps its weight as [in, out]. llm-compressor skips them silently, and
what torchao makes of them fails in the forward: these two and ModelOpt, which was not tried, are refused. AutoRound
takes them: of a tiny GPT-2 at int4 it moved the logits by 5.6 %, our own rounding by 5.9 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from noisescope.diagnosis.format_costs import GROUP, UNTOUCHED
from noisescope.errors import InvalidInput, unknown
from noisescope.jsonform import Json, to_json
from noisescope.options.fields import TOOLS
from noisescope.plans.precision import Module, Plan

if TYPE_CHECKING:
    import yaml

SMALLEST_GROUP = 16  # in smaller ones scales would take more than a bit per weight
INTEGERS = {"int8": 8, "int4": 4, "int3": 3}
BLOCKS = {"mxfp4": 32, "nvfp4": 16}  # the format's own
TRANSPOSED = "Conv1D"
TRANSPOSING = ("autoround",)  # tools that take it

Spelling = Callable[[int], dict[str, Json]]  # a group -> a format with that group, as a tool spells it


@dataclass(frozen=True)
class Export:
    """The text of a file for a tool, and where it differs from the plan."""

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rounded:
    """A module that a tool is to round. `group` is of integers; other formats have their own."""

    module: str
    format: str
    group: int


def _compressed(bits: int) -> Spelling:
    """compressed-tensors' quantization arguments of a weight."""
    about = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group"}
    return lambda group: {**about, "group_size": group}


def _intx(name: str) -> Spelling:
    """As torchao.core.config writes its configs."""
    return lambda group: {
        "_type": "IntxWeightOnlyConfig",
        "_version": 2,
        "_data": {
            "weight_dtype": {"_type": "torch.dtype", "_data": name},
            "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": group}},
        },
    }


def _blocked(bits: int) -> Spelling:
    return lambda group: {"num_bits": bits, "block_sizes": {-1: group, "type": "static"}}


def _auto(bits: int) -> Spelling:
    return lambda group: {**_weights("int", bits), "group_size": group}


def _weights(data_type: str, bits: int) -> dict[str, Json]:
    """AutoRound takes what a layer does not say from its scheme, and some of those round activations."""
    return {"bits": bits, "data_type": data_type, "sym": True, "act_bits": 16}


def _always(**spelled: Json) -> Spelling:
    return lambda group: spelled


_COMPRESSED: dict[str, Spelling] = {
    **{name: _compressed(bits) for name, bits in INTEGERS.items()},
    "fp8_e4m3": _always(num_bits=8, type="float", symmetric=True, strategy="channel"),
    "nvfp4": _always(
        num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16,
        scale_dtype="torch.float8_e4m3fn", zp_dtype="torch.float8_e4m3fn",
    ),
    "mxfp4": _always(
        num_bits=4, type="float", symmetric=True, strategy="group", group_size=32,
        scale_dtype="torch.uint8", zp_dtype="torch.uint8",
    ),
}  # fmt: skip
_MODELOPT: dict[str, Spelling] = {
    **{name: _blocked(bits) for name, bits in INTEGERS.items()},
    "fp8_e4m3": _always(num_bits=[4, 3], axis=0),
    "nvfp4": _always(num_bits=[2, 1], block_sizes={-1: 16, "type": "dynamic", "scale_bits": [4, 3]}),
    "mxfp4": _always(num_bits=[2, 1], block_sizes={-1: 32, "type": "dynamic", "scale_bits": [8, 0]}),
}
_AUTOROUND: dict[str, Spelling] = {
    **{name: _auto(bits) for name, bits in INTEGERS.items()},
    "fp8_e4m3": _always(**_weights("fp8", 8), group_size=-1),
    "nvfp4": _always(**_weights("nv_fp4", 4), group_size=16),
    "mxfp4": _always(**_weights("mx_fp", 4), group_size=32),
}
_TORCHAO: dict[str, Spelling] = {
    **{name: _intx(name) for name in INTEGERS},
    "fp8_e4m3": _always(_type="Float8WeightOnlyConfig", _version=2, _data={}),
}


def export_plan(plan: Plan, tool: str, modules: Sequence[Module]) -> Export:
    """A file for that tool: YAML where block sizes have integer keys or people edit it, else JSON.

    `modules` are those that were planned: their widths decide on groups.
    """
    import yaml

    made = {
        "llm-compressor": (_recipe, _COMPRESSED),
        "modelopt": (_modelopt, _MODELOPT),
        "autoround": (_autoround, _AUTOROUND),
        "torchao": (_torchao, _TORCHAO),
    }
    if tool == "json":
        return Export(json.dumps(to_json(plan), indent=1) + "\n")
    if tool not in made:
        raise unknown("export", tool, TOOLS)
    write, spellings = made[tool]
    rounded = _rounded(plan, tool, modules, spellings)
    found, notes = write(plan, rounded), _notes(rounded, modules)
    if tool in ("llm-compressor", "modelopt"):
        return Export(yaml.dump(found, Dumper=_plain_dumper(), sort_keys=False), notes)
    return Export(json.dumps(found, indent=1) + "\n", notes)


def _plain_dumper() -> type[yaml.SafeDumper]:
    """YAML without anchors: a format that many modules share is written out for each, as people would."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return Plain


def _rounded(plan: Plan, tool: str, modules: Sequence[Module], spellings: dict[str, Spelling]) -> list[Rounded]:
    """The modules that a tool is to round, with groups that divide their inputs."""
    found = []
    for module in modules:
        name = plan.assignment[module.name]
        if name == UNTOUCHED:
            continue
        if name not in spellings:
            raise InvalidInput(
                f"{tool} has no weight-only {name}: plan with --formats {','.join((UNTOUCHED, *spellings))}"
            )
        if module.kind == TRANSPOSED and tool not in TRANSPOSING:
            raise InvalidInput(
                f"{tool} does not quantise {module.name}, which is a {TRANSPOSED} and no torch.nn.Linear: export for "
                f"{' or '.join(TRANSPOSING)}, or export json"
            )
        found.append(Rounded(module.name, name, _group(module, name)))
    return found


def _group(module: Module, name: str) -> int:
    """The largest group up to ours that divides a module's inputs."""
    if module.inputs is None:
        raise InvalidInput(
            f"{module.name} was planned without its number of inputs, which decides on groups: plan from a report"
        )
    wanted = BLOCKS.get(name, GROUP)
    group = math.gcd(wanted, module.inputs)
    if (name in BLOCKS and group < wanted) or (name in INTEGERS and group < SMALLEST_GROUP):
        raise InvalidInput(
            f"{module.name} has {module.inputs} inputs, which groups of {wanted} ({name}) do not divide, and the tools "
            "take whole groups alone: plan with --formats bf16,fp8_e4m3, which have none, or export json"
        )
    return group


def _notes(rounded: Sequence[Rounded], modules: Sequence[Module]) -> tuple[str, ...]:
    """One for each width that our groups do not divide."""
    inputs = {module.name: module.inputs for module in modules}
    narrow: dict[tuple[int | None, int], list[str]] = {}
    for one in rounded:
        if one.format in INTEGERS and one.group != GROUP:
            narrow.setdefault((inputs[one.module], one.group), []).append(one.module)
    return tuple(
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {width} inputs are no multiple of "
        f"{GROUP}, so the file has groups of {group} there ({16 / group:g} bits of scales per weight)"
        for (width, group), names in narrow.items()
    )


def _recipe(plan: Plan, rounded: Sequence[Rounded]) -> dict[str, Json]:
    groups: dict[str, dict[str, Json]] = {}
    for one in rounded:
        key = one.format if one.group == GROUP or one.format not in INTEGERS else f"{one.format}_group_{one.group}"
        groups.setdefault(key, {"targets": [], "weights": _COMPRESSED[one.format](one.group)})
        groups[key]["targets"].append(one.module)
    kept = [module for module, name in plan.assignment.items() if name == UNTOUCHED]
    modifier = {"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head", *kept]}}
    return {"quant_stage": {"quant_modifiers": modifier}}


def _modelopt(plan: Plan, rounded: Sequence[Rounded]) -> dict[str, Json]:
    rules: list[dict[str, Json]] = [{"quantizer_name": "*", "enable": False}]
    for one in rounded:
        rules.append({"quantizer_name": f"{one.module}.weight_quantizer", "cfg": _MODELOPT[one.format](one.group)})
    return {"quant_cfg": rules, "algorithm": "max"}


def _autoround(plan: Plan, rounded: Sequence[Rounded]) -> dict[str, Json]:
    kept = {module: _weights("float", 16) for module in plan.assignment}
    return {**kept, **{one.module: _AUTOROUND[one.format](one.group) for one in rounded}}


def _torchao(plan: Plan, rounded: Sequence[Rounded]) -> dict[str, Json]:
    configs = {one.module: _TORCHAO[one.format](one.group) for one in rounded}
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}
