"""What comes of comparing a module's code, run on the host, with the device's calls: tensors and forms that differ."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from noisescope.localization.call_tree import CHOICE, Node
from noisescope.localization.host_copies import plain_values, tensors_in
from noisescope.localization.result_dtypes import is_shorter

_COLLECTED = ("hidden_states.", "attentions.")  # outputs that transformers collects by hooks, around a class's code
OTHER_SHAPE = "a shape is"
Key = tuple[int, str]  # a call inside a module (-1: the module's own output), and the path of a tensor in it


@dataclass(frozen=True)
class Difference:
    """A tensor on the device that differs from what the host's code computes from the device's own results."""

    node: Node  # whose input or output it is
    tensor: str  # "input" or "output"
    path: str
    got: Tensor
    expected: Tensor
    limit: Tensor | None  # how far an element may be off; None: not at all
    inside: Node  # the module whose code was run
    before: Node | None  # the call before it there
    source: Node | None = None  # the call there that gave just what is expected
    gain: tuple[float, float] = (0.0, math.inf)  # by what share all elements are too large in common, and may be


@dataclass(frozen=True)
class OtherValue:
    """A number, flag or None on the device where the host's code has another value, or a tensor."""

    node: Node
    tensor: str  # "input" or "output"
    words: str


@dataclass(frozen=True)
class OtherArguments:
    """A call of a function whose arguments on the device have another form than those that the host's code gives it."""

    node: Node
    caller: str  # the class whose code it is
    args: tuple[Any, ...]  # that it gives
    kwargs: dict[str, Any]
    words: tuple[str, ...]


@dataclass
class Comparison:
    """The result of running one module's code."""

    compared: int = 0  # tensors
    exact: bool = True  # no inexact function had a part in it
    differences: list[Difference] = field(default_factory=list)
    others: list[OtherValue] = field(default_factory=list)
    other_arguments: list[OtherArguments] = field(default_factory=list)
    problem: str = ""  # why the code could not be run to its end
    bound: float = 0.0  # the widest mean bound of its tensors, relative to the rms; 0 where all must be equal
    equal: bool = False  # bit for bit, so that no bound had to be used


def other_forms(
    node: Node,
    forms: Mapping[int, dict[str, Any]],
    functions: Container[int],
    different: Mapping[Key, tuple[Tensor, Tensor]],
) -> dict[int, tuple[str, ...]]:
    """Of each call, which numbers and flags are not those of the code; of functions, shapes and dtypes too."""
    found: dict[int, list[str]] = {}
    for at, expected in forms.items():
        child = node if at < 0 else node.children[at]
        got = plain_values(child.output if at < 0 else (child.args, child.kwargs), words=at in functions)
        unlike = _unlike(got, expected)
        if at in functions and _same_values(unlike):
            continue
        for path, (one, other) in unlike.items():
            if not (at < 0 and other is None and path.startswith(_COLLECTED)):
                found.setdefault(at, []).append(f"{path.rpartition('.')[2] or 'it'} is {one}, and not {other}")
    for (at, _), (x, y) in different.items():
        if at in functions and x.shape != y.shape:
            found.setdefault(at, []).append(f"{OTHER_SHAPE} {list(x.shape)}, and not {list(y.shape)}")
        elif at in functions and node.children[at].operator != CHOICE and is_shortened(node, x, y):
            found.setdefault(at, []).append(f"a {other_dtype(x, y)}")
    return {at: tuple(words) for at, words in found.items()}


def is_shortened(node: Node, got: Tensor, expected: Tensor) -> bool:
    """Whether a tensor in a module's code has a shorter dtype on the device, and not because of autocast."""
    return is_shorter(got.dtype, expected.dtype) and not node.autocast_inside


def _unlike(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    paths = dict.fromkeys((*got, *expected))
    return {path: (got.get(path), expected.get(path)) for path in paths if got.get(path) != expected.get(path)}


def _same_values(unlike: dict[str, tuple[Any, Any]]) -> bool:
    """Whether a function was given the same values, by position on one side and by name on the other."""
    moved = all(None in both for both in unlike.values())
    here, there = ([repr(both[side]) for both in unlike.values() if both[side] is not None] for side in (0, 1))
    return moved and sorted(here) == sorted(there)


def use_callers_arguments(child: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let a module's code run with the flags that its caller's code gives it, where the device's call had others.

    Whether that matters shows in what the functions inside it return.
    """
    unlike = _unlike(plain_values((child.args, child.kwargs)), plain_values((args, kwargs)))
    names = [path.removeprefix("1.") for path in unlike if path.startswith("1.")]
    whole = len(names) == len(unlike) and all(name in kwargs for name in names)  # no parts of arguments
    if names and whole and not child.by_formula:
        child.kwargs = {**child.kwargs, **{name: kwargs[name] for name in names}}


def other_dtype(got: Tensor, expected: Tensor) -> str:
    return f"dtype is {got.dtype}, and not {expected.dtype}".replace("torch.", "")


def alike(got: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float64 if their dtypes differ: a copy may have another dtype (autocast, float32 outputs)."""
    return (got, expected) if got.dtype == expected.dtype else (got.double(), expected.double())


def place_of(node: Node, at: int) -> tuple[Node, str]:
    """Whose tensor it is that the code of a module gives its call number `at`, or returns (-1)."""
    return (node, "output") if at < 0 else (node.children[at], "input")


def difference(
    node: Node, key: Key, got: Tensor, expected: Tensor, limit: Tensor | None, gain: tuple[float, float]
) -> Difference:
    at, path = key
    earlier = node.children if at < 0 else node.children[:at]
    source = next((child for child in reversed(earlier) if child.is_module and _gave(child, expected)), None)
    before = earlier[-1] if earlier else None
    return Difference(*place_of(node, at), path, got, expected, limit, node, before, source, gain)


def _gave(child: Node, expected: Tensor) -> bool:
    return any(x.shape == expected.shape and torch.equal(x, expected) for _, x in tensors_in(child.output))
