"""The formats a weight may be stored in, a plan of them as an injection, and what each would cost each linear.

Rounding is to nearest. Integers have one scale for each group of 64 weights along the input dimension; they are
symmetric, but int4 comes with a zero point, too, and with that and a clipped range (`int4_asymmetric`, `int4_clipped`).
A clipped range is chosen for the inputs of the linear: the squared error of a weight counts by the mean square of what
it multiplies (input_squares.py; llama.cpp calls this an importance matrix). For fused experts all errors count alike.
FP8 has one scale for each output channel; MXFP4 and NVFP4 have their own blocks (32 and 16). "bf16" stands for 16 bits.

Two counts of bits: nominal (the number in the name, which budgets of average bits are of) and effective (with the share
of the scales: 16 bits each, 8 in MXFP4 and NVFP4, and 4 of a zero point; a last group that is not full has its own).

Rounding W to Wq puts an error d_t = (Wq - W) x_t on the output at every token t. To second order the KL of the logits,
summed over scored positions s, is

    KL = 1/2 sum_s E[(v_s . sum_t J_st d_t)^2],     E[v_s v_s^T] = diag(p_s) - p_s p_s^T,

J_st the Jacobian of the logits at s in the output at t. One backward of independent random v_s (`fisher_factor`) gives
g_t = sum_s J_st^T v_s. With a_t = g_t . d_t, 1/2 (sum_t a_t)^2 has the right mean, but every pair of tokens adds noise;
1/2 sum_t a_t^2 leaves out how errors at two tokens act together at a third (most for v_proj, whose errors attention
averages: 2.1 times as much), and is far steadier. And a large error costs in proportion to its size, not to its square:
the first token of a sequence, whose massive activations all others attend to, would be taken for most of the damage. So

    predicted KL = sum_t (sqrt(1 + a_t^2) - 1),     which is 1/2 a_t^2 where a_t is small.

SmolLM2-135M, int3 / int4 / int8, 12 x 128 tokens with 2 draws. Spearman with the KL measured, over 24 random plans of
different mixtures of formats and over 32 of one mixture (5 bits); and of the modules' scores by two draws, at int4:

===========================  ========  ===========  =========
estimate                     mixtures  one mixture  two draws
===========================  ========  ===========  =========
1/2 (sum_t a_t)^2            0.937     0.841        0.775
1/2 sum_t a_t^2              0.957     0.839        0.961
sum_t (sqrt(1 + a_t^2) - 1)  0.970     0.889        0.966
===========================  ========  ===========  =========

A plain diagonal, sum_i g_i^2 d_i^2, would also lose how the channels of one token add up. a_t costs one product
x (Wq - W)^T for each format, in a backward like the screen's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, NothingInjected, unknown
from noisescope.injection import Injection, Perturbation
from noisescope.measures.fisher import GradientScreen
from noisescope.model.anatomy import EXPERTS, MODULE, Anatomy, Unit, linear_weight
from noisescope.names_in_trial_ids import registered
from noisescope.probe.formats import WEIGHT_GROUP, Format, quantise
from noisescope.probe.functions import matrix_first
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import Site
from noisescope.trials import Slice

# The same names and group are in diagnosis/format_costs.py, which may not import torch; a test keeps them in sync.
UNTOUCHED = "bf16"  # 16 bits: the module is left as it is
GROUP = WEIGHT_GROUP
Product = Callable[[Tensor, Tensor], Tensor]
WEIGHT_FORMATS: dict[str, Format] = {
    UNTOUCHED: Format(UNTOUCHED),
    "int8": Format("int8", "group", GROUP),
    "fp8_e4m3": Format("fp8_e4m3", "channel"),
    "int4": Format("int4", "group", GROUP),
    "int4_asymmetric": Format("int4", "group", GROUP, asymmetric=True),
    "int4_clipped": Format("int4", "group", GROUP, asymmetric=True, clipped=True),
    "nvfp4": Format("nvfp4"),
    "mxfp4": Format("mxfp4"),
    "int3": Format("int3", "group", GROUP),
}


def weight_format(name: str) -> Format:
    if name not in WEIGHT_FORMATS:
        raise unknown("weight format", name, WEIGHT_FORMATS)
    return WEIGHT_FORMATS[name]


def effective_bits(name: str, inputs: int) -> float:
    """Stored bits per weight with its share of the scales, where each output channel has `inputs` weights."""
    fmt = weight_format(name)
    if fmt.granularity == "channel":
        return fmt.element_bits + 16 / inputs
    group = fmt.group_size or 1
    full = math.ceil(inputs / group) * group  # weights there would be, if the last group were not short
    return fmt.element_bits + (fmt.bits() - fmt.element_bits) * full / inputs


@registered("noisescope.Calibrated")
@dataclass(frozen=True)
class Calibrated:
    """A clipped format whose ranges fit the inputs that a linear has on some samples."""

    format: Format
    samples: Slice
    importance: Tensor | None = field(default=None, compare=False, repr=False, metadata={"identity": False})

    def __call__(self, tensor: Tensor, draw: Any) -> Tensor:
        if self.importance is None:
            raise InvalidInput(
                "a calibrated format is carried out by a plan that is measured: it needs the inputs of each linear"
            )
        return round_weight(tensor, self)


WeightFormat = Format | Calibrated


def for_samples(fmt: Format, samples: Slice) -> WeightFormat:
    """The format as a plan made on these samples carries it out."""
    return Calibrated(fmt, samples) if fmt.clipped else fmt


def with_inputs(fmt: WeightFormat, squares: Tensor | None) -> WeightFormat:
    """The format with the mean squares of a linear's inputs, where it counts them; without any all count alike."""
    if not isinstance(fmt, Calibrated):
        return fmt
    return fmt.format if squares is None else replace(fmt, importance=squares)


