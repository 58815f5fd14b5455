"""`noisescope compare A.record B.record`: how two devices differ, and where they part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common
from noisescope.errors import InvalidInput

MOST_ROWS = 12
MOST_CELLS = 5


def compare_devices(
    a: Annotated[Path, typer.Argument(metavar="A", help="The reference: a record, or a dump of msprobe.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The other device's.")],
    layers: Annotated[str | None, typer.Option("--layers", help="Only these blocks, such as 9,10.")] = None,
    max_mape: Annotated[
        float | None, typer.Option("--max-mape", help="Exit code 1 where the MAPE of a site is larger, such as 0.05.")
    ] = None,
    sensitivity: Annotated[
        Path | None, typer.Option("--sensitivity", help="A diagnosis's report.json of this model: prices in nats.")
    ] = None,
    affordable: Annotated[
        float | None, typer.Option("--affordable", help="Nats that a layer's difference may cost. Default 0.01.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the comparison there as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Compare what two devices computed.

    \b
    noisescope compare gpu.record npu.record
    noisescope compare gpu.record npu.record --layers 9,10 --max-mape 0.05
    noisescope compare gpu.record npu.record --sensitivity out/report.json
    noisescope compare gpu_dump/step0/rank0 npu_dump/step0/rank0        dumps of msprobe

    Says whether they differ by round-off only, else the first operator at which they part. Exit code 1 where --max-mape
    is exceeded; records of other models or prompts are refused with code 2.
    """
    from noisescope.api import compare

    if max_mape is not None and max_mape < 0:
        raise InvalidInput(f"--max-mape is a share such as 0.05, got {max_mape}")
    asked: dict[str, Any] = {} if affordable is None else {"affordable": affordable}
    found = compare(a, b, layers=common.layers(layers), max_mape=max_mape, sensitivity=sensitivity, **asked)
    if output is not None:
        found.save(output)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        say_comparison(found)
    raise typer.Exit(1 if found.passed is False else 0)


def say_comparison(found: Any) -> None:
    """Both sides, the verdict, a table of the sites that matter, tokens, prices, what was not seen."""
    for name, side in found.sides.items():
        typer.echo(f"{name}: {side['path']} ({side['architecture']}, {side['dtype']}, {side.get('device', '')})")
    typer.echo(f"\n{found.verdict}. {found.words}\n")
    say_rows(found)
    for token in found.tokens[:3]:
        typer.echo(f"token {token['token']} of prompt {token['prompt']}: relative L2 {token['relative_l2']:.2g}")
    if found.crossing is not None:
        say_prices(found.crossing)
    if found.passed is not None:
        worst = found.worst_mape
        typer.echo(
            f"\nlargest MAPE {worst.measures.mape:.3g} at {worst.site}; allowed {found.max_mape:g}: "
            f"{'passed' if found.passed else 'exceeded'}"
        )
    for note in found.notes:
        typer.echo(f"note: {note}")


def say_rows(found: Any) -> None:
    """The first site to part and those with the largest error, in the order they ran."""
    ranked = sorted(found.rows, key=lambda row: (not row.parts, -row.measures.relative_l2))
    shown = {id(row) for row in ranked[:MOST_ROWS]} | ({id(found.first)} if found.first else set())
    header = ("place", "operator", "module", "rel. L2", "MAPE", "band", "Pearson", "max ulp", "")
    rows = [header, *(_cells(row, row is found.first) for row in found.rows if id(row) in shown)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(header))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(found.rows) > len(rows) - 1:
        typer.echo(f"... the largest of {len(found.rows)} sites; --json lists all")


def _cells(row: Any, first: bool) -> tuple[str, ...]:
    found = row.measures
    size = f"{found.relative_l2:.2g}" if found.elements else f"~{found.relative_l2:.2g}"
    mape = "-" if found.mape is None else f"{found.mape:.2g}"
    mark = "parts here" if first else "apart" if row.parts else ""
    if found.where is not None and found.where.outlier_channel:
        mark = f"{mark} max in outlier channel {found.where.channel}".strip()
    bands = row.to_dict()["bands"]
    band = bands["mape"] if found.mape is not None else "needs full detail"
    pearson = "-" if found.pearson is None else f"{found.pearson:.5f}"
    ulps = "-" if found.max_ulp is None else f"{found.max_ulp:.3g}"
    return (str(row.site.place), row.site.operator, row.site.module, size, mape, band, pearson, ulps, mark)


def say_prices(crossing: Any) -> None:
    """What to fix first, and which layers are within what they can afford."""
    typer.echo(f"\nwhat differences cost, at most {crossing.affordable_nats:g} nats being affordable:")
    dear = [cell for cell in crossing.cells if cell.nats is not None][:MOST_CELLS]
    for cell in dear:
        mark = "  fix first" if cell.fix_first else ""
        typer.echo(
            f"  layer {cell.layer} {cell.operator}: {cell.nats:.2g} nats (relative L2 {cell.relative_l2:.2g}, "
            f"affordable {cell.affordable:.2g}){mark}"
        )
    typer.echo("  " + "  ".join(("layer", "affordable", "has", "within")))
    for row in crossing.tolerances:
        has = "-" if row["relative_l2"] is None else f"{row['relative_l2']:.2g}"
        within = {True: "yes", False: "no", None: "-"}[row["within"]]
        typer.echo(f"  {row['layer']:>5}  {row['affordable_relative_l2']:>10.2g}  {has:>7}  {within}")
