"""What a verdict covers: the phases and shapes that ran, the share checked, and what was not checked, by name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from noisescope.localization.resolution import Resolution
from noisescope.sites import Place

BACKWARD = "backward"
SHOWN = 3  # shapes named in a headline
ENOUGH = 0.95  # of modules, of parameters and of multiply-adds, each: the least for a plain "healthy"


@dataclass(frozen=True)
class Phase:
    """Forwards of one shape: a prefill, or the decode steps that follow it with the model's cache."""

    kind: str  # "prefill", "decode" or BACKWARD; "images" where there are no tokens
    batch: int
    tokens: int  # of each sequence; in decode those in the cache before the first step
    steps: int = 1  # forwards
    padding: str = ""  # "left" or "right"
    encoded: bool = False  # with synthetic encoder states, which cross attention reads

    def __str__(self) -> str:
        padded = f", {self.padding} padding" if self.padding else ""
        padded += ", with encoder states" if self.encoded else ""
        if self.kind == "decode":
            return f"decode {self.batch} x {self.steps} tokens after {self.tokens}{padded}"
        if self.kind == BACKWARD:
            return f"backward {self.batch} x {self.tokens} tokens{padded}, {self.steps} micro-batches"
        if self.kind == "images":
            return f"images, batch of {self.batch}"
        times = f", {self.steps} forwards" if self.steps > 1 else ""
        return f"prefill {self.batch} x {self.tokens} tokens{padded}{times}"


@dataclass(frozen=True)
class Share:
    """A share of modules, parameters or multiply-adds."""

    judged: float
    total: float

    @property
    def share(self) -> float:
        return self.judged / self.total if self.total else 1.0

    def __str__(self) -> str:
        return percent(self.share)


@dataclass(frozen=True)
class NotJudged:
    """A class of modules that could not be checked."""

    module_class: str
    modules: tuple[str, ...]
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"class": self.module_class, "modules": list(self.modules), "reason": self.reason}

    def __str__(self) -> str:
        more = f" and {len(self.modules) - 1} more" if len(self.modules) > 1 else ""
        return f"{self.module_class} ({self.modules[0] or 'the model itself'}{more}): {self.reason}"


@dataclass(frozen=True)
class BackwardCoverage:
    """How much of the gradients was checked."""

    modules: Share
    parameters: Share
    not_judged: tuple[NotJudged, ...] = ()

    def __str__(self) -> str:
        return f"in backward {self.modules} of modules and {self.parameters} of parameters"

    def to_dict(self) -> dict[str, Any]:
        return {
            "modules": self.modules.share,
            "parameters": self.parameters.share,
            "not_judged": [each.to_dict() for each in self.not_judged],
        }


@dataclass(frozen=True)
class Cell:
    """An operator at a place, with how many of its modules or calls were checked."""

    place: Place
    operator: str
    judged: int
    total: int


