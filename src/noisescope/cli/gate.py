"""`noisescope gate MODEL --baseline report.json`: a check for CI."""

from __future__ import annotations

import importlib.resources

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.cli.output import say
from noisescope.options.sensitivity import GateOptions


def gate_model(options: GateOptions) -> None:
    """Fail where a model got worse than its baseline.

    For CI: exit code 1 where noise moves the outputs more than 20 % further than the baseline's, or costs more accuracy
    than it may. Both are decided with their intervals.

    \b
    noisescope diagnose path/to/model --data eval.jsonl -o baseline        once, for the baseline
    noisescope gate path/to/new --baseline baseline/report.json --data eval.jsonl --max-degradation 0.15
    noisescope gate path/to/new --baseline baseline/report.json --junit gate.xml --history gates
    noisescope gate --template github > .github/workflows/robustness.yml

    On the baseline's own samples all numbers are compared in pairs; others are refused without --other-samples, as is
    another architecture. Another dtype, device or attention path is reported. A row that could have missed twice the
    limit is undecided, and says what it would have caught. Exit code 3 where none could be decided.
    """
    if options.template is not None:
        folder = importlib.resources.files("noisescope.cli") / "ci"
        say((folder / f"{options.template}.yml").read_text(encoding="utf-8"), nl=False)
        return
    subject, options = command_builder.load_model(options)
    if options.dry_run:
        say(str(api.gates.cost_of_gate(subject, options)))
        return
    result = api.gates.gate(subject, options=command_builder.resumable_options(options))
    paths = []
    if options.junit is not None:
        share = result.seconds / len(result.checks)  # one measurement serves all checks
        checks, headline = result.checks, result.headline
        paths.append(api.reports.write_junit(options.junit, "noisescope gate", checks, seconds=share, summary=headline))
    paths += output.write_table(result, options.csv)
    paths += [] if options.history is None else api.gates.keep(result, options.history)
    if options.json:
        say(api.reports.as_json(result), nl=False)
    else:
        print_verdict(result)
        output.print_each(paths)
    command_builder.exit_by(result.verdict, options)


def print_verdict(result: api.gates.GateResult) -> None:
    """The verdict, every check with its numbers, and scores under noise with their power.

    The score without noise is a check, which has its numbers.
    """
    before = f"{result.baseline.model} ({result.baseline.finished})"
    say(f"{result.verdict}: {result.model} against {before}: {result.n}")
    say(f"{result.headline}\n")
    for row in result.checks:
        say(f"  {row.verdict:<9}  {row.name}: {row.message}")
    if result.accuracy_under_noise:
        say("\nscore under noise, for information:")
    for change in result.accuracy_under_noise:
        say(f"  {_change(change)}")


def _change(row: api.gates.ScoreChange) -> str:
    sides = " -> ".join("..." if one.value is None else row.score(one.value) for one in (row.baseline, row.candidate))
    return f"noise in {row.under_noise_in}: {sides} ({row.change}); {row.power} would have been detected"
