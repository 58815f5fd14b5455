"""Third stage: run each operator of b on the inputs it has in a, and compare with a's output.

One forward of b per prompt: every module receives a's input, and its output is compared; b continues with a's output,
so the input of the next module shows what the code between them does (attention between its projections, an activation,
a residual add). The same holds for blocks, of which only the last add remains to be judged. Differences do not
accumulate, and each is attributed to where it arises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from noisescope import progress
from noisescope.engines.protocol import Engine, EngineCall, Ids, OnCall, is_leaf
from noisescope.findings import LIMITS, ROUND_OFF
from noisescope.measures.float64_mode import Float64Mode
from noisescope.sites import WHOLE, Place, Site

_TOKEN_FACTOR = 10.0  # a single token may be off by so many round-offs: few numbers vary more than many
_SMALL = 0.1  # of the median token's size: a smaller token's error is taken relative to this
_EXPLAINS = 0.3  # an explanation must make the error at least so many times smaller


@dataclass(eq=False)
class SiteError:
    """The difference at one site over all prompts; `between`: that of its input, computed by the code before it."""

    site: Site
    between: bool
    before: Site | None  # the leaf that ran before this one
    error: float = 0.0  # sums of squares
    size: float = 0.0
    elements: int = 0
    changed: int = 0
    worst: float = 0.0  # relative error of a token
    first_token: int | None = None  # at which a difference beyond round-off is seen
    sample: tuple[Tensor, Tensor, Tensor] | None = field(default=None, repr=False)  # input, a's output, b's output

    @property
    def relative_l2(self) -> float:
        return math.sqrt(self.error / self.size) if self.size else math.inf if self.error else 0.0

    def add(self, x: Tensor, a: Tensor, b: Tensor, floor: float) -> None:
        a, b = a.double(), b.to(a.device).double()
        gaps = (a - b).reshape(len(a), -1)
        bad = ~gaps.isfinite()
        gaps = torch.where(bad, a.reshape(len(a), -1).abs().nan_to_num(1.0, 1.0, 1.0) + 1.0, gaps)
        norms, sizes = gaps.norm(dim=-1), a.reshape(len(a), -1).norm(dim=-1)
        self.error += float(norms.square().sum())
        self.size += float(sizes.square().sum())
        self.elements += gaps.numel()
        self.changed += int((gaps != 0).sum())
        relative = norms / torch.maximum(sizes, _SMALL * sizes.median()).clamp_min(1e-30)
        self.worst = max(self.worst, float(relative.max()))
        beyond = (relative > floor).nonzero()
        if len(beyond):
            at = int(beyond[0])
            self.first_token = at if self.first_token is None else min(at, self.first_token)
        if self.sample is None:
            self.sample = (x, a, b)

    def beyond(self, round_off: float, own: SiteError | None = None) -> bool:
        """Whether healthy arithmetic can't cause a difference of this size; `own`: a's error here, where it is known.

        Sums of large terms that nearly cancel (scores of attention of 1e4) lose more digits than others.
        """
        factor: float = LIMITS["divergence_factor"]
        typical, worst = (own.relative_l2, own.worst) if own else (0.0, 0.0)
        return self.relative_l2 > factor * max(round_off, typical) or self.worst > max(
            _TOKEN_FACTOR * round_off, factor * worst
        )


def coarser(one: str, other: str) -> float:
    """The round-off of the dtype with fewer bits."""
    return max(ROUND_OFF.get(dtype, ROUND_OFF["float32"]) for dtype in (one, other))


def replay(a: Engine, b: Engine, prompts: Sequence[Ids]) -> tuple[list[SiteError], SiteError]:
    """The error of every leaf and of its input, in execution order, and that of the logits."""
    round_off = coarser(a.facts.dtype, b.facts.dtype)
    found: dict[tuple[str, bool], SiteError] = {}
    end = SiteError(Site("lm_head", "lm_head", "logits"), True, None)
    for ids in progress.track("operators by prompt", prompts):
        reference: dict[str, tuple[Tensor, Tensor]] = {}
        order: list[Site] = []
        logits = a.logits(ids, _keep(reference, order))
        before = {site.module: order[at - 1] if at else None for at, site in enumerate(order)}

        def compare(
            call: EngineCall,
            reference: dict[str, tuple[Tensor, Tensor]] = reference,
            before: dict[str, Site | None] = before,
        ) -> Tensor | None:
            site = call.site
            if site.module not in reference:
                return None
            x, y = reference[site.module]
            previous = before[site.module]
            if site.operator == "residual" and call.output.shape == y.shape:
                added = found.setdefault((site.module, True), SiteError(site, True, previous))
                added.add(y, y, call.output, _TOKEN_FACTOR * round_off)
                return y
            if x.is_floating_point() and call.inputs.shape == x.shape:
                arriving = found.setdefault((site.module, True), SiteError(site, True, previous))
                arriving.add(x, x, call.inputs, _TOKEN_FACTOR * round_off)
            own = found.setdefault((site.module, False), SiteError(site, False, previous))
            if call.output.shape == y.shape:
                # As it was called where it had a's input: a fused add and norm may keep digits of the sum between them.
                same = torch.equal(call.inputs, x.to(call.inputs))
                own.add(x, y, call.output if same else call.again(x.to(call.inputs)), _TOKEN_FACTOR * round_off)
                return y
            return None

        end.add(logits, logits, b.logits(ids, compare), _TOKEN_FACTOR * round_off)
    return list(found.values()), end


def own_errors(a: Engine, prompts: Sequence[Ids]) -> dict[tuple[str, bool], SiteError]:
    """How far a's operators are from the same code in float64 on the same inputs; empty where that can't be run."""
    if a.facts.engine != "transformers" or a.facts.dtype != "float32":
        return {}
    try:
        errors, _ = replay(a, _InFloat64(a), prompts)  # type: ignore[arg-type]  # facts and logits are all it uses
    except RuntimeError:
        return {}
    return {(error.site.module, error.between): error for error in errors}


class _InFloat64:
    """An engine whose forwards run in float64."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.facts = engine, engine.facts

    def logits(self, ids: Ids, on_call: OnCall | None = None) -> Tensor:
        with Float64Mode():
            return self._engine.logits(ids, on_call)


