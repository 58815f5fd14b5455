"""Reads a worker's settings from its launcher's environment variables, and writes its count of injections."""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from noisescope.atomic_write import write_file
from noisescope.errors import InvalidInput

NOTES_PREFIX = "VERL_NOISY_OPS_"
ALIASED = ("ENABLED", "SCALE", "TYPE", "ALL_OPS", "FORWARD_ONLY", "BACKWARD_ONLY", "TRAINING_ONLY")
STEP_FILE = "step"  # in the folder of the tally: the trainer's step, for schedules in rollout workers
_TALLY_SECONDS = 5.0
_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}


def read(name: str, parse: Callable[[str], Any]) -> Any:
    """The parsed value of an environment variable; None if it is not set, or empty."""
    for variable in (f"NOISESCOPE_{name}", *([f"{NOTES_PREFIX}{name}"] if name in ALIASED else [])):
        text = os.environ.get(variable, "").strip()
        if text:
            try:
                return parse(text)
            except (ValueError, KeyError) as error:
                why = f"allowed: {', '.join(_FLAGS)}" if isinstance(error, KeyError) else error
                raise InvalidInput(f"environment variable {variable}={text!r}: {why}") from None
    return None


def flag(text: str) -> bool:
    return _FLAGS[text.lower()]


def rank() -> int:
    """This process's number among those that see different samples."""
    own = read("RANK", int)
    return int(os.environ.get("RANK") or 0) if own is None else int(own)


def keep_tally(folder: Path, counts: Callable[[], dict[str, int]]) -> None:
    """Write this process's counts into a file of the folder: now, every few seconds, and at the end.

    A worker may be killed without notice, so writing only at the end is too late. `training.launch.confirm` reads the
    files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank{rank()}-{os.getpid()}.json"

    def write() -> None:
        write_file(file, json.dumps({"rank": rank(), **counts()}))

    def write_on() -> None:
        while True:
            write()
            time.sleep(_TALLY_SECONDS)

    atexit.register(write)
    threading.Thread(target=write_on, name="noisescope-tally", daemon=True).start()
