"""ModelOpt's `auto_quantize` for precision.py, and our plans with its groups of linears kept together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from noisescope.diagnosis.section_types import FormatScore
from noisescope.plans.precision import Module

GROUPS = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}  # served as one matrix, so of one format


def group_of(name: str) -> str:
    parent, _, last = name.rpartition(".")
    return f"{parent}.{GROUPS.get(last, last)}"


def merged(modules: Sequence[Module]) -> list[Module]:
    """Each group as one module: weights and costs add up."""
    found: dict[str, Module] = {}
    for module in modules:
        name = group_of(module.name)
        known = found.get(name)
        if known is None:
            found[name] = Module(name, module.place, module.parameters, module.choices)
            continue
        choices = {
            f: FormatScore(c.bits, c.effective_bits, c.predicted_kl + known.choices[f].predicted_kl, None)
            for f, c in module.choices.items()
        }
        found[name] = Module(name, module.place, module.parameters + known.parameters, choices)
    return list(found.values())


def spread(assignment: Mapping[str, str], modules: Sequence[Module]) -> dict[str, str]:
    """A plan of groups as a plan of modules."""
    return {module.name: assignment[group_of(module.name)] for module in modules}


def modelopt_assignment(folder: str, tokens: torch.Tensor, bits: float, planned: int) -> tuple[dict[str, str], str]:
    """What `auto_quantize` chooses of int4 and int8 (groups of 64) by its gradient scores, and its version."""
    import modelopt
    import modelopt.torch.quantization as mtq

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    head = model.lm_head.weight.numel()

    def weight_only(width: int) -> dict[str, Any]:
        cfg = {"num_bits": width, "block_sizes": {-1: 64, "type": "static"}}
        rules = [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": cfg},
                 {"quantizer_name": "*lm_head*", "enable": False}]  # fmt: skip
        return {"quant_cfg": rules, "algorithm": "max"}

    def loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    batches = list(tokens.split(4))
    found, _ = mtq.auto_quantize(
        model,
        constraints={"effective_bits": (planned * bits + head * 16) / (planned + head)},
        quantization_formats=[weight_only(4), weight_only(8)],
        data_loader=batches,
        forward_step=lambda m, ids: m(input_ids=ids, use_cache=False).logits,
        loss_func=loss,
        num_calib_steps=1,
        num_score_steps=len(batches),
        disabled_layers=["*lm_head*"],
        method="gradient",
        verbose=False,
    )
    names = {4: "int4", 8: "int8"}
    chosen = {
        name.removesuffix(".weight_quantizer"): names[module.num_bits] if module.is_enabled else "bf16"
        for name, module in found.named_modules()
        if name.endswith("_proj.weight_quantizer")
    }
    return chosen, modelopt.__version__
