"""One kernel that is wrong in every layer is one suspect: the first place of it, and the others beside it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence

from noisescope.localization.verdict import Suspect
from noisescope.model.anatomy import Anatomy
from noisescope.sites import Site

_NEARLY_ALL = 0.8  # of the places that have such an operator
_FEWEST = 2

Kind = Callable[[Site], Hashable]


def in_all_layers(suspects: Sequence[Suspect], judged: Iterable[Site], anatomy: Anatomy) -> tuple[Suspect, ...]:
    """Suspects of one operator with one class in nearly all layers as one; the others as they are.

    First all calls of an operator (every linear), then those of one role (every q_proj). What is wrong in a few places
    alone is never joined, so a fault of one layer keeps its place.
    """
    known = {*judged, *(suspect.site for suspect in suspects)}
    for kind in (_by_operator, lambda site: (*_by_operator(site), _role(site, anatomy))):
        suspects = _joined(suspects, known, kind)
    return tuple(suspects)


def _by_operator(site: Site) -> tuple[str, str]:
    return site.operator, site.tensor


def _role(site: Site, anatomy: Anatomy) -> tuple[str, int]:
    """A module's name within its block, and which call of it."""
    inside = isinstance(site.place, int)
    prefix = anatomy.blocks[site.place] if isinstance(site.place, int) else ""
    return (site.module.removeprefix(prefix) if inside else site.module), site.occurrence


def _joined(suspects: Sequence[Suspect], known: set[Site], kind: Kind) -> list[Suspect]:
    groups: dict[Hashable, list[Suspect]] = {}
    for suspect in suspects:
        groups.setdefault(kind(suspect.site), []).append(suspect)
    swallowed: set[int] = set()
    first: dict[int, Suspect] = {}
    for key, group in groups.items():
        # What enters an operator is judged only where it is wrong, so that its outputs tell how many there are.
        total = {s for s in known if kind(dataclasses.replace(s, tensor="output")) == _as_output(key)}
        places = {(s.place, s.module) for s in total if isinstance(s.place, int)}
        name = Counter(s.fault_class for s in group if s.class_confidence > 0).most_common(1)
        same = [s for s in group if name and (s.fault_class == name[0][0] or s.class_confidence == 0)]
        layers = {(s.site.place, s.site.module) for s in same if isinstance(s.site.place, int)}
        if len(layers) < max(_FEWEST, _NEARLY_ALL * len(places)) or len({place for place, _ in layers}) < _FEWEST:
            continue
        head = next(s for s in same if s.class_confidence > 0)
        swallowed |= {id(s) for s in same}
        first[id(head)] = _join(head, [s for s in same if s is not head])
    return [first.get(id(s), s) for s in suspects if id(s) in first or id(s) not in swallowed]


def _as_output(key: Hashable) -> Hashable:
    return (key[0], "output", *key[2:]) if isinstance(key, tuple) else key


def _join(head: Suspect, others: Sequence[Suspect]) -> Suspect:
    sites = tuple(site for other in others for site in (other.site, *other.also))
    layers = {site.place for site in sites if isinstance(site.place, int)} - {head.site.place}
    modules = len({site.module for site in sites})
    words = f"the same in {len(layers)} other layers"
    if modules > len(layers):
        words += f", {modules} other modules in all"
    return dataclasses.replace(
        head,
        evidence=f"{head.evidence}; {words}",
        score=max(s.score for s in (head, *others)),
        also=(*head.also, *sites),
        class_confidence=max(s.class_confidence for s in (head, *others)),
    )
