"""Noise in several processes: enabled by a launcher's environment variables, and drawn by data-parallel rank.

    variables = launch.environment(0.05, seed=1, tally="tally")              # give these to the workers
    ...                                                                      # the training runs
    launch.confirm(variables["NOISESCOPE_TALLY"], workers=8)                 # raises unless all eight injected

Workers read them when `noisescope.noisy_ops` is imported there; docs/training.md has the one line for each launcher.
The scale is constant there: a launcher's worker does not know the step. Where you write the loop, or there is a
Trainer, use a schedule (aqn.py, trainer_callback.py). vLLM's rollout workers read the variables by a plugin
(engines/vllm_plugin.py) and learn the step by `set_step`. A worker writes its count of injections.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from noisescope.atomic_write import write_file
from noisescope.errors import InvalidInput, NothingInjected, unknown
from noisescope.injection import checked_scale
from noisescope.sites import PHASES, canonical_operator
from noisescope.training import schedules
from noisescope.untrusted_files import FileKind, read_foreign

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


TENSOR = ("tp", "tensor", "tensor_parallel", "model", "sp", "cp", "ep", "pp")  # dimensions that split one sample's work
TALLY = FileKind("injection tally", "Call launch.environment() again and rerun")


@dataclass(frozen=True)
class WorkerTally:
    rank: int
    forward: int
    backward: int


def environment(
    scale: float = 0.05,
    *,
    phases: Iterable[str] | str = PHASES,
    operators: Iterable[str] | str | None = None,
    seed: int = 0,
    tally: str | Path | None = None,
    without_gradients: bool = False,
    schedule: str = "constant",
    steps: int = 1,
) -> dict[str, str]:
    """The environment variables of a run's workers; what they inherit of these is overridden.

    `tally` is a folder that all workers can write into. Each call is a run with a folder of its own in it
    (variables["NOISESCOPE_TALLY"]), so that an earlier run's counts are never taken for this one's.

    A `schedule` over `steps` is for rollout workers (`without_gradients`), which learn the step from `set_step`.
    """
    if checked_scale(scale, "scale") == 0:
        raise InvalidInput("scale 0 means no noise: give a scale above 0, or start the workers without these variables")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInput(f"seed must be an int, got {seed!r}")
    chosen = _names(phases)
    for phase in chosen:
        if phase not in PHASES:
            raise unknown("phase", phase, PHASES)
    if not chosen:
        raise InvalidInput("phases is empty: give 'forward', 'backward' or both")
    targets = None if operators is None else sorted(canonical_operator(name) for name in _names(operators))
    if targets == []:
        raise InvalidInput("operators is empty: name some, such as ['softmax'], or omit it for all matrix products")
    schedules.named(schedule, scale, steps)  # which refuses bad values
    if schedule != "constant" and (tally is None or not without_gradients):
        raise InvalidInput(
            f"the schedule {schedule} works only in rollout workers, which read the step from the tally folder: "
            f"give without_gradients=True and tally. In a trainer use training.noise or its callback"
        )
    variables = {
        "NOISESCOPE_SCHEDULE": schedule,
        "NOISESCOPE_STEPS": str(steps),
        "NOISESCOPE_ENABLED": "1",
        "NOISESCOPE_SCALE": repr(float(scale)),
        "NOISESCOPE_SEED": str(seed),
        "NOISESCOPE_TRAINING_ONLY": "0" if without_gradients else "1",
        "NOISESCOPE_FORWARD_ONLY": "1" if chosen == {"forward"} else "0",
        "NOISESCOPE_BACKWARD_ONLY": "1" if chosen == {"backward"} else "0",
        "NOISESCOPE_OPERATORS": ",".join(targets or ()),  # empty is as not set
    }
    if tally is not None:
        variables["NOISESCOPE_TALLY"] = str(Path(tally).absolute() / f"run-{secrets.token_hex(4)}")
    return variables


def _names(given: Iterable[str] | str) -> set[str]:
    """A set given as any collection, or (a kind mistake) as one bare name."""
    return {given} if isinstance(given, str) else set(given)


def set_step(tally: str | Path, step: int) -> None:
    """Set the trainer's step for rollout workers, which determines the scale and draws of their next forward.

    `tally` is the run's own folder, variables["NOISESCOPE_TALLY"].
    """
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise InvalidInput(f"a step must be an integer of at least 0, got {step!r}")
    write_file(Path(tally) / STEP_FILE, str(step))


def confirm(tally: str | Path, workers: int) -> dict[str, dict[str, int]]:
    """What each worker of a run counted, by file; raises unless exactly `workers` of them report injections.

    `tally` is the run's own folder, variables["NOISESCOPE_TALLY"]. Workers write every five seconds: ask after the
    first steps, or at the end.
    """
    files = sorted(Path(tally).glob("rank*.json"))
    found = {path.stem: vars(read_foreign(path, WorkerTally, TALLY)) for path in files}
    if len(found) < workers:
        raise NothingInjected(
            f"{len(found)} of {workers} workers reported in {tally}: the others never imported noisescope.noisy_ops "
            f"or did not receive the environment variables. The folder is variables['NOISESCOPE_TALLY']"
        )
    if len(found) > workers:
        raise InvalidInput(
            f"{len(found)} workers reported in {tally}, but {workers} were expected: some were restarted, or "
            f"another run wrote to the same folder. Call launch.environment() again for each run"
        )
    silent = [name for name, counts in found.items() if not counts["forward"] + counts["backward"]]
    if silent:
        raise NothingInjected(
            f"{', '.join(silent)} injected nothing: noise was enabled there after its model was compiled, or no model "
            "with the targeted operators ran with gradients (a rollout worker has none)"
        )
    ranks = [counts["rank"] for counts in found.values()]
    if len(set(ranks)) < len(ranks):
        raise InvalidInput(
            f"several workers have the same rank ({sorted(ranks)}), so they drew the same noise: set RANK or "
            "NOISESCOPE_RANK in each, unless they share their samples"
        )
    return found


def data_rank(model: nn.Module) -> int:
    """This process's number among those that see different samples; 0 where there is only one process.

    Data-parallel processes see different samples, so each draws its own noise. Tensor-parallel ones hold parts of the
    same samples and must agree, or their copies of an activation drift apart: they share a number. Which is which is
    read from the device meshes of the parameters; if it can't be read, the caller must pass it. FSDP2 gathers a block's
    weights before its forward, so noise on a weight applies to the whole weight, never to the sharded parameter.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    meshes.append(getattr(model, "_device_mesh", None))  # transformers keeps that of a distributed model here
    split = [mesh for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values() if _splits(mesh, model)]
    if not split:
        return dist.get_rank()
    return rank_beside(max(split, key=lambda mesh: mesh.ndim))


def _splits(mesh: Any, model: nn.Module) -> bool:
    """Whether a mesh dimension splits the work on one sample; an error if its dimensions have no names."""
    if mesh.mesh_dim_names is not None:
        return any(name in TENSOR for name in mesh.mesh_dim_names)
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return False  # FSDP2's own mesh: it shards weights, not samples
    raise InvalidInput(
        "the model is spread over a device mesh whose dimensions have no names, so noisescope can't determine which "
        "processes see the same samples: pass rank=, equal in processes that share samples and different in all others"
    )


def rank_beside(mesh: Any) -> int:
    """The number of the group of processes that share samples: a position in the mesh's other dimensions."""
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    others = [(mesh.size(d), coordinate[d]) for d, name in enumerate(names) if name not in TENSOR]
    if not others:  # a slice of a larger mesh: its groups are numbered by their first process
        return int(mesh.mesh.flatten()[0])
    number = 0
    for size, position in others:
        number = number * size + position
    return number
