"""Operators that a program calls by name (NoisyMatMul ...): what falls on them, and how often it did."""

from __future__ import annotations

import torch

from noisescope.anatomy import CALLS, Unit
from noisescope.errors import NoiseRoundsAway
from noisescope.noisy_ops.settings import Settings
from noisescope.probe.aims import Aim, Context
from noisescope.probe.draws import Rows
from noisescope.probe.tally import SiteCount
from noisescope.sites import PHASES, Place, matches_operator

_OUTSIDE = ""  # the place of a call that is made in no block


class DirectCalls:
    """Aims at such calls, one for each operator and block, and their counts."""

    def __init__(self) -> None:
        self._aims: dict[tuple[str, Place], Aim | None] = {}
        self._counts: dict[tuple[str, Place], SiteCount] = {}
        self._looked: set[tuple[str, str, Place]] = set()
        self._calls = 0

    @property
    def sites(self) -> list[SiteCount]:
        return list(self._counts.values())

    def forget(self) -> None:
        """The settings changed: aims are made anew, counts go on."""
        self._aims.clear()

    def aim(self, settings: Settings, name: str, operator: str, layer: int | None) -> Aim | None:
        """What falls on a call; None where the settings leave it alone."""
        place: Place = _OUTSIDE if layer is None else layer
        key = (name, place)
        if key not in self._aims:
            places = () if layer is None else (layer,)
            injection = settings.anywhere(places, numbered=layer is not None)
            unit = Unit(name, CALLS, place, "", (operator,))
            chosen = settings.noisy_phases and injection.selects(unit.site(operator))
            self._aims[key] = Aim(unit, operator, injection, self._count(key, operator)) if chosen else None
        return self._aims[key]

    def context(self) -> Context:
        """A call outside any model is a forward of its own."""
        self._calls += 1
        return Context(Rows(self._calls), grad=torch.is_grad_enabled())

    def fired(self, operator: str | None = None) -> list[SiteCount]:
        """Sites where noise fell, of one operator or group, or of all."""
        named = None if operator is None else {operator}
        return [site for site in self.sites if site.total and matches_operator(named, site.operator, "")]

    def check_rounding(self) -> None:
        """Noise that rounds away everywhere is no noise."""
        for phase in PHASES:
            fired = [site for site in self.sites if (site.forward if phase == "forward" else site.backward)]
            if fired and all(phase in site.rounded_away for site in fired):
                scale, floor, dtype = fired[0].rounded_away[phase]
                raise NoiseRoundsAway(
                    f"{fired[0].module}, {phase}: noise of scale {scale:g} rounds away in {dtype}. The smallest scale "
                    f"that survives is {floor:.4g}; raise it, or compute in a finer dtype"
                )

    def _count(self, key: tuple[str, Place], operator: str) -> SiteCount:
        if key not in self._counts:
            name, place = key
            self._counts[key] = SiteCount(operator=operator, place=place, module=name, looked=self._looked)
        return self._counts[key]