@dataclass(frozen=True)
class Coverage:
    """What ran and what was checked."""

    phases: tuple[Phase, ...] = ()
    not_run: tuple[str, ...] = ()  # phases and shapes, with the reason
    in_part: tuple[str, ...] = ()  # those that an error of the model ended, or that have NaN on the host as well
    modules: Share = Share(0, 0)
    parameters: Share = Share(0, 0)
    multiply_adds: Share = Share(0, 0)
    not_judged: tuple[NotJudged, ...] = ()
    cells: tuple[Cell, ...] = ()
    resolution: tuple[Resolution, ...] = ()  # how small an error of each class of modules was judged
    own_code: tuple[str, ...] = ()  # modules of a class that the config does not give, checked against their own code
    doubtful: tuple[str, ...] = ()  # what in memory may be on purpose, or damage
    state: str = ""  # what was compared in the model's memory, and what was not
    backward: BackwardCoverage | None = None  # where gradients were audited
    repeated: int = 1  # forwards of the same input, each of which an intermittent fault could have hit

    @property
    def measured(self) -> bool:
        """Whether the method counts what it checks; methods that only compare outputs do not."""
        return self.modules.total > 0

    @property
    def smallest_share(self) -> float:
        backward = () if self.backward is None else (self.backward.modules.share, self.backward.parameters.share)
        return min(self.modules.share, self.parameters.share, self.multiply_adds.share, *backward)

    @property
    def enough(self) -> bool:
        """Whether the coverage suffices for a plain "healthy"."""
        return self.smallest_share >= ENOUGH

    @property
    def never_decoded(self) -> bool:
        """Whether the model's own errors ended every decode."""
        return not any(phase.kind == "decode" for phase in self.phases) and any(
            "decode" in each for each in self.in_part
        )

    @property
    def excluded_rate(self) -> float:
        """Intermittent faults that hit a larger share of forwards than this are excluded with 95 % confidence."""
        forwards = sum(phase.steps for phase in self.phases if phase.kind != BACKWARD) + self.repeated - 1
        return 1.0 if forwards < 1 else 1 - 0.05 ** (1 / forwards)

    @property
    def shares(self) -> str:
        found = f"{self.modules} of modules, {self.parameters} of parameters and {self.multiply_adds} of multiply-adds"
        return found if self.backward is None else f"{found}, {self.backward}"

    @property
    def left_out(self) -> tuple[str, ...]:
        """Modules not judged, and shapes judged in part."""
        return *map(str, self.not_judged), *(each for each in self.in_part if each not in self.not_run)

    @property
    def exceptions(self) -> str:
        """For the end of a headline: modules not judged, or checked against their own code only, and doubts."""
        named = {
            "not judged": tuple(map(str, self.not_judged)),
            "not in full": self.in_part,
            "not of the config's class, checked against its own code only": self.own_code,
            "on purpose, or damaged": self.doubtful,
        }
        words = (
            f"; {why}: {found[0]}" + f" and {len(found) - 1} more" * (len(found) > 1)
            for why, found in named.items()
            if found
        )
        return "".join(words)

    @property
    def ran(self) -> str:
        """Phases and shapes in a few words: "prefill (2 x 32, 1 x 1, 2 x 17 and 4 more shapes) and decode"."""
        prefill = [_shape(phase) for phase in self.phases if phase.kind == "prefill"]
        images = [str(phase.batch) for phase in self.phases if phase.kind == "images"]
        parts = [f"prefill ({_some(prefill)})"] if prefill else []
        parts += [f"batches of images ({_some(images)})"] if images else []
        parts += [kind for kind in ("decode", BACKWARD) if any(phase.kind == kind for phase in self.phases)]
        *first, last = parts or ["the forwards that ran"]
        return f"{', '.join(first)} and {last}" if first else last

    def to_dict(self) -> dict[str, Any]:
        return {
            "phases": [str(phase) for phase in self.phases],
            "not_run": list(self.not_run),
            "in_part": list(self.in_part),
            "modules": self.modules.share,
            "parameters": self.parameters.share,
            "multiply_adds": self.multiply_adds.share,
            "not_judged": [each.to_dict() for each in self.not_judged],
            "cells": [
                {"place": each.place, "operator": each.operator, "judged": each.judged, "total": each.total}
                for each in self.cells
            ],
            "resolution": [row.to_dict() for row in self.resolution],
            "own_code": list(self.own_code),
            "doubtful": list(self.doubtful),
            "state": self.state,
            "backward": None if self.backward is None else self.backward.to_dict(),
            "excluded_rate_per_forward": self.excluded_rate,
        }


def percent(share: float) -> str:
    """Rounded down: only all of it is 100 %."""
    return f"{math.floor(100 * share + 1e-9)} %"


def _shape(phase: Phase) -> str:
    return f"{phase.batch} x {phase.tokens}" + (f" with {phase.padding} padding" if phase.padding else "")


def _some(shapes: Sequence[str]) -> str:
    names = list(dict.fromkeys(shapes))
    if len(names) <= SHOWN + 1:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more shapes"
