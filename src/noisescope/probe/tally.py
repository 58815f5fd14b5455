"""What a scope actually did: counts per operator, place and module, and the share of elements that changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from noisescope.model.host_copy import begin_copies
from noisescope.sites import Place, place_order
from noisescope.tables import Sheet, Table, Tabular

Group = TypeVar("Group", int | str, str)


@dataclass
class Counts:
    """How often a perturbation was applied, per phase."""

    forward: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.backward


@dataclass
class SiteCount(Counts):
    """Counts of one operator in one module, with a sample of what changed there."""

    operator: str = ""
    place: Place = ""
    module: str = ""
    rounded_away: dict[str, tuple[float, float, str]] = field(default_factory=dict)  # phase: scale, smallest, dtype
    control: bool = False  # scale 0 on purpose: the clean decomposed path, or a layer muted by its multiplier
    samples: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # elements changed, and sampled (on device)
    looked: set[tuple[str, ...]] = field(default_factory=set, repr=False)  # shared by all sites of a tally

    def look(self, phase: str, *, every: bool = False) -> bool:
        """Whether to sample here: the first module of each operator in each place, because sampling costs time.

        `every` module of a number format: some may hold numbers of that format already.
        """
        key = (phase, self.operator, str(self.place), self.module if every else "")
        if key in self.looked:
            return False
        self.looked.add(key)
        return True


@dataclass
class Tally(Tabular):
    """The counts of a scope; they grow while it is open."""

    sites: list[SiteCount] = field(default_factory=list)
    looked: set[tuple[str, ...]] = field(default_factory=set, repr=False)
    forced_eager: bool = False  # torch.compile was met inside the scope, and the model ran eagerly

    def begin_reading(self) -> Callable[[], None]:
        """Start copying what was sampled to the host; the returned function waits for it, and for nothing later."""
        kept = [site for site in self.sites if site.samples]
        copies = begin_copies([number for site in kept for pair in site.samples for number in pair])

        def read() -> None:
            numbers = iter(copies.wait())
            for site in kept:
                site.samples[:] = [(next(numbers), next(numbers)) for _ in site.samples]

        return read

    def look_again(self) -> None:
        """Under another injection each site is sampled again, and earlier rounding results no longer apply."""
        self.looked.clear()
        for site in self.sites:
            site.control = False
            site.rounded_away.clear()
            site.samples.clear()

    @property
    def forward(self) -> int:
        return sum(site.forward for site in self.sites)

    @property
    def backward(self) -> int:
        return sum(site.backward for site in self.sites)

    @property
    def per_layer(self) -> dict[Place, Counts]:
        """Blocks by index, other places by name; only what fired."""
        counts = self._grouped(lambda site: site.place)
        return dict(sorted(counts.items(), key=lambda item: place_order(item[0])))

    @property
    def per_operator(self) -> dict[str, Counts]:
        return self._grouped(lambda site: site.operator)

    @property
    def per_module(self) -> dict[str, Counts]:
        return self._grouped(lambda site: site.module)

    @property
    def changed(self) -> float | None:
        """The share of elements actually changed, in the first rows of each operator and place; None: nothing fired."""
        looked = sum(int(count) for site in self.sites for _, count in site.samples)
        if not looked:
            return None
        return sum(int(changed) for site in self.sites for changed, _ in site.samples) / looked

    def _grouped(self, by: Callable[[SiteCount], Group]) -> dict[Group, Counts]:
        groups: dict[Group, Counts] = {}
        for site in self.sites:
            if site.total:
                group = groups.setdefault(by(site), Counts())
                group.forward += site.forward
                group.backward += site.backward
        return groups

    def sheet(self) -> Sheet:
        fired = (site for site in self.sites if site.total)
        sites = ((site.operator, site.place, site.module, site.forward, site.backward) for site in fired)
        operators = ((name, counts.forward, counts.backward) for name, counts in self.per_operator.items())
        tables = {
            "sites": Table(("operator", "place", "module", "forward", "backward"), tuple(sites)),
            "operators": Table(("operator", "forward", "backward"), tuple(operators)),
        }
        title, *rest = str(self).splitlines()
        lines = tuple(line.strip() for line in rest[len(self.per_operator) :])
        heads = {name: name for name in tables["operators"].columns}
        return Sheet(title, tables, heads, lines, shown=tables["operators"])

    def __str__(self) -> str:
        share = self.changed
        lines = [f"{self.forward} forward and {self.backward} backward injections"]
        if share is not None:
            lines[0] += f", {share:.1%} of the sampled non-zero elements changed"
        for operator, counts in self.per_operator.items():
            lines.append(f"  {operator:<10} forward {counts.forward:>7}  backward {counts.backward:>7}")
        if self.forced_eager:
            lines.append("  torch.compile was disabled: the model ran eagerly inside the scope")
        return "\n".join(lines)
