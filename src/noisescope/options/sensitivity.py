"""Options of the commands that measure sensitivity: diagnose, robustness, gate, demo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from noisescope.options.base import Naming
from noisescope.options.fields import (
    DEFAULT_OPERATORS,
    EFFORTS,
    FORMATS_ON,
    GATE_EFFORTS,
    GAUSSIAN,
    GROUP,
    INTEGERS,
    LEVELS,
    NUMBER_FORMATS,
    OUTPUTS,
    OWN_SCALES,
    TEMPLATES,
    changed,
    command_option,
    option,
)
from noisescope.options.shared import (
    CheckingOptions,
    ExecutionOptions,
    FileOptions,
    LoadingOptions,
    MeasuringOptions,
    PrintingOptions,
    ProgressOptions,
    SamplingOptions,
    ScoringOptions,
    Source,
    TableOptions,
    noise_scale,
    report_path,
)
from noisescope.sites import CACHED, canonical_operator

FITTING = "{}; on a CPU, what fits ten minutes"


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(
    MeasuringOptions, ExecutionOptions, LoadingOptions, FileOptions, ProgressOptions, PrintingOptions, TableOptions
):
    command: ClassVar[str] = "diagnose"

    level: tuple[str, ...] = option(
        LEVELS, "What to look at.", choices=LEVELS, words={"full": LEVELS}, aliases=("levels", "mode")
    )
    effort: str = option(
        "standard",
        "screen predicts, standard injects where it matters, full injects everywhere.",
        choices=EFFORTS,
        default_text=FITTING.format("standard"),
    )
    samples: int = changed(SamplingOptions, "samples", default_text=FITTING.format(100))
    noise_scale: float = option(0.05, "Relative size of the Gaussian noise; 0 is refused.", unit="S", check=noise_scale)
    perturbation: Any = option(
        GAUSSIAN,
        "Gaussian noise, or a number format that numbers are rounded to.",
        python="Or a perturbation: a value with a field scale, or a Format.",
        choices=(GAUSSIAN, *NUMBER_FORMATS),
        open=True,
    )
    on: str | None = option(
        None,
        "What is perturbed. activations are the inputs of linears; kv-cache is keys after rotation, and values.",
        choices=(OUTPUTS, *FORMATS_ON),
        word="target",
        default_text="outputs; weights for a number format",
    )
    group_size: int | None = option(
        None,
        "With a number format: neighbouring numbers that share one scale.",
        least=1,
        default_text="weights 64 (fp8: an output channel); activations a token; kv-cache a head (fp8: no scale)",
    )
    asymmetric: bool = option(False, "With int8 and int4: a zero point beside each scale.")
    operators: tuple[str, ...] | None = option(
        None,
        "Operators and groups to test: rows of the operator level and columns of the map. For noise on outputs alone.",
        default_text=", ".join(DEFAULT_OPERATORS),
        check=canonical_operator,
    )
    seeds: int | tuple[int, ...] = option(
        3, "Number of noise seeds, counted from 0.", python="Or a list of seeds.", least=1, open=True
    )
    window: int = option(3, "Layers in a sliding window.", least=1, aliases=("window_size",))
    step: int = option(1, "Layers between windows.", least=1, aliases=("step_size",))
    outlier_threshold: float = option(10.0, "A channel is an outlier at this many times the median channel.", above=0)
    target_degradation: float = option(
        0.10, "The loss that the critical noise scale is searched for.", above=0, below=1, surface="python"
    )
    highest_scale: float = option(0.20, "The largest scale of that search.", above=0, surface="python")
    generate: bool = changed(ScoringOptions, "generate")
    output: Path | None = changed(
        ExecutionOptions, "output", None, command_default=Path("noisescope-run"), default_text="noisescope-run"
    )
    save_activations: bool = command_option(
        False,
        "Write outputs of the linears that feed the residual stream, on the calibration data, to OUTPUT/activations.",
    )
    dry_run: bool = command_option(False, "Time one sample, print trials, forwards, time and memory, and stop.")

    @property
    def format_on(self) -> str | None:
        """What a number format is asked on; None for noise."""
        name = self.perturbation
        has_scale = name is None or name == GAUSSIAN or hasattr(name, "scale")
        return None if has_scale else self.on or "weights"

    def problems(self, named: Naming) -> Iterator[str]:
        yield from super().problems(named)
        given, on = self.perturbation, self.format_on
        chosen = named("perturbation")
        if on is None:
            if self.on not in (None, OUTPUTS):
                yield f"{named('on')} {self.on} takes a number format, such as {chosen} int4: noise falls on outputs"
            if self.group_size is not None or self.asymmetric:
                one = named("asymmetric" if self.group_size is None else "group_size")
                yield f"{one} belongs to a number format, such as {chosen} int4; noise has no groups"
            if set(self.operators or ()) & {"kv_cache", *CACHED}:
                yield f"keys and values take a number format: {chosen} fp8_e4m3 {named('on')} kv-cache"
            return
        if not isinstance(given, str) and not hasattr(given, "granularity"):
            yield f"{chosen} takes a value with a field scale, or a Format; got {given!r}"
        if on == OUTPUTS:
            yield f"a number format falls on {', '.join(FORMATS_ON)}: give {named('on')} one of them"
        if self.operators is not None:
            yield f"{named('operators')} is for noise on outputs: a number format falls on all of its {on}"
        if self.noise_scale != type(self).noise_scale:
            yield f"{named('noise_scale')} is for Gaussian noise: a number format has no scale of noise"
        if isinstance(given, str):
            if self.group_size is not None and given in OWN_SCALES:
                yield f"{given} {OWN_SCALES[given]}: leave {named('group_size')} out"
            if self.asymmetric and given not in INTEGERS:
                yield f"{named('asymmetric')} is for {' and '.join(INTEGERS)}: {given} has no zero point"
        elif self.group_size is not None or self.asymmetric:
            yield f"{named('group_size')} and {named('asymmetric')} go with a format's name: {given!r} has its own"


@dataclass(frozen=True, kw_only=True)
class RobustnessOptions(
    ScoringOptions, ExecutionOptions, LoadingOptions, FileOptions, ProgressOptions, PrintingOptions, TableOptions
):
    command: ClassVar[str] = "robustness"

    noise_levels: tuple[float, ...] = option((0.0, 0.05, 0.10), "Noise scales; 0 is the clean model.", least=0)
    operators: tuple[str, ...] = option((GROUP,), "Operators that are noised, everywhere in the model.",
                                        check=canonical_operator)  # fmt: skip
    rounding: bool = option(
        False,
        "Instead of noise levels: what round-off alone does. Digits per layer, how far two healthy systems differ, "
        "and after how many tokens their greedy texts do.",
    )
    seeds: int | tuple[int, ...] = changed(DiagnoseOptions, "seeds")
    generate: bool | None = changed(
        ScoringOptions, "generate", None, default_text="on where the data has answers", negative="no-generate"
    )
    samples: int = changed(SamplingOptions, "samples", default_text=FITTING.format(100))
    dry_run: bool = changed(DiagnoseOptions, "dry_run")

    def problems(self, named: Naming) -> Iterator[str]:
        yield from super().problems(named)
        if not any(self.noise_levels):
            yield f"{named('noise_levels')} must hold a noise level above 0, such as 0,0.05,0.10; got 0"


@dataclass(frozen=True, kw_only=True)
class GateOptions(
    CheckingOptions,
    SamplingOptions,
    ExecutionOptions,
    LoadingOptions,
    FileOptions,
    ProgressOptions,
    PrintingOptions,
    TableOptions,
):
    command: ClassVar[str] = "gate"

    baseline: Path | Mapping[str, Any] = option(
        None,
        "The report.json of an earlier diagnosis.",
        required=True,
        open=True,
        check=report_path,
        aliases=("baseline_report",),
    )
    data: Source = changed(SamplingOptions, "data", default_text="the baseline's")
    max_degradation: float = option(0.15, "The share of its accuracy that noise may cost.", unit="SHARE", above=0,
                                    below=1)  # fmt: skip
    max_worse: float = option(
        0.2, "How much further than the baseline's noise may move the outputs, as a share.", unit="SHARE", above=0
    )
    samples: int = changed(SamplingOptions, "samples", 50)
    seeds: int | tuple[int, ...] | None = changed(
        DiagnoseOptions, "seeds", None, default_text="the baseline's", surface="python"
    )
    other_samples: bool = option(False, "The data hold other samples of the baseline's source; refused without this.")
    effort: str = option(
        "screen",
        "screen predicts, and injects into all products once; standard injects into every operator.",
        choices=GATE_EFFORTS,
    )
    slice: int = changed(ScoringOptions, "slice")
    junit: Path | None = command_option(None, "Write the checks there as JUnit XML.", stored=False)
    history: Path | None = command_option(
        None, "Folder that keeps every verdict, with a plot of the trend.", unit="DIR", stored=False
    )
    step: int | None = option(None, "The checkpoint's step, for the trend.")
    dry_run: bool = changed(DiagnoseOptions, "dry_run")
    template: str | None = command_option(None, "Print a CI job and stop.", choices=TEMPLATES, stops=True)


@dataclass(frozen=True, kw_only=True)
class GateBaselineOptions(ScoringOptions, ExecutionOptions):
    """One side of a gate."""

    seeds: int | tuple[int, ...] = changed(DiagnoseOptions, "seeds")
    noise_scale: float = changed(DiagnoseOptions, "noise_scale")
    effort: str = changed(GateOptions, "effort")


@dataclass(frozen=True, kw_only=True)
class DemoOptions(ProgressOptions, PrintingOptions):
    command: ClassVar[str] = "demo"

    output: Path = changed(ExecutionOptions, "output", Path("noisescope-demo"), default_text="")
    resumes: str | None = changed(ExecutionOptions, "resumes", None)
