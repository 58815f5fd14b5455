"""What a command line leaves open, chosen: device, dtype, effort and number of samples. Each choice has its reason.

Python callers say what they want; nothing is chosen for them. What was chosen is stored with the run, so that the same
command into the same folder, and `runs resume`, go on with it. A CPU without 16-bit instructions is many times slower
in a 16-bit format, so that is measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.nn import functional

from noisescope.api import preparation
from noisescope.api.diagnosis import prepare_question
from noisescope.api.preparation import FEW
from noisescope.api.reports import FILE, stored_command
from noisescope.api.run_cost import Cost, cost_of, plan_trials
from noisescope.diagnosis.context import StudyContext
from noisescope.errors import NoisescopeError
from noisescope.model.checkpoint_folder_check import CONFIG, WHOLE, shards_of
from noisescope.model.forwards import input_device
from noisescope.model.loading import Subject, checkpoint_folder
from noisescope.options.device_commands import LocateOptions, RecordOptions
from noisescope.options.sensitivity import DiagnoseOptions, RobustnessOptions
from noisescope.options.shared import DeviceOptions, LoadingOptions, ReportModelOptions
from noisescope.progress import begin, duration
from noisescope.trials import slices
from noisescope.untrusted_files import parse_json, read_text

SHORT = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SLOW = 1.5  # times float32: less than that may be chance
_ROWS, _SIZE, _REPEATS = 128, 1024, 3


def stored_dtype(source: str, revision: str | None = None) -> str | None:
    """The 16-bit format that a Hugging Face folder is stored in, "bfloat16" or "float16"; None for all else.

    A quantised checkpoint has its own arithmetic, and GGUF files are dequantised to float32.
    """
    if source.startswith("tiny:"):
        return None
    folder, file = checkpoint_folder(source, revision)
    if file is not None:
        return None
    path = folder / "config.json"
    config = parse_json(read_text(path, CONFIG), path, CONFIG)
    if not isinstance(config, dict) or config.get("quantization_config") is not None:
        return None
    named = config.get("dtype") or config.get("torch_dtype")
    found = named if isinstance(named, str) else _first_tensor(folder)
    return found if found in SHORT else None


def _first_tensor(folder: Path) -> str:
    """The format of a checkpoint's first tensor, as torch names it."""
    from safetensors import safe_open

    path = (shards_of(folder) or [folder / WHOLE])[0]
    try:
        with safe_open(path, framework="pt") as file:
            name = next(iter(file.keys()))
            return str(file.get_tensor(name).dtype).removeprefix("torch.")
    except Exception:  # the loader says what is wrong with the file
        return ""


def slowdown(dtype: str) -> float:
    """How many times as long as in float32 this CPU takes for a product in a 16-bit format, measured."""
    return _seconds(SHORT[dtype]) / _seconds(torch.float32)


def _seconds(dtype: torch.dtype) -> float:
    """Processor time of a product, the best of three: other programs on the machine don't count."""
    inputs, weight = torch.ones(_ROWS, _SIZE, dtype=dtype), torch.ones(_SIZE, _SIZE, dtype=dtype)
    functional.linear(inputs, weight)
    spent = []
    for _ in range(_REPEATS):
        started = time.process_time()
        functional.linear(inputs, weight)
        spent.append(time.process_time() - started)
    return max(min(spent), 1e-6)


L = TypeVar("L", bound=LoadingOptions)
R = TypeVar("R", bound=ReportModelOptions)
S = TypeVar("S", bound=DiagnoseOptions | RobustnessOptions)
Announce = Callable[[str], None]
MOST_SECONDS = 600.0  # what a run on a CPU may take where nobody asked for more
LADDER = (100, 80, 64, 48, 32, 24, 16)  # numbers of samples to choose from
FEWEST_INJECTED = 32  # samples: with fewer, injected losses have intervals too wide to decide by
_SYSTEM_UNDER_TEST = (LocateOptions, RecordOptions)  # there the stored dtype is part of what is tested


