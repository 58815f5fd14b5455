"""Which channels of a model may be rescaled without changing what it computes: SmoothQuant's and AWQ's folds.

Dividing what a source gives by s, channel by channel, and multiplying the columns of every linear that reads it by s
changes nothing in exact arithmetic:

==================================  ==========================================  ==============================
source                              linears that read it                        exact because
==================================  ==========================================  ==============================
a norm with a weight                those that are given its output             the weight multiplies at the end
v_proj                              o_proj                                      attention averages values
up_proj beside a gate_proj          down_proj                                   act(gate) * up is linear in up
==================================  ==========================================  ==============================

With grouped-query attention several heads of o_proj's input come from one head of v_proj, so they share their scales.
Norms and their readers are found by running the model: a linear reads a norm where it is given that very tensor. A norm
that also feeds a router is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import MODULE, Anatomy, Unit
from noisescope.evaluation import evaluating
from noisescope.probe.aims import CallWatcher, Context
from noisescope.probe.door import PlainDoor
from noisescope.quantisation.scores import weight_of


@dataclass(frozen=True)
class Fold:
    """A source, the linears that read it, and how many consecutive heads of their input share a head of the source."""

    source: str
    targets: tuple[str, ...]
    place: int
    repeats: int = 1
    head: int = 1  # channels of a head, where heads repeat
    norm: int | None = None  # of a norm: how often the block had added to the residual stream before it, 0 or 1


def find_folds(model: nn.Module, ids: Tensor, anatomy: Anatomy) -> list[Fold]:
    """Every fold of every block, in order of blocks."""
    modules = dict(model.named_modules())
    place = {unit.module: unit.place for unit in anatomy.units}
    folds: list[Fold] = []
    stages: dict[int, list[int]] = {}  # of each block: addresses of what its norms are given, in order
    for norm, (address, linears) in _readers(model, ids, anatomy).items():
        at = place[norm]
        if isinstance(at, int) and getattr(modules[norm], "weight", None) is not None:
            known = stages.setdefault(at, [])
            if address not in known:  # the norms of parallel attention and MLP are given the same
                known.append(address)
            folds.append(Fold(norm, tuple(linears), at, norm=known.index(address)))
    for unit in anatomy.units:
        parent, _, name = unit.module.rpartition(".")
        source = {"o_proj": "v_proj", "down_proj": "up_proj"}.get(name)
        given = modules.get(f"{parent}.{source}")
        if given is None or not isinstance(unit.place, int) or unit.packed:
            continue
        outputs, inputs = weight_of(given).shape[0], weight_of(modules[unit.module]).shape[1]
        if source == "up_proj" and outputs == inputs and f"{parent}.gate_proj" in modules:
            folds.append(Fold(f"{parent}.up_proj", (unit.module,), unit.place))
        head = getattr(modules[parent], "head_dim", None)
        if source == "v_proj" and head and inputs % outputs == 0 and outputs % head == 0:
            folds.append(Fold(f"{parent}.v_proj", (unit.module,), unit.place, inputs // outputs, head))
    return sorted(folds, key=lambda fold: fold.place)


def _readers(model: nn.Module, ids: Tensor, anatomy: Anatomy) -> dict[str, tuple[int, list[str]]]:
    """Linears that are given the output of a norm, with the address of what the norm was given; in order of calls."""
    watched = Calls(model, lambda unit, operator: operator in ("norm", "linear"), anatomy)
    with evaluating(model), watched as flow, torch.no_grad():
        norms: dict[int, str] = {}  # address of a norm's output; unique as long as `kept` holds it
        inputs: dict[str, int] = {}
        kept: list[Tensor] = []
        found: dict[str, list[str]] = {}
        routed: set[str] = set()  # experts read these, too, through functions that no module stands for

        def seen(unit: Unit, callee: Any, x: Tensor, y: Any) -> None:
            if "norm" in unit.operators and isinstance(y, Tensor):
                kept.extend((x, y))
                norms[y.data_ptr()] = unit.module
                inputs[unit.module] = x.data_ptr()
            elif (norm := norms.get(x.data_ptr())) is not None:
                if unit.component == "router":
                    routed.add(norm)
                found.setdefault(norm, []).append(unit.module)

        flow.seen = seen
        model(input_ids=ids, use_cache=False)
    return {norm: (inputs[norm], linears) for norm, linears in found.items() if norm not in routed}


class Calls(PlainDoor):
    """A door that shows calls of modules: `seen(unit, module, its first tensor, what it gave)`."""

    def __init__(self, model: nn.Module, wanted: Callable[[Unit, str], bool], anatomy: Anatomy | None = None) -> None:
        super().__init__(model, anatomy)
        self.wanted = wanted
        self.seen: Callable[[Unit, Any, Tensor, Any], None] = lambda unit, callee, x, y: None

    def aim_at(self, unit: Unit, operator: str) -> Any:
        return _Call(self, unit, operator) if unit.kind == MODULE and self.wanted(unit, operator) else None


class _Call(CallWatcher):
    def __init__(self, door: Calls, unit: Unit, operator: str) -> None:
        super().__init__(unit, operator)
        self.door = door

    def on_call(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], y: Any, context: Context, occurrence: int
    ) -> Any:
        x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self.door.seen(self.unit, callee, x.detach(), y)
        return None


def fold_in(model: nn.Module, fold: Fold, scales: Tensor) -> bool:
    """Divide the source by scales [its channels] and multiply the targets' columns; False where the source can't be."""
    modules = dict(model.named_modules())
    source = modules[fold.source]
    with torch.no_grad():
        if not _divide(source, scales):
            return False
        for name in fold.targets:
            weight_of(modules[name]).mul_(spread(fold, scales))  # a view of the parameter: changed in place
    return True


def spread(fold: Fold, scales: Tensor) -> Tensor:
    """Scales of the source's channels as scales of the targets' input channels."""
    if fold.repeats == 1:
        return scales
    return scales.view(-1, 1, fold.head).expand(-1, fold.repeats, -1).reshape(-1)


def gathered(fold: Fold, largest: Tensor) -> Tensor:
    """The largest values of the targets' input channels [in] as those of the source's channels."""
    return largest if fold.repeats == 1 else largest.view(-1, fold.repeats, fold.head).amax(1).reshape(-1)


def _divide(source: nn.Module, scales: Tensor) -> bool:
    """Make a module give 1 / scales of what it gives. A norm may weigh by w, or by 1 + w (Gemma): trying tells."""
    weight: Any = source.weight
    bias: Any = getattr(source, "bias", None)
    if weight.dim() == 2:
        weight_of(source).div_(scales[:, None])
    else:
        x = torch.randn(4, len(scales), generator=torch.Generator().manual_seed(0)).to(weight)
        shift = 0.0 if bias is None else bias
        before, gain = weight.clone(), (source(x) - shift) / scales
        for weighed in (before / scales, (1 + before) / scales - 1, before):
            weight.copy_(weighed)
            if weighed is before:
                return False
            if torch.allclose(source(x) - shift, gain, rtol=1e-2, atol=1e-4 * float(gain.abs().max())):
                break
    if bias is not None:
        bias.div_(scales)
    return True
