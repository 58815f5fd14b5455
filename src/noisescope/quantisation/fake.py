"""Fake quantisation: a plan carried out in a model through the probe, weights rounded where they are used.

The model's own weights stay as they are, and nothing is left behind: a plan is an `Injection`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noisescope.identity import registered
from noisescope.injection import Injection, Perturbation
from noisescope.quantisation.formats import UNTOUCHED, weight_format
from noisescope.sites import Site


@registered("noisescope.PerModule")
@dataclass(frozen=True)
class PerModule:
    """Another perturbation for each module, by name; `Injection.perturbation_at` asks for the one of a site."""

    perturbations: tuple[tuple[str, Perturbation], ...]

    def at(self, site: Site) -> Perturbation:
        return dict(self.perturbations)[site.module]

    def __call__(self, tensor: Any, draw: Any) -> Any:
        raise TypeError("a PerModule is for the modules of an Injection: ask .at(site) for the perturbation of one")


def plan_injection(assignment: Mapping[str, str]) -> Injection | None:
    """The injection that rounds each module's weight to its format; None where all keep 16 bits."""
    rounded = {module: weight_format(name) for module, name in sorted(assignment.items()) if name != UNTOUCHED}
    if not rounded:
        return None
    return Injection(
        PerModule(tuple(rounded.items())),
        operators=frozenset({"linear"}),
        modules=tuple(rounded),
        tensor="weight",
        phases=frozenset({"forward"}),
    )