def round_weight(weight: Tensor, fmt: WeightFormat) -> Tensor:
    if isinstance(fmt, Calibrated):
        return quantise(weight, fmt.format, weight=True, importance=fmt.importance)
    return quantise(weight, fmt, weight=True)


@registered("noisescope.PerModule")
@dataclass(frozen=True)
class PerModule:
    """A separate perturbation for each module, by name; `Injection.perturbation_at` selects the one of a site."""

    perturbations: tuple[tuple[str, Perturbation], ...]

    def at(self, site: Site) -> Perturbation:
        return dict(self.perturbations)[site.module]

    def __call__(self, tensor: Any, draw: Any) -> Any:
        raise TypeError("a PerModule holds one perturbation per module of an Injection: call .at(site) to get one")


def plan_injection(assignment: Mapping[str, str], samples: Slice | None = None) -> Injection | None:
    """The injection that rounds each weight to its format where it is used; None if all keep 16 bits.

    `samples` are those that formats were scored on: clipped ranges fit their inputs. Without any they fit the weights.
    """
    formats = {module: weight_format(name) for module, name in sorted(assignment.items()) if name != UNTOUCHED}
    rounded = formats if samples is None else {name: for_samples(fmt, samples) for name, fmt in formats.items()}
    if not rounded:
        return None
    return Injection(
        PerModule(tuple(rounded.items())),
        operators=frozenset({"linear"}),
        modules=tuple(rounded),
        tensor="weight",
        phases=frozenset({"forward"}),
    )


def is_planned(unit: Unit) -> bool:
    """A linear of a block whose weight is a matrix of plain numbers, or fused experts; lm_head and routers are not.

    The experts of a block that are kept in tensors [experts, out, in] have one format.
    """
    inside = unit.kind in (MODULE, EXPERTS) and isinstance(unit.place, int) and unit.component != "router"
    return inside and "linear" in unit.operators and not unit.packed


def planned_weights(module: nn.Module) -> list[Tensor]:
    """The weight [out, in] of a linear, or the tensors of fused experts, [experts, out, in] or [experts, in, out]."""
    if isinstance(getattr(module, "weight", None), Tensor):
        return [linear_weight(module)]
    return [weight.detach() for weight in module._parameters.values() if weight is not None and weight.dim() == 3]


def count_block_parameters(model: nn.Module, anatomy: Anatomy) -> int:
    """Weights of the blocks: of linears and experts, and of routers, which are not planned; packed ones are not."""
    inside = tuple(f"{block}." for block in anatomy.blocks)
    weights = (weight for name, weight in model.named_parameters() if name.startswith(inside))
    matrices = (weight for weight in weights if weight.dim() > 1 and weight.is_floating_point())
    return sum(weight.numel() for weight in matrices)  # norms and biases are vectors


def _one_matrix(x: Tensor, weight: Tensor) -> Tensor:
    """x weight^T; with [experts, out, in] x has as many matrices."""
    return x @ weight.transpose(-1, -2)


def _by_expert(x: Tensor, weight: Tensor, *, ends: Tensor) -> Tensor:
    """The rows of x up to each end by the matrix of that expert; rows behind the last end belong to none."""
    rows = [0, *ends.tolist()]
    parts = [x[a:b] @ w.T for a, b, w in zip(rows, rows[1:], weight, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - rows[-1], weight.shape[1])])


