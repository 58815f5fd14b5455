"""Second stage: settings, weights and buffers that differ, by name, grouped into causes, with how to correct each.

b receives a's numbers. If b can't hold them (it was cast to 16 bits, or the tensor is also another one there, such as a
head that shares the embedding's weight), a receives b's instead: either way, both then compute with the same numbers.
`Mended.restore` undoes everything.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescope.comparison.system_comparison import Setting
from noisescope.engines.protocol import Engine
from noisescope.localization.tensors import bits_of
from noisescope.localization.weight_difference import Difference, difference

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")
WHOLE_CHECKPOINT = ("quantised checkpoint", "another checkpoint")  # causes that concern most layers
_MANY = 0.5  # of the blocks: such a model is another checkpoint, and not one with a stale layer
_SHOWN = 3


@dataclass(frozen=True)
class StateCause:
    """A group of differences with one explanation."""

    name: str
    words: str
    tensors: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({block for name in (*self.tensors, *self.settings) if (block := _block(name)) is not None}))


@dataclass(frozen=True)
class _Pair:
    name: str
    a: Tensor
    b: Tensor
    found: Difference


@dataclass
class Mended:
    """What was changed, so that it can be restored."""

    tensors: list[tuple[Engine, str, Tensor]] = field(default_factory=list)  # what it held before
    settings: list[tuple[Engine, str, Setting]] = field(default_factory=list)

    def mend(self, a: Engine, b: Engine, cause: StateCause) -> None:
        wanted = set(cause.tensors)
        held_by_a, held_by_b = dict(a.tensors()), dict(b.tensors())
        tied = set(_tied(held_by_b)) - set(_tied(held_by_a))
        mine, its = ({name: held[name].clone() for name in wanted} for held in (held_by_a, held_by_b))
        for name in cause.tensors:
            wide = torch.promote_types(mine[name].dtype, its[name].dtype) == its[name].dtype
            to_b = wide and name not in tied
            engine, source, held = (b, mine[name], its[name]) if to_b else (a, its[name], mine[name])
            self.tensors.append((engine, name, held))
            engine.write(name, source)
        for name in cause.settings:
            self.settings.append((b, name, b.settings()[name]))
            b.set(name, a.settings()[name])

    def restore(self) -> None:
        for engine, name, held in reversed(self.tensors):
            engine.write(name, held)
        for engine, name, value in reversed(self.settings):
            engine.set(name, value)


def find_state(a: Engine, b: Engine) -> tuple[tuple[StateCause, ...], tuple[str, ...]]:
    """Causes in the order of correction, and notes on what could not be compared."""
    mine, its = dict(a.tensors()), dict(b.tensors())
    common = [name for name in mine if name in its]
    pairs: list[_Pair] = []
    notes = list(_lacking(mine, its, {*_tied(mine), *_tied(its)}))
    for name in common:
        here, there = mine[name].cpu(), its[name].cpu()
        if here.shape != there.shape:
            notes.append(f"{name} is {tuple(here.shape)} in a and {tuple(there.shape)} in b: not compared")
        elif (found := _difference(name, here, there)) is not None:
            pairs.append(_Pair(name, here, there, found))
    causes = (*_settings(a, b), *_grouped(pairs, mine, len({_block(name) for name in common} - {None})))
    return causes, tuple(notes)


def _difference(name: str, a: Tensor, b: Tensor) -> Difference | None:
    wide = torch.promote_types(a.dtype, b.dtype)
    if name.endswith("inv_freq"):  # an engine may keep sines and cosines instead
        eps = max(torch.finfo(x.dtype).eps for x in (a, b))
        same = torch.allclose(a.to(wide), b.to(wide), rtol=16 * eps, atol=0)
        return None if same else Difference("differs from the reference")
    one, other = a.to(wide), b.to(wide)
    if torch.equal(one, other) or torch.equal(bits_of(one), bits_of(other)):  # -0 is 0: packed weights lose that sign
        return None
    if a.dtype != b.dtype and difference(b, a) is None:
        return Difference(f"holds the reference's numbers rounded to {_name(b.dtype)}", "truncation", rounded=True)
    if a.dtype != b.dtype and difference(a, b) is None:
        return Difference(
            f"has numbers that the reference holds rounded to {_name(a.dtype)}", "truncation", rounded=True
        )
    return difference(other, one)


def _settings(a: Engine, b: Engine) -> Iterator[StateCause]:
    """One cause for each kind of setting, over all modules."""
    mine, its = a.settings(), b.settings()
    differing: dict[str, list[str]] = defaultdict(list)
    for name in mine:
        if name in its and mine[name] != its[name] and not _same_number(mine[name], its[name]):
            differing[name.rpartition(".")[2]].append(name)
    for kind, names in differing.items():
        values = f"{its[names[0]]!r} in b, {mine[names[0]]!r} in a"
        yield StateCause(f"setting {kind}", f"{kind} is {values} ({_some(names)})", settings=tuple(names))


def _same_number(one: Setting, other: Setting) -> bool:
    """Equal as float32 numbers: engines compute the same scale in different ways."""
    return isinstance(one, float) and isinstance(other, float) and math.isclose(one, other, rel_tol=1e-6)


def _grouped(pairs: Sequence[_Pair], reference: dict[str, Tensor], blocks: int) -> Iterator[StateCause]:
    tables = [pair for pair in pairs if pair.name.endswith("inv_freq")]
    if tables:
        yield StateCause("rotary frequencies", _rotary(tables[0]), tuple(pair.name for pair in tables))
    rest = [pair for pair in pairs if pair not in tables]
    rounded = [pair for pair in rest if pair.found.rounded]
    for words in dict.fromkeys(pair.found.words for pair in rounded):
        names = tuple(pair.name for pair in rounded if pair.found.words == words)
        yield StateCause("cast", f"{len(names)} tensors: each {_words(words)} ({_some(names)})", names)
    dense = [pair for pair in rest if pair.found.dense]
    for pair in rest:
        if not pair.found.rounded and not pair.found.dense:
            yield StateCause("damaged weight", f"{pair.name} {_words(pair.found.words)}", (pair.name,))
    moved = _moved(dense, reference)
    for (block, other), held in _by_block(moved).items():
        own = block is not None and other == f"layer {block}"  # exchanged within a layer
        source = ", ".join(moved[name] for name in held[:_SHOWN]) if len(held) == 1 or own else other
        holders = f"{_some(held)} hold{'s' if len(held) == 1 else ''}" if own else _holders(block, held)
        yield StateCause("another layer's weights", f"{holders} the numbers of {source}", tuple(held))
    yield from _stale([pair for pair in dense if pair.name not in moved], blocks)


def _stale(dense: Sequence[_Pair], blocks: int) -> Iterator[StateCause]:
    """Tensors whose numbers differ throughout: in some layers (not updated), or in the whole model."""
    known = {pair.name: pair for pair in dense}
    by_block = {block: [known[name] for name in names] for block, names in by_layer(list(known)).items()}
    if blocks and len(by_block.keys() - {None}) > _MANY * blocks:
        names = tuple(pair.name for pair in dense)
        quantised = "quantised weights" if _look_quantised(dense) else "another checkpoint or training step"
        words = (
            f"{len(names)} tensors in {len(by_block)} places differ in all elements, by {_sizes(dense)}: {quantised}"
        )
        yield StateCause(WHOLE_CHECKPOINT[not _look_quantised(dense)], words, names)
        return
    for block, held in by_block.items():
        names = tuple(pair.name for pair in held)
        where = "outside the blocks" if block is None else f"of layer {block}"
        words = f"{len(names)} tensors {where} hold different numbers ({_some(names)}), off by {_sizes(held)}"
        yield StateCause("stale layer" if block is not None else "stale weights", f"{words} (not updated?)", names)


def _look_quantised(dense: Sequence[_Pair]) -> bool:
    """Whether the rows of most matrices have few distinct numbers, as on a quantisation grid."""
    matrices = [pair for pair in dense if pair.b.dim() == 2 and pair.b.shape[1] >= 32]
    few = sum(_levels(pair.b) < 0.6 * _levels(pair.a) for pair in matrices)
    return bool(matrices) and 2 * few > len(matrices)


def _levels(matrix: Tensor) -> float:
    """Different numbers per element in some rows."""
    rows = matrix[:8]
    different = sum(int(row.unique().numel()) for row in rows)
    return different / rows.numel()


def _moved(dense: Sequence[_Pair], reference: dict[str, Tensor]) -> dict[str, str]:
    """Names of tensors that hold what the reference has under another name."""
    if not dense:
        return {}
    digests = {_digest(tensor.cpu().to(dense[0].b.dtype)): name for name, tensor in reference.items()}
    found = {pair.name: digests.get(_digest(pair.b)) for pair in dense}
    return {name: other for name, other in found.items() if other is not None and other != name}


def _by_block(moved: dict[str, str]) -> dict[tuple[int | None, str], list[str]]:
    groups: dict[tuple[int | None, str], list[str]] = defaultdict(list)
    for name, other in moved.items():
        block = _block(other)
        groups[_block(name), other if block is None else f"layer {block}"].append(name)
    return groups


def _holders(block: int | None, names: Sequence[str]) -> str:
    """Which tensors, for a sentence that goes on with what they hold."""
    if block is None or len(names) < 2:
        return f"{_some(names)} holds" if len(names) == 1 else f"{_some(names)} hold"
    return f"{len(names)} tensors of layer {block} hold"


def _digest(tensor: Tensor) -> bytes:
    return hashlib.blake2b(bits_of(tensor).numpy().tobytes() + str(tensor.shape).encode()).digest()


def _rotary(pair: _Pair) -> str:
    """The bases, where both tables are powers of one."""
    a, b = (_base(table) for table in (pair.a, pair.b))
    words = f"{pair.name} differs"
    if a and b and not math.isclose(a, b, rel_tol=1e-3):
        return f"{words}: base {b:g} in b, {a:g} in a"
    ratio = (pair.b.double() / pair.a.double()).reshape(-1)
    if bool(torch.isclose(ratio, ratio[:1], rtol=1e-3).all()):
        return f"{words}: b's is a's times {float(ratio[0]):.4g} (a scaling factor of positions)"
    return words


def _base(table: Tensor) -> float:
    """inv_freq[i] is base^(-i / n); 0 if it is not such a table."""
    n = table.numel()
    if n < 2 or float(table[0]) != 1 or not 0 < float(table[1]) < 1:
        return 0.0
    return float(f"{float(table[1].double()) ** -n:.4g}")


def _sizes(pairs: Sequence[_Pair]) -> str:
    return f"a relative L2 of {relative_l2([(pair.a, pair.b) for pair in pairs]):.2g}"


def relative_l2(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Of the second tensors from the first, all together."""
    error = sum(float((a.double() - b.to(a.device).double()).square().sum()) for a, b in pairs)
    size = sum(float(a.double().square().sum()) for a, _ in pairs)
    return math.sqrt(error / size) if size else math.inf


def by_layer(names: Sequence[str]) -> dict[int | None, list[str]]:
    """Names by the block that they belong to, in order; None, outside the blocks, comes last."""
    found: dict[int | None, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda name: (_block(name) is None, _block(name) or 0)):
        found[_block(name)].append(name)
    return found


def _tied(tensors: dict[str, Tensor]) -> Iterator[str]:
    """Names that share their numbers with another name."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, tensor in tensors.items():
        names[tensor.data_ptr() if tensor.numel() else -len(names)].append(name)
    return (name for held in names.values() if len(held) > 1 for name in held)


def _lacking(mine: dict[str, Tensor], its: dict[str, Tensor], tied: set[str]) -> Iterator[str]:
    """A tied name that one engine does not use is no lack: its numbers are compared under the other name."""
    for which, here, there in (("b", mine, its), ("a", its, mine)):
        names = [name for name in here if name not in there and name not in tied]
        if names:
            yield f"{which} lacks {len(names)} tensors, which were not compared ({_some(names)})"


def _block(name: str) -> int | None:
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


def _some(names: Sequence[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    return text if len(names) <= _SHOWN else f"{text} ... {len(names)} in all"


def _words(text: str) -> str:
    return text.replace("the checkpoint", "the reference")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
