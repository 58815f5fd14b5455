"""`noisescope plan precision REPORT`: a number format for each linear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common
from noisescope.cli.report import load_report
from noisescope.errors import InvalidInput

NO_MEASUREMENT = {"kl": None, "uniform_kl": None, "seeds_rule_kl": None, "random": {"n": 0, "median_kl": None}}  # yet


def plan_precision(
    report: common.ReportPath,
    average_bits: Annotated[
        float | None, typer.Option("--average-bits", help="Bits a weight on average, over the linears of the blocks.")
    ] = None,
    max_megabytes: Annotated[
        float | None, typer.Option("--max-megabytes", help="Size of those weights with their scales, in 10^6 bytes.")
    ] = None,
    latency_table: Annotated[
        Path | None, typer.Option("--latency-table", help="JSON: {module: {format: ms}}; '*' is for a million weights.")
    ] = None,
    max_milliseconds: Annotated[
        float | None, typer.Option("--max-milliseconds", help="With --latency-table: the sum over all modules.")
    ] = None,
    granularity: Annotated[str, typer.Option("--granularity", help="module, or layer: one format a block.")] = "module",
    formats: Annotated[
        str | None, typer.Option("--formats", help="Formats to choose from. Default: all that were scored.")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Carry the plan out on the model, and measure.")] = False,
    random: Annotated[int, typer.Option("--random", help="With --verify: random plans to compare with.")] = 32,
    samples: Annotated[int, typer.Option("--samples", help="With --verify: samples to measure on.")] = 64,
    max_tokens: common.MaxTokens = 256,
    model: common.OtherModel = None,
    data: common.OtherData = None,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    export: Annotated[
        str | None, typer.Option("--export", help="For llm-compressor, modelopt, autoround, torchao, or json.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="With --export: the file to write.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plan and measurements as JSON.")] = False,
) -> None:
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
    from noisescope.plans.coverage import coverage_notes, planned_share
    from noisescope.plans.exports import export_plan
    from noisescope.plans.precision import Budget, modules_of, optimal_plan
    from noisescope.plans.prediction import prediction_of

    if (export is None) != (output is None):
        raise InvalidInput("--export and -o belong together: the tool, and the file to write for it")
    found = load_report(report)
    budget = Budget(average_bits, max_megabytes, max_milliseconds, _table(latency_table))
    chosen = common.names(formats)
    modules = modules_of(found, chosen)
    plan = optimal_plan(modules, budget, granularity=granularity)
    exported = None if export is None else export_plan(plan, export, modules)  # refused before the work of --verify
    result: dict[str, Any] = {
        **NO_MEASUREMENT,
        **plan.to_dict(),
        "prediction": prediction_of(found, modules, plan),
        "planned_share": planned_share(found),
        "verified": verify,
        "notes": coverage_notes(found),
    }
    if verify:
        from noisescope.api.planning import verify_precision

        with common.plain_warnings():
            subject = common.subject_of_report(
                found,
                model,
                device=device,
                dtype=dtype,
                device_map=device_map,
                revision=revision,
                trust=trust_remote_code,
            )
            result |= verify_precision(
                subject,
                data,
                found,
                plan,
                formats=chosen,
                random=random,
                samples=samples,
                max_tokens=max_tokens,
            )
    if output is not None and exported is not None:
        common.written(output, exported.text)
        result["notes"] = [*result["notes"], *exported.notes]
    if as_json:
        typer.echo(json.dumps(result, indent=1))
        return
    say_plan(plan, result)
    if output is not None:
        typer.echo(f"  {output}")


def _table(path: Path | None) -> Any:
    """A latency table from JSON."""
    if path is None:
        return {}
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path} is no latency table: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(row, dict) for row in table.values()):
        raise InvalidInput(f"{path} must be JSON of the form {{module: {{format: milliseconds}}}}; '*' for all others")
    return table


def say_plan(plan: Any, result: dict[str, Any]) -> None:
    """What each format got, what it costs, and what it was compared with."""
    from noisescope.plans.prediction import prediction_told
    from noisescope.plans.words import counted

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
    from noisescope.plans.words import counted

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
