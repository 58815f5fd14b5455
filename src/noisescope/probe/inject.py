"""`inject`: noise in a model inside a `with` block, counted, without leaving a trace."""

from __future__ import annotations

import dataclasses
import fnmatch
import warnings

import torch
from torch import nn

from noisescope.errors import InvalidInput, NoiseRoundsAway, NothingInjected, UnsupportedModel
from noisescope.injection import Injection
from noisescope.model.anatomy import Anatomy, Unit
from noisescope.probe.formats import Format
from noisescope.probe.forward_patching import ModelScope
from noisescope.probe.forward_wrapper import in_backward
from noisescope.probe.operator_target import OperatorTarget, Target
from noisescope.probe.tally import SiteCount, Tally
from noisescope.sites import CACHED, GROUPS, OUTER_PLACES, PHASES, Place, matches_operator, place_order

WEIGHTED = ("linear", "norm", "embedding")


def inject(model: nn.Module, injection: Injection, *, anatomy: Anatomy | None = None) -> Probe:
    """A scope that applies `injection` to `model`.

    >>> import torch, noisescope as ns
    >>> model = ns.load("tiny:llama").model
    >>> with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"softmax"}, layers={1})) as tally:
    ...     output = model(torch.arange(8)[None])
    >>> tally.forward, tally.per_layer[1].forward
    (1, 1)

    Leaving raises NothingInjected if nothing was altered, or an operator or layer named explicitly was not. Keep the
    returned probe for `probe.rows(samples)` and `probe.update(injection)`.
    """
    return Probe(model, injection, anatomy=anatomy)


