"""What to do after a diagnosis, as commands that can be pasted as they stand.

A report names its model, data and folder by the last part of their paths, so the commands are meant for the folder that
holds them.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Iterator

from noisescope.diagnosis.question import Question
from noisescope.diagnosis.report import Run
from noisescope.options.fields import INTEGERS
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.reports.document import Command
from noisescope.reports.report_file import DiagnosisReport

BITS = 5  # average bits per weight that a plan is first tried with
ENOUGH = 100  # samples of a run that is worth confirming with
MOST_SAMPLES = 1000
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(DiagnoseOptions)}
BUNDLED = ("demo", "built-in text")  # data that need no option


def run_command(report: DiagnosisReport, *, effort: str = "", samples: int = 0) -> str:
    """The diagnosis as a command line, or the same with another effort or number of samples."""
    run, settings = report.run, report.run.settings
    words = ["noisescope", "diagnose", run.model.source, *_data(run)]
    words += ["--samples", str(samples or run.data.samples), "--seeds", str(len(settings.seeds))]
    words += ["--effort", effort or settings.effort, "--dtype", run.conditions.dtype]
    words += [] if run.conditions.device == "cpu" else ["--device", run.conditions.device]
    words += _format(settings.question)
    words += ["--metric", run.metric] if run.metric == "perplexity" else []
    scale = settings.noise_scale if settings.question is None else _DEFAULTS["noise_scale"]
    for name, value in (("noise_scale", scale), ("window", settings.window), ("step", settings.step)):
        words += [] if value == _DEFAULTS[name] else [f"--{name.replace('_', '-')}", f"{value:g}"]
    words += [] if settings.levels == _DEFAULTS["level"] else ["--level", ",".join(settings.levels)]
    return shlex.join([*words, *(["-o", run.store] if run.store else [])])


def _format(question: Question | None) -> list[str]:
    """The options that ask about a number format; formats with blocks of their own take no group size."""
    if question is None:
        return []
    grouped = question.granularity == "group" and question.format in INTEGERS
    size = ["--group-size", str(question.group_size)] if grouped else []
    return ["--perturbation", question.format, "--on", question.on, *size, *["--asymmetric"] * question.asymmetric]


def _data(run: Run) -> list[str]:
    return [] if run.data.source in BUNDLED else ["--data", run.data.source]


def next_steps(report: DiagnosisReport) -> Iterator[Command]:
    """Commands, the most useful first."""
    run, settings = report.run, report.run.settings
    folder = run.store or "report.json"
    if settings.effort == "screen":
        samples = max(run.data.samples, ENOUGH)
        yield Command(run_command(report, effort="standard", samples=samples), "Confirm the predictions by injection:")
    elif report.executive_summary.overall_risk_level == "not measurable":
        more = min(4 * run.data.samples, MOST_SAMPLES)
        yield Command(run_command(report, samples=more), "Measure again, with more samples:")
    if settings.question is not None:
        if settings.question.on == "kv-cache" and report.layer_analysis is not None:
            words = "Choose the layers whose KV cache keeps 16 bits, and measure the result:"
            yield Command(shlex.join(["noisescope", "plan", "kv-cache", folder, "--verify"]), words)
    elif report.layer_analysis is not None:
        words = "List what to validate first on the new hardware, with the commands for both machines:"
        yield Command(shlex.join(["noisescope", "plan", "migration", folder]), words)
    plan, scores = report.precision_plan, report.format_scores
    if plan is not None:
        bits = f"{plan.average_bits:.2g}" if math.isfinite(plan.average_bits) else str(BITS)
        words = "Export the precision plan for llm-compressor:"
        tool = ["--average-bits", bits, "--export", "llm-compressor", "-o", "recipe.yaml"]
        yield Command(shlex.join(["noisescope", "plan", "precision", folder, *tool]), words)
    elif scores is not None and scores.modules:
        words = f"Choose a number format for each linear at {BITS} bits per weight, and measure the result:"
        tool = ["--average-bits", str(BITS), "--verify"]
        yield Command(shlex.join(["noisescope", "plan", "precision", folder, *tool]), words)
    if report.gate is not None:
        words = "Check that the next checkpoint is no more fragile than this one (exit code 1 if it is):"
        options = ["--baseline", folder, *_data(run)]
        yield Command(shlex.join(["noisescope", "gate", run.model.source, *options]), words)