def _keep(reference: dict[str, tuple[Tensor, Tensor]], order: list[Site]) -> OnCall:
    def keep(call: EngineCall) -> None:
        if is_leaf(call.site) or call.site.operator == "residual":
            reference[call.site.module] = (call.inputs.clone(), call.output.clone())
            order.append(call.site)

    return keep


@dataclass(frozen=True)
class Role:
    """The sites with the same function in all layers, and the modules to correct for them."""

    name: str  # the module's name without the block
    errors: tuple[SiteError, ...]
    mend: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({error.site.place for error in self.errors if isinstance(error.site.place, int)}))

    @property
    def relative_l2(self) -> float:
        return math.sqrt(_mean([error.relative_l2**2 for error in self.errors]))

    @property
    def changed(self) -> float:
        return sum(error.changed for error in self.errors) / max(1, sum(error.elements for error in self.errors))


def roles(errors: Sequence[SiteError], sites: Sequence[Site]) -> tuple[Role, ...]:
    """Errors grouped by role: operators first, in execution order, then the code between them."""
    blocks = {site.place: site.module for site in sites if site.operator == "residual"}
    holders = {site.module for site in sites if site.operator == WHOLE}
    groups: dict[tuple[bool, str], list[tuple[SiteError, str]]] = {}
    for error in errors:
        module = _holder(error, blocks, holders) if error.between else error.site.module
        if module is not None:
            groups.setdefault((error.between, _short(module, blocks)), []).append((error, module))
    ordered = sorted(groups.items(), key=lambda item: item[0][0])
    return tuple(
        Role(
            f"{name} (between its operators)" if between else name,
            tuple(error for error, _ in held),
            tuple(dict.fromkeys(module for _, module in held)),
        )
        for (between, name), held in ordered
    )


def _holder(error: SiteError, blocks: dict[Place, str], holders: set[str]) -> str | None:
    """The smallest module that contains this leaf and the one before it: the code between them is that module's.

    Where the one before is in another block, what lies between is that block's last add.
    """
    if error.before is None:
        return None
    parent = error.site.module
    while parent:
        parent = parent.rpartition(".")[0]
        if parent in holders | set(blocks.values()) and error.before.module.startswith(f"{parent}."):
            return parent
    return blocks.get(error.before.place)


