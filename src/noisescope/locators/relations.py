"""`relations`: laws that healthy arithmetic obeys, tried on every module of the model under test.

No weights on a host and no reference are needed: modules are called again, in place, with transformed inputs, and what
must follow is checked (laws.py has the table). Exact laws come with no tolerance, the others with a round-off model.

Two forwards are listened to: one at modules (projections, norms, activations, sub-layers, block sums), one at functions
(fused attention, softmax, products, experts). A third, with the batch in another order, lies between them, so that the
two also say whether the model repeats itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.anatomy import ATTENTION, CALLS, EXPERTS, MODULE, ROUTER, Anatomy, Unit, dissect
from noisescope.anatomy import ROTARY as ROTARY_KIND
from noisescope.errors import unknown
from noisescope.locators import law_activations, law_attention, law_linear, law_model, law_modules, law_norms, law_weights
from noisescope.locators.floors import number_format
from noisescope.locators.inputs import Batch, batches_for
from noisescope.locators.law_book import MODEL, SUBLAYER, Book
from noisescope.locators.law_linear import Examined, Linear
from noisescope.locators.law_readings import Reading, exact, host
from noisescope.locators.law_scope import ATTENTION_MODULE, FUSED, MLP, ROTARY, Handler, Heard, Listening, unbiased
from noisescope.locators.recompute import first_tensor, host_arithmetic
from noisescope.locators.residuals import OUT, Recorder, Residuals
from noisescope.locators.verdict import Verdict
from noisescope.model import Subject
from noisescope.probe.attention import decomposed_config
from noisescope.probe.door import unwrap
from noisescope.sites import Place, Site

_PART = "part"
_HUGE = 1e15  # inputs beyond this come from a fault upstream: their squares overflow


def relations(
    subject: Subject | nn.Module,
    inputs: Any = None,
    *,
    weights: bool = False,
    places: Iterable[Place] | None = None,
    seed: int = 0,
) -> Verdict:
    """Where a model computes wrongly, by the laws that its modules must obey.

        verdict = relations(ns.load("path/to/model", device="cuda"))
        verdict.verdict, verdict.suspects[0].site, verdict.suspects[0].fault_class

    `inputs` are a batch (the model's arguments as a dict, or token ids), a list of batches, or a list of texts; by
    default built-in text, or random tokens where there is no tokenizer. `weights=True` also reads the weights, which
    shows linear faults (gain, swapped channels, lost inputs) that no law without them can. `places` narrows the search
    to some blocks (by index) or outer places. The model runs as it is, in this thread and inside the scopes that are
    open; nothing of it is changed.
    """
    if isinstance(subject, Subject):
        model, tokenizer, anatomy = unwrap(subject.model), subject.tokenizer, subject.anatomy
    else:
        model, tokenizer, anatomy = unwrap(subject), None, dissect(subject)
    batch = batches_for(model, tokenizer, inputs, seed)[0]
    with _evaluating(model):
        return Examination(model, anatomy, weights=weights, places=_checked(places, anatomy)).of(batch)


def _checked(places: Iterable[Place] | None, anatomy: Anatomy) -> frozenset[Place] | None:
    if places is None:
        return None
    wanted = frozenset([places] if isinstance(places, (int, str)) else places)
    known = anatomy.places()
    for place in wanted:
        if place not in known:
            raise unknown("place", place, known)
    return wanted


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off, each module back in its own mode afterwards; no gradients."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class Examination:
    """One run of the locator on one model."""

    def __init__(
        self, model: nn.Module, anatomy: Anatomy, *, weights: bool, places: frozenset[Place] | None = None
    ) -> None:
        self.model = model
        self.anatomy = anatomy
        self.weights = weights
        self.places = places
        self.book = Book()
        self.rotary = law_modules.Rotary()
        self.recorder = Recorder()
        self.residuals = Residuals()
        self.blocks: dict[int, Tensor] = {}
        self.parts: dict[str, Tensor] = {}  # outputs of linears inside the MLP that runs now, by module name
        self.mixture = any(unit.kind in (EXPERTS, ROUTER) or unit.component == "router" for unit in anatomy.units)
        self.causal = law_model.looks_back_only(model)

    def of(self, batch: Batch) -> Verdict:
        with Listening(self.model, self._module_anatomy(), self._at_modules) as modules:
            first = law_model.answer(law_model.run(self.model, batch))
        turned = law_model.answer(law_model.run(self.model, _turned(batch)))
        with Listening(self.model, self._function_anatomy(), self._at_functions) as functions:
            again = law_model.answer(law_model.run(self.model, batch))
        forwards = 3 + (modules.extra + functions.extra) / max(1, modules.natural + functions.natural)
        self._block_sums()
        with host_arithmetic():
            self._model_laws(law_model.repeatability(first, turned, again), first)
        forwards += self._cache(batch, first)
        return self.book.verdict(forwards)

    # -- what is listened to

    def _module_anatomy(self) -> Anatomy:
        """Modules that are operators, blocks, and attention, MLP and rotary modules as wholes."""
        units: list[Unit] = [unit for unit in self.anatomy.units if unit.kind == MODULE]
        known = {unit.module for unit in units}
        modules = dict(self.model.named_modules())
        for unit in self.anatomy.units:
            if unit.kind == ATTENTION:
                units.append(replace(unit, kind=MODULE, operators=(ATTENTION_MODULE,), counts=()))
            elif unit.kind == ROTARY_KIND:
                units.append(replace(unit, kind=MODULE, operators=(ROTARY,), counts=()))
            known.add(unit.module)
        for place, block in enumerate(self.anatomy.blocks):
            for name, module in modules[block].named_modules(prefix=block):
                if name == block or name in known or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
                    continue
                if not any(True for _ in module.parameters()):
                    continue
                inner = [u for u in units if u.module.startswith(f"{name}.") and u.operators == ("linear",)]
                mlp = bool(inner) and all(u.component == "mlp" for u in inner)
                units.append(Unit(name, MODULE, place, "mlp" if mlp else "", (MLP if mlp else _PART,)))
        return replace(self.anatomy, units=tuple(units))

    def _function_anatomy(self) -> Anatomy:
        """Modules whose own function calls are operators; the others only as what they are, so that they stay apart."""
        modules = dict(self.model.named_modules())
        units = []
        for unit in self.anatomy.units:
            module = modules.get(unit.module)
            if unit.kind == ATTENTION and isinstance(module, nn.MultiheadAttention):
                self.book.notes.append(f"{unit.module}: nn.MultiheadAttention is judged as a whole")
                continue
            if unit.kind == ATTENTION and module is not None and decomposed_config(module) is not None:
                kernel = getattr(getattr(module, "config", None), "_attn_implementation", "")
                self.book.notes.append(f"{unit.module}: the attention kernel {kernel} can only be judged as a whole")
                continue
            units.append(unit)
        return replace(self.anatomy, units=tuple(units))

    def _at_modules(self, unit: Unit, operator: str) -> Handler | None:
        if self.places is not None and unit.place not in self.places:
            return None
        return {
            "linear": self._linear,
            "norm": self._norm,
            "silu": self._activation,
            "gelu": self._activation,
            "embedding": self._embedding,
            "residual": self._block,
            ATTENTION_MODULE: self._attention_module,
            MLP: self._mlp,
            ROTARY: self._rotary,
            _PART: self._part,
        }.get(operator)

    def _at_functions(self, unit: Unit, operator: str) -> Handler | None:
        if unit.kind not in (ATTENTION, EXPERTS, ROUTER, CALLS):
            return None
        if self.places is not None and unit.place not in self.places:
            return None
        return {
            "linear": self._product,
            "matmul": self._product,
            "bmm": self._product,
            "softmax": self._softmax,
            "silu": self._activation,
            "gelu": self._activation,
            "norm": self._norm,
            FUSED: self._fused,
        }.get(operator)

    # -- handlers: modules

    def _judged(self, heard: Heard) -> bool:
        """Whether an input can be judged at all: it is finite, and not so large that a healthy module overflows."""
        x = heard.x
        if x is None or not x.is_floating_point() or x.numel() == 0:
            return False
        largest = float(x.detach().abs().max())
        if largest < min(_HUGE, torch.finfo(x.dtype).max / 4):
            return True
        self.book.skipped["inputs that are not finite, or too large to be judged"] = (
            self.book.skipped.get("inputs that are not finite, or too large to be judged", 0) + 1
        )
        return False

    def _record(self, heard: Heard, *, norm: bool = False) -> None:
        y = heard.output
        if y is None or not isinstance(heard.unit.place, int):
            return
        if norm and heard.x is not None:
            self.recorder.got(heard.unit.module, heard.x)
        self.recorder.gave(heard.unit.module, y)

    def _linear(self, heard: Heard) -> None:
        self._record(heard)
        if heard.unit.component == "mlp" and heard.output is not None:
            self.parts[heard.unit.module] = heard.output.detach()
        if not self._judged(heard) or heard.output is None or heard.x is None:
            return
        call, biased = unbiased(heard)
        packed = bool(heard.unit.packed)
        linear = Linear(
            call, heard.x, heard.x.shape[-1], additive=not packed, zero_channels=lambda c: _zero_rows(heard.callee, c)
        )
        found = law_linear.examine(linear, None if biased else heard.output)
        if packed:
            found.skipped.append(f"R18, R26: {heard.unit.packed} may quantise what it is given")
        if self.weights and not packed:
            law_weights.checksums(heard, found)
            if found.broken and isinstance(heard.callee, nn.Module):
                recomputed = law_weights.look_closer(heard, found)
                if recomputed is not None:
                    found.facts["recomputed"] = recomputed
        self._add(heard, found)

    def _norm(self, heard: Heard) -> None:
        self._record(heard, norm=True)
        if self._judged(heard):
            self._add(heard, law_norms.examine(heard, weights=self.weights))

    def _activation(self, heard: Heard) -> None:
        if self._judged(heard):
            self._add(heard, law_activations.examine(heard))

    def _embedding(self, heard: Heard) -> None:
        x, y = heard.x, heard.output
        if x is None or y is None or x.is_floating_point():
            return
        found = Examined()
        plain = type(heard.callee).forward is nn.Embedding.forward
        turned = heard.again(x.flip(-1)) if plain and x.dim() else None
        repeat = heard.again(x)
        with host_arithmetic():
            first = host(y).double()
            found.readings.append(exact("R1", host(repeat).double(), first))
            if turned is not None:
                found.readings.append(exact("R2", host(turned.flip(-2)).double(), first))
            if self.weights and plain and heard.callee.max_norm is None:
                table = heard.callee.weight.detach().cpu()[x.detach().cpu().flatten()]
                found.readings.append(exact("R27", first, table.double()))
                if found.broken:
                    found.facts["expected"] = (host(y), table.double(), torch.zeros_like(first))
        self._add(heard, found)

    def _part(self, heard: Heard) -> None:
        self._record(heard)

    def _mlp(self, heard: Heard) -> None:
        self._record(heard)
        prefix = f"{heard.unit.module}."
        parts = {name.removeprefix(prefix): y for name, y in self.parts.items() if name.startswith(prefix)}
        self.parts.clear()
        if self._judged(heard) and parts and not self.mixture:
            self._add(heard, law_modules.examine_mlp(heard, parts), level=SUBLAYER)

    def _attention_module(self, heard: Heard) -> None:
        self._record(heard)
        if self._judged(heard):
            causal = self.causal or bool(getattr(heard.callee, "is_causal", False) and self.causal)
            self._add(heard, law_modules.examine_attention(heard, self.rotary, causal=causal), level=SUBLAYER)

    def _rotary(self, heard: Heard) -> None:
        self._add(replace(heard, operator="matmul"), self.rotary.examine(heard))

    def _block(self, heard: Heard) -> None:
        y = heard.output
        if y is not None and isinstance(heard.unit.place, int):
            self.blocks[heard.unit.place] = y.detach().cpu()
            with host_arithmetic():
                x = first_tensor(heard.args, heard.kwargs)
                self.residuals.see(self.recorder.block(heard.unit, len(self.blocks), x, y))
        self.recorder.clear()

    # -- handlers: functions

    def _product(self, heard: Heard) -> None:
        """A product as a linear function of its first factor, the other one and what is added held."""
        if not self._judged(heard) or heard.output is None or not isinstance(heard.output, Tensor):
            return
        name = getattr(heard.callee, "__name__", "")
        args = list(heard.args)
        at = 1 if name in ("baddbmm", "addmm") else 0
        if at and isinstance(args[0], Tensor):
            args[0] = torch.zeros_like(args[0])
        if at >= len(args) or not isinstance(args[at], Tensor) or name in ("einsum", "__rmatmul__"):
            return
        x = args[at]
        plain = replace(heard, args=tuple(args))
        linear_function = name == "linear"
        call, biased = unbiased(plain)

        def again(z: Tensor) -> Tensor:
            if not at:
                return call(z)
            return heard.callee(*(z if place == at else arg for place, arg in enumerate(args)), **heard.kwargs)  # type: ignore[no-any-return]

        if x.dim() < 2 or x.shape[-2] < 2:
            return
        found = law_linear.examine(
            Linear(again, x, x.shape[-1], free_rows=linear_function, statistics=linear_function or at == 0),
            None if biased or at else heard.output,
        )
        self._add(heard, found)

    def _softmax(self, heard: Heard) -> None:
        if heard.x is not None and heard.x.is_floating_point():
            self._add(heard, law_attention.examine_softmax(heard))

    def _fused(self, heard: Heard) -> None:
        if self._judged(heard):
            self._add(heard, law_attention.examine(heard))

    # -- conclusions

    def _add(self, heard: Heard, found: Examined, *, level: int = 0) -> None:
        x, y = heard.x, heard.output
        shape = f"{heard.operator}, {0 if x is None else x.shape[-1]} to {0 if y is None else y.shape[-1]}"
        width = 0 if y is None else y.shape[-1]
        unit = heard.unit
        site = heard.site if unit.kind in (ATTENTION,) and heard.operator != FUSED else unit.site(heard.operator)
        self.book.add(site, found, level=level, kind=shape, width=width)

    def _block_sums(self) -> None:
        """R25 of blocks, bit for bit."""
        with host_arithmetic():
            for index, name in enumerate(self.anatomy.blocks):
                if index in self.blocks:
                    kept = Reading("R25", 0.0, elements=self.blocks[index].numel())
                    known = self.residuals.forms.get(OUT)
                    if known:
                        self.book.add(Site("residual", index, name), Examined([kept]), kind="residual")
            for block, target, _, recomputed in self.residuals.failures():
                reading = exact("R25", recomputed.y.double(), recomputed.reference.values)
                found = Examined([reading], {"recomputed": recomputed})
                site = block.unit.site("residual")
                if target != OUT:
                    found.readings[0] = replace(reading, facts={"words": f"the sum that enters {target} is off"})
                entry = self.book.add(site, found, kind="residual", width=recomputed.y.shape[-1])
                entry.width = recomputed.y.shape[-1]
            unknown = self.residuals.unknown()
            if unknown:
                self.book.notes.append(f"R25 of {len(unknown)} blocks: their output is no plain sum of tensors seen")

    def _model_laws(self, found: dict[str, Reading], first: Tensor) -> None:
        """The self-test of the stack; what is broken here is told, and left to the modules to explain."""
        loose = [law for law, reading in found.items() if reading.broken]
        if "R1" in loose:
            self.book.notes.append(f"the model does not repeat itself: two runs differ by {found['R1'].size:.2g} of the rms")
        if "R2" in loose:
            self.book.notes.append(f"batch order changes the model's answer by {found['R2'].size:.2g} of the rms")
        if not loose:
            self.book.notes.append("the model repeats itself bit for bit, in any batch order")
        _ = number_format

    def _cache(self, batch: Batch, logits: Tensor) -> float:
        if self.places is not None:
            return 0.0
        if not self.causal or set(batch) != {"input_ids"} or self.mixture or batch["input_ids"].shape[1] < 3:
            why = "MoE routing may jump" if self.mixture else "not a causal language model with token ids alone"
            self.book.notes.append(f"R4 and R5 of the whole model: {why}")
            return 0.0
        if any(entry.broken for entry in self.book.entries.values()):
            self.book.notes.append("R4 and R5 of the whole model: not tried, since inner laws are broken")
            return 0.0
        try:
            found, site, cost = law_model.cache_laws(self.model, self.anatomy, batch, self.blocks, logits)
        except Exception as error:  # a model's own cache code may raise anything: then there is nothing to judge
            self.book.notes.append(f"R4 and R5 of the whole model: its cache can't be used ({type(error).__name__})")
            return 1.0
        place = site or Site("linear", "lm_head", "")
        self.book.add(place, Examined(list(found.values())), level=MODEL, kind="model")
        return cost


def _turned(batch: Batch) -> Batch:
    """The batch in reverse order."""
    return {name: value.flip(0) if isinstance(value, Tensor) and value.dim() else value for name, value in batch.items()}


def _zero_rows(module: Any, channels: tuple[int, ...]) -> set[int]:
    """Of some channels those whose weights are all 0: they are silent for a good reason."""
    weight = law_weights.weight_of(module)
    return set() if weight is None else {c for c in channels if not bool(weight[c].any())}