def default_device() -> tuple[str, str]:
    """The device to run on, and why."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    return "cpu", "torch sees no CUDA device here"


def load_chosen(options: L, announce: Announce) -> tuple[Subject, L]:
    """The model of a command on the device and in the dtype that were given or chosen, and the options with these."""
    options = _as_begun(options)
    chosen, reasons = _device(options)
    if "dtype" in options.left_open and options.device_map is None:
        dtype, why = _dtype(replace(options, **chosen))
        chosen["dtype"] = dtype
        reasons.append(why)
    if reasons:
        announce(", ".join(reasons))
    options = replace(options, **chosen)
    return preparation.load_subject(options), options


def load_report_chosen(report: Mapping[str, Any], options: R, announce: Announce) -> tuple[Subject, R]:
    """The model of a report; the dtype is the report's unless given."""
    chosen, reasons = _device(options)
    if reasons:
        dtype = options.dtype or f"{report['run']['conditions']['dtype']} (the report's)"
        announce(", ".join([*reasons, f"dtype {dtype}"]))
    options = replace(options, **chosen)
    return preparation.load_report_subject(report, options), options


def _device(options: DeviceOptions) -> tuple[dict[str, Any], list[str]]:
    if "device" not in options.left_open or options.device_map is not None:
        return {}, []
    device, why = default_device()
    return {"device": device}, [f"device {device} ({why})"]


def _dtype(options: LoadingOptions) -> tuple[str | None, str]:
    """The dtype to load in (None: as stored), and the choice in words."""
    if options.device == "cpu" and options.model == "demo":
        return "float32", "dtype float32"  # as `load` takes it
    stored = stored_dtype(options.model, options.revision) if options.device == "cpu" else None
    if stored is None:
        return None, "dtype as stored"
    times = slowdown(stored)
    if times < SLOW:
        return None, f"dtype {stored}, as stored"
    slow = f"{times:.1f} x slower than float32 on this CPU"
    if isinstance(options, _SYSTEM_UNDER_TEST):
        return None, f"dtype {stored}, as stored ({slow}; --dtype float32 is quicker, and another arithmetic)"
    return "float32", f"dtype float32 (stored {stored} is {slow}; --dtype {stored} keeps it)"


def _as_begun(options: L) -> L:
    """Options left open take what the run in the same output folder began with: it goes on, not another one."""
    output = getattr(options, "output", None)
    if not isinstance(output, Path) or not (output / FILE).exists():
        return options
    try:
        command, _ = stored_command(output)
    except NoisescopeError:
        return options  # damaged, or not ours: the run itself says what is wrong
    if command is None or command.name != options.command:
        return options
    now = options.plain()
    same = ("model", "data", "level", "metric", "generate", "noise_levels")
    if any(_path(now.get(name)) != _path(command.options.get(name)) for name in same):
        return options
    known = {name: command.options[name] for name in options.left_open if command.options.get(name) is not None}
    return replace(options, **known, left_open=tuple(name for name in options.left_open if name not in known))


def _path(value: object) -> object:
    """A stored command has absolute paths."""
    return str(Path(value).absolute()) if isinstance(value, str) and Path(value).exists() else value


# -- how much to measure


def choose_size(subject: Subject, options: S, announce: Announce) -> S:
    """Effort and number of samples, where left open: on a CPU what fits ten minutes, by timed samples."""
    left = {"samples"} & set(options.left_open)
    if isinstance(options, DiagnoseOptions):
        left |= {"effort"} & set(options.left_open)
    elif options.rounding:
        return options
    known_small = subject.source == "demo" or subject.source.startswith("tiny:")
    if not left or known_small or input_device(subject.model).type != "cpu":
        return options
    begin("timing samples")
    costs = _Costs(subject, options)
    options = _fitting(costs, options, left)
    announce(_words(costs, options, left))
    return options


