"""`noisescope plan precision REPORT`: a number format for each linear."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from noisescope.cli import common
from noisescope.options.planning import PrecisionOptions

if TYPE_CHECKING:
    from noisescope.api.precision import PrecisionPlan


def plan_precision(asked: PrecisionOptions) -> None:
    """Choose a number format for each linear.

    At the least predicted KL that the budget allows; with --verify carried out on the model, beside uniform plans, the
    bit rule of the original method notes and random plans.

    \b
    noisescope diagnose path/to/model --data eval.jsonl -o out
    noisescope plan precision out --average-bits 5 --verify
    noisescope plan precision out --average-bits 4.5 --formats int3,int4,int8 --granularity layer
    noisescope plan precision out --max-megabytes 900 --export llm-compressor -o recipe.yaml

    REPORT is the folder of a run or its report.json. Bits are those of the format's name; bits
    with scales are printed beside them.
    """
    from noisescope.api.drawing import as_json
    from noisescope.api.precision import exported, predicted_precision
    from noisescope.api.precision import plan_precision as choose
    from noisescope.api.stored import load_report

    report = load_report(asked.report)
    plan = choose(report, options=asked)
    result = predicted_precision(report, plan, formats=asked.formats)
    export = None if asked.export is None else exported(report, plan, asked)  # refused before the work of --verify
    if asked.verify:
        with common.plain_warnings():
            from noisescope.api.loading import subject_of_report
            from noisescope.api.planning import verify_precision

            result = verify_precision(subject_of_report(report, asked), report, plan, options=asked)
    if asked.output is not None and export is not None:
        common.written(asked.output, export.text)
        result = replace(result, notes=(*result.notes, *export.notes))
    if asked.json:
        typer.echo(as_json(result), nl=False)
        return
    say_plan(result)
    if asked.output is not None:
        typer.echo(f"  {asked.output}")


def say_plan(plan: PrecisionPlan) -> None:
    """What each format got, what it costs, and what it was compared with."""
    from noisescope.api.words import counted, prediction_sentence

    sizes = f"{plan.effective_bits:.2f} with scales, {plan.megabytes:.1f} MB"
    typer.echo(f"{plan.method}: {plan.average_bits:.3f} bits per weight ({sizes})")
    typer.echo("  " + ", ".join(f"{name}: {counted(count, 'module')}" for name, count in plan.counts.items()))
    typer.echo(f"predicted mean KL {prediction_sentence(plan.prediction)}")
    if plan.note:
        typer.echo(f"note: {plan.note}")
    if plan.data is not None:
        say_measured(plan)
    else:
        typer.echo("predicted only: --verify carries it out and measures")
    for note in plan.notes:
        typer.echo(f"note: {note}")


def say_measured(plan: PrecisionPlan) -> None:
    from noisescope.api.words import counted, estimate, mean

    assert plan.data is not None
    tokens = counted(plan.data.scored_tokens, "token")
    typer.echo(f"\nmeasured on {counted(plan.data.samples, 'held-out sample')} ({tokens}), not used to choose formats:")
    typer.echo(
        f"{'':<18}{'bits':>7}  {'mean KL predicted':<17}  {'mean KL measured':<30}  {'typical KL measured':<30}  "
        f"{'score':<24}  KL over the plan's"
    )
    for row in plan.rows:
        if row.kind != "random":
            average, typical = mean(row.kl.mean), estimate(row.kl.typical)
            score, over = estimate(row.accuracy, share=True), estimate(row.over_plan)
            bits = f"{row.name:<18}{row.average_bits:>7.3f}  {row.predicted_mean_kl:<17.3g}"
            kl = f"{average.text:<30}  {typical.text:<30}"
            typer.echo(f"{bits}  {kl}  {score.text:<24}  {over.text}".rstrip())
    if plan.random.n and plan.random.median_typical_kl:
        middle = f"median of their typical KL {plan.random.median_typical_kl:.4g}"
        typer.echo(f"{plan.random.n} random plans of the same bits: {middle}")
