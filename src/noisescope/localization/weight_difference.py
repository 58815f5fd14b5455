"""How a tensor in memory differs from the checkpoint: a bit, a scale, a transposition, another tensor's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from noisescope.localization.tensors import bits_of

_ROUNDED = (torch.bfloat16, torch.float16, torch.float32)
_FEW = 64  # channels that are listed
_SPARSE = 0.1  # of the elements: an update by training changes more


@dataclass(frozen=True)
class Difference:
    """What is wrong with a tensor, as text that follows its name; `dense`: everywhere, and unlike any known damage."""

    words: str
    fault_class: str = "unknown"
    channels: tuple[int, ...] = ()
    dense: bool = False
    rounded: bool = False  # the same numbers with fewer mantissa bits, as after a cast there and back


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits_of(one), bits_of(other))


def difference(found: Tensor, stored: Tensor) -> Difference | None:
    """None if they are the same; both on the host, of one shape; `stored` is cast as on loading."""
    expected = stored.to(found.dtype)
    if same_bits(found, expected):
        return None
    for kind in _ROUNDED:
        if same_bits(found, stored.to(kind).to(found.dtype)):
            name = str(kind).removeprefix("torch.")
            return Difference(f"holds the checkpoint's numbers rounded to {name}", "truncation", rounded=True)
    wrong = bits_of(found) != bits_of(expected)
    if not found.is_floating_point():
        return Difference(f"differs from the checkpoint in {_count(wrong)}")
    known = next(_recognised(found, expected, wrong), None)
    if known is not None:
        return known
    share = float(wrong.double().mean())
    worst = float((found.double() - expected.double()).abs().nan_to_num(torch.inf).max())
    words = f"differs from the checkpoint in {_count(wrong)} by up to {worst:.3g}{_lines(wrong)}"
    return Difference(words, "spike" if share < _SPARSE else "unknown", _channels(wrong), dense=share >= _SPARSE)


def _recognised(found: Tensor, expected: Tensor, wrong: Tensor) -> Iterator[Difference]:
    """The kinds of damage that fit, the most certain first."""
    bad = int((~found.isfinite() & expected.isfinite()).sum())
    if bad > 1 or (bad and found.numel() < 2):
        yield Difference(f"holds {bad} NaN or infinities that the checkpoint does not", "unknown", _channels(wrong))
    if not found.any():
        yield Difference("is all zero, unlike the checkpoint", "dead lane")
    yield from _flipped(found, expected, wrong)
    if bad:
        yield Difference("holds a NaN or infinity that the checkpoint does not", "spike", _channels(wrong))
    yield from _dead(found, wrong)
    yield from _moved(found, expected)
    yield from _scaled(found, expected)


def _flipped(found: Tensor, expected: Tensor, wrong: Tensor) -> Iterator[Difference]:
    """The same bit in one or a few elements."""
    changed = bits_of(found)[wrong] ^ bits_of(expected)[wrong]
    pattern = int(changed[0]) % (1 << 8 * found.element_size())
    in_most = 2 * len(changed) > wrong.numel() > 1  # as with another sign or scale
    if in_most or pattern.bit_count() != 1 or not bool((changed == changed[0]).all()):
        return
    bit = pattern.bit_length() - 1
    where = tuple(int(i) for i in wrong.nonzero()[0])
    element = f"element {list(where)}, {float(found[where]):.6g} where the checkpoint has {float(expected[where]):.6g}"
    if len(changed) == 1:
        words = f"has one flipped bit: bit {bit} of {element}"
    else:
        words = f"has bit {bit} flipped in {_count(wrong)}, such as {element}"
    yield Difference(words, "stuck bit", _channels(wrong))


def _dead(found: Tensor, wrong: Tensor) -> Iterator[Difference]:
    """Whole rows or columns that are 0 where the checkpoint has numbers, with nothing else wrong."""
    if found.dim() != 2 or bool(found[wrong].any()):
        return
    for dim, name, kind in ((0, "rows", "dead lane"), (1, "columns", "dead input lane")):
        empty = ~found.any(1 - dim) & wrong.any(1 - dim)
        if bool(empty.any()) and not bool(wrong.index_select(dim, (~empty).nonzero()[:, 0]).any()):
            which = empty.nonzero()[:, 0].tolist()
            words = f"has {len(which)} {name} of zeros ({_some(which)}), unlike the checkpoint"
            yield Difference(words, kind, tuple(which[:_FEW]))
    yield Difference(f"has {_count(wrong)} at zero, unlike the checkpoint", "dead zone")


def _moved(found: Tensor, expected: Tensor) -> Iterator[Difference]:
    """The checkpoint's numbers in another order."""
    if found.dim() < 2:
        if not torch.equal(found.sort().values, expected.sort().values):
            return
        shift = _shift(found.reshape(-1, 1), expected.reshape(-1, 1))
        words = f"is shifted by {shift} elements" if shift else "has the checkpoint's numbers in another order"
        yield Difference(words, "swapped channels")
        return
    if same_bits(found, expected.transpose(-1, -2)):
        yield Difference("is transposed relative to the checkpoint", "swapped channels")
    if same_bits(found, expected.mT.reshape(found.shape)):
        yield Difference("is stored column-major, the checkpoint row-major", "swapped channels")
    for dim, name in ((0, "rows"), (1, "columns")):
        here, there = found.transpose(0, dim).flatten(1), expected.transpose(0, dim).flatten(1)
        shift = _shift(here, there)
        if shift:
            yield Difference(f"has its {name} shifted by {shift}", "swapped channels")
        elif _same_rows(here, there):
            moved = (here != there).any(1).nonzero()[:, 0].tolist()
            words = f"has {len(moved)} {name} in another order ({_some(moved)})"
            yield Difference(words, "swapped channels", tuple(moved[:_FEW]))
    whole = _shift(found.reshape(-1, 1), expected.reshape(-1, 1))
    if whole:
        yield Difference(f"is shifted by {whole} elements in memory", "swapped channels")