class _Costs:
    """What a question costs at other efforts and numbers of samples."""

    def __init__(self, subject: Subject, options: DiagnoseOptions | RobustnessOptions) -> None:
        self.prepared, self.question = prepare_question(subject, options)
        self.sample = self.prepared.time_sample()
        self.slice = options.slice
        self.most = self.prepared.context.test[-1].stop  # samples that were asked for, or that the data holds
        self._known: dict[tuple[str, int], Cost] = {}

    def of(self, effort: str, samples: int) -> Cost:
        if (effort, samples) not in self._known:
            context = _resized(self.prepared.context, effort, samples, self.slice)
            planned = plan_trials(context, self.question.propose, self.prepared.subject.anatomy)
            self._known[effort, samples] = cost_of(planned, context, self.sample)
        return self._known[effort, samples]

    def seconds(self, effort: str, samples: int) -> float:
        """By interpolation: work is a fixed part and one for each sample."""
        low, high = min(LADDER[-1], self.most), self.most
        first, last = self.of(effort, low).seconds, self.of(effort, high).seconds
        return last if low == high else first + (last - first) * (samples - low) / (high - low)

    def largest(self, effort: str) -> int:
        """The largest number of samples that fits; 0 where none does."""
        sizes = sorted({min(size, self.most) for size in LADDER}, reverse=True)
        return next((size for size in sizes if self.seconds(effort, size) <= MOST_SECONDS), 0)


def _resized(context: StudyContext, effort: str, samples: int, size: int) -> StudyContext:
    test, curved, calibration = context.test[0].data, context.curvature_slice, context.calibration
    if calibration is not None and calibration.data == test:
        calibration = replace(calibration, stop=min(calibration.stop, samples))
    return replace(
        context,
        settings=replace(context.settings, effort=effort),
        test=slices(test, samples, size),
        all_token_slices=slices(context.all_token_slices[0].data, samples, size) if context.all_token_slices else (),
        curvature_slice=None if curved is None else replace(curved, stop=min(FEW, samples)),
        calibration=calibration,
    )


def _fitting(costs: _Costs, options: S, left: set[str]) -> S:
    if not isinstance(options, DiagnoseOptions):
        return replace(options, samples=costs.largest("standard") or min(LADDER[-1], costs.most))
    given = options.samples
    if left == {"effort"}:
        fits = costs.seconds("standard", costs.most) <= MOST_SECONDS
        return replace(options, effort="standard" if fits else "screen")
    if left == {"samples"}:
        return replace(options, samples=costs.largest(options.effort) or min(LADDER[-1], costs.most))
    samples = costs.largest("standard")
    if samples >= min(FEWEST_INJECTED, costs.most):
        return replace(options, effort="standard", samples=samples)
    return replace(options, effort="screen", samples=costs.largest("screen") or min(LADDER[-1], costs.most, given))


def _words(costs: _Costs, options: DiagnoseOptions | RobustnessOptions, left: set[str]) -> str:
    """What was chosen, what it takes, and what more would buy."""
    effort = options.effort if isinstance(options, DiagnoseOptions) else "standard"
    samples = min(options.samples, costs.most)
    named = f"effort {effort}, " if isinstance(options, DiagnoseOptions) else ""
    took = f"{named}{samples} samples: about {duration(costs.seconds(effort, samples))} on this CPU, by timed samples"
    if samples < costs.most and "samples" in left:
        smaller = math.sqrt(costs.most / samples)
        longer = duration(costs.seconds(effort, costs.most))
        return f"{took}. --samples {costs.most} takes about {longer} and detects losses {smaller:.1f} x smaller"
    if "effort" in left and effort != "full":
        more, buys = ("standard", "confirms predictions by injection")
        if effort == "standard":
            more, buys = ("full", "injects into every layer and operator")
        return f"{took}. --effort {more} takes about {duration(costs.seconds(more, samples))} and {buys}"
    return took
