"""The original method notes' criteria for noise in training, as regions (see hypotheses.py), and their theory.

Points are percentage points of accuracy. Arms are compared only where both were trained, at the same scale. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from noisescope.reports.experiment import JudgedCriterion, Theory
from noisescope.training.hypotheses import REFUTED, SUPPORTED, UNDECIDED, UNMEASURABLE, Criterion

if TYPE_CHECKING:
    from noisescope.training.phases_experiment import Arm

BETTER, SIMILAR, POOR = 0.05, 0.01, 0.02  # points of accuracy: at least, less than, at most
STABLE = math.log(1.1)  # the notes' band of gradient ratios, 0.9 to 1.1


UNEVEN = {  # roles of arms that are compared with uniform constant noise both ways
    "adaptive": "noise with per-layer factors than after uniform noise of the same total cost",
    "methodology": "noise with factors of 0.5, 1 and 2 by loss (limits 5 and 15 %) than after uniform noise",
    "summary": "noise with factors of 0.5, 1 and 2 by loss (limits 2 and 10 %) than after uniform noise",
    "sensitive": "more noise in sensitive layers than after uniform noise of the same total cost",
    "rising": "noise that rises from step to step than after constant noise",
}

Pair = tuple["Arm", "Arm"]


def criteria(
    arms: Sequence[Arm], levels: Sequence[float], scale: float, *, same_noise: bool = False
) -> list[Criterion]:
    """Those that the trained arms can answer; `scale` is the experiment's, to choose among several arms of a kind."""
    noisy = [level for level in levels if level]
    found: list[Criterion] = []

    def add(
        name: str, statement: str, quantity: str, pair: Pair | None, *, own_level: bool = False,
        falsifies: bool = False, **region: float
    ) -> None:  # fmt: skip
        """Where such arms were trained; `own_level` is the noise level nearest to what they were trained with."""
        if pair is None or (own_level and not noisy):
            return
        if own_level:
            region["level"] = min(noisy, key=lambda level: abs(level - pair[0].scale))
            statement = statement.format(f"at {100 * region['level']:g} % noise")
        a, b = str(pair[0]), str(pair[1])
        found.append(Criterion(name, statement, quantity, a, b, falsifies=falsifies, **region))

    forward_both = matched(arms, "forward", "both", scale)
    add("forward beats both",
        "accuracy {} is at least 5 points higher after forward noise alone than after both",
        "accuracy", forward_both, own_level=True, falsifies=True, low=BETTER)  # fmt: skip
    add("forward retains more",
        "more of the clean accuracy is retained {} after forward noise alone than both",
        "retention", forward_both, own_level=True, low=0.0)  # fmt: skip
    add("similar training", "clean accuracy after forward noise and after both differs by less than 1 point",
        "accuracy", forward_both, low=-SIMILAR, high=SIMILAR)  # fmt: skip
    add("backward is worse", "accuracy {} is lower after backward noise than after forward noise",
        "accuracy", matched(arms, "backward", "forward", scale), own_level=True, high=0.0)  # fmt: skip
    add("backward is poor", "accuracy {} is at most 2 points higher after backward noise than without noise",
        "accuracy", matched(arms, "backward", "none", scale), own_level=True, high=POOR)  # fmt: skip
    both_backward = matched(arms, "both", "backward", scale)
    add("similar stability: gradients", "gradient norms under both and under backward noise are within a factor of 1.1",
        "gradient_norm", both_backward, low=-STABLE, high=STABLE)  # fmt: skip
    add("similar stability: loss", "held-out losses under both and under backward noise are within a factor of 1.1",
        "held_out", both_backward, low=-STABLE, high=STABLE)  # fmt: skip
    for level in noisy:
        where = f"at {100 * level:g} % noise"
        for kind, words in (("forward", "forward noise"), ("both", "noise both ways"), ("norm", "norm-weight noise")):
            add(f"{words} helps {where}", f"accuracy {where} is higher after training with {words} than without noise",
                "accuracy", matched(arms, kind, "none", scale), falsifies=kind == "forward", level=level,
                low=0.0)  # fmt: skip
        for kind, words in UNEVEN.items():
            add(f"{kind} beats uniform {where}", f"accuracy {where} is higher after {words}", "accuracy",
                matched(arms, kind, "both", scale), level=level, low=0.0)  # fmt: skip
        for arm in arms if same_noise else ():
            if arm.kind != "none":
                found.append(Criterion(f"same noise helps {arm} {where}", f"{arm}: accuracy {where} is higher under "
                             "draws of its own training than under others", "same_noise", str(arm), str(arm),
                             level=level, low=0.0))  # fmt: skip
        add(f"dose {where}", f"accuracy {where} is higher after forward noise of the full scale than of the smaller",
            "accuracy", doses(arms, scale), level=level, low=0.0)  # fmt: skip
        add(f"constant beats falling {where}", f"accuracy {where} is higher after constant than after falling noise",
            "accuracy", matched(arms, "both", "falling", scale), level=level, low=0.0)  # fmt: skip
    return found


