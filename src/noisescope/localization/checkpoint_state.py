"""Compares the weights in memory with the checkpoint they were loaded from, bit for bit after the loading cast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import NoisescopeError
from noisescope.localization.state_fault import ADAPTED, Compared, StateFault
from noisescope.localization.weight_difference import Difference, difference, same_bits

PLAIN = (Tensor, nn.Parameter, nn.Buffer)  # those of quantisers are classes of their own
_MANY = 0.25  # of the matrices: such a model was trained or edited as a whole, and not damaged
_FEWEST = 4

Stored = Callable[[], Iterator[tuple[str, Tensor]]]  # (name in the model, tensor of the checkpoint), from the first


@dataclass(frozen=True)
class WeightsCompared:
    """`same` and `wrong` are ids of tensors, the last of faults; `as_stored`: not cast to a shorter dtype and back."""

    result: Compared = field(default_factory=Compared)
    same: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    as_stored: bool = False


@dataclass(frozen=True, eq=False)
class _Wrong:
    path: str
    tensor: Tensor
    difference: Difference

    @property
    def is_matrix(self) -> bool:
        return self.tensor.dim() > 1


def held_tensors(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Parameters and persistent buffers, (path, tensor), by their names without adapters."""
    held = model.state_dict(keep_vars=True).items()
    return {name.replace(ADAPTED, ""): (name, tensor) for name, tensor in held if isinstance(tensor, Tensor)}


def compare_weights(model: Any, stored: Stored, *, loaded: bool) -> WeightsCompared:
    """Compare every tensor of a checkpoint with the model; a model `loaded` by `load` should not have changed."""
    held = held_tensors(model)
    same: set[int] = set()
    wrong: dict[int, _Wrong] = {}
    skipped: dict[int, tuple[str, str]] = {}
    kinds = {tensor.dtype for _, tensor in held.values()}
    beginnings: set[tuple[Any, ...]] = set()
    try:
        for name, tensor_of_file in stored():
            beginnings |= {_beginning(tensor_of_file, kind) for kind in kinds}
            if name not in held:
                continue
            path, tensor = held[name]
            reason = _no_comparison(model, path, tensor, tensor_of_file)
            changed = None if reason else difference(tensor.detach().cpu(), tensor_of_file)
            if reason:
                skipped[id(tensor)] = (path, reason)
            elif changed is None:
                same.add(id(tensor))
            else:  # tied weights may be stored twice, with one copy out of date; others are one tensor by mistake
                wrong[id(tensor)] = _Wrong(path, tensor, changed)
        tied = {name for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}
        left = [each for key, each in wrong.items() if key not in same or each.path.replace(ADAPTED, "") not in tied]
        matrices = len({id(tensor) for _, tensor in held.values() if tensor.dim() > 1})
        like_others = [each for each in left if _beginning(each.tensor, each.tensor.dtype) in beginnings]
        others = _names_of_others(stored, like_others)
        exchanged = {each.path.replace(ADAPTED, "") for each in like_others if id(each.tensor) in others}
        if _are_many(left, matrices) and not (loaded and exchanged == set(others.values())):
            # blocks may have been taken out, but one that is here twice was not
            twice = {key: name for key, name in others.items() if name in held and id(held[name][1]) in same}
            others = twice if loaded else {}
    except (NoisescopeError, OSError, ValueError) as error:
        return WeightsCompared(Compared(notes=(f"weights were not compared with a checkpoint: {error}",)))
    was_cast = _are_many([each for each in left if each.difference.rounded], matrices)
    left, notes = _unexplained(left, others, matrices, loaded=loaded)
    done = same | wrong.keys()
    for path, tensor in held.values():
        if id(tensor) not in done:
            skipped.setdefault(id(tensor), (path, "not in the checkpoint"))
    missing = tuple(entry for key, entry in skipped.items() if key not in done)
    faults = tuple(_fault(each, others, loaded=loaded) for each in left)
    return WeightsCompared(
        Compared(faults, len(done), missing, notes),
        same=frozenset(same),
        wrong=frozenset(id(each.tensor) for each in left),
        as_stored=bool(same) and not was_cast,
    )


