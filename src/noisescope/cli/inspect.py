"""`noisescope inspect MODEL`: places, operators and modules; what is fused, absent, quantised, left alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noisescope.sites import OPERATORS, Place, place_order

if TYPE_CHECKING:
    from noisescope.anatomy import Anatomy
    from noisescope.model import Subject


def inspect_model(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A Hugging Face folder or cached id, a .gguf file, demo, or tiny:NAME."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the machine form.")] = False,
    dtype: Annotated[str | None, typer.Option(help="float32, bf16, fp16 ...; as stored unless given.")] = None,
    attn_implementation: Annotated[str | None, typer.Option(help="sdpa, eager ...; the model's own choice.")] = None,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="List every module.")] = False,
) -> None:
    """Show where noise can fall in a model.

    Places, operators, and what is fused, absent or quantised.

    Reads the config, not the weights, so a model of any size is inspected in seconds and on any machine.

    \b
    Examples:
      noisescope inspect ./Qwen2.5-1.5B-Instruct
      noisescope inspect ./Qwen2.5-1.5B-Instruct --attn-implementation eager --verbose
      noisescope inspect ./llama-3.2-1b-q4_k_m.gguf
      noisescope inspect ./Mixtral-8x7B-v0.1 --json
      noisescope inspect tiny:llama      a tiny random Llama, to try without a model; also
                                         tiny:gpt2, tiny:mixtral, tiny:bert, tiny:t5 ...
    """
    from noisescope.model import outline

    found = facts(outline(model, dtype=dtype, attn_implementation=attn_implementation), verbose=verbose)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        draw(found)


def facts(subject: Subject, *, verbose: bool = False) -> dict[str, Any]:
    """All that the command says, as plain values; `draw` and `--json` only show it."""
    model, anatomy = subject.model, subject.anatomy
    parameters = list(model.parameters())
    packed = [unit for unit in anatomy.units if unit.packed]
    found: dict[str, Any] = {
        "source": subject.source,
        "architecture": anatomy.architecture,
        "blocks": len(anatomy.blocks),
        "parameters": sum(parameter.numel() for parameter in parameters),  # a tied weight counts once
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "attention": _attention(subject),
        "experts": _experts(subject),
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


def _attention(subject: Subject) -> dict[str, Any]:
    """Which kernel computes attention, and whether its products and softmax are fused in it."""
    name = getattr(getattr(subject.model, "config", None), "_attn_implementation", None)
    present = subject.anatomy.operators() & {"softmax", "matmul", "bmm"}
    return {"implementation": name or "torch", "fused": bool(present) and name != "eager"}


def _experts(subject: Subject) -> str | None:
    """How transformers computes the experts of an MoE model: "grouped_mm", "batched_mm", "eager"."""
    if not any(unit.kind == "experts" for unit in subject.anatomy.units):
        return None
    return getattr(getattr(subject.model, "config", None), "_experts_implementation", None) or "eager"


def _folded(counts: dict[Place, dict[str, int]]) -> list[dict[str, Any]]:
    """Blocks that compute the same, as one entry: [{"places": [0, 1, 2], "counts": {"linear": 7}}]."""
    groups: dict[tuple[Any, ...], list[Place]] = {}
    for place, here in counts.items():
        outer = "" if isinstance(place, int) else place  # only blocks are folded
        groups.setdefault((outer, *((op, here[op]) for op in OPERATORS if op in here)), []).append(place)
    rows = [{"places": places, "counts": dict(key[1:])} for key, places in groups.items()]
    return sorted(rows, key=lambda row: place_order(row["places"][0]))


def _modules(anatomy: Anatomy) -> list[dict[str, Any]]:
    return [
        {
            "module": unit.module,
            "place": unit.place,
            "counts": dict(zip(unit.operators, unit.counts or (1,) * len(unit.operators), strict=True)),
            "remark": ", ".join(
                remark
                for remark, applies in (
                    ("only when named", unit.left_alone),
                    (f"packed ({unit.packed})", bool(unit.packed)),
                    ("may be called", not unit.certain),
                )
                if applies
            ),
        }
        for unit in sorted(anatomy.units, key=lambda unit: place_order(unit.place))
        if unit.operators
    ]


# -- drawing


def draw(found: dict[str, Any]) -> None:
    say = typer.echo
    say(found["architecture"])
    say(f"  blocks      {found['blocks']}")
    say(f"  parameters  {found['parameters']:,} in {', '.join(found['dtypes'])}")
    name, how = found["attention"]["implementation"], "are plain calls"
    if found["attention"]["fused"]:
        how = f"run inside {name}; a targeted layer is opened to a decomposed path"
    say(f"  attention   {name}: softmax and matmul {how}")
    if found["experts"]:
        eager = found["experts"] == "eager"
        how = "each expert hit makes its own products, counted below as one" if eager else "one product for all experts"
        say(f"  experts     {found['experts']}: {how}")
    say(f"\nOperators in one forward, by place\n{_counts(found['operators'])}")
    if found["left_alone"]:
        say("\nLeft alone unless named: routers by modules=..., rotary angles by places={'rotary'}")
        say(_counts(found["left_alone"]))
    if found["possible"]:
        say(f"\nMay be called by a block itself, seen only when it runs: {', '.join(found['possible'])}")
    say(f"\nAbsent: {', '.join(found['absent']) or 'nothing'}")
    for kind, count in found["quantised"].items():
        say(f"Quantised: {count} x {kind}, packed; noise can fall on their output and input, not on their weight")
    for note in found["notes"]:
        say(f"Note: {note}")
    if "modules" in found:
        rows = [[str(m["place"]), m["module"], _times(m["counts"]), m["remark"]] for m in found["modules"]]
        say("\nModules\n" + _aligned([["place", "module", "operators", "remark"], *rows]))


def _counts(rows: list[dict[str, Any]]) -> str:
    operators = [op for op in OPERATORS if any(op in row["counts"] for row in rows)]
    lines = [[_ranges(row["places"]), *(str(row["counts"].get(op, "")) for op in operators)] for row in rows]
    return _aligned([["place", *operators], *lines])


def _aligned(rows: list[list[str]]) -> str:
    """Columns as wide as they need to be: a module's name is there to be copied, so it is never cut."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _times(counts: dict[str, int]) -> str:
    return ", ".join(operator if count == 1 else f"{count} {operator}" for operator, count in counts.items())


def _ranges(places: list[Place]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    runs: list[list[Place]] = []
    for place in places:
        if runs and isinstance(place, int) and runs[-1][-1] == place - 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