def of_second(name: str, first: Sequence[Criterion], arms: Sequence[Arm], levels: Sequence[float]) -> list[Criterion]:
    """The same criteria of a second model or task; and whether a second model retains more by itself."""
    of = f", {name}"
    found = [
        replace(
            row, name=row.name + of, statement=f"{name}: {row.statement}", a=row.a + of, b=row.b + of, falsifies=False
        )
        for row in first
    ]
    if name != "second model" or not any(arm.kind == "none" for arm in arms):
        return found
    statement = "trained without noise, the second model retains more of its accuracy than the first"
    return found + [
        Criterion(f"size at {100 * level:g} % noise", f"{statement} at {100 * level:g} % noise", "retention",
                  f"none{of}", "none", level=level, low=0.0)
        for level in levels if level
    ]  # fmt: skip


def matched(arms: Sequence[Arm], a: str, b: str, scale: float) -> Pair | None:
    """Arms for two roles that differ in nothing else: of one scale (no noise has none), the nearest to `scale`."""
    pairs = [
        (one, other)
        for one in arms
        for other in arms
        if (_role(one), _role(other)) == (a, b) and (b == "none" or one.scale == other.scale)
    ]
    return min(pairs, key=lambda pair: (abs(pair[0].scale - scale), str(pair)), default=None)


def doses(arms: Sequence[Arm], scale: float) -> Pair | None:
    """The forward arm nearest to `scale`, and the strongest below it."""
    forward = [arm for arm in arms if _role(arm) == "forward"]
    main = min(forward, key=lambda arm: abs(arm.scale - scale), default=None)
    smaller = [arm for arm in forward if main is not None and arm.scale < main.scale]
    return (main, max(smaller, key=lambda arm: arm.scale)) if main is not None and smaller else None


def _role(arm: Arm) -> str | None:
    """An arm's kind where its noise is constant; "falling" is noise both ways that falls, "rising" that rises."""
    if arm.schedule == "constant":
        return arm.kind
    if arm.schedule == "rising":
        return "rising" if arm.kind == "both" else None
    return "falling" if arm.kind == "both" else None


_VERIFIED = ("forward beats both", "backward is worse", "similar stability: gradients", "similar stability: loss")


def theory(rows: Sequence[JudgedCriterion]) -> Theory:
    """The notes' theory (gradient noise regularises, activation noise makes models robust) by its own rule.

    Verified where every one of its predictions is supported; falsified where forward noise is refuted to beat both, or
    refuted to help at all. What this task can't measure speaks neither for it nor against it.
    """
    verdicts = {row.name: row.verdict for row in rows}
    known = {name: verdicts[name] for name in _VERIFIED if name in verdicts and verdicts[name] != UNMEASURABLE}
    beyond = any(name in verdicts and verdicts[name] == UNMEASURABLE for name in _VERIFIED)
    against = [row.name for row in rows if row.falsifies and row.verdict == REFUTED]
    if against:
        word = REFUTED
    elif beyond:
        word = UNMEASURABLE
    elif len(known) == len(_VERIFIED) and set(known.values()) == {SUPPORTED}:
        word = SUPPORTED
    else:
        word = UNDECIDED
    return Theory(word, {**known, **dict.fromkeys(against, REFUTED)})
