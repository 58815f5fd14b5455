"""Options that several commands share, each written once, and checks of their values before torch is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar

from noisescope.errors import InvalidInput, unknown
from noisescope.injection import checked_scale
from noisescope.options.base import CommandOptions, Naming
from noisescope.options.fields import (
    DEVICES,
    DTYPES,
    EXECUTORS,
    METRICS,
    STREAMS,
    TORCH_DEVICES,
    argument,
    changed,
    command_option,
    option,
)
from noisescope.testing import MODELS

ALLOWED = (
    "A model is a Hugging Face folder (config.json beside *.safetensors), an id from the local Hugging Face cache, "
    "a .gguf file, a .pt state dict beside its config.json, demo (the small trained model in the package; a folder of "
    "that name is ./demo), or tiny:NAME (a tiny random model, such as tiny:llama)."
)


def refuse_missing_path(text: str) -> None:
    """Refuse what can only be a path and leads nowhere."""
    path = Path(text).expanduser()
    is_path = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if not path.exists() and (is_path or path.suffix.lower() == ".gguf"):
        raise InvalidInput(f"there is no file or folder {text!r}. {ALLOWED}")


def uncached(text: str, revision: str | None) -> InvalidInput:
    """The error for a hub id that is not in the local cache."""
    version = f" --revision {revision}" if revision else ""
    return InvalidInput(
        f"{text!r} is neither a folder here nor in the local Hugging Face cache, and noisescope downloads nothing. "
        f"Fetch it with the hub's own tool first: hf download {text}{version}"
    )


def checked_model(text: str) -> str:
    """The text, where a model may lie there."""
    if text.startswith("tiny:"):
        if text.removeprefix("tiny:") not in MODELS:
            raise unknown("tiny model", text.removeprefix("tiny:"), MODELS)
        return text
    if text == "demo" or Path(text).expanduser().exists():
        return text
    refuse_missing_path(text)
    if "/" in text and not (_hub_cache() / f"models--{text.replace('/', '--')}").exists():
        raise uncached(text, None)
    return text


def _hub_cache() -> Path:
    """Where the hub library keeps models, by its own variables."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "hub"


@dataclass(frozen=True)
class DataFile:
    """A data file whose fields have names of their own."""

    path: Path
    prompt_field: str
    answer_field: str | None = None

    def __str__(self) -> str:
        return str(self.path)


DTYPE_DEFAULT = "as stored; float32 on a CPU that is slow in 16 bits"
Source = Path | Any | None  # a file; from Python also a DataSet or tokenised batches


def with_fields(data: Source, prompt: str | None, answer: str | None) -> Source:
    """The data, with the names of its fields where these were given."""
    if prompt is None:
        return data
    if not isinstance(data, (str, Path)):
        raise InvalidInput("a prompt field names a field of a file: give the file as data (--data)")
    return DataFile(Path(data).expanduser(), prompt, answer)


def noise_scale(value: float) -> float:
    """A scale that injects something."""
    if checked_scale(value, "noise scale") == 0:
        raise InvalidInput("a noise scale of 0 injects nothing; the clean model is measured anyway")
    return value


def device_name(text: str) -> str:
    """A device by torch's spelling. Another name is refused, unless a backend may have brought it: torch decides then.

    Backends outside torch name their device when they are loaded: torch loads those that are installed with an entry
    point, and a Python caller may have imported one.
    """
    kind, colon, index = text.partition(":")
    if kind in (*DEVICES, *TORCH_DEVICES):
        if colon and not index.isdigit():
            raise InvalidInput(f"a device is a name such as cuda, or with a number cuda:1; got {text!r}")
    elif "torch" not in sys.modules and not entry_points(group="torch.backends"):
        raise unknown("device", text, DEVICES)
    return text


def report_path(path: Path) -> Path:
    """A report.json, or the folder that holds one."""
    if not path.exists():
        raise InvalidInput(f"there is no report at {path}: give a report.json or the folder that holds it")
    return path


@dataclass(frozen=True, kw_only=True)
class PrintingOptions(CommandOptions):
    json: bool = command_option(False, "Print the result as JSON on stdout, and nothing else there.",
                        aliases=("as_json",))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TableOptions(CommandOptions):
    """Of commands whose result is a table; in Python `to_csv()` and `to_frame()` of the result."""

    csv: Path | None = command_option(None, "Write the result's rows to this file as CSV.", stored=False)


@dataclass(frozen=True, kw_only=True)
class ProgressOptions(CommandOptions):
    """Of commands that may run for more than a few seconds."""

    quiet: bool = command_option(False, "Show no progress and no chosen settings: results and errors only.", short="-q")
    verbose: bool = command_option(False, "Show what each phase took.", short="-v")


@dataclass(frozen=True, kw_only=True)
class FileOptions(CommandOptions):
    config: Path | None = command_option(
        None,
        "YAML file with any of these options (and model). The command line takes precedence. Paths in the file are "
        "relative to the current folder.",
    )


@dataclass(frozen=True, kw_only=True)
class CheckingOptions(CommandOptions):
    allow_undecided: bool = command_option(False, "Exit with 0 instead of 3 where nothing could be decided.")


