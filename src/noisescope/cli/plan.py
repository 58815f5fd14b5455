"""`noisescope plan WHAT REPORT`: what to do about a report's findings, tried out on the model where that tells more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.cli.command_builder import add_command
from noisescope.cli.output import say
from noisescope.options.plans import (
    FaultTestOptions,
    KvCacheOptions,
    MigrationOptions,
    PrecisionOptions,
    SmoothquantOptions,
)
from noisescope.options.shared import ReportModelOptions

MOST_REASONS = 2
MOST_MODULES = 10


def loader(report: api.reports.Report, options: ReportModelOptions) -> Callable[[], Any]:
    """Loads the report's model, or the one that the options name, once it is needed."""

    def load() -> Any:
        return command_builder.load_reported_model(report, options)[0]

    return load


def plan_fault_tests(options: FaultTestOptions) -> None:
    """Fault tests from a report, and their results.

    The operators, layers and channels that a report warns of, broken on purpose: what must hold then, and does it?

    \b
    noisescope plan fault-tests noisescope-demo --csv tests.csv
    noisescope plan fault-tests out/report.json --run --junit faults.xml -o tests
    noisescope plan fault-tests out/report.json --run --limit 2 --samples 16 --device cuda

    Exit code 1 where a test fails: too much accuracy lost, too many NaN, no recovery, a fault that locate can't find;
    3 where no test could be decided.
    """
    report = api.reports.load_report(options.report)
    show = (lambda result: None) if options.json else print_test_result  # each as soon as it ends
    tested = api.plan.fault_tests(report, options=options, subject=loader(report, options), on_result=show)
    tests, results = tested.tests, tested.results
    if not options.run and not options.json:
        for test in tests:
            print_test(test)
    found = api.reports.as_json({"tests": [test.to_dict() for test in tests], "results": results})
    paths = output.write_table(tested, options.csv)
    if options.output is not None:
        paths += output.write_table(tested, options.output / "fault_tests.csv")
        paths.append(api.reports.write_text(options.output / "fault_tests.json", found))
    if options.junit is not None:
        spent = [result.seconds for result in results]
        paths.append(api.reports.write_junit(options.junit, "noisescope fault tests", results, seconds=spent))
    rows = [result.verdict for result in results]
    verdict = api.reports.pass_fail.overall(rows)
    if options.json:
        say(found, nl=False)
    else:
        if rows:
            criteria = [one.verdict for result in results for one in result.criteria]
            say(api.reports.pass_fail.headline(verdict, criteria or rows))
        output.print_each(paths)
    if rows:
        command_builder.exit_by(verdict, options)


def print_test(test: api.plans.FaultTest) -> None:
    say(f"{test.test_id}: {test.component} ({test.parameters.reason})")
    say(f"  {test.test_type}: {', '.join(test.parameters.faults)}")
    criteria = test.acceptance_criteria.columns()
    say("  accepted: " + ", ".join(f"{name} {limit}" for name, limit in criteria.items()))


def print_test_result(result: api.plans.FaultTestResult) -> None:
    say(f"{result.verdict:<9}  {result.name}")
    if result.measured is not None:
        say(f"  {result.measured.hits}")
    for criterion in result.criteria:
        say(f"  {criterion.verdict:<9}  {criterion.criterion}: {criterion.message}")
    if not result.criteria:
        say(f"  {result.message}")


def plan_hardware_migration(options: MigrationOptions) -> None:
    """Which layers to validate first on new hardware.

    Three priorities with their evidence, precision and validation, and the commands to run next.

    \b
    noisescope plan migration noisescope-demo
    noisescope plan migration out/report.json --device npu -o migration.json
    """
    output.emit(api.plan.migration(options.report, options=options), options, print_migration)


def print_migration(plan: api.plans.MigrationSteps) -> None:
    for priority in plan.priorities:
        places = api.reports.counted(len(priority.evidence), "place")
        say(f"priority {priority.priority}: {places}. {priority.validation}")
        if priority.priority == 3:
            continue
        for entry in priority.evidence:
            where = f"layer {entry.place}" if isinstance(entry.place, int) else entry.place
            reasons = "; ".join(entry.reasons[:MOST_REASONS])
            say(f"  {where:<12} {priority.precision[str(entry.place)]:<5} {reasons}")
    say(f"\nif a comparison fails: {plan.fallback}\n")
    for at, step in enumerate(plan.commands, 1):
        say(f"{at}. {step.where}\n   {step.command}")
    output.print_each(plan.notes, "note: ")