def _short(module: str, blocks: dict[Place, str]) -> str:
    """A module's name without its block; the block itself is "block"."""
    for name in blocks.values():
        if module == name:
            return "block"
        if module.startswith(f"{name}."):
            return module.removeprefix(f"{name}.")
    return module


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def mended_logits(a: Engine, b: Engine, ids: Ids, modules: set[str]) -> tuple[Tensor, Tensor]:
    """Logits of a, and of b with these modules returning a's output for the same input."""
    reference = a.logits(ids)

    def mend(call: EngineCall) -> Tensor | None:
        return a.apply(call.site, call.inputs)

    return reference, b.logits(ids, mend, modules=modules) if modules else b.logits(ids)


def rounded_logits(a: Engine, ids: Ids, modules: set[str], dtype: torch.dtype) -> Tensor:
    """Logits of a with these modules' outputs rounded to another dtype; of nested ones the outermost decides."""
    outer = {name for name in modules if not any(name.startswith(f"{other}.") for other in modules)}
    return a.logits(ids, lambda call: call.output.to(dtype), modules=outer)


# -- words


def explain(role: Role, weights: dict[str, Tensor]) -> str:
    """What is known about a role's difference: where, how large, and what it looks like."""
    first = role.errors[0]
    words = explain_size(role)
    looks = (first.between and _attention(first)) or _arithmetic(first, weights)
    return f"{words}; {looks}" if looks else words


def explain_size(role: Role) -> str:
    return f"{role.name}{_layers(role)}: relative L2 {role.relative_l2:.2g} on the reference's own inputs"


def _layers(role: Role) -> str:
    layers = role.layers
    if not layers:
        return ""
    if len(layers) == 1:
        return f" of layer {layers[0]}"
    return f" of {len(layers)} layers, {layers[0]} to {layers[-1]}"


def _arithmetic(error: SiteError, weights: dict[str, Tensor]) -> str:
    if error.sample is None:
        return ""
    x, a, b = error.sample
    gap = float((a - b).norm())
    return next((words for words, other in _explanations(error, x, a, b, weights) if _fits(b, other, gap)), "")


def _fits(b: Tensor, other: Tensor, gap: float) -> bool:
    return other.shape == b.shape and float((other - b).norm()) < _EXPLAINS * gap


def _explanations(
    error: SiteError, x: Tensor, a: Tensor, b: Tensor, weights: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    site, between = error.site, error.between
    gain = float((a * b).sum() / (a * a).sum()) if bool(a.any()) else 1.0
    yield f"b's output is a's times {gain:.4g}", gain * a
    names = [f"{site.module}.{name}" for name in ("weight", "bias")]
    weight, bias = (None, None) if between else (weights.get(name) for name in names)
    for dtype in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        if site.operator == "linear" and weight is not None and weight.shape[-1] == x.shape[-1]:
            short = x.to(dtype).double() @ weight.to(dtype).double().T
            short = short if bias is None else short + bias.double()
            yield f"b computes it in {name}", short
            yield f"b computes it in {name}", short.to(dtype).double()
        if site.operator == "norm" and weight is not None and bool(weight.all()):
            wide = weight.double()
            yield f"b rounds to {name} before it applies the weight", (a / wide).to(dtype).double() * wide
        yield f"b rounds {'its input' if between else 'its output'} to {name}", a.to(dtype).double()
    offset = (b - a).mean(0, keepdim=True)
    yield "b adds the same numbers to every token", a + offset


def _attention(error: SiteError) -> str:
    """By the first token that differs: it attends only to itself, so scores can't change it."""
    if "attn" not in error.site.module and "attention" not in error.site.module:
        return ""
    at = error.first_token
    if at is None:
        return ""
    if at == 0:
        return (
            "it also differs at the first token, which attends only to itself: the cause is values, precision or a "
            "mask that lets it see later tokens"
        )
    if at <= 2:
        return (
            "it does not differ at the first token, which attends only to itself: the scores differ (scale, "
            "position, softmax)"
        )
    return f"it differs only from token {at} on: a mask or window starts there"
