"""Options of `experiment phases`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from noisescope.options.choices import STARTS, TRAINING_METHODS
from noisescope.options.diagnosing import DiagnoseOptions, RobustnessOptions
from noisescope.options.fields import changed, option
from noisescope.options.groups import DeviceOptions, ExecutionOptions, FileOptions, PrintingOptions, SamplingOptions


@dataclass(frozen=True, kw_only=True)
class PhasesOptions(ExecutionOptions, FileOptions, PrintingOptions):
    command: ClassVar[str] = "experiment phases"

    arms: tuple[str, ...] = option(
        ("none", "both", "forward", "backward"),
        "KIND[@SCALE][:SCHEDULE]. Kinds: none, both, forward, backward, adaptive, norm. Schedules: constant, linear, "
        "cosine, exponential, staged.",
        unit="LIST",
    )
    seeds: int = option(5, "Trainings per arm.", unit="N", least=1)
    method: str = option("supervised", "grpo trains by rewards, through TRL.", unit="NAME", choices=TRAINING_METHODS)
    start: str = option("bundled", "Train on from the bundled model, or from scratch.", unit="NAME", choices=STARTS)
    noise_scale: float = changed(DiagnoseOptions, "noise_scale", help="Scale of arms that name none (norm: 0.01).")
    noise_levels: tuple[float, ...] = changed(
        RobustnessOptions, "noise_levels", help="Scales at which trained models are tested."
    )
    samples: int = changed(SamplingOptions, "samples", 1000, help="Problems at each level.")
    noise_seeds: int = option(2, "Draws of noise for each problem.", unit="N", least=1)
    operators: tuple[str, ...] = changed(
        RobustnessOptions, "operators", help="Operators that are noised, in training and testing."
    )
    steps: int | None = option(
        None, "Training steps.", unit="N", least=1, default_text="600; from scratch 2700; grpo 100"
    )
    batch: int | None = option(None, "Problems per step.", unit="N", least=1, default_text="512; grpo 16")
    rate: float | None = option(
        None, "Learning rate.", unit="R", above=0, default_text="3e-4; from scratch 2e-3; grpo 2e-5"
    )
    examples: int | None = option(
        None,
        "Training problems to draw from.",
        unit="N",
        least=1,
        default_text="200000; from scratch 400000; grpo 2000",
    )
    layers: int | None = option(None, "From scratch: number of blocks.", unit="N", least=1, default_text="16")
    width: int | None = option(None, "From scratch: 32, 96 or a multiple of 64.", unit="N", least=1, default_text="96")
    workers: int = changed(
        ExecutionOptions, "workers", 1, help="Processes (several share one GPU), or workers with executor ray."
    )
    device: str = changed(DeviceOptions, "device", surface="both")
    seconds: float | None = option(
        None, "Stop cleanly by then; the same command continues.", unit="S", above=0, default_text="no limit"
    )
