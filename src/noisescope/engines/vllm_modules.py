"""Maps the modules of a vLLM model to the names that transformers gives the same parts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.sites import WHOLE, Place, Site

BLOCK = re.compile(r".*\blayers\.(\d+)")
_INSIDE = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True)
class Projection:
    """A part of a module's output: channels first to last of a merged projection; all where there is one."""

    module: str
    first: int = 0
    last: int | None = None

    def part(self, y: Tensor, *, dim: int = -1) -> Tensor:
        return y if self.last is None else y.narrow(dim, self.first, self.last - self.first)


@dataclass(frozen=True)
class ModuleMap:
    """A vLLM model's modules: the anatomy to watch, and the sites that each of them is."""

    anatomy: Anatomy
    projections: Mapping[str, Projection]  # by the site's module name
    by_site: Mapping[str, Site]
    final_norm: str
    rotary: str | None
    head: Site | None

    @classmethod
    def of(cls, model: nn.Module) -> ModuleMap:
        modules = dict(model.named_modules())
        packed: Mapping[str, list[str]] = vars(type(model)).get("packed_modules_mapping", {})
        units = [unit for name, module in modules.items() if (unit := _unit(name, module)) is not None]
        units += _holders(units)
        blocks = [name for name in modules if BLOCK.fullmatch(name)]
        units += [Unit(name, MODULE, int(name.rpartition(".")[2]), "", ("residual",)) for name in blocks]
        projections: dict[str, Projection] = {}
        sites: dict[str, Site] = {}
        for unit in units:
            for name, projection in _projections(unit, modules[unit.module], packed):
                projections[name] = projection
                sites[name] = Site(unit.operators[0], unit.place, name, unit.component)
        norms = [unit.module for unit in units if unit.operators == ("norm",) and unit.place == "final_norm"]
        rotary = next((name for name in modules if name.endswith("rotary_emb")), None)
        head = Site("linear", "lm_head", "lm_head") if "lm_head" in modules else None
        if head is not None:
            sites["lm_head"] = head
        anatomy = Anatomy(type(model).__name__, tuple(blocks), tuple(units))
        return cls(anatomy, projections, sites, norms[-1], rotary, head)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(self.by_site.values())

    def site(self, name: str) -> Site:
        return self.by_site[name]

    def parts(self, module: str) -> dict[str, Projection]:
        """The sites that a module is, with their parts of its output."""
        return {name: one for name, one in self.projections.items() if one.module == module}

    def taken_apart(self, module: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A parameter of a module split into those of its sites."""
        parts = self.parts(module)
        if not parts:
            yield module, tensor
        for name, projection in parts.items():
            yield name, projection.part(tensor, dim=0)


def _unit(name: str, module: nn.Module) -> Unit | None:
    kind = [one.__name__ for one in type(module).__mro__]
    inside = _INSIDE.search(name)
    place: Place = int(inside[1]) if inside else "final_norm"
    component = "attention" if "attn" in name else ""
    if "ParallelLMHead" in kind:
        return None
    if "VocabParallelEmbedding" in kind:
        return Unit(name, MODULE, "embed", "", ("embedding",))
    if "LinearBase" in kind and inside:
        return Unit(name, MODULE, place, component, ("linear",))
    return Unit(name, MODULE, place, component, ("norm",)) if "norm" in kind[0].lower() else None


def _holders(units: list[Unit]) -> list[Unit]:
    """Modules between a block and its linears: attention, MLP."""
    found: dict[str, Unit] = {}
    for unit in units:
        parent = unit.module.rpartition(".")[0]
        while isinstance(unit.place, int) and not BLOCK.fullmatch(parent):
            found.setdefault(parent, Unit(parent, MODULE, unit.place, unit.component, (WHOLE,)))
            parent = parent.rpartition(".")[0]
    return list(found.values())


def _projections(unit: Unit, module: Any, packed: Mapping[str, list[str]]) -> Iterator[tuple[str, Projection]]:
    """A merged projection has one part for each that it is made of."""
    parent, _, last = unit.module.rpartition(".")
    names = packed.get(last, [])
    if unit.operators != ("linear",) or len(names) < 2:
        yield unit.module, Projection(unit.module)
        return
    first = 0
    for name, size in zip(names, _sizes(module), strict=True):
        yield f"{parent}.{name}", Projection(unit.module, first, first + size)
        first += size


def _sizes(module: Any) -> list[int]:
    """Output channels of each part on this rank."""
    sizes: list[int] = list(module.output_partition_sizes)
    return sizes
