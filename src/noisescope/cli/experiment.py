"""`noisescope experiment phases`: which noise in training makes a model robust, with a statistical verdict."""

from __future__ import annotations

import dataclasses

import typer

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.cli.command_builder import add_command
from noisescope.cli.output import say
from noisescope.options.experiment_and_run_commands import PhasesOptions

experiment = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Experiments with noise in training.")


@experiment.callback()
def _experiments() -> None:
    """Experiments with noise in training."""


def experiment_phases(options: PhasesOptions) -> None:
    """Train with noise in the forward pass, the backward pass, both or none; then ask every model under noise.

    What is trained is the bundled model on its own task, or with --model and --data yours.

    Gives a verdict on each criterion of the original method notes: supported, refuted, or not decidable with this n.

    \b
    noisescope experiment phases --seeds 5 --device cuda --workers 8 --seconds 500 -o phases
    noisescope experiment phases --arms none,both,forward,forward@0.025,adaptive,norm@0.01,both:staged -o phases
    noisescope experiment phases --method grpo --seconds 3000 -o grpo
    noisescope experiment phases --model MODEL --data train.jsonl --held-out test.jsonl --arms none,forward -o mine
    noisescope experiment phases --start scratch --layers 4 --width 32 --steps 300 --batch 64 --seeds 2 -o small
    """
    if "device" in options.left_open:
        device, why = api.defaults.default_device()
        command_builder.announcer(options)(f"device {device} ({why})")
        options = dataclasses.replace(options, device=device)
    report = api.phases(options=command_builder.resumable_options(options))
    output.finish(report, options.output, print_verdicts, as_json=options.json)
    if report.value.trained.failed and not report.value.trained.done:
        raise typer.Exit(1)


def print_verdicts(report: api.experiment.PhasesReport) -> None:
    found = report.value
    say(f"{found.trained.done} of {found.trained.of} models trained, n = {found.n}\n")
    levels = [f"{level:g}" for level in found.levels]
    say(f"{'arm':<24}" + "".join(f"{f'at {100 * float(level):g} %':>28}" for level in levels))
    for arm in found.arms:
        cells = (api.reports.cell_text.estimate(arm.accuracy[level], share=True).text for level in levels)
        say(f"{arm.name:<24}" + "".join(f"{cell:>28}" for cell in cells))
    say("")
    output.print_each(map(api.reports.experiment.verdict_line, found.hypotheses), "")
    say(f"\n{api.reports.experiment.theory_line(found)}")
    output.print_each(found.could_not_see, "note: ")


add_command(experiment, experiment_phases)
