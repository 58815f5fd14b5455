"""Noise in workers that a launcher spawns: by environment variables, with a check that it took. No torch.

    variables = launch.environment(0.05, seed=1, tally="/shared/tally")      # give these to the workers
    ...                                                                      # the training runs
    launch.confirm("/shared/tally", workers=8)                               # raises unless all eight injected

Workers read them when `noisescope.noisy_ops` is imported there; docs/training.md has the one line for each launcher.
The scale is constant: a launcher's worker does not know the step. Where you write the loop, or there is a Trainer, use
a schedule (`aqn`, `callback`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from noisescope.errors import InvalidInput, NothingInjected, unknown
from noisescope.injection import checked_scale
from noisescope.sites import PHASES, canonical_operator


def environment(
    scale: float = 0.05,
    *,
    phases: Iterable[str] = PHASES,
    operators: Iterable[str] | None = None,
    seed: int = 0,
    tally: str | Path | None = None,
    without_gradients: bool = False,
) -> dict[str, str]:
    """The environment variables of a worker. `tally` is a folder that all workers can write into."""
    chosen = frozenset(phases)
    for phase in chosen:
        if phase not in PHASES:
            raise unknown("phase", phase, PHASES)
    if not chosen:
        raise InvalidInput("phases is empty: give 'forward', 'backward' or both")
    variables = {
        "NOISESCOPE_ENABLED": "1",
        "NOISESCOPE_SCALE": repr(checked_scale(scale, "scale")),
        "NOISESCOPE_SEED": str(seed),
        "NOISESCOPE_TRAINING_ONLY": "0" if without_gradients else "1",
    }
    if len(chosen) == 1:
        variables[f"NOISESCOPE_{next(iter(chosen)).upper()}_ONLY"] = "1"
    if operators is not None:
        variables["NOISESCOPE_OPERATORS"] = ",".join(sorted(canonical_operator(name) for name in operators))
    if tally is not None:
        variables["NOISESCOPE_TALLY"] = str(Path(tally).absolute())
    return variables


def confirm(tally: str | Path, workers: int) -> dict[str, dict[str, int]]:
    """What each worker counted, by file; raises NothingInjected unless `workers` of them report and all injected.

    Workers write every five seconds: ask after the first steps, or at the end.
    """
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(Path(tally).glob("rank*.json"))}
    if len(found) < workers:
        raise NothingInjected(
            f"{len(found)} of {workers} workers report in {tally}: the others never imported noisescope.noisy_ops, or "
            "did not get the environment variables"
        )
    silent = [name for name, counts in found.items() if not counts["forward"] + counts["backward"]]
    if silent:
        raise NothingInjected(
            f"{', '.join(silent)} injected nothing: noise was enabled there after its model was compiled, or no model "
            "with the operators aimed at ran with gradients (a rollout worker has none)"
        )
    ranks = [counts["rank"] for counts in found.values()]
    if len(set(ranks)) < len(ranks):
        raise InvalidInput(
            f"several workers have the same rank ({sorted(ranks)}), so they drew the same noise: set RANK or "
            "NOISESCOPE_RANK in each, unless they share their samples"
        )
    return found
