"""Inputs for the fuzzers, as hypothesis strategies: valid files changed in tree or bytes, and nonsense."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

MUTATED, MADE_UP = "mutated", "made up"
TOKENS = (
    b"9" * 5000, b"0x" + b"f" * 6000, b"1e999", b"-1", b"NaN", b"Infinity", b"[" * 3000, b"{" * 3000, b'{"a":' * 500,
    b"null", b"\x00", b"\xff\xfe", b"\x1b[31m", "\u202e".encode(), b"../../../etc/passwd", b"/etc/passwd",
    b"&a [*a, *a]",
    b"!!python/object/apply:os.system ['true']", b"\r\n", b'"', b",", b"A" * 20000, b"%", b"*a", b"<<: *a", b"---\n",
    b"\xff" * 8, b"\x00" * 8, b"\x7f\xff\xff\xff", b"(dp0\n", b"cos\nsystem\n(S'true'\ntR.",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**64, 10**50, 10**400, 0.5, -0.0, 1e308, -1e308, 5e-324,
    float("nan"), float("inf"), "", "x", "x" * 5000, "\x1b[31mred", "\u202eevil", "\ud800", "a\nb",
    "| **b** [x](y) <s>",
    "../../etc/passwd", "/etc/passwd", "demo", "transformers.pipeline", [], {}, [None], [[]], {"": {}}, [0] * 2000,
    {"type": "noisescope.Gaussian"}, {"float": "0x1p9999999"}, {"set": 3}, {"callable": 3}, "=1+1", "NaN", "1e999",
)  # fmt: skip
plain = st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=20)
made_up_json = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner))


@dataclass(frozen=True)
class Input:
    kind: str
    content: bytes


@st.composite
def inputs(draw: st.DrawFn, corpus: tuple[bytes, ...], *, is_json: bool) -> Input:
    """Three of four are made from a valid file."""
    choice = draw(st.integers(0, 7))
    if choice == 0:
        return Input(MADE_UP, draw(st.binary(max_size=200)))
    if choice == 1:
        return Input(MADE_UP, as_bytes(draw(made_up_json)) if is_json else draw(st.sampled_from(TOKENS)))
    content = draw(st.sampled_from(corpus))
    if is_json and choice < 6:
        return Input(MUTATED, tree_changed(draw, content))
    return Input(MUTATED, bytes_changed(draw, content))


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass") if value != 10**400 else b"1" + b"0" * 400


def tree_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """One to three parts replaced, dropped, wrapped, repeated, renamed or put elsewhere."""
    tree = [json.loads(content)]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        parent, key = _place(draw, tree)
        part = parent[key]
        change = draw(st.integers(0, 6))
        if change <= 2:
            parent[key] = copy.deepcopy(draw(plain))
        elif change == 3:
            del parent[key]
        elif change == 4:
            parent[key] = _nested(part, draw(st.sampled_from([1, 2, 70, 700])))
        elif change == 5 and isinstance(part, list):
            parent[key] = part * draw(st.sampled_from([0, 2, 50]))
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "", "\u202e", "y" * 3000, "__class__", *list(parent)[:5]]))] = part
        if not tree:
            return b""
    return _dumped(tree[0])


def _dumped(value: Any) -> bytes:
    try:
        return as_bytes(value)
    except (RecursionError, ValueError):  # ValueError: more digits than Python writes
        return b"[" * 700


def _nested(part: Any, times: int) -> Any:
    for at in range(times):
        part = [part] if at % 2 else {"a": part}
    return part


def _place(draw: st.DrawFn, tree: list[Any]) -> tuple[Any, Any]:
    """A random part of the tree, as its parent and its key there; the deeper the likelier."""
    parent: Any = tree
    key: Any = 0
    while isinstance(parent[key], (dict, list)) and parent[key] and (parent is tree or draw(st.integers(0, 4))):
        parent = parent[key]
        keys = list(parent) if isinstance(parent, dict) else range(len(parent))
        key = keys[draw(st.integers(0, len(keys) - 1))]
    return parent, key


def bytes_changed(draw: st.DrawFn, content: bytes) -> bytes:
    """One to four changes of bytes: flipped, cut out, cut off, repeated, overwritten, something put in."""
    found = bytearray(content)
    for _ in range(draw(st.sampled_from([1, 1, 2, 4]))):
        at = draw(st.integers(0, max(0, len(found) - 1)))
        length = draw(st.sampled_from([1, 2, 4, 8, 40]))
        change = draw(st.integers(0, 6))
        if change == 0 and found:
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif change == 1 and found:
            found[at] = draw(st.integers(0, 255))
        elif change == 2:
            del found[at : at + length]
        elif change == 3:
            del found[at:]
        elif change == 4:
            found[at:at] = found[at : at + length] * draw(st.sampled_from([1, 30]))
        elif change == 5:
            found[at : at + length] = draw(st.binary(min_size=length, max_size=length))
        else:
            found[at:at] = draw(st.sampled_from(TOKENS))
    return bytes(found)
