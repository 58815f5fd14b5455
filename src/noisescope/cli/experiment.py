"""`noisescope experiment phases`: which noise in training makes a model robust, with a statistical verdict."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from noisescope.cli import common, outcome

if TYPE_CHECKING:
    from noisescope.reports.phases import PhasesReport

experiment = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Experiments with noise in training.")


@experiment.command("phases")
def experiment_phases(
    arms: Annotated[
        str,
        typer.Option(
            "--arms",
            help="KIND[@SCALE][:SCHEDULE] with commas between. Kinds: none, both, forward, backward, adaptive, norm.",
        ),
    ] = "none,both,forward,backward",
    seeds: Annotated[int, typer.Option("--seeds", help="Trainings an arm.")] = 5,
    method: Annotated[
        str, typer.Option("--method", help="supervised, or grpo: by rewards, through TRL.")
    ] = "supervised",
    start: Annotated[str, typer.Option("--start", help="bundled (train on) or scratch.")] = "bundled",
    noise_scale: Annotated[float, typer.Option("--noise-scale", help="Of arms that name none.")] = 0.05,
    noise_levels: Annotated[str, typer.Option("--noise-levels", help="At which models are asked.")] = "0,0.05,0.10",
    samples: Annotated[int, typer.Option("--samples", help="Problems asked at each level.")] = 1000,
    noise_seeds: Annotated[int, typer.Option("--noise-seeds", help="Draws of noise for each problem.")] = 2,
    operators: Annotated[str, typer.Option("--operators", help="What is noised, in training and asking.")] = "gemm",
    steps: Annotated[
        int | None, typer.Option("--steps", help="Default: 600 from the bundled model, else 2700; grpo: 100.")
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", help="Problems a step. Default: 512; grpo: 16.")] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Default: 3e-4 from the bundled model, else 2e-3; grpo: 2e-5.")
    ] = None,
    examples: Annotated[int | None, typer.Option("--examples", help="Training problems to draw from.")] = None,
    layers: Annotated[int | None, typer.Option("--layers", help="From scratch: blocks. Default: 16.")] = None,
    width: Annotated[
        int | None, typer.Option("--width", help="From scratch: 32, 96 or a multiple of 64. Default: 96.")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes; several share one GPU.")] = 1,
    executor: common.Executor = "local",
    address: common.Address = None,
    device: common.Device = "cpu",
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Stop cleanly by then; the same command goes on.")
    ] = None,
    retry_failed: common.RetryFailed = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the store and the report.")] = None,
    as_json: common.Json = False,
) -> None:
    """Train with noise in the forward pass, the backward pass, both or none; then ask every model under noise.

    Gives a verdict on each criterion of the original method notes: supported, refuted, or not decidable with this n.

    \b
    noisescope experiment phases --seeds 5 --device cuda --workers 8 --seconds 500 -o phases
    noisescope experiment phases --arms none,both,forward,forward@0.025,adaptive,norm@0.01,both:staged -o phases
    noisescope experiment phases --method grpo --seconds 3000 -o grpo
    noisescope experiment phases --start scratch --layers 4 --width 32 --steps 300 --batch 64 --seeds 2 -o small
    """
    asked = {name: value for name, value in locals().items() if name != "as_json"}
    asked["output"] = None if output is None else str(output)
    run_phases(asked, as_json=as_json)


def run_phases(asked: dict[str, Any], *, as_json: bool = False) -> None:
    """The command from its options as plain values."""
    from noisescope import api
    from noisescope.cli.progress import Shown

    output = None if asked["output"] is None else Path(asked["output"])
    training = {name: asked[name] for name in ("steps", "batch", "rate", "examples", "layers", "width")}
    with common.plain_warnings(), common.resumable(output), Shown() as progress:
        report = api.phases(
            arms=common.names(asked["arms"]) or (),
            seeds=asked["seeds"],
            method=asked["method"],
            start=asked["start"],
            noise_scale=asked["noise_scale"],
            noise_levels=common.numbers(asked["noise_levels"], "--noise-levels"),
            samples=asked["samples"],
            noise_seeds=asked["noise_seeds"],
            operators=common.names(asked["operators"]) or (),
            device=asked["device"],
            processes=asked["workers"],
            seconds=asked["seconds"],
            options=common.run_options("experiment phases", asked, progress),
            **training,
        )
    outcome.finish(report, output, say_verdicts, as_json=as_json)
    if report.value.trained.failed and not report.value.trained.done:
        raise typer.Exit(1)


def say_verdicts(report: PhasesReport) -> None:
    from noisescope.reports.phases import theory_line, verdict_line
    from noisescope.reports.words import estimate

    found = report.value
    typer.echo(f"{found.trained.done} of {found.trained.of} models trained, n = {found.n}\n")
    levels = [f"{level:g}" for level in found.levels]
    typer.echo(f"{'arm':<24}" + "".join(f"{f'at {100 * float(level):g} %':>28}" for level in levels))
    for arm in found.arms:
        cells = (estimate(arm.accuracy[level], share=True).text for level in levels)
        typer.echo(f"{arm.name:<24}" + "".join(f"{cell:>28}" for cell in cells))
    typer.echo("")
    for row in found.hypotheses:
        typer.echo(verdict_line(row))
    typer.echo(f"\n{theory_line(found)}")
    for note in found.could_not_see:
        typer.echo(f"note: {note}")
