"""Second stage: settings, weights and buffers that differ, by name, grouped into causes, with how to correct each.

b receives a's numbers. If b can't hold them (it was cast to 16 bits, or the tensor is also another one there, such as a
head that shares the embedding's weight), a receives b's instead: either way, both then compute with the same numbers.
`Mended.restore` undoes everything.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
_WHOLE = 0.02  # of a step: float32 and float16 scales leave less


@dataclass(frozen=True)
class StateCause:
    """A group of differences with one explanation."""

    name: str
    words: str
    tensors: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    may_cancel: bool = False  # channels in another order, which do nothing where all that use them agree

    def with_settings(self, other: StateCause) -> StateCause:
        """Both, to be corrected together."""
        words = f"{self.words}, {other.words}"
        return StateCause(f"{self.name}, {other.name}", words, (), (*self.settings, *other.settings))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({block for name in (*self.tensors, *self.settings) if (block := _block(name)) is not None}))


@dataclass(frozen=True, eq=False)
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

    def undo_settings(self, count: int) -> None:
        """Restore the last settings that were changed."""
        for _ in range(count):
            engine, name, value = self.settings.pop()
            engine.set(name, value)

    def restore(self) -> None:
        for engine, name, held in reversed(self.tensors):
            engine.write(name, held)
        for engine, name, value in reversed(self.settings):
            engine.set(name, value)


def find_state(a: Engine, b: Engine) -> tuple[tuple[StateCause, ...], tuple[str, ...]]:
    """Causes in the order of correction, and notes on what could not be compared."""
    mine, its = dict(a.tensors()), dict(b.tensors())
    same = _same_twice(mine) & _same_twice(its)
    common = [name for name in mine if name in its and name not in same]
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


def lacking_layers(a: Engine, b: Engine) -> Iterator[str]:
    """Blocks that one side has no tensor of."""
    mine, its = ({_block(name) for name, _ in engine.tensors()} - {None} for engine in (a, b))
    for which, here, there in (("b", mine, its), ("a", its, mine)):
        missing = sorted(block for block in here - there if block is not None)
        if missing and there:
            names = ", ".join(map(str, missing[:_SHOWN])) + (" ..." if len(missing) > _SHOWN else "")
            yield f"{which} has {len(there)} layers and the other side {len(here)}: it lacks {len(missing)} ({names})"


def _same_twice(tensors: dict[str, Tensor]) -> set[str]:
    """Names of numbers that an earlier name has, too: the head where it is the embedding."""
    tied = list(_tied(tensors))
    first = {tensors[name].data_ptr(): name for name in reversed(tied)}
    return {name for name in tied if first[tensors[name].data_ptr()] != name}


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
    for kind, names in _with_config(differing, mine, its).items():
        values = f"{its[names[0]]!r} in b, {mine[names[0]]!r} in a"
        yield StateCause(f"setting {kind}", f"{kind} is {values} ({_some(names)})", settings=tuple(names))


def _with_config(
    differing: dict[str, list[str]], mine: Mapping[str, Setting], its: Mapping[str, Setting]
) -> dict[str, list[str]]:
    """A config value joins the attribute of modules that has the same two values under another name."""
    values = {kind: (mine[names[0]], its[names[0]]) for kind, names in differing.items()}
    found = {kind: list(names) for kind, names in differing.items()}
    for kind, names in differing.items():
        if all(name.startswith("config.") for name in names):
            of_modules = (
                other
                for other, held in differing.items()
                if other != kind and values[other] == values[kind] and not held[0].startswith("config.")
            )
            if (other := next(of_modules, None)) is not None:
                found[other] = found.pop(kind) + found[other]
    return found


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
    dense = _with_sparse([pair for pair in rest if pair.found.dense], rest)
    ordered = [pair for pair in rest if pair.found.fault_class == "swapped channels"]
    if len(ordered) > 1:
        words = f"{len(ordered)} tensors have the reference's numbers in another order ({_orders(ordered)})"
        yield StateCause("damaged weight", words, tuple(pair.name for pair in ordered), may_cancel=True)
    for pair in rest:
        if not pair.found.rounded and pair not in dense and (pair not in ordered or len(ordered) == 1):
            yield StateCause("damaged weight", f"{pair.name} {_words(pair.found.words)}", (pair.name,))
    moved = _moved(dense, reference)
    for (block, other), held in _by_block(moved).items():
        own = block is not None and other == f"layer {block}"  # exchanged within a layer
        source = ", ".join(moved[name] for name in held[:_SHOWN]) if len(held) == 1 or own else other
        holders = f"{_some(held)} hold{'s' if len(held) == 1 else ''}" if own else _holders(block, held)
        yield StateCause("another layer's weights", f"{holders} the numbers of {source}", tuple(held))
    yield from _stale([pair for pair in dense if pair.name not in moved], blocks)


def _with_sparse(dense: list[_Pair], pairs: Sequence[_Pair]) -> list[_Pair]:
    """A layer whose matrices differ throughout explains the few elements of its norms that differ, too."""
    blocks = Counter(_block(pair.name) for pair in dense)
    few = ("spike", "stuck bit")
    return [
        pair for pair in pairs if pair in dense or (pair.found.fault_class in few and blocks[_block(pair.name)] > 2)
    ]


def _orders(pairs: Sequence[_Pair]) -> str:
    text = "; ".join(f"{pair.name} {_words(pair.found.words)}" for pair in pairs[:2])
    return text if len(pairs) <= 2 else f"{text} ... {len(pairs)} in all"


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
        tensors = "1 tensor" if len(names) == 1 else f"{len(names)} tensors"
        verb = "holds" if len(names) == 1 else "hold"
        words = f"{tensors} {where} {verb} different numbers ({_some(names)}), off by {_sizes(held)}"
        if _look_quantised(held):
            yield StateCause("quantised weights", f"{words}: quantised weights", names)
            continue
        yield StateCause("stale layer" if block is not None else "stale weights", f"{words} (not updated?)", names)


def _look_quantised(dense: Sequence[_Pair]) -> bool:
    """Whether the rows of most matrices have few distinct numbers, as on a quantisation grid."""
    matrices = [pair for pair in dense if pair.b.dim() == 2 and pair.b.shape[1] >= 32]
    few = sum(_levels(pair.b) < 0.6 * _levels(pair.a) or _on_grid(pair) for pair in matrices)
    return bool(matrices) and 2 * few > len(matrices)


def _on_grid(pair: _Pair) -> bool:
    """Whether b's numbers, unlike a's, are those of symmetric int8 with a scale per row, or of FP8 (E4M3)."""
    return any(fits(pair.b) and not fits(pair.a) for fits in (_steps_fit, _fp8_fits))


def _fp8_fits(matrix: Tensor) -> bool:
    """With a scale per row, per tensor, or without one."""
    x = matrix.float()
    most = torch.finfo(torch.float8_e4m3fn).max
    scaled = (x, *(x * (most / x.abs().amax(dims, keepdim=True).clamp(min=1e-30)) for dims in ((0, 1), (1,))))
    return any(torch.allclose(y.to(torch.float8_e4m3fn).float(), y, rtol=2e-3, atol=0) for y in scaled)


def _steps_fit(matrix: Tensor) -> bool:
    """Whether rows are multiples of one step each, at most 127 of them."""
    rows = matrix[:8].double()
    levels = torch.arange(1, 128, dtype=torch.float64)
    for row in rows:
        steps = row.abs().max() / levels  # the largest is a whole number of steps
        multiples = row.abs()[None, :] / steps.clamp(min=1e-300)[:, None]
        if not bool(((multiples - multiples.round()).abs().amax(1) < _WHOLE).any()):
            return False
    return True


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
