"""Precision plans in the words of the tools that carry them out for real.

==============  ====================================================================================================
llm-compressor  a YAML recipe for `oneshot(recipe=...)`: a QuantizationModifier with one config group a format
modelopt        a YAML file for `modelopt.torch.quantization.quantize`: weight quantisers by module name
autoround       a JSON `layer_config` for AutoRound
torchao         a JSON file for `torchao.core.config.config_from_dict`, which makes a config for `quantize_`
json            the plan as it is
==============  ====================================================================================================

Modules at 16 bits and lm_head stay as they are. The integers of llm-compressor and torchao use one more level than ours
(-8 to 7), and GPTQ or AWQ round better than to nearest: the plan says which format, the tool how.
"""

from __future__ import annotations

import json
from typing import Any

from noisescope.errors import InvalidInput, unknown
from noisescope.plans.precision import Plan

TOOLS = ("llm-compressor", "modelopt", "autoround", "torchao", "json")
GROUP = 64
LEFT_ALONE = "bf16"

_COMPRESSED: dict[str, dict[str, Any]] = {  # compressed-tensors' quantization arguments of a weight
    "int8": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
    "int4": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
    "int3": {"num_bits": 3, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
    "fp8_e4m3": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
    "nvfp4": {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn",
    },
    "mxfp4": {
        "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32,
        "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8",
    },
}  # fmt: skip
_MODELOPT: dict[str, dict[str, Any]] = {
    "int8": {"num_bits": 8, "block_sizes": {-1: GROUP, "type": "static"}},
    "int4": {"num_bits": 4, "block_sizes": {-1: GROUP, "type": "static"}},
    "int3": {"num_bits": 3, "block_sizes": {-1: GROUP, "type": "static"}},
    "fp8_e4m3": {"num_bits": [4, 3], "axis": 0},
    "nvfp4": {"num_bits": [2, 1], "block_sizes": {-1: 16, "type": "dynamic", "scale_bits": [4, 3]}},
    "mxfp4": {"num_bits": [2, 1], "block_sizes": {-1: 32, "type": "dynamic", "scale_bits": [8, 0]}},
}
_AUTOROUND: dict[str, dict[str, Any]] = {
    LEFT_ALONE: {"bits": 16, "data_type": "float"},
    "int8": {"bits": 8, "group_size": GROUP, "sym": True, "data_type": "int"},
    "int4": {"bits": 4, "group_size": GROUP, "sym": True, "data_type": "int"},
    "int3": {"bits": 3, "group_size": GROUP, "sym": True, "data_type": "int"},
    "fp8_e4m3": {"bits": 8, "group_size": -1, "sym": True, "data_type": "fp8"},
    "nvfp4": {"bits": 4, "group_size": 16, "sym": True, "data_type": "nv_fp4"},
    "mxfp4": {"bits": 4, "group_size": 32, "sym": True, "data_type": "mx_fp"},
}
_TORCHAO: dict[str, dict[str, Any]] = {  # as torchao.core.config writes its configs
    **{
        name: {
            "_type": "IntxWeightOnlyConfig",
            "_version": 2,
            "_data": {
                "weight_dtype": {"_type": "torch.dtype", "_data": name},
                "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": GROUP}},
            },
        }
        for name in ("int8", "int4", "int3")
    },
    "fp8_e4m3": {"_type": "Float8WeightOnlyConfig", "_version": 2, "_data": {}},
}


def export_plan(plan: Plan, tool: str) -> str:
    """The text of a file for that tool: YAML where block sizes have integer keys or people edit it, else JSON."""
    import yaml

    made = {
        "llm-compressor": _recipe,
        "modelopt": _modelopt,
        "autoround": _autoround,
        "torchao": _torchao,
        "json": Plan.to_dict,
    }
    if tool not in made:
        raise unknown("export", tool, TOOLS)
    found = made[tool](plan)
    if tool in ("llm-compressor", "modelopt"):
        text: str = yaml.dump(found, Dumper=_plain_dumper(), sort_keys=False)
        return text
    return json.dumps(found, indent=1) + "\n"


def _plain_dumper() -> Any:
    """YAML without anchors: a format that many modules share is written out for each, as people would."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return Plain


def _by_format(plan: Plan, tool: str, known: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Modules of each format that a tool is told of."""
    found: dict[str, list[str]] = {}
    for module, name in plan.assignment.items():
        if name == LEFT_ALONE:
            continue
        if name not in known:
            raise InvalidInput(f"{tool} has no weight-only {name}: plan with --formats {','.join(known)}")
        found.setdefault(name, []).append(module)
    return found


def _recipe(plan: Plan) -> dict[str, Any]:
    groups = {
        name: {"targets": modules, "weights": _COMPRESSED[name]}
        for name, modules in _by_format(plan, "llm-compressor", _COMPRESSED).items()
    }
    kept = [module for module, name in plan.assignment.items() if name == LEFT_ALONE]
    modifier = {"QuantizationModifier": {"config_groups": groups, "ignore": ["lm_head", *kept]}}
    return {"quant_stage": {"quant_modifiers": modifier}}


def _modelopt(plan: Plan) -> dict[str, Any]:
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, modules in _by_format(plan, "modelopt", _MODELOPT).items():
        rules += [{"quantizer_name": f"{module}.weight_quantizer", "cfg": _MODELOPT[name]} for module in modules]
    return {"quant_cfg": rules, "algorithm": "max"}


def _autoround(plan: Plan) -> dict[str, Any]:
    return {module: _AUTOROUND[name] for module, name in plan.assignment.items()}


def _torchao(plan: Plan) -> dict[str, Any]:
    by_format = _by_format(plan, "torchao", _TORCHAO)
    configs = {module: _TORCHAO[name] for name, modules in by_format.items() for module in modules}
    return {"_type": "FqnToConfig", "_version": 1, "_data": {"fqn_to_config": configs}}
