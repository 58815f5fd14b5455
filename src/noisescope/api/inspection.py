"""Where noise can fall in a model, from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from noisescope.model.anatomy_as_tables import folded, module_rows
from noisescope.model.loading import Subject, outline
from noisescope.options.base import takes_options
from noisescope.options.device_commands import InspectOptions
from noisescope.sites import place_ranges as place_ranges


@takes_options(InspectOptions)
def inspect(model: str | Path, options: InspectOptions) -> Subject:
    """A model without its weights: where noise can fall, what is fused, absent or quantised.

    Reads the config alone, so a model of any size is inspected in seconds. The subject can't be run.

    >>> import noisescope as ns
    >>> subject = ns.inspect("tiny:llama")
    >>> subject.anatomy.absent()
    ['bmm', 'gelu']
    >>> subject.to_frame("places")[["place", "linear"]].dropna().values.tolist()
    [['0-1', 7.0], ['lm_head', 1.0]]
    """
    return outline(str(model), **options.pick("dtype", "attn_implementation"))


def anatomy_facts(subject: Subject, *, verbose: bool = False) -> dict[str, Any]:
    """All that `noisescope inspect` says, as plain values."""
    model, anatomy = subject.model, subject.anatomy
    parameters = list(model.parameters())
    packed = [unit for unit in anatomy.units if unit.packed]
    config = getattr(model, "config", None)
    experts = None  # of an MoE model, how transformers computes them: "grouped_mm", "batched_mm", "eager"
    if any(unit.kind == "experts" for unit in anatomy.units):
        experts = getattr(config, "_experts_implementation", None) or "eager"
    kernel = getattr(config, "_attn_implementation", None)  # that computes attention
    products = anatomy.operators() & {"softmax", "matmul", "bmm"}
    found: dict[str, Any] = {
        "source": subject.source,
        "architecture": anatomy.architecture,
        "blocks": len(anatomy.blocks),
        "parameters": sum(parameter.numel() for parameter in parameters),  # a tied weight counts once
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "attention": {"implementation": kernel or "torch", "fused": bool(products) and kernel != "eager"},
        "experts": experts,
        "operators": folded(anatomy.counts()),
        "left_alone": folded(anatomy.counts(left_alone=True)),
        "possible": sorted({op for unit in anatomy.units if not unit.certain for op in unit.operators}),
        "absent": anatomy.absent(),
        "quantised": {kind: sum(u.packed == kind for u in packed) for kind in sorted({u.packed for u in packed})},
        "notes": list(anatomy.notes),
    }
    if verbose:
        found["modules"] = module_rows(anatomy)
    return found