class SampleCosts(GradientScreen):
    """Sums the predicted KL of each site and sample over tokens and draws."""

    nothing_seen: ClassVar[str]

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None) -> None:
        super().__init__(model, anatomy)
        self.recorded: list[tuple[Site, Tensor]] = []  # KL [B, ...] of each site in the backward that runs now
        self.sums: dict[Site, dict[int, Any]] = {}
        self._modules = dict(self.model.named_modules())

    def costs(self, projections: Tensor, unit: Unit) -> Tensor:
        """Predicted KL [B] from a_t: sqrt(1 + a^2) - 1, without its cancellation."""
        assert self.samples is not None
        batch, squares = self.samples.numel(), projections.square().flatten()
        costs = squares / (1 + (1 + squares).sqrt())
        if unit.kind == EXPERTS or costs.numel() % batch:  # rows sorted by expert: whose they are is not known
            tokens = self.tokens_of(costs)
            return costs.sum() * tokens / tokens.sum()
        return costs.view(batch, -1).sum(1)

    def product(self, call: RecordedCall) -> tuple[Tensor, Product] | None:
        """The weight [..., out, in] of a linear or of experts, and the product of inputs and such a weight.

        None for a product of something else.
        """
        weight = call.weight
        if weight is None or call.unit.kind != EXPERTS:
            return None if weight is None else (weight, _one_matrix)
        own = {w.shape[-2:] for w in planned_weights(self._modules[call.unit.module])}
        if weight.shape[-2:] not in own | {shape[::-1] for shape in own} or matrix_first(call.callee, call.args):
            return None
        ends = call.argument(2, "offs")
        by_expert = weight.dim() == 3 and isinstance(ends, Tensor)
        return weight, functools.partial(_by_expert, ends=ends) if by_expert else _one_matrix

    def take_in(self) -> None:
        assert self.samples is not None
        recorded, self.recorded = self.recorded, []
        for site, found in recorded:
            known, wide = self.sums.setdefault(site, {}), found.double().cpu()
            rows: Iterable[Any] = wide.tolist() if wide.dim() == 1 else wide
            for sample, row in zip(self.samples.tolist(), rows, strict=True):
                known[sample] = known[sample] + row if sample in known else row

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is None and not self.sums:
            raise NothingInjected(self.nothing_seen)


class FormatScreen(SampleCosts):
    """Projects the rounding error of each format on the gradients of linears' outputs.

    with FormatScreen(model, formats) as screen, torch.enable_grad():
        screen.samples = ids_of_the_batch
        screen.score(model(tokens).logits.flatten(0, 1), scored, keys, draws=1, seed=0)
    screen.sums[site][sample]      # [formats]
    """

    nothing_seen = "no linear in a block has a weight that can be rounded, so there is nothing to plan"

    def __init__(
        self,
        model: nn.Module,
        formats: Mapping[str, WeightFormat],
        squares: Mapping[str, Tensor] | None = None,  # mean squares of inputs by module, for calibrated formats
        *,
        anatomy: Anatomy | None = None,
    ) -> None:
        super().__init__(model, anatomy)
        self.formats, self.squares = dict(formats), dict(squares or {})
        # weights of an output channel; of several matrices the greatest common divisor
        self.inputs: dict[Site, int] = {}

    def reads(self, unit: Unit, operator: str) -> bool:
        return operator == "linear" and is_planned(unit)

    def read_gradient(self, call: RecordedCall, y: Tensor) -> None:
        found, unit, site = self.product(call), call.unit, call.unit.site("linear")
        if found is None:
            return
        weight, multiply = found
        self.inputs[site] = math.gcd(self.inputs.get(site, 0), weight.shape[-1])

        def add(gradient: Tensor, x: Tensor, weight: Tensor) -> None:
            self.recorded.append((site, self._predicted(weight, x, gradient, multiply, unit)))

        self.on_gradient(call, y, (call.tensors[0], weight), add)

    def _predicted(self, weight: Tensor, x: Tensor, g: Tensor, multiply: Product, unit: Unit) -> Tensor:
        """Predicted KL of each sample and format [B, formats]; x [B, T, in] or [B * T, in], g likewise with out."""
        # Nothing here needs more digits than 16 bits have, and an accelerator multiplies these ten times as fast.
        dtype = torch.float32 if x.device.type == "cpu" or x.element_size() > 2 else torch.bfloat16
        x, g = x.to(dtype), g.float()
        formats = (with_inputs(fmt, self.squares.get(unit.module)) for fmt in self.formats.values())
        errors = (round_weight(weight, fmt).float() - weight.float() for fmt in formats)
        return torch.stack([self.costs((multiply(x, error.to(dtype)) * g).sum(-1), unit) for error in errors], 1)
