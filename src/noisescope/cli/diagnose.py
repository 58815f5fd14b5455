"""`noisescope diagnose`: sensitivity at three levels; `robustness`: noise levels; `demo`: all on the bundled model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.cli.output import say
from noisescope.options.sensitivity import DemoOptions, DiagnoseOptions, RobustnessOptions


def diagnose_model(options: DiagnoseOptions) -> None:
    """Find what is sensitive to numerical error.

    Which operators, layers and channels lose most when their arithmetic gets a little wrong.

    \b
    noisescope diagnose demo
    noisescope diagnose path/to/model --data gsm8k.jsonl --device cuda -o out
    noisescope diagnose path/to/model --effort screen          two backward passes, seconds
    noisescope diagnose path/to/model --level operator --operators softmax,norm
    noisescope diagnose path/to/model --perturbation int4 --on weights --group-size 32
    noisescope diagnose path/to/model --perturbation fp8_e4m3 --on kv-cache
    noisescope diagnose path/to/model --dry-run                what it would cost, by one timed sample
    noisescope diagnose path/to/model --data wiki.txt --metric perplexity
    noisescope diagnose path/to/model --data qa.jsonl --prompt-field query --answer-field reply
    noisescope diagnose --config run.yaml --seeds 5            the file's options, and another number of seeds

    The same command into the same folder resumes. Levels: operator (which kind of operation), layer (sliding windows,
    avalanche points, layer x operator map), channel (outliers).
    """
    subject, options = command_builder.load_model(options)
    options = api.defaults.choose_size(subject, options, command_builder.announcer(options))
    if options.dry_run:
        say(str(api.diagnosis.cost_of_run(subject, options)))
        return
    report = api.diagnosis.diagnose(subject, options=command_builder.resumable_options(options))
    if options.save_activations and options.output is not None:
        source = options.source() if options.calibration is None else options.calibration
        folder, count = options.output / "activations", options.calibration_samples
        api.records.save_activations(subject, source, folder, samples=count, max_tokens=options.max_tokens)

    def seconds_of(changes: Mapping[str, Any]) -> float:
        return api.diagnosis.cost_of_run(subject, replace(options, **changes)).seconds

    show = partial(output.print_summary, options=options, seconds_of=seconds_of)
    output.finish(report, options.output, show, as_json=options.json, csv=options.csv)


def robustness_of_model(options: RobustnessOptions) -> None:
    """Accuracy at several noise levels.

    With the share of the clean accuracy that is retained, and intervals. Or, with --rounding, what round-off alone
    does: how far two healthy systems may differ.

    \b
    noisescope robustness demo
    noisescope robustness demo --dtype bfloat16 --rounding
    noisescope robustness path/to/model --data gsm8k.jsonl --noise-levels 0,0.02,0.05 --samples 200 --device cuda
    """
    subject, options = command_builder.load_model(options)
    options = api.defaults.choose_size(subject, options, command_builder.announcer(options))
    if options.dry_run:
        say(str(api.diagnosis.cost_of_run(subject, options)))
        return
    report = api.diagnosis.robustness(subject, options=command_builder.resumable_options(options))
    show = print_roundoff if options.rounding else print_levels
    output.finish(report, options.output, show, as_json=options.json, csv=options.csv)


def print_levels(report: api.reports.Report) -> None:
    found, words = report.robustness, api.reports.cell_text
    data = found.run.data
    how = {"generate": "by generation", "score": "teacher-forced"}.get(data.measure, "by your metric")
    say(f"{found.run.model.source}: {data.source}, {data.samples} samples, {how}\n")
    name = words.run_metric(found.run)
    say(f"{'noise':>8}  {words.described(name):>26}  {'retention':>26}  band of the loss")
    for row in found.robustness.levels:
        if row.error:
            say(f"{row.noise_level:>8g}  failed: {row.error}")
            continue
        accuracy = words.estimate(row.accuracy, share=name in words.SHARES).text
        retention = words.estimate(row.retention, share=True).text
        band = words.band_of(row).text if row.injected else ""
        say(f"{row.noise_level:>8g}  {accuracy:>26}  {retention:>26}  {band}")


def print_roundoff(report: api.reports.Report) -> None:
    """The band, greedy texts, digits of the layers that matter."""
    found = report.roundoff
    data = found.run.data
    say(f"{found.run.model.source}: {data.source}, {data.samples} samples, {found.run.conditions.dtype}\n")
    for line in api.reports.roundoff_lines(found.roundoff):
        say(line)
    shown = api.reports.digit_rows(found.roundoff)
    say("\n" + output.aligned([("place", "digits (typical token)", "digits (19 of 20 tokens)"), *shown]))
    output.print_each(found.could_not_see, "note: ")


# `noisescope demo`: everything on the bundled model, on a CPU, in under a minute.


def run_demo(options: DemoOptions) -> None:
    """Everything on the bundled model, in a minute.

    Diagnoses it, tests the findings with a simulated fault, plans its precision, finds a fault, and writes
    the reports.

    \b
    noisescope demo
    noisescope demo -o somewhere

    The bundled model answers arithmetic problems in words. No network, no GPU, no other model is needed.
    """
    started = time.perf_counter()

    def announce(line: str) -> None:
        if not options.json and not options.quiet:
            say(line, err=True)

    announce("1. diagnosing the bundled model: 5 % noise in every operator, window of layers and channel")

    report = api.diagnosis.run_demo(options.output, announce, resumes=options.resumes)
    output.finish(report, options.output, partial(print_demo, options=options), as_json=options.json)
    if not options.json:
        seconds = time.perf_counter() - started
        say(f"\n{seconds:.0f} s in all. Open {options.output / 'report.html'} in a browser.")


def print_demo(report: api.reports.Report, options: DemoOptions) -> None:
    """The findings, whether they held, what it cost."""
    output.print_findings(report, options)
    print_check(report)
    output.print_cost(report)


def print_check(report: api.reports.Report) -> None:
    """Whether the findings held, what a plan gains, whether a fault is found."""
    found = report.diagnosis
    assert found.check is not None and found.precision_plan is not None and found.locate is not None
    say(f"\nwas it right? A fault in the linears ({found.check.fault}), three layers at a time, on")
    say(f"{found.check.samples} problems the diagnosis has not seen:")
    roles = {"warned": "<- the report warns of these", "least": "<- diverge least in the report", "between": ""}
    for row in found.check.windows:
        where = f"layers {row.start_layer} to {row.end_layer}"
        clean, faulty = (api.reports.percent(share or 0.0) for share in (row.baseline_acc, row.noisy_acc))
        right = row.error or f"{clean} -> {faulty} right"
        say(f"  {where:<16} {right}  {roles[row.role]}".rstrip())
    _print_plan(found.precision_plan)
    located = found.locate
    say(f"\nbroken on purpose: {located.simulated}; located in {located.forwards:g} forwards:")
    for suspect in located.suspects[:1]:
        where = f"layer {suspect.place}, {suspect.operator} ({suspect.module})"
        say(f"  {where}: {suspect.fault_class}, confidence {suspect.confidence:.2f}")


def _print_plan(plan: api.plans.PrecisionPlan) -> None:
    """The plan beside what else the same bits could buy."""
    assert plan.typical_kl is not None
    rivals = []
    if plan.uniform_typical_kl is not None:
        rivals.append(f"{plan.uniform_typical_kl:.3g} by {plan.uniform_format} everywhere")
    if plan.bit_rule_typical_kl is not None:
        rivals.append(f"{plan.bit_rule_typical_kl:.3g} by the bit rule of the original method notes")
    beside = f" ({', '.join(rivals)})" if rivals else ""
    say(f"\nplanned at {plan.average_bits:.2f} bits per weight: typical KL {plan.typical_kl:.3g}{beside}")
