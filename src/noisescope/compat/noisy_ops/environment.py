"""Settings of `noisescope.noisy_ops` from environment variables, and a script run under them.

Launchers start one process a device. Processes draw different noise: the rank (NOISESCOPE_RANK, else RANK, as torchrun
and Ray's trainers set it) is part of the seed. Those that share samples (tensor parallel) need one NOISESCOPE_RANK.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from noisescope.atomic_write import write_file
from noisescope.compat import noisy_ops
from noisescope.compat.noisy_ops.settings import Settings
from noisescope.compat.noisy_ops.state import state
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.probe.noise import Gaussian

_NOTES_PREFIX = "VERL_NOISY_OPS_"
_ALIASED = ("ENABLED", "SCALE", "TYPE", "ALL_OPS", "FORWARD_ONLY", "BACKWARD_ONLY", "TRAINING_ONLY")
_TALLY_SECONDS = 5.0
_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def _read(name: str, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of an environment variable; None where it is not set, or empty."""
    for variable in (f"NOISESCOPE_{name}", *([f"{_NOTES_PREFIX}{name}"] if name in _ALIASED else [])):
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                return parse(text)
            except (ValueError, KeyError) as error:
                why = f"allowed: {', '.join(_FLAGS)}" if isinstance(error, KeyError) else error
                raise InvalidInput(f"environment variable {variable}={text!r}: {why}") from None
    return None


def _flag(text: str) -> bool:
    return _FLAGS[text.lower()]


def _error_type(text: str) -> str:
    Settings(kind=text).injection()
    return text


def _select_layers(text: str) -> None:
    ends = [part.partition("-") for part in text.split(",")]
    try:
        layers = [n for first, dash, last in ends for n in range(int(first), int(last if dash else first) + 1)]
    except ValueError:
        raise InvalidInput("expected block numbers such as 0,5,9-11") from None
    state.register_first = True
    noisy_ops.set_selective_layers(layers)


def read_environment(*, enabled: bool = False) -> None:
    """Take settings from the environment; enable if it asks for that, or by `enabled` where it does not decide."""
    _warn_of_unknown()
    with state.lock:
        forward_only, backward_only = _read("FORWARD_ONLY", _flag), _read("BACKWARD_ONLY", _flag)
        if bool(forward_only) != bool(backward_only):
            noisy_ops.set_noise_phases(forward=bool(forward_only), backward=bool(backward_only))
        _read("OPERATORS", lambda text: noisy_ops.set_selective_operators(text.split(",")))
        _read("LAYERS", _select_layers)
        scale = _read("SCALE", lambda text: Gaussian(float(text)).scale)  # which refuses bad numbers
        kind = _read("TYPE", _error_type)
        all_ops, seed = _read("ALL_OPS", _flag), _read("SEED", int)
        wanted = _read("ENABLED", _flag)
        state.change(training_only=bool(_read("TRAINING_ONLY", _flag)))
        if enabled if wanted is None else wanted:
            noisy_ops.enable_noisy_ops(
                0.05 if scale is None else scale, kind or "relative_gaussian", bool(all_ops), _ranked(seed)
            )
            _read("TALLY", lambda folder: keep_tally(Path(folder)))


def _warn_of_unknown() -> None:
    """A misspelt variable would make a run without the noise that was meant."""
    names = sorted(name for name in os.environ if name.startswith(_NOTES_PREFIX))
    unknown = [name for name in names if name.removeprefix(_NOTES_PREFIX) not in _ALIASED]
    if unknown:
        known = ", ".join(f"{_NOTES_PREFIX}{name}" for name in _ALIASED)
        message = f"unknown environment variables, which have no effect: {', '.join(unknown)}. Known: {known}"
        warnings.warn(message, stacklevel=3)


def rank() -> int:
    """This process's number among those that see different samples."""
    own = _read("RANK", int)
    return int(os.environ.get("RANK") or 0) if own is None else int(own)


def _ranked(seed: int | None) -> int | None:
    """A seed of this process alone; process 0 has the seed itself."""
    if not (number := rank()):
        return seed
    return (torch.initial_seed() if seed is None else seed) + (number << 64)


def keep_tally(folder: Path) -> None:
    """Write this process's counts into a file of the folder: now, every few seconds, and at the end.

    A worker may be killed without a word, so the end alone is too late. `training.launch.confirm` reads the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank{rank()}-{os.getpid()}.json"

    def write() -> None:
        counts = state.counts("total").get("", {"forward": 0, "backward": 0})
        write_file(file, json.dumps({"rank": rank(), **counts}))

    def write_on() -> None:
        while True:
            write()
            time.sleep(_TALLY_SECONDS)

    atexit.register(write)
    threading.Thread(target=write_on, name="noisescope-tally", daemon=True).start()


def report_at_exit() -> None:
    """Nobody disables what the environment enabled: print an error if it did nothing."""
    try:
        noisy_ops.disable_noisy_ops()
    except NoisescopeError as error:
        print(f"noisescope: {error}", file=sys.stderr)


def run_script(arguments: list[str]) -> Any:
    """Run a script with noise on. The exit code is the script's, or 2 where nothing was injected."""
    if not arguments or not Path(arguments[0]).is_file():
        came = f"no file {arguments[0]!r}; " if arguments else ""
        usage = "usage: python -m noisescope.noisy_ops SCRIPT.py [ARGUMENTS...]"
        print(f"noisescope: {came}{usage}", file=sys.stderr)
        return 2
    read_environment(enabled=True)
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)  # as `python script.py` has it
    code: Any = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    finally:
        noisy_ops.print_injection_summary(sys.stderr)
    try:
        noisy_ops.disable_noisy_ops()
    except NoisescopeError as error:
        print(f"noisescope: {error}", file=sys.stderr)
        code = code or error.exit_code
    return code
