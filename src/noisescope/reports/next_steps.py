"""What to do after a diagnosis, as commands that can be pasted as they stand.

A report names its model, data and folder by relative paths as they were typed, or by the last part of absolute ones;
`given` has those that were typed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from noisescope.diagnosis.report import Run
from noisescope.options.base import CommandOptions
from noisescope.options.command_text import command_line
from noisescope.options.plans import KvCacheOptions, MigrationOptions, PrecisionOptions
from noisescope.options.sensitivity import DiagnoseOptions, GateOptions, RobustnessOptions
from noisescope.progress import duration
from noisescope.reports.document import Command
from noisescope.reports.saved_report import DiagnosisReport

BITS = 5  # average bits per weight that a plan is first tried with
ENOUGH = 100  # samples of a run that is worth confirming with
BUNDLED = ("demo", "built-in text")  # data that need no option
_COMMANDS: dict[str, type[CommandOptions]] = {one.command: one for one in (DiagnoseOptions, RobustnessOptions)}
_SAME_DATA = ("data", "prompt_field", "answer_field", "max_tokens")


def run_command(run: Run, given: Mapping[str, Any] | None = None, **changes: object) -> str:
    """The command that made a run, or the same with changes; "" where no command line can ask it."""
    if run.command is None or run.command.name not in _COMMANDS:
        return ""
    return command_line(_COMMANDS[run.command.name], {**run.command.options, **(given or {}), **changes})


def more_samples(run: Run, wanted: int) -> int:
    """As many as are wanted and the data hold, and never fewer than there were."""
    return max(run.data.samples, min(wanted, run.data.available or 0))


def _about(seconds: float | None) -> str:
    return "" if seconds is None else f" (about {duration(seconds)})"


def _verification_seconds(run: Run, formats: int) -> float | None:
    """At the speed of the run: a forward of each held-out sample for the clean model, the plan and each rival."""
    work = run.cost.forwards * run.data.samples
    plans = 3 + formats + PrecisionOptions.random  # the clean model, the plan and the bit rule; uniform plans
    return PrecisionOptions.samples * plans * run.cost.seconds / work if work else None


def next_steps(
    report: DiagnosisReport,
    given: Mapping[str, Any] | None = None,
    seconds_of: Callable[[Mapping[str, Any]], float] | None = None,
) -> Iterator[Command]:
    """Commands, the most useful first. `given` are the model, data and folder where the report cuts their paths.

    Where it is known, they come with the time they take; `seconds_of` the diagnosis with other options estimates that.
    """
    run, settings, typed = report.run, report.run.settings, given or {}
    options = {} if run.command is None else {**run.command.options, **typed}
    data = {} if run.data.source in BUNDLED else {"data": run.data.source}
    data |= {name: options[name] for name in _SAME_DATA if name in options}
    where = ("device", "device_map", "stream", "revision")
    place: dict[str, Any] = {name: options[name] for name in where if name in options}
    folder = str(typed.get("output") or run.store or "report.json")
    measured: dict[str, Any] = {"report": folder, "verify": True, **place}
    measured |= {name: value for name, value in data.items() if name != "data" or "data" in typed}
    measured |= {"model": typed["model"]} if "model" in typed else {}

    again: dict[str, Any] = {}
    if settings.effort == "screen":
        again = {"effort": "standard", "samples": more_samples(run, ENOUGH)}
        words = "Confirm the predictions by injection"
    elif report.executive_summary.overall_risk_level == "not measurable":
        more = more_samples(run, 4 * run.data.samples)
        again = {"samples": more} if more > run.data.samples else {}
        words = "Measure again, with more samples"
    if again and run.command is not None:
        longer = run.cost.seconds * again["samples"] / run.data.samples
        takes = seconds_of(again) if seconds_of is not None else None if "effort" in again else longer
        yield Command(run_command(run, given, **again), f"{words}{_about(takes)}:")
    if settings.question is not None:
        if settings.question.on == "kv-cache" and report.layer_analysis is not None:
            words = "Choose the layers whose KV cache keeps 16 bits, and measure the result:"
            yield Command(command_line(KvCacheOptions, measured), words)
    elif report.layer_analysis is not None:
        words = "List what to validate first on the new hardware, with the commands for both machines:"
        paths = {name: typed[name] for name, known in (("model", run.model), ("data", run.data))
                 if name in typed and typed[name] != known.source}  # fmt: skip
        yield Command(command_line(MigrationOptions, {"report": folder, **paths}), words)
    plan, scores = report.precision_plan, report.format_scores
    if plan is not None:
        bits = f"{plan.average_bits:.2g}" if math.isfinite(plan.average_bits) else BITS
        words = "Export the precision plan for llm-compressor:"
        export = {"report": folder, "average_bits": bits, "export": "llm-compressor", "output": "recipe.yaml"}
        yield Command(command_line(PrecisionOptions, export), words)
    elif scores is not None and scores.modules:
        words = f"Choose a number format for each linear at {BITS} bits per weight, and measure the result"
        words += f"{_about(_verification_seconds(run, len(scores.uniform)))}:"
        yield Command(command_line(PrecisionOptions, {**measured, "average_bits": BITS}), words)
    if report.gate is not None:
        words = "Check that the next checkpoint is no more fragile than this one (exit code 1 if it is):"
        model = typed.get("model", run.model.source)
        compared = {**place, **data, "model": model, "baseline": folder}
        compared |= {name: options[name] for name in ("dtype", "slice") if name in options}
        yield Command(command_line(GateOptions, compared), words)