@dataclass(frozen=True, kw_only=True)
class DeviceOptions(CommandOptions):
    title: ClassVar[str] = "Model loading"

    device: str = command_option(
        "cpu",
        "Any torch device: cpu, cuda, cuda:1 ...",
        unit="D",
        check=device_name,
        default_text="cuda where there is one, else cpu",
    )
    device_map: str | None = command_option(
        None, "accelerate's device map, such as auto, for a model larger than a device.", unit="M"
    )
    stream: str | None = command_option(
        None,
        "For a model larger than the device: keep weights in the host's memory or in the checkpoint's files, and copy "
        "them block by block.",
        choices=STREAMS,
    )
    dtype: str | None = command_option(
        None, "Number format of the weights.", unit="T", choices=DTYPES, default_text=DTYPE_DEFAULT
    )
    revision: str | None = command_option(None, "Version of a hub id.", unit="R")
    trust_remote_code: bool = command_option(False, "Run Python code that comes with the model.", stored=False)
    left_open: tuple[str, ...] = option((), "What the command line left open, to be chosen.", surface="none")


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(DeviceOptions):
    model: str = argument(
        "MODEL",
        "A Hugging Face folder or cached id, a .gguf or .pt file, or demo.",
        default="demo",
        check=checked_model,
        surface="command",
        aliases=("model_path", "checkpoint"),
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions(CommandOptions):
    report: Path = argument("REPORT", "A run's folder, or its report.json.", check=report_path, surface="command")


@dataclass(frozen=True, kw_only=True)
class ReportModelOptions(ReportOptions, DeviceOptions):
    """A report, and the model that it is of."""

    model: str | None = command_option(
        None, "Model to use.", unit="M", default_text="the report's", check=checked_model
    )
    dtype: str | None = changed(DeviceOptions, "dtype", default_text="the report's")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(CommandOptions):
    title: ClassVar[str] = "Data"

    data: Source = option(
        None,
        "JSONL, JSON, CSV, Parquet or text file. A text file is split at blank lines, or at every line if it has none.",
        python="Or a DataSet, or tokenised batches.",
        default_text="the demo's own, else built-in text",
        exists="file",
        open=True,
        aliases=("test_data",),
    )
    prompt_field: str | None = option(
        None, "The field of the data that holds the prompt, or without an answer field the text.", unit="NAME"
    )
    answer_field: str | None = option(None, "The field of the data that holds the answer.", unit="NAME")
    samples: int = option(100, "Number of samples: the first N of the data.", least=1, aliases=("n_samples",))
    max_tokens: int = option(256, "Longer samples are cut, and the report counts them.", least=1)

    def problems(self, named: Naming) -> Iterator[str]:
        if self.answer_field is not None and self.prompt_field is None:
            yield f"{named('answer_field')} needs {named('prompt_field')}: a prompt goes with every answer"

    def source(self, default: Source = None) -> Source:
        """The data, else `default`, with the names of its fields where these were given."""
        return with_fields(default if self.data is None else self.data, self.prompt_field, self.answer_field)


@dataclass(frozen=True, kw_only=True)
class ScoringOptions(SamplingOptions):
    """Data, and how answers are scored."""

    title: ClassVar[str] = "Data and scores"

    metric: str | Callable[..., Any] = option(
        "accuracy",
        "The score that degradation and bands refer to.",
        python="Or a function (model, batches) -> one score per sample.",
        choices=METRICS,
        open=True,
    )
    generate: bool | None = option(False, "Score answers by generation (slow) instead of teacher forcing.")
    max_new_tokens: int = option(256, "With generate: the longest answer.", least=1)
    slice: int = option(
        50,
        "Samples in one forward; fewer need less memory. Part of a trial's identity.",
        least=1,
        aliases=("slice_samples",),
    )


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions(ScoringOptions):
    """Scores on test data, and channels on calibration data: what a prepared run needs besides its settings."""

    calibration: Source = option(
        None,
        "Data that channel statistics are captured on.",
        default_text="the demo's own, else the test data",
        exists="file",
        open=True,
        aliases=("calibration_data",),
    )
    calibration_samples: int = option(1000, "Samples for channel statistics; 0 captures none.", least=0)


@dataclass(frozen=True, kw_only=True)
class ExecutionOptions(CommandOptions):
    """How a run is carried out; nothing here changes a number."""

    title: ClassVar[str] = "Execution"

    output: Path | None = option(
        None,
        "Folder for the store run.sqlite and the reports. The same command into the same folder resumes.",
        unit="DIR",
        default_text="nothing is stored",
        short="-o",
    )
    executor: str = option("local", "Where trials run.", choices=EXECUTORS)
    workers: int = option(2, "With executor ray: number of workers.", least=1, aliases=("processes",))
    address: str | None = option(
        None, "With executor ray: address of the cluster.", unit="A", default_text="a local cluster", stored=False
    )
    memory: float | None = option(
        None,
        "Memory of the device for activations and results, beside the weights: samples run at once as it allows.",
        unit="GIB",
        above=0,
        default_text="what is free, less a tenth",
    )
    retry_failed: bool = option(False, "Run trials again that failed before.")
    full_paths: bool = option(False, "Keep absolute paths and the host's name in the report, for internal use.")
    progress: Any = option(None, "An object with wave(trials) and step(trial, result, seconds).", surface="python",
                              open=True)  # fmt: skip
    repeat: Any = option(None, "How to repeat this, for `noisescope runs resume`.", surface="none", open=True)
    resumes: str | None = option(None, "Fingerprint of the model that the run was of; empty: unknown.", surface="none")


Options = ExecutionOptions  # its public name: ns.Options
