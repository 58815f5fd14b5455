"""Where noise can fall in a model, from its config alone."""

from __future__ import annotations

from typing import Any

from noisescope.model.anatomy import Anatomy
from noisescope.model.loading import Subject, outline
from noisescope.options.device_commands import InspectOptions
from noisescope.sites import OPERATORS, Place, place_order


def describe_model(options: InspectOptions) -> dict[str, Any]:
    """Places, operators and modules of the model that options name."""
    subject = outline(options.model, dtype=options.dtype, attn_implementation=options.attn_implementation)
    return anatomy_facts(subject, verbose=options.verbose)


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
        "operators": _folded(anatomy.counts()),
        "left_alone": _folded(anatomy.counts(left_alone=True)),
        "possible": sorted({op for unit in anatomy.units if not unit.certain for op in unit.operators}),
        "absent": anatomy.absent(),
        "quantised": {kind: sum(u.packed == kind for u in packed) for kind in sorted({u.packed for u in packed})},
        "notes": list(anatomy.notes),
    }
    if verbose:
        found["modules"] = _modules(anatomy)
    return found


def _folded(counts: dict[Place, dict[str, int]]) -> list[dict[str, Any]]:
    """Blocks that compute the same, as one entry: [{"places": [0, 1, 2], "counts": {"linear": 7}}]."""
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place, here in counts.items():
        outer = "" if isinstance(place, int) else place  # only blocks are folded
        groups.setdefault((outer, *((op, here[op]) for op in OPERATORS if op in here)), []).append(place)
    rows = [{"places": places, "counts": dict(key[1:])} for key, places in groups.items()]
    return sorted(rows, key=lambda row: place_order(row["places"][0]))


def _modules(anatomy: Anatomy) -> list[dict[str, Any]]:
    rows = []
    for unit in sorted(anatomy.units, key=lambda unit: place_order(unit.place)):
        if unit.operators:
            remarks = ["only when named"] if unit.left_alone else []
            remarks += [f"packed ({unit.packed})"] if unit.packed else []
            remarks += [] if unit.certain else ["may be called"]
            counts = dict(zip(unit.operators, unit.counts or (1,) * len(unit.operators), strict=True))
            rows.append({"module": unit.module, "place": unit.place, "counts": counts, "remark": ", ".join(remarks)})
    return rows
