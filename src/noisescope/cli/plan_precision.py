"""`noisescope plan precision REPORT`: a number format for each linear."""

from __future__ import annotations

import json
from typing import Any

import typer

from noisescope.cli import common
from noisescope.options.planning import PrecisionOptions


def plan_precision(asked: PrecisionOptions) -> None:
    """Choose a number format for each linear.

    At the least predicted KL that the budget allows; with --verify carried out on the model, beside uniform plans, the
    bit rule of the original method notes and random plans.

    \b
    noisescope diagnose path/to/model --data eval.jsonl -o out
    noisescope plan precision out --average-bits 5 --verify
    noisescope plan precision out --average-bits 4.5 --formats int3,int4,int8 --granularity layer
    noisescope plan precision out --max-megabytes 900 --export llm-compressor -o recipe.yaml

    REPORT is the folder of a run or its report.json. Bits are those of the format's name; bits with scales are told.
    """
    from noisescope.api.precision import exported, planned
    from noisescope.api.stored import load_report

    report = load_report(asked.report)
    plan, result = planned(report, asked)
    export = None if asked.export is None else exported(report, plan, asked)  # refused before the work of --verify
    if asked.verify:
        with common.plain_warnings():
            from noisescope.api.loading import subject_of_report
            from noisescope.api.planning import verify_precision

            result |= verify_precision(subject_of_report(report, asked), report, plan, options=asked)
    if asked.output is not None and export is not None:
        common.written(asked.output, export.text)
        result["notes"] = [*result["notes"], *export.notes]
    if asked.json:
        typer.echo(json.dumps(result, indent=1))
        return
    say_plan(plan, result)
    if asked.output is not None:
        typer.echo(f"  {asked.output}")


def say_plan(plan: Any, result: dict[str, Any]) -> None:
    """What each format got, what it costs, and what it was compared with."""
    from noisescope.api.words import counted, prediction_told

    sizes = f"{plan.effective_bits:.2f} with scales, {plan.megabytes:.1f} MB"
    typer.echo(f"{plan.method}: {plan.average_bits:.3f} bits a weight ({sizes})")
    typer.echo("  " + ", ".join(f"{name}: {counted(count, 'module')}" for name, count in plan.counts().items()))
    typer.echo(f"predicted KL {prediction_told(result['prediction'])}")
    if plan.note:
        typer.echo(f"note: {plan.note}")
    if result["verified"]:
        say_measured(result)
    else:
        typer.echo("predicted only: --verify carries it out and measures")
    for note in result["notes"]:
        typer.echo(f"note: {note}")


def say_measured(result: dict[str, Any]) -> None:
    from noisescope.api.words import counted

    data = result["data"]
    typer.echo(f"\nmeasured on {counted(data['samples'], 'sample')} ({counted(data['scored_tokens'], 'token')}):")
    typer.echo(f"{'':<18}{'bits':>7}  {'KL (nats a token)':>30}  {'accuracy':>9}")
    for row in result["rows"]:
        if not row["name"].startswith("random"):
            kl, accuracy = row["kl"], f"{100 * row['accuracy']['value']:.1f} %"
            span = "" if kl["low"] is None else f" [{kl['low']:.3g}, {kl['high']:.3g}]"
            typer.echo(f"{row['name']:<18}{row['average_bits']:>7.3f}  {kl['value']:>9.4g}{span:<21}  {accuracy:>9}")
    count, middle = result["random"]["n"], result["random"]["median_kl"]
    if count:
        share = f" (the plan's is {result['kl'] / middle:.2f} of it)" if middle else ""  # 0: nothing was rounded
        typer.echo(f"{count} random plans of the same bits: median KL {middle:.4g}{share}")