class Probe(ModelScope):
    """A scope that injects."""

    def __init__(
        self,
        model: nn.Module,
        injection: Injection,
        *,
        anatomy: Anatomy | None = None,
        check: bool = True,
        gradients_only: bool = False,
    ) -> None:
        super().__init__(model, anatomy)
        self.injection = injection
        self.tally = Tally()
        self._counts: dict[tuple[str, Place, str], SiteCount] = {}
        self._ran: set[tuple[str, str]] = set()
        self._check = check  # on leaving; `noisy_ops` has several models and asks them together
        self.gradients_only = gradients_only  # no noise in forwards that record no gradients: evaluation, generation
        self._check_targets()

    def __enter__(self) -> Tally:  # type: ignore[override]
        self._open()
        return self.tally

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.tally.forced_eager = self.compiled
        self._ran = self._operators_that_ran()
        try:
            self._close()
        except Exception:
            if kind is None:
                raise
            return
        if kind is None and self._check:
            self.check()

    def update(self, injection: Injection) -> None:
        """Replace the injection between steps; the tally continues."""
        previous, self.injection = self.injection, injection
        try:
            self._check_targets()
            self.tally.look_again()
            if self.owned_by is not None:
                self._install(dict(self.model.named_modules(remove_duplicate=False)))
        except BaseException:
            self.injection = previous
            raise

    def reseed(self, seed: int) -> None:
        """Use other draws of the same injection from here on: all targets stay, so this costs almost nothing."""
        if seed == self.injection.seed:
            return
        self.injection = dataclasses.replace(self.injection, seed=seed)
        for wrapper in self._wrappers.values():
            for targets in wrapper.targets.values():
                for target in targets.values():
                    if isinstance(target, OperatorTarget):
                        target.reseed(seed)

    def sleeps(self) -> bool:
        """Decided when a forward starts: inside it, checkpointing may first run blocks without gradients."""
        started = self.context is not None or in_backward()
        return self.gradients_only and not started and not torch.is_grad_enabled()

    def operators_at(self, unit: Unit) -> tuple[str, ...]:
        return unit.injectable

    def target_at(self, unit: Unit, operator: str) -> Target | None:
        if not self.injection.selects(unit.site(operator)):
            return None
        if unit.packed and self.injection.tensor == "weight":
            raise InvalidInput(
                f"{unit.module} is a {unit.packed} whose weight is packed: noise can only be injected into its "
                f"output or input"
            )
        if not self._has_tensor(operator):
            return None
        return OperatorTarget(unit, operator, self.injection, self.count_of(unit, operator))

    def count_of(self, unit: Unit, operator: str) -> SiteCount:
        """The tally's entry for an operator of a unit, created on first request."""
        key = (operator, unit.place, unit.module)
        if key not in self._counts:
            self._counts[key] = SiteCount(
                operator=operator, place=unit.place, module=unit.module, looked=self.tally.looked
            )
            self.tally.sites.append(self._counts[key])
        return self._counts[key]

    def _has_tensor(self, operator: str) -> bool:
        """Whether an operator has the targeted tensor: a softmax has no weight, an embedding no float input."""
        tensor = self.injection.tensor
        return {"weight": operator in WEIGHTED, "input": operator not in ("embedding", *CACHED)}.get(tensor, True)

    def _operators_that_ran(self) -> set[tuple[str, str]]:
        """(operator, module) of units that are certain to compute them and were called, as far as targets reach now."""
        certain = {(op, unit.module) for unit in self.anatomy.units if unit.certain for op in unit.injectable}
        targets = [
            (target.operator, target.unit.module)
            for wrapper in self._wrappers.values()
            if wrapper.calls and not wrapper.shared
            for place in wrapper.targets.values()
            for target in place.values()
        ]
        return certain.intersection(targets)

    # -- checks

    def _check_targets(self) -> None:
        """Reject before the run what can't be hit: a layer out of range, an operator the model lacks."""
        self.anatomy.check_layers([*self.injection.named_places, *self.injection.layer_multipliers])
        names = {unit.module for unit in self.anatomy.units}
        for pattern in self.injection.modules or ():
            if pattern not in names and not fnmatch.filter(names, pattern):
                raise NothingInjected(
                    f"modules: {pattern!r} matches no operator's module; `noisescope inspect -v` lists them"
                )
        hit = [
            (op, unit) for unit in self.anatomy.units for op in unit.injectable if self.injection.selects(unit.site(op))
        ]
        self._check_cached([unit for op, unit in hit if op in CACHED])
        if self.injection.tensor == "weight" and not any(op in WEIGHTED for op, _ in hit):
            raise NothingInjected("tensor='weight' needs an operator with a weight: linear, norm or embedding")
        if self.injection.tensor == "input" and hit and all(op == "embedding" for op, _ in hit):
            raise InvalidInput(
                "the input of embedding is token ids (integers), but noise applies only to floating-point tensors"
            )
        for name in sorted(self.injection.operators or ()):
            if not any(matches_operator({name}, op, unit.component) for op, unit in hit):
                raise NothingInjected(self._why_not(name))
        if not hit:
            raise NothingInjected(self._why_not(None))

    def _check_cached(self, units: list[Unit]) -> None:
        """Refuse what can't be done to keys and values."""
        if not units:
            return
        if not isinstance(self.injection.perturbation, Format):
            raise InvalidInput(
                f"keys and values are read again for every later token, so they take a number format such as "
                f"Format('fp8_e4m3'), not {self.injection.perturbation!r}, which would draw anew each time"
            )
        if self.injection.tensor != "output":
            raise InvalidInput(f"keys and values have no {self.injection.tensor}: leave tensor out")
        modules = dict(self.model.named_modules())
        for unit in units:
            if getattr(modules.get(unit.module), "kv_lora_rank", None):
                raise UnsupportedModel(
                    f"{unit.module} ({type(modules[unit.module]).__name__}) caches a compressed latent (kv_lora_rank), "
                    "not keys and values: what rounding its cache costs is not modelled"
                )

    def _why_not(self, operator: str | None) -> str:
        """Why nothing was found to inject into, and what to do."""
        what = f"operator {operator!r}" if operator else "no operator"
        units = self.anatomy.units
        members = GROUPS[operator][0] if operator in GROUPS else {operator}
        where = sorted({str(u.place) for u in units if members & set(u.injectable)}) if operator else []
        if operator and not where:
            present = sorted({op for unit in units for op in unit.operators})
            return f"{what} does not exist in {self.anatomy.architecture}: it computes {', '.join(present)}"
        places = ", ".join(p for p in OUTER_PLACES if any(u.place == p for u in units))
        return (
            f"{what} matches the given layers, places and modules in {self.anatomy.architecture}: "
            f"blocks 0 to {len(self.anatomy.blocks) - 1}, and {places}. See `noisescope inspect` for names; "
            "MoE routers need modules=..., rotary angles places={'rotary'}."
        )

    def check(self) -> None:
        """Raise NothingInjected unless every explicitly named target was hit and changed."""
        tally, injection = self.tally, self.injection
        if not self.forwards:
            raise NothingInjected("the model was not called inside the scope, so nothing was injected")
        if injection.phases == {"backward"} and not tally.backward:
            raise NothingInjected(
                "phases={'backward'}, but no backward pass ran inside the scope, or nothing targeted requires a "
                "gradient: call loss.backward() inside the scope"
            )
        if not tally.forward and not tally.backward:
            raise NothingInjected(f"nothing fired in {self.forwards} forward(s): {self._silent_reason()}")
        for name in sorted(injection.operators or ()):
            members = self.fired(name)
            if not members:
                raise NothingInjected(f"operator {name!r} never fired: {self._silent_reason()}")
            self._check_rounding(members, f"operator {name!r}")
        rounded = isinstance(injection.perturbation, Format)
        everywhere = rounded and injection.named_places == frozenset(range(len(self.anatomy.blocks)))
        for place in () if everywhere else sorted(injection.named_places, key=place_order):  # text runs no image tower
            here = [s for s in tally.sites if s.place == place and s.total]
            what = f"layer {place}" if isinstance(place, int) else str(place)
            if not here:
                raise NothingInjected(f"{what} never fired: was it skipped in this forward?")
            if not rounded:  # what is in the format already costs nothing here
                self._check_rounding(here, what)
        self.check_effects()

    def check_effects(self) -> None:
        """Raise if an operator that must have run was never observed, or if all noise was lost to rounding."""
        self._check_unseen()
        fired = [site for site in self.tally.sites if site.total]
        if fired:
            self._check_rounding(fired, "everywhere")
            self._warn_of_rounding()

    def _check_unseen(self) -> None:
        """A module that must compute an operator ran, but the operator was not observed: an unknown kernel."""
        for (operator, _, module), count in self._counts.items():
            if count.total == 0 and (operator, module) in self._ran and "forward" in self.injection.phases:
                raise NothingInjected(f"{module} ran, but its {operator} was never observed: {self._silent_reason()}")

    def fired(self, name: str) -> list[SiteCount]:
        """The sites of an operator or group that fired."""
        units = {(unit.module, op): unit.component for unit in self.anatomy.units for op in unit.injectable}
        fired = [site for site in self.tally.sites if site.total]
        return [s for s in fired if matches_operator({name}, s.operator, units[s.module, s.operator])]

    def _silent_reason(self) -> str:
        return (
            "noisescope can't intercept its functions (a custom fused kernel?). `noisescope inspect` shows what is "
            "visible; eager attention (attn_implementation='eager') makes softmax and matmul visible"
        )

    def _check_rounding(self, sites: list[SiteCount], what: str) -> None:
        """Noise that is lost to rounding at every target counts as zero injection."""
        for phase in PHASES:
            fired = [site for site in sites if getattr(site, phase)]
            rounded = [site for site in fired if phase in site.rounded_away]
            if rounded and len(rounded) == len(fired):
                raise NoiseRoundsAway(f"{what}, {phase}: {self._rounding_words(rounded[0], phase)}")
        looked = [pair for site in sites if not site.control for pair in site.samples if int(pair[1])]
        if looked and not any(int(changed) for changed, _ in looked):
            noise = self.injection.perturbation
            if isinstance(noise, Format):
                raise NoiseRoundsAway(
                    f"{what}: rounding to {noise.name} changed none of the sampled elements: all have this format"
                )
            raise NoiseRoundsAway(
                f"{what}: {noise!r} fired but changed none of the sampled elements, so the result is clean: it is too "
                "small for their dtype"
            )

    def _warn_of_rounding(self) -> None:
        """If noise is lost to rounding in some places only, warn and continue."""
        for phase in PHASES:
            rounded = [site for site in self.tally.sites if phase in site.rounded_away]
            if rounded:
                words = self._rounding_words(rounded[0], phase)
                warnings.warn(f"{words} (at {len(rounded)} of {len(self.tally.sites)} sites)", stacklevel=4)

    def _rounding_words(self, site: SiteCount, phase: str) -> str:
        scale, floor, dtype = site.rounded_away[phase]
        return (
            f"noise of scale {scale:g} is lost to rounding in {dtype}, whose numbers are spaced further apart than "
            f"that. The smallest scale that has an effect is {floor:.4g}; raise the scale, or use a "
            f"higher-precision dtype"
        )
