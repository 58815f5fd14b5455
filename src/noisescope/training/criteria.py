"""The original method notes' criteria for noise in training, as regions (see `hypotheses`), and what they say together.

Points are percentage points of accuracy. Arms are compared only where both were trained. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from noisescope.training.hypotheses import REFUTED, SUPPORTED, UNDECIDED, Criterion

BETTER, SIMILAR, POOR = 0.05, 0.01, 0.02  # points of accuracy: at least, less than, at most
STABLE = math.log(1.1)  # the notes' band of gradient ratios, 0.9 to 1.1


def criteria(arms: Mapping[str, str], levels: Sequence[float], scale: float) -> list[Criterion]:
    """Those that the trained arms can answer. `arms` gives the name of the main arm of each kind."""
    noisy = [level for level in levels if level]
    at = min(noisy, key=lambda level: abs(level - scale)) if noisy else 0.0  # tested at the training's own scale
    found: list[Criterion] = []

    def add(name: str, statement: str, quantity: str, a: str, b: str, **region: float) -> None:
        if a in arms and b in arms:
            found.append(Criterion(name, statement, quantity, arms[a], arms[b], **region))

    where = f"at {100 * at:g} % noise"
    add("forward beats both", f"accuracy {where} is at least 5 points higher after forward noise alone than after both",
        "accuracy", "forward", "both", level=at, low=BETTER)  # fmt: skip
    add("forward retains more", f"more of the clean accuracy is retained {where} after forward noise alone than both",
        "retention", "forward", "both", level=at, low=0.0)  # fmt: skip
    add("similar training", "clean accuracy after forward noise and after both differs by less than 1 point",
        "accuracy", "forward", "both", low=-SIMILAR, high=SIMILAR)  # fmt: skip
    add("backward is worse", f"accuracy {where} is lower after backward noise than after forward noise",
        "accuracy", "backward", "forward", level=at, high=0.0)  # fmt: skip
    add("backward is poor", f"accuracy {where} is at most 2 points higher after backward noise than without noise",
        "accuracy", "backward", "none", level=at, high=POOR)  # fmt: skip
    add("similar stability: gradients", "gradient norms under both and under backward noise are within a factor of 1.1",
        "gradient_norm", "both", "backward", low=-STABLE, high=STABLE)  # fmt: skip
    add("similar stability: loss", "held-out losses under both and under backward noise are within a factor of 1.1",
        "held_out", "both", "backward", low=-STABLE, high=STABLE)  # fmt: skip
    for level in noisy:
        where = f"at {100 * level:g} % noise"
        for kind, words in (("forward", "forward noise"), ("both", "noise both ways"), ("norm", "norm-weight noise")):
            add(f"{words} helps {where}", f"accuracy {where} is higher after training with {words} than without noise",
                "accuracy", kind, "none", level=level, low=0.0)  # fmt: skip
        add(f"adaptive beats uniform {where}", f"accuracy {where} is higher after noise with per-layer factors than "
            "after uniform noise of the same total cost", "accuracy", "adaptive", "both",
            level=level, low=0.0)  # fmt: skip
        add(f"dose {where}", f"accuracy {where} is higher after forward noise of the full scale than of the smaller",
            "accuracy", "forward", "smaller", level=level, low=0.0)  # fmt: skip
        add(f"constant beats falling {where}", f"accuracy {where} is higher after constant than after falling noise",
            "accuracy", "both", "falling", level=level, low=0.0)  # fmt: skip
    return found


def main_arms(arms: Sequence[Any], scale: float) -> dict[str, str]:
    """The arm that stands for each kind in the criteria: constant, of the experiment's scale where there are several.

    "smaller" is the strongest forward arm below that scale, "falling" the both-ways arm whose schedule falls.
    """
    found: dict[str, str] = {}
    for arm in sorted(arms, key=lambda arm: (abs(arm.scale - scale), str(arm))):
        if arm.schedule == "constant":
            found.setdefault(arm.kind, str(arm))
            if arm.kind == "forward" and arm.scale < scale:
                found.setdefault("smaller", str(arm))
        elif arm.kind == "both":
            found.setdefault("falling", str(arm))
    return found


def ceilings(rows: Sequence[Mapping[str, Any]], accuracy: Mapping[tuple[str, float], float]) -> list[str]:
    """Where the better arm could not have been as much better as asked: such a criterion is refuted by the task."""
    found = []
    for row in rows:
        low, known = row["region"][0], accuracy.get((row["arms"][1], row["noise_level"]))
        if row["quantity"] == "accuracy" and low and known is not None and known + low > 1:
            found.append(
                f"{row['name']}: {row['arms'][1]} answers {100 * known:.1f} % already, so {100 * low:g} points more "
                "are out of reach; ask at a higher noise level, or a harder task"
            )
    return found


_VERIFIED = ("forward beats both", "backward is worse", "similar stability: gradients", "similar stability: loss")


def theory(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The notes' theory (gradient noise regularises, activation noise makes robust) by its own rule.

    Verified where every one of its predictions is supported; falsified where forward noise is refuted to beat both, or
    refuted to help at all.
    """
    verdicts = {row["name"]: row["verdict"] for row in rows}
    known = {name: verdicts[name] for name in _VERIFIED if name in verdicts}
    useless = [name for name in verdicts if name.startswith("forward noise helps") and verdicts[name] == REFUTED]
    if known.get("forward beats both") == REFUTED or useless:
        word = REFUTED
    elif len(known) == len(_VERIFIED) and set(known.values()) == {SUPPORTED}:
        word = SUPPORTED
    else:
        word = UNDECIDED
    return {"verdict": word, "because": {**known, **dict.fromkeys(useless, REFUTED)}}
