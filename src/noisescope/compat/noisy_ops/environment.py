"""Settings of `noisescope.noisy_ops` from environment variables, and running a script under them.

Launchers start one process per device. Processes draw different noise: the rank (NOISESCOPE_RANK, else RANK, as
torchrun and Ray's trainers set it) is part of the seed. Processes that share samples (tensor parallel) need the same
NOISESCOPE_RANK.
"""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from noisescope.compat import noisy_ops
from noisescope.compat.noisy_ops.settings import Settings
from noisescope.compat.noisy_ops.state import state
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.probe.noise import Gaussian
from noisescope.training.launch import ALIASED, NOTES_PREFIX, flag, keep_tally, rank, read


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
    """Read settings from the environment; enable if it says so, or by `enabled` if it does not decide."""
    _warn_of_unknown()
    with state.lock:
        forward_only, backward_only = read("FORWARD_ONLY", flag), read("BACKWARD_ONLY", flag)
        if bool(forward_only) != bool(backward_only):
            noisy_ops.set_noise_phases(forward=bool(forward_only), backward=bool(backward_only))
        read("OPERATORS", lambda text: noisy_ops.set_selective_operators(text.split(",")))
        read("LAYERS", _select_layers)
        scale = read("SCALE", lambda text: Gaussian(float(text)).scale)  # which refuses bad numbers
        kind = read("TYPE", _error_type)
        all_ops, seed = read("ALL_OPS", flag), read("SEED", int)
        wanted = read("ENABLED", flag)
        state.change(training_only=bool(read("TRAINING_ONLY", flag)))
        if enabled if wanted is None else wanted:
            noisy_ops.enable_noisy_ops(
                0.05 if scale is None else scale, kind or "relative_gaussian", bool(all_ops), _ranked(seed)
            )
            read("TALLY", lambda folder: keep_tally(Path(folder), _counts))


def _warn_of_unknown() -> None:
    """A misspelt variable would silently run without the intended noise."""
    names = sorted(name for name in os.environ if name.startswith(NOTES_PREFIX))
    unknown = [name for name in names if name.removeprefix(NOTES_PREFIX) not in ALIASED]
    if unknown:
        known = ", ".join(f"{NOTES_PREFIX}{name}" for name in ALIASED)
        message = f"unknown environment variables were ignored: {', '.join(unknown)}. Known: {known}"
        warnings.warn(message, stacklevel=3)


def _ranked(seed: int | None) -> int | None:
    """A seed for this process; process 0 has the seed itself."""
    if not (number := rank()):
        return seed
    return (torch.initial_seed() if seed is None else seed) + (number << 64)


def _counts() -> dict[str, int]:
    return state.counts("total").get("", {"forward": 0, "backward": 0})


def report_at_exit() -> None:
    """Print an error at exit if noise that the environment enabled had no effect."""
    try:
        noisy_ops.disable_noisy_ops()
    except NoisescopeError as error:
        print(f"noisescope: {error}", file=sys.stderr)


def run_script(arguments: list[str]) -> Any:
    """Run a script with noise on. The exit code is the script's, or 2 if nothing was injected."""
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