def plan_precision(options: PrecisionOptions) -> None:
    """Choose a number format for each linear.

    At the least predicted KL that the budget allows; with --verify carried out on the model, beside uniform plans, the
    bit rule of the original method notes and random plans.

    \b
    noisescope diagnose path/to/model --data eval.jsonl -o out
    noisescope plan precision out --average-bits 5 --verify
    noisescope plan precision out --average-bits 4.5 --refine 8 --verify
    noisescope plan precision out --average-bits 4.5 --formats int3,int4,int8 --granularity layer
    noisescope plan precision out --max-megabytes 900 --export llm-compressor -o recipe.yaml

    REPORT is the folder of a run or its report.json. Bits are those of the format's name; bits
    with scales are printed beside them.
    """
    report = api.reports.load_report(options.report)
    result = api.plan.precision(report, options=options, subject=loader(report, options))
    paths = output.write_table(result, options.csv)
    if options.json:
        say(api.reports.as_json(result), nl=False)
        return
    print_precision(result)
    output.print_each([*paths, *([] if options.output is None else [options.output])])


def print_precision(plan: api.plans.PrecisionPlan) -> None:
    """What each format got, what it costs, and what it was compared with."""
    sizes = f"{plan.effective_bits:.2f} with scales, {plan.megabytes:.1f} MB"
    say(f"{plan.method}: {plan.average_bits:.3f} bits per weight ({sizes})")
    for name, count in plan.counts.items():
        say(f"  {name}: {api.reports.counted(count, 'module')}")
        lines = plan.named(name)
        output.print_each(lines[:MOST_MODULES], "    ")
        _say_more(len(lines), "line", "    ")
    say(f"predicted mean KL {api.reports.prediction_sentence(plan.prediction)}")
    if plan.note:
        say(f"note: {plan.note}")
    if plan.data is not None:
        print_measured(plan)
    else:
        say("predicted only: --verify carries it out and measures")
    output.print_each(plan.notes, "note: ")


def print_measured(plan: api.plans.PrecisionPlan) -> None:
    assert plan.data is not None
    counted, words = api.reports.counted, api.reports.cell_text
    tokens = counted(plan.data.scored_tokens, "token")
    say(f"\nmeasured on {counted(plan.data.samples, 'held-out sample')} ({tokens}), not used to choose formats:")
    head = ("", "bits", "mean KL predicted", "mean KL measured", "typical KL measured", "score", "KL over the plan's")
    rows = [
        (
            row.name,
            f"{row.average_bits:.3f}",
            f"{row.predicted_mean_kl:.3g}",
            words.mean(row.kl.mean).text,
            words.estimate(row.kl.typical).text,
            words.estimate(row.accuracy, share=True).text,
            words.estimate(row.over_plan).text,
        )
        for row in plan.rows
        if row.kind != "random"
    ]
    say(output.aligned([head, *rows]))
    say(api.plans.OVER_PLAN)
    if plan.random.n and plan.random.median_typical_kl:
        middle = f"median of their typical KL {plan.random.median_typical_kl:.4g}"
        say(f"{counted(plan.random.n, 'random plan')} of the same bits: {middle}")


def plan_kv_cache(options: KvCacheOptions) -> None:
    """Choose the layers whose KV cache keeps 16 bits.

    From a report of the cache in a number format: the layers that cost most keep 16 bits, the others are rounded. With
    --verify carried out on the model, beside every layer rounded and the first and last layers kept.

    \b
    noisescope diagnose path/to/model --data eval.jsonl --perturbation fp8_e4m3 --on kv-cache -o kv
    noisescope plan kv-cache kv --verify
    noisescope plan kv-cache kv --keep-layers 2 --export vllm -o kv_cache.json
    """
    report = api.reports.load_report(options.report)
    plan = api.plan.kv_cache(report, options=options, subject=loader(report, options))
    paths = output.write_table(plan, options.csv)
    if options.json:
        say(api.reports.as_json(plan), nl=False)
        return
    print_kv_cache(plan)
    if options.export == "vllm":
        say(f"next: {api.plans.vllm_command(plan, options.model or report['run']['model']['source'])}")
    output.print_each([*paths, *([] if options.output is None else [options.output])])


