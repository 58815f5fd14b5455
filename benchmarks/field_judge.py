"""The outcome of a verdict for a case, from the stored answer alone, so that old runs can be judged again."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from field_cases import Answer, FaultCase
from field_visibility import Visibility

Said = Mapping[str, Any]  # a verdict as JSON

NAMED = "named"
WRONG_CLASS = "named, wrong class"
BELOW = "below its detection limit"
NOT_JUDGED = "named as not judged"
UNDECIDED = "undecided, nothing named"
HEALTHY = "healthy"
WRONG = "wrong blame"
CRASH = "crash"
EXCLUDED = "changes nothing"
ALARM = "alarm"
FAULT_OUTCOMES = (NAMED, WRONG_CLASS, BELOW, NOT_JUDGED, UNDECIDED, HEALTHY, WRONG, CRASH)
HEALTHY_OUTCOMES = (HEALTHY, UNDECIDED, ALARM, CRASH)

FULL_SHARE = 0.95  # of modules, parameters and operations, each: less than that is no unqualified "healthy"

# The largest detection limits that count, in ulp of one element: those of version 0.1 on the models of this benchmark.
LIMITS: Mapping[str, tuple[float, float]] = {  # operator: (16-bit dtypes, float32)
    "linear": (2.0, 45.0),
    "matmul": (25.1, 25.5),
    "bmm": (25.1, 25.5),
    "softmax": (32.8, 29.8),
    "attention": (4.7, 48.9),
    "norm": (3.1, 57.4),
    "silu": (1.0, 10.7),
    "gelu": (13.9, 16.1),
    "embedding": (0.5, 0.5),
    "residual": (0.5, 0.5),
    "between operators": (0.5, 0.5),
}
_BETWEEN = frozenset({"between operators", "residual"})  # whose limits hold for what lies between two modules


@dataclass(frozen=True)
class Judgement:
    outcome: str
    rank: int | None = None  # of the first suspect that is right, from 1
    module_right: bool = False
    class_right: bool = False


def said_by(verdict: Any) -> dict[str, Any]:
    """A verdict as JSON: its own form, and its coverage where the verdict has one."""
    said = dict(verdict.to_dict())
    coverage = getattr(verdict, "coverage", None)
    if "coverage" not in said and coverage is not None:
        said["coverage"] = _plain(coverage)
    said["count"] = len(said["suspects"])
    said["suspects"] = [{**s, "evidence": s["evidence"][:300], "details": {}} for s in said["suspects"][:5]]
    return said


def _plain(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def judge_healthy(said: Said | None, error: str = "") -> str:
    """The outcome for a model that computes rightly."""
    if error or said is None:
        return CRASH
    if said["verdict"] == "faulty":
        return ALARM
    return HEALTHY if said["verdict"] == "healthy" and not qualified(said) else UNDECIDED


def judge_fault(
    case: FaultCase, change: Visibility, said: Said | None, error: str = "", module_class: str = ""
) -> Judgement:
    """The outcome for a fault case; `module_class` is the class of the module that the case is in."""
    if not change.visible:
        return Judgement(EXCLUDED)
    if error or said is None:
        return Judgement(CRASH)
    suspects = said["suspects"]
    right = [index for index, suspect in enumerate(suspects) if _answered(case.answers, suspect)]
    rank = right[0] + 1 if right else None
    if said["verdict"] == "faulty" and suspects:
        if rank != 1:
            return Judgement(WRONG, rank)
        first = suspects[0]
        module_right = bool(case.module) and _related(first["module"], case.module)
        class_right = first["fault_class"] in case.classes
        return Judgement(NAMED if class_right else WRONG_CLASS, rank, module_right, class_right)
    if below_limit(case, change, said):
        return Judgement(BELOW, rank)
    if named_as_not_judged(case, said, module_class):
        return Judgement(NOT_JUDGED, rank)
    unqualified = said["verdict"] == "healthy" and not qualified(said)
    return Judgement(HEALTHY if unqualified else UNDECIDED, rank)


def _answered(answers: tuple[Answer, ...], suspect: Mapping[str, Any]) -> bool:
    return any(answer.matches(suspect["place"], suspect["operator"], suspect["tensor"]) for answer in answers)


def _related(one: str, other: str) -> bool:
    """The same module, or one inside the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def below_limit(case: FaultCase, change: Visibility, said: Said) -> bool:
    """Whether the change is below every limit the verdict states for these operators, and those are small enough."""
    operators = {name for a in case.answers for name in (_BETWEEN if a.edge else a.operators)}
    stated = [
        (name.split(",")[0], limit)
        for name, limit in said.get("smallest_visible", {}).items()
        if isinstance(limit, Mapping) and name.split(",")[0] in operators
    ]
    return bool(stated) and all(_within(change, limit, name, case.dtype) for name, limit in stated)


def _within(change: Visibility, limit: Mapping[str, Any], operator: str, dtype: str) -> bool:
    element, gain = limit.get("element_ulp"), limit.get("gain")
    most = LIMITS.get(operator, (0.0, 0.0))[dtype == "float32"]
    if element is None or element > most:
        return False
    return bool(change.largest_ulp <= element and (gain is None or abs(change.gain) <= gain))


def qualified(said: Said) -> bool:
    """Whether a share of what was judged is below FULL_SHARE, by the verdict's own coverage."""
    return any(0 <= share < FULL_SHARE for share in _shares(said.get("coverage")))


def _shares(coverage: Any, key: str = "") -> Iterator[float]:
    if isinstance(coverage, Mapping):
        for name, value in coverage.items():
            yield from _shares(value, f"{key} {name}")
    elif isinstance(coverage, float) and ("share" in key or re.search(r"(modules|parameters|operations|adds)$", key)):
        yield coverage


def named_as_not_judged(case: FaultCase, said: Said, module_class: str) -> bool:
    """Whether the verdict names this module (or its class), phase or shape among what it did not judge."""
    for text in not_judged(said):
        names = re.findall(r"[\w.]+", text)
        if case.module and any("." in name and _related(name.strip("."), case.module) for name in names):
            return True
        if (case.module and case.module in names) or (module_class and module_class in names):
            return True
        if any(re.search(rf"\b{word}\b", text.lower()) for word in case.shape.words):
            return True
    return False


def not_judged(said: Said) -> list[str]:
    """Every text in the parts of a verdict that list what was not judged; general notes do not count."""
    return [*map(str, said.get("unseen", ())), *_listed(said.get("coverage"), inside=False)]


def _listed(value: Any, *, inside: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, each in value.items():
            apart = bool(re.search(r"^(not_|un(seen|judged|run)|missing|skipped)|_not_", str(name)))
            if inside:
                yield str(name)
            yield from _listed(each, inside=inside or apart)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _listed(each, inside=inside)
    elif inside and isinstance(value, str):
        yield value