def _shift(found: Tensor, expected: Tensor) -> int:
    """By how many rows one is rolled against the other; 0 if it is not, or if the first row is ambiguous."""
    places: list[int] = (expected == found[0]).all(1).nonzero()[:, 0].tolist()
    for place in places[:8]:
        if place and torch.equal(found, expected.roll(-place, 0)):
            return -place if place <= len(found) // 2 else len(found) - place
    return 0


def _same_rows(found: Tensor, expected: Tensor) -> bool:
    """The same rows in another order, identified by an order-sensitive sum of each."""
    weights = torch.rand(found.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = (found.double() @ weights).sort(), (expected.double() @ weights).sort()
    return torch.equal(one.values, other.values) and torch.equal(found[one.indices], expected[other.indices])


def _scaled(found: Tensor, expected: Tensor) -> Iterator[Difference]:
    """A factor or an offset for all elements, or for whole rows or columns."""
    x, y = expected.double(), found.double()
    room = 4 * torch.finfo(found.dtype).eps * y.abs() + torch.finfo(found.dtype).tiny
    square = float((x * x).sum())
    factor = float((x * y).sum()) / square if square else 0.0
    fits = bool(((y - factor * x).abs() <= room).all()) and _explains(y - factor * x, y - x)
    if fits and f"{factor:.4g}" != "1":
        yield Difference(f"is the checkpoint's times {factor:.4g}", "gain")
    offset = float((y - x).median())
    shifted = bool(((y - x - offset).abs() <= room + 4 * torch.finfo(found.dtype).eps * abs(offset)).all())
    if offset and shifted and _explains(y - x - offset, y - x):
        yield Difference(f"is the checkpoint's plus {offset:.4g}", "bias")


def _explains(left: Tensor, difference: Tensor) -> bool:
    """Whether little of the difference is left: in 16 bits, a change of other kinds is within the rounding, too."""
    return 2 * float(left.abs().sum()) < float(difference.abs().sum())


# -- words


def _count(wrong: Tensor) -> str:
    number = int(wrong.sum())
    return f"{number} of {wrong.numel()} elements"


def _lines(wrong: Tensor) -> str:
    """Which rows or columns, if there are only a few."""
    if wrong.dim() != 2:
        return ""
    for dim, name in ((0, "rows"), (1, "columns")):
        which = wrong.any(1 - dim).nonzero()[:, 0].tolist()
        if len(which) <= max(1, wrong.shape[dim] // 4):
            return f", all in {name} {_some(which)}"
    return ""


def _channels(wrong: Tensor) -> tuple[int, ...]:
    """Rows of a matrix are output channels; () for all of them, or more than a few."""
    which: list[int] = wrong.reshape(len(wrong), -1).any(1).nonzero()[:, 0].tolist() if wrong.dim() else []
    return tuple(which) if len(which) <= _FEW and len(which) < len(wrong) else ()


def _some(which: list[int]) -> str:
    text = ", ".join(map(str, which[:4]))
    return text if len(which) <= 4 else f"{text} ... {which[-1]}"
