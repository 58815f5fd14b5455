"""`noisescope compare A.record B.record`: how two devices differ, and where they part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import typer

from noisescope.cli import common
from noisescope.options.comparing import CompareOptions

MOST_ROWS = 12
MOST_CELLS = 5
MOST_TOKENS = 3
DETAILED = ("MAPE", "band", "Pearson", "max ulp")  # columns that whole tensors alone can fill


def compare_devices(asked: CompareOptions) -> None:
    """Compare what two devices computed.

    \b
    noisescope compare gpu.record npu.record
    noisescope compare gpu.record npu.record --layers 9,10 --max-mape 0.05
    noisescope compare gpu.record npu.record --sensitivity out/report.json
    noisescope compare gpu_dump/step0/rank0 npu_dump/step0/rank0        dumps of msprobe

    Says whether they differ by round-off only, else the first operator at which they part. Exit code 1 where --max-mape
    is exceeded, 3 where no site could be checked; records of other models or prompts are refused with code 2.
    """
    from noisescope.api.comparing import compare

    found = compare(options=asked)
    if asked.output is not None:
        common.written(asked.output, found.to_json())
    if asked.json:
        typer.echo(found.to_json(), nl=False)
    else:
        say_comparison(found)
    if found.passed is not None:
        common.leave(verdict_of(found), asked)


def verdict_of(found: Any) -> str:
    """The check of --max-mape: sites that can't be compared decide nothing, and keep it from passing."""
    from noisescope.api.words import overall

    measured = [row.measures.mape for row in found.rows if row.measures.measurable and row.measures.mape is not None]
    rows = ["fail" if mape > found.max_mape else "pass" for mape in measured]
    verdict = overall([*rows, *("fail" for _ in found.unmeasurable), *("undecided" for _ in found.uncompared)])
    return "fail" if verdict == "pass" and not found.passed else verdict


def say_comparison(found: Any) -> None:
    """Both sides, the verdict, a table of the sites that matter, tokens, prices, what was not seen."""
    for name, side in found.sides.items():
        typer.echo(f"{name}: {side['path']} ({side['architecture']}, {side['dtype']}, {side.get('device', '')})")
    typer.echo(f"\n{found.verdict}. {found.words}\n")
    say_rows(found)
    say_tokens(found.tokens)
    if found.crossing is not None:
        say_prices(found.crossing)
    if found.passed is not None:
        typer.echo(f"\n{_decision(found)}")
    for note in found.notes:
        typer.echo(f"note: {note}")


def _decision(found: Any) -> str:
    worst = found.worst_mape
    largest = "not measurable" if worst is None else f"{worst.measures.mape:.3g} at {worst.site}"
    if found.passed:
        outcome = "passed"
    elif worst is not None and worst.measures.mape > found.max_mape:
        outcome = "exceeded"
    elif found.unmeasurable:
        outcome = f"not passed, {len(found.unmeasurable)} sites can't be checked for NaN or infinite numbers"
    else:
        outcome = f"not passed, {len(found.uncompared)} sites can't be compared"
    return f"largest MAPE {largest}; allowed {found.max_mape:g}: {outcome}"


def say_tokens(tokens: Any) -> None:
    """The tokens that differ most; sizes only where whole tensors tell them."""
    if not tokens:
        return
    by_sketch = all(token["relative_l2"] is None and not token["nonfinite"] for token in tokens)
    typer.echo("tokens that differ most" + (", by sketch (sizes need full detail):" if by_sketch else ":"))
    for token in tokens[:MOST_TOKENS]:
        size = "" if token["relative_l2"] is None else f": relative L2 {token['relative_l2']:.2g}"
        size = ": NaN or infinite on one side only" if token["nonfinite"] else size
        typer.echo(f"  token {token['token']} of prompt {token['prompt']}{size}")


def say_rows(found: Any) -> None:
    """The first site to part and those with the largest error, in the order they ran."""
    if found.verdict == "identical" and not any(row.measures.nonfinite_both for row in found.rows):
        typer.echo(f"{len(found.rows)} sites are compared, none differs; --json lists them")
        return
    ranked = sorted(
        found.rows, key=lambda row: (not row.parts, row.measures.measurable, -(row.measures.relative_l2 or 0))
    )
    chosen = {id(row) for row in ranked[:MOST_ROWS]} | ({id(found.first)} if found.first else set())
    shown = [row for row in found.rows if id(row) in chosen]
    whole = any(row.measures.elements for row in shown)
    header = ("place", "operator", "module", "rel. L2", *(DETAILED if whole else ()), "")
    rows = [header, *(_cells(row, row is found.first, whole) for row in shown)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(header))]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(found.rows) > len(shown):
        typer.echo(f"... the largest of {len(found.rows)} sites; --json lists all")
    if not whole:
        typer.echo("~ by sketch: MAPE, Pearson and ulps need records of --detail full, or of --full-layers")


def _cells(row: Any, first: bool, whole: bool) -> tuple[str, ...]:
    found = row.measures
    sign = "" if found.elements else "~"
    size = "-" if found.relative_l2 is None else f"{sign}{found.relative_l2:.2g}"
    site = (str(row.site.place), row.site.operator, row.site.module, size)
    return (*site, *(_detailed(row) if whole else ()), "; ".join(_marks(row, first)))


def _detailed(row: Any) -> tuple[str, ...]:
    found = row.measures
    mape = "-" if found.mape is None else f"{found.mape:.2g}"
    band = row.to_dict()["bands"]["mape"] if found.elements or not found.measurable else "needs full detail"
    pearson = "-" if found.pearson is None else f"{found.pearson:.5f}"
    ulps = "-" if found.max_ulp is None else f"{found.max_ulp:.3g}"
    return (mape, band, pearson, ulps)


def _marks(row: Any, first: bool) -> Iterator[str]:
    """What a row's figures don't tell."""
    found = row.measures
    if row.parts:
        gain = f", gain {100 * found.gain:+.2f} %" if found.gain else ""
        yield ("parts here" if first else "apart") + gain
    if found.nonfinite:
        yield f"CRITICAL: {found.nonfinite} {found.counted} NaN or infinite on one side only"
    if found.nonfinite_both:
        yield f"{found.nonfinite_both} {found.counted} NaN or infinite on both sides, left out"
    if found.where is not None and found.where.outlier_channel:
        yield f"max in outlier channel {found.where.channel}"


def say_prices(crossing: Any) -> None:
    """What to fix first, and which layers are within what they can afford."""
    typer.echo(f"\nwhat differences cost, at most {crossing.affordable_nats:g} nats being affordable:")
    dear = [cell for cell in crossing.cells if cell.nats is not None][:MOST_CELLS]
    for cell in dear:
        mark = "  fix first" if cell.fix_first else ""
        if math.isinf(cell.nats):
            price = "infinitely far apart, no price"
        else:
            price = f"{cell.nats:.2g} nats (relative L2 {cell.relative_l2:.2g}, affordable {cell.affordable:.2g})"
        typer.echo(f"  layer {cell.layer} {cell.operator}: {price}{mark}")
    typer.echo(f"  {'layer':>5}  {'affordable':>10}  {'has':>7}  within")
    for row in crossing.tolerances:
        has = "-" if row["relative_l2"] is None else f"{row['relative_l2']:.2g}"
        within = {True: "yes", False: "no", None: "-"}[row["within"]]
        broken = f"  {row['unmeasurable']} sites not measurable" if row["unmeasurable"] else ""
        typer.echo(f"  {row['layer']:>5}  {row['affordable_relative_l2']:>10.2g}  {has:>7}  {within}{broken}")