def print_kv_cache(plan: api.plans.KvCachePlan) -> None:
    """The layers that are kept and why, and what was measured."""
    words, named = api.reports.cell_text, f": {', '.join(map(str, plan.kept))}" if plan.kept else ""
    say(f"{plan.question.name}: {len(plan.kept)} of {len(plan.layers)} layers keep 16 bits{named}")
    left = f"{plan.nats_left:.3g} of {plan.nats_all:.3g} nats per token are left"
    say(f"  {left} (the sum of what each rounded layer costs by itself)")
    for row in plan.layers[:MOST_MODULES]:
        kept = "16 bits" if row.keeps_16_bits else plan.question.format
        say(f"  layer {row.layer:<4} {row.nats:<9.3g} {row.evidence:<10} {kept}")
    _say_more(len(plan.layers), "layer")
    if plan.data is None:
        say("not carried out: --verify measures it")
    else:
        say(f"\nmeasured on {api.reports.counted(plan.data.samples, 'held-out sample')}:")
        head = ("", "layers kept", "typical KL", "score", "KL over the plan's")
        rows = [
            (
                row.name,
                " ".join(map(str, row.kept)) or "none",
                words.estimate(row.kl.typical).text,
                words.estimate(row.accuracy, share=True).text,
                words.estimate(row.over_plan).text,
            )
            for row in plan.rows
        ]
        say(output.aligned([head, *rows], "  "))
        say(f"  {api.plans.OVER_PLAN}")
    output.print_each(plan.notes, "note: ")


def _say_more(count: int, what: str, indent: str = "  ") -> None:
    """How many rows a list leaves out, and where they are."""
    if count > MOST_MODULES:
        say(f"{indent}... and {api.reports.counted(count - MOST_MODULES, f'more {what}')} (--json or --csv has all)")


def plan_smoothquant(options: SmoothquantOptions) -> None:
    """Fold outlier channels away, and measure what it gains.

    SmoothQuant on a copy of the model: 8-bit weights and activations before and after, and for each module with
    outliers the method that the original method notes advise, with what it gains here.

    \b
    noisescope plan smoothquant out
    noisescope plan smoothquant out --alpha 0.5 --samples 64 --json
    noisescope plan smoothquant out --target W4A16
    """
    found = api.reports.load_report(options.report)
    result = api.plan.smoothquant(found, options=options, subject=loader(found, options))
    output.emit(result, options, print_smoothing)


def print_smoothing(result: api.plan_trials.SmoothingPlan) -> None:
    say(result.scheme)
    before, after = (api.reports.cell_text.estimate(kl.typical).text for kl in (result.kl.before, result.kl.after))
    say(f"typical KL {before} before, {after} after (n = {result.gain.n})")
    say(api.reports.gain_sentence(result.gain))
    say(f"the float output moved by {result.float_error:.2g} (relative L2)")
    folds = [fold for fold in result.folds if fold.alpha is not None]
    say(f"{len(folds)} of {len(result.folds)} folds smoothed; the others are better left alone")
    for row in result.recommendations[:MOST_MODULES]:
        gains = ", ".join(f"{name} {api.reports.times_better(gain)}" for name, gain in row.gains.items())
        strength = "" if row.alpha is None else f", alpha {row.alpha:g}"
        measured = f"; error of the linears there: {gains}" if gains else ""
        say(f"  {row.component}: {row.max_ratio:.1f} x the median: {row.method}{strength}{measured}")
    _say_more(len(result.recommendations), "module")
    output.print_each(result.notes, "note: ")


plan = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="What to do about a report's findings.")
add_command(plan, plan_precision)
add_command(plan, plan_kv_cache)
add_command(plan, plan_smoothquant)
add_command(plan, plan_hardware_migration)
add_command(plan, plan_fault_tests)
