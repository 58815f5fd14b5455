"""Options of `experiment phases`, and of the commands about stored runs: report, runs list, show, resume, compare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from noisescope.options.base import CommandOptions, Naming
from noisescope.options.fields import (
    REPORT_FORMATS,
    STARTS,
    TRAINING_METHODS,
    argument,
    changed,
    command_option,
    option,
)
from noisescope.options.sensitivity import DiagnoseOptions, RobustnessOptions
from noisescope.options.shared import (
    DeviceOptions,
    ExecutionOptions,
    FileOptions,
    PrintingOptions,
    ProgressOptions,
    SamplingOptions,
    ScoringOptions,
    Source,
    TableOptions,
    checked_model,
)


@dataclass(frozen=True, kw_only=True)
class PhasesOptions(ExecutionOptions, FileOptions, ProgressOptions, PrintingOptions):
    command: ClassVar[str] = "experiment phases"

    model: str | None = option(
        None,
        "Train this model (a Hugging Face folder or cached id) on your data.",
        unit="M",
        default_text="the bundled model's task",
        check=checked_model,
        aliases=("model_path",),
    )
    data: Source = option(None, "With a model: prompts with answers, or chats, to train on.", exists="file", open=True)
    held_out: Source = option(
        None,
        "With a model: data to test on, with the same fields.",
        exists="file",
        open=True,
        default_text="the last items of the data, which are not trained on",
    )
    prompt_field: str | None = changed(SamplingOptions, "prompt_field")
    answer_field: str | None = changed(SamplingOptions, "answer_field")
    lora: int = option(8, "With a model: rank of LoRA adapters on the blocks' linears; 0 trains every weight.", least=0)
    epochs: int = option(2, "With a model: how often the data are gone through.", least=1)
    generate: bool = option(False, "With a model: test generated answers (slow) instead of teacher forcing.")
    max_new_tokens: int = changed(ScoringOptions, "max_new_tokens", help="With generate or grpo: the longest answer.")
    max_tokens: int = changed(SamplingOptions, "max_tokens", help="With a model: longer problems are cut.")
    second_model: str | None = option(
        None, "With a model: train all arms of this one, too, such as a larger one.", unit="M", check=checked_model
    )
    second_data: Source = option(
        None, "With a model: train and test all arms on these data, too: a second task.", exists="file", open=True
    )
    same_noise: bool = option(False, "Also test under the draws of each training's first step.")
    match_doses: bool = option(
        False, "Scale schedules and rules so that each arm's mean squared scale, or predicted cost, is that of uniform "
        "constant noise.",
    )  # fmt: skip
    arms: tuple[str, ...] = option(
        ("none", "both", "forward", "backward"),
        "KIND[@SCALE][:SCHEDULE]. Kinds: none, both, forward, backward, norm, and both with factors by layer: "
        "adaptive, methodology, summary, sensitive. Schedules: constant, linear, cosine, exponential, staged, rising.",
    )
    seeds: int = option(5, "Trainings per arm.", least=1)
    method: str = option("supervised", "grpo trains by rewards, through TRL.", choices=TRAINING_METHODS)
    start: str = option("bundled", "Train on from the bundled model, or from scratch.", choices=STARTS)
    noise_scale: float = changed(DiagnoseOptions, "noise_scale", help="Scale of arms that name none (norm: 0.01).")
    noise_levels: tuple[float, ...] = changed(
        RobustnessOptions, "noise_levels", help="Scales at which trained models are tested."
    )
    samples: int = changed(SamplingOptions, "samples", 1000, help="Problems at each level.")
    noise_seeds: int = option(2, "Draws of noise for each problem.", least=1)
    operators: tuple[str, ...] = changed(
        RobustnessOptions, "operators", help="Operators that are noised, in training and testing."
    )
    steps: int | None = option(
        None, "Training steps.", least=1, default_text="600; from scratch 2700; grpo 100; with a model by epochs"
    )
    batch: int | None = option(None, "Problems per step.", least=1, default_text="512; grpo 16; with a model 8")
    rate: float | None = option(
        None,
        "Learning rate.",
        unit="R",
        above=0,
        default_text="3e-4; from scratch 2e-3; grpo 2e-5; with a model 2e-4 (LoRA) or 2e-5, grpo a tenth",
    )
    examples: int | None = option(
        None,
        "Training problems to draw from.",
        least=1,
        default_text="200000; from scratch 400000; grpo 2000; with a model all",
    )
    layers: int | None = option(None, "From scratch: number of blocks.", least=1, default_text="16")
    width: int | None = option(None, "From scratch: 32, 96 or a multiple of 64.", least=1, default_text="96")
    workers: int = changed(
        ExecutionOptions, "workers", 1, help="Processes (several share one GPU), or workers with executor ray."
    )
    device: str = changed(DeviceOptions, "device", surface="both")
    left_open: tuple[str, ...] = changed(DeviceOptions, "left_open")
    seconds: float | None = option(
        None, "Stop cleanly by then; the same command continues.", unit="S", above=0, default_text="no limit"
    )

    def problems(self, named: Naming) -> Iterator[str]:
        if (self.model is None) != (self.data is None):
            yield f"{named('model')} and {named('data')} go together: a model of yours is trained on data of yours"
        if self.model is None:
            for name in ("held_out", "second_model", "second_data", "prompt_field", "answer_field"):
                if vars(self)[name] is not None:
                    yield f"{named(name)} needs {named('model')} and {named('data')}"
            if self.generate:
                yield f"{named('generate')} needs {named('model')} and {named('data')}"
        else:
            for name in ("layers", "width"):
                if vars(self)[name] is not None:
                    yield f"{named(name)} is of models trained from scratch: leave it out with {named('model')}"
            if self.start == "scratch":
                yield f"{named('start')} is of the bundled model: a model of yours is trained on from its weights"
        if self.answer_field is not None and self.prompt_field is None:
            yield f"{named('answer_field')} needs {named('prompt_field')}: a prompt goes with every answer"


@dataclass(frozen=True, kw_only=True)
class DrawOptions(TableOptions):
    command: ClassVar[str] = "report"

    run: Path = argument(
        "RUN", "A run's folder or a report.json (`noisescope runs list` shows some).", surface="command"
    )
    format: tuple[str, ...] = command_option(
        REPORT_FORMATS, "Forms to write.", choices=REPORT_FORMATS, word="report format"
    )
    summary: bool = command_option(False, "Write one page instead, for a pull request: summary.md, .html and .pdf.")
    step_summary: bool = command_option(
        False, "Append that page to the summary of a GitHub Actions job ($GITHUB_STEP_SUMMARY)."
    )
    figures: bool = command_option(False, "Also write the charts as PNG and SVG, into figures/.")
    output: Path | None = command_option(
        None, "Folder to write into.", unit="DIR", short="-o", default_text="the run's own"
    )
    csv: Path | None = changed(
        TableOptions, "csv", help="Write a table of the report to this file as CSV, and nothing else."
    )
    table: str | None = command_option(
        None, "With csv: which table, such as findings or channels.", unit="NAME", default_text="the main one"
    )
    schema: bool = command_option(False, "Print the JSON Schema of report.json and stop.", stops=True)

    def problems(self, named: Naming) -> Iterator[str]:
        if self.table is not None and self.csv is None:
            yield f"{named('table')} chooses what {named('csv')} writes: give {named('csv')} FILE, too"


@dataclass(frozen=True, kw_only=True)
class ListOptions(PrintingOptions):
    command: ClassVar[str] = "runs list"

    folder: Path = argument(
        "DIR", "Where to look, two folders deep.", required=False, default=Path(), surface="command"
    )


@dataclass(frozen=True, kw_only=True)
class FolderOptions(CommandOptions):
    folder: Path = argument("RUN", "A run's folder (the -o of its command).", surface="command")


@dataclass(frozen=True, kw_only=True)
class ShowOptions(FolderOptions, PrintingOptions):
    command: ClassVar[str] = "runs show"


@dataclass(frozen=True, kw_only=True)
class CheckRunOptions(FolderOptions, PrintingOptions):
    command: ClassVar[str] = "runs check"


@dataclass(frozen=True, kw_only=True)
class ResumeOptions(FolderOptions, ProgressOptions):
    command: ClassVar[str] = "runs resume"

    trust_remote_code: bool = changed(
        DeviceOptions, "trust_remote_code", help="Run Python code that comes with the model; never stored with a run."
    )
    address: str | None = changed(
        ExecutionOptions,
        "address",
        help="With executor ray: address of the cluster, or local; never stored with a run.",
        surface="command",
        default_text="",
    )


@dataclass(frozen=True, kw_only=True)
class CompareRunsOptions(PrintingOptions, TableOptions):
    command: ClassVar[str] = "runs compare"

    a: Path = argument("A", "The folder of a run.", surface="command")
    b: Path = argument("B", "The folder of another: differences are B less A.", surface="command")
    output: Path | None = command_option(
        None, "Folder for comparison.json, .md, .html and .pdf.", unit="DIR", short="-o"
    )
    format: tuple[str, ...] = changed(
        DrawOptions, "format", REPORT_FORMATS, help="With -o: any of json, md, html, pdf."
    )