def _no_comparison(model: Any, path: str, tensor: Tensor, stored: Tensor) -> str:
    """Why a tensor is not compared, or ""."""
    module = model.get_submodule(path.rpartition(".")[0])
    replaced = not type(module).__module__.startswith(("torch.nn.", "transformers.models."))
    plain = type(tensor) in PLAIN and type(tensor.data) in PLAIN and min(tensor.itemsize, stored.itemsize) > 1
    if not plain or (replaced and vars(model.config).get("quantization_config") is not None):
        return "packed by a quantiser"
    if tensor.device.type == "meta":
        return "offloaded"
    if tensor.shape != stored.shape:
        return "shape differs from the checkpoint"
    if vars(model.base_model).get("layers_are_rescaled") is True:  # RWKV halves weights in place while it runs
        return "rescaled by the model itself"
    merged = ADAPTED in path and getattr(model.get_submodule(path.split(ADAPTED)[0]), "merged", False) is True
    return "merged with an adapter" if merged else ""


def _beginning(tensor: Tensor, kind: torch.dtype) -> tuple[Any, ...]:
    """A tensor's shape and first numbers in a dtype, to tell cheaply that it is not another one."""
    first = tensor.detach()[(slice(0, 1),) * (tensor.dim() - 1)].flatten()[:4] if tensor.dim() else tensor.detach()
    return tensor.shape, kind, *first.cpu().to(kind).flatten().tolist()


def _names_of_others(stored: Stored, left: Sequence[_Wrong]) -> dict[int, str]:
    """Which of the wrong tensors hold the numbers that the checkpoint stores under another name."""
    hosts = {id(each.tensor): each.tensor.detach().cpu() for each in left if each.difference.dense}
    found: dict[int, str] = {}
    for name, tensor in stored() if hosts else ():
        for key, host in hosts.items():
            alike = host.shape == tensor.shape and torch.equal(host[:1], tensor[:1].to(host.dtype))
            if alike and same_bits(host, tensor.to(host.dtype)):
                found.setdefault(key, name)
    return found


def _are_many(wrong: Iterable[_Wrong], matrices: int) -> bool:
    hit = sum(each.is_matrix for each in wrong)
    return hit >= _FEWEST and hit > _MANY * matrices


def _unexplained(
    left: list[_Wrong], others: dict[int, str], matrices: int, *, loaded: bool
) -> tuple[list[_Wrong], tuple[str, ...]]:
    """Differences that training, merging or a cast does not explain, and notes on the others.

    A model loaded by `load` should be as stored, unless most of it changed everywhere; a wrapped model may have been
    edited in any way.
    """
    notes: list[str] = []
    rounded = [each for each in left if each.difference.rounded]
    if _are_many(rounded, matrices):
        words = rounded[0].difference.words.removeprefix("holds ")
        notes.append(f"{len(rounded)} tensors hold {words}: the model was cast to it and back")
        left = [each for each in left if not each.difference.rounded]
    edited = [each for each in left if each.difference.dense and id(each.tensor) not in others] if loaded else left
    if _are_many(edited, matrices):
        notes.append(f"{len(edited)} tensors differ from the checkpoint: the model was trained or edited after loading")
        left = [each for each in left if each not in edited]
    return left, tuple(notes)


def _fault(wrong: _Wrong, others: dict[int, str], *, loaded: bool) -> StateFault:
    module, _, name = wrong.path.rpartition(".")
    found = wrong.difference
    if id(wrong.tensor) in others:
        found = Difference(f"holds the numbers of {others[id(wrong.tensor)]}", "stale data")
    sure = loaded or not found.dense
    words = found.words if sure else f"{found.words}: changed on purpose after loading, or damaged"
    return StateFault(module, f"{name} {words}", found.fault_class, sure, found.channels)
