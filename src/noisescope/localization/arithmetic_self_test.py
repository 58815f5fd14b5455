"""Self-test of the device's elementwise arithmetic and copies, bit for bit against the host.

Norms, activations, residual adds and rotations are built from these operations, and so are the inputs of a law: if
multiplication is wrong, everything that multiplies is wrong. The self-test therefore runs first, and later alarms may
be its consequence.

Each operation is called as models call it, through the ordinary torch functions and operators, on shapes that this
model uses. IEEE arithmetic determines every result: add, subtract, multiply and casts round correctly, and copies do
not round. A quotient may be off by one unit in the last place, because some devices divide by multiplying with a
reciprocal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.classify import classify
from noisescope.localization.error_pattern import Evidence, Pattern
from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.host_products import Recomputed
from noisescope.localization.judge import Judgement, judge
from noisescope.localization.roundoff_floors import Reference, number_format
from noisescope.localization.tensors import differing
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.sites import DEVICE, ELEMENTWISE, Site

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]  # of two tensors, and of indices of the last dimension but one

_BATCH, _TOKENS = 2, 19  # no multiple of a vector's length
_LARGEST_WIDTH = 8192
COPY = "copy to the device and back"
_SCORE = 100.0  # above every other suspect: they may all be consequences
_FACTOR = 1.75  # a Python number that every dtype holds: others are rounded to the dtype by some devices only
_MADE_OF_THEM = frozenset({"norm", "silu", "gelu", "residual", "embedding"})  # operators that are elementwise inside


@dataclass(frozen=True)
class ArithmeticFault:
    """One operation that the device computes wrongly, at its largest error."""

    operation: str
    shapes: tuple[str, ...]  # of those tried, such as "[B, T, C]"
    dtypes: tuple[str, ...]
    effect: str  # "results 2 % too large"
    judgement: Judgement
    pattern: Pattern

    def __str__(self) -> str:
        on = f"{' and '.join(self.shapes)} {' and '.join(self.dtypes)} tensors"
        return f"the device's {self.operation} of {on} is wrong: {self.effect}"


def _rows(at: Tensor, like: Tensor) -> Tensor:
    """Indices of rows in the shape of a tensor."""
    return at[:, None].expand_as(like)


# What models call, each under its name; several forms are several code paths.
OPERATIONS: Mapping[str, tuple[Operation, ...]] = {
    COPY: (lambda a, b, at: a,),
    "clone": (lambda a, b, at: a.clone(), lambda a, b, at: torch.empty_like(a).copy_(a)),
    "transposed copy": (
        lambda a, b, at: a.transpose(-1, -2).contiguous(),
        lambda a, b, at: a.transpose(0, 1).contiguous(),
        lambda a, b, at: a.transpose(0, 1).reshape(-1, a.shape[-1]),
    ),
    "cat": (lambda a, b, at: torch.cat([a, b], -1), lambda a, b, at: torch.cat([a, b], -2)),
    "stack": (lambda a, b, at: torch.stack([a, b], 0), lambda a, b, at: torch.stack([a, b], -1)),
    "index": (
        lambda a, b, at: a[..., at, :],
        lambda a, b, at: torch.index_select(a, -2, at),
        lambda a, b, at: a[..., 1::2].contiguous(),
        lambda a, b, at: torch.repeat_interleave(a, 2, 0),
    ),
    "gather": (lambda a, b, at: torch.gather(a, -2, _rows(at, a)),),
    "scatter": (lambda a, b, at: torch.scatter(a, -2, _rows(at, a), b),),
    "negate": (lambda a, b, at: -a, lambda a, b, at: torch.neg(a)),
    "abs": (lambda a, b, at: torch.abs(a), lambda a, b, at: a.abs()),
    "compare": (lambda a, b, at: a < b, lambda a, b, at: torch.ge(a, b), lambda a, b, at: a == a.flip(-1)),
    "where": (
        lambda a, b, at: torch.where(a < b, a, b),
        lambda a, b, at: a.masked_fill(a < b, -3.0),
        lambda a, b, at: torch.maximum(a, b),
    ),
    "add": (
        lambda a, b, at: a + b,
        lambda a, b, at: torch.add(a, b),
        lambda a, b, at: a.clone().add_(b),
        lambda a, b, at: a + b[..., :1, :],
        lambda a, b, at: a + _FACTOR,
    ),
    "subtract": (lambda a, b, at: a - b, lambda a, b, at: torch.sub(a, b), lambda a, b, at: a - b[..., :1]),
    "multiply": (
        lambda a, b, at: a * b,
        lambda a, b, at: torch.mul(a, b),
        lambda a, b, at: a.mul(b),
        lambda a, b, at: a.clone().mul_(b),
        lambda a, b, at: a * b[..., :1, :],
        lambda a, b, at: a * b[..., :1],
        lambda a, b, at: a * _FACTOR,
        lambda a, b, at: _FACTOR * a,
    ),
    "divide": (
        lambda a, b, at: a / b,
        lambda a, b, at: torch.div(a, b),
        lambda a, b, at: a / b[..., :1],
        lambda a, b, at: a / 3.0,
    ),
    "cast to float32": (lambda a, b, at: a.float(), lambda a, b, at: a.to(torch.float32)),
    "cast to bfloat16": (lambda a, b, at: a.bfloat16(), lambda a, b, at: a.to(torch.bfloat16)),
    "cast to float16": (lambda a, b, at: a.half(), lambda a, b, at: a.to(torch.float16)),
}


def self_test(
    device: torch.device | str, dtype: torch.dtype, *, width: int, heads: int, seed: int = 0
) -> list[ArithmeticFault]:
    """Operations that the device computes wrongly, on tensors of this width and number of heads, in order."""
    found: dict[str, list[ArithmeticFault]] = {}
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for kind in dict.fromkeys((dtype, torch.float32)):
            for name, shape in _shapes(min(width, _LARGEST_WIDTH), heads).items():
                for fault in _wrong(torch.device(device), kind, name, shape, generator):
                    found.setdefault(fault.operation, []).append(fault)
    return [_joined(several) for several in found.values()]


def self_test_of(model: nn.Module, *, seed: int = 0) -> list[ArithmeticFault]:
    """Run the self-test on every device that holds parameters of the model, in the dtype they have there."""
    plain = [p for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1 and not p.is_meta]
    kinds = {p.device: p.dtype for p in reversed(plain)}
    config = getattr(model, "config", None)
    width = _setting(config, ("hidden_size", "n_embd", "d_model")) or next((p.shape[-1] for p in plain if p.dim()), 64)
    heads = _setting(config, ("num_attention_heads", "n_head", "encoder_attention_heads")) or 4
    return [f for device, dtype in kinds.items() for f in self_test(device, dtype, width=width, heads=heads, seed=seed)]


def _setting(config: Any, names: Iterable[str]) -> int | None:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _shapes(width: int, heads: int) -> dict[str, tuple[int, ...]]:
    size = max(2, width // heads)
    return {
        "[T, C]": (_TOKENS, width),
        "[B, T, C]": (_BATCH, _TOKENS, width),
        "[B, H, T, D]": (_BATCH, heads, _TOKENS, size),
    }


def _wrong(
    device: torch.device, dtype: torch.dtype, shape_name: str, shape: tuple[int, ...], generator: torch.Generator
) -> list[ArithmeticFault]:
    forms = [(name, form) for name, several in OPERATIONS.items() for form in several]
    with host_arithmetic():
        a, b = (_numbers(shape, dtype, generator) for _ in range(2))
        at = torch.randperm(shape[-2], generator=generator, device="cpu")
        expected = [form(a, b, at) for _, form in forms]
    given = [t.to(device) for t in (a, b, at)]
    got = [_result(form, given) for _, form in forms]
    kind = str(dtype).removeprefix("torch.")
    found = []
    with host_arithmetic():
        for (name, _), its, right in zip(forms, got, expected, strict=True):
            fault = None if its is None else _compared(name, its, right)
            if fault is not None:
                found.append(dataclasses.replace(fault, shapes=(shape_name,), dtypes=(kind,)))
                if name == COPY:  # then the others can't be tested
                    break
    return found


def _result(form: Operation, given: list[Tensor]) -> Tensor | None:
    """What the device computes; None if it has no such operation."""
    try:
        return form(*given).cpu()
    except (RuntimeError, NotImplementedError, TypeError):
        return None


def _numbers(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Numbers with all mantissas, between 1/64 and 64 in size, so that no product or quotient overflows float16."""
    powers = torch.rand(shape, generator=generator, device="cpu") * 12 - 6
    signs = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1
    return (torch.exp2(powers) * signs).to(dtype)


def _compared(name: str, got: Tensor, expected: Tensor) -> ArithmeticFault | None:
    """None if both are equal; quotients may differ by one unit in the last place."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        effect = f"{tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        judgement = Judgement({"exact": math.inf}, elements=expected.numel())
        return ArithmeticFault(name, (), (), effect, judgement, Pattern("unknown", 0.5, "another shape or dtype"))
    got, expected = (t.float() if t.dtype == torch.bool else t for t in (got, expected))
    wide, right = got.double(), expected.double()
    off = differing(wide, right)
    if name == "divide":
        off &= ~((wide - right).abs() <= number_format(expected.dtype).ulp(right))
    if not bool(off.any()):
        return None
    width = expected.shape[-1]
    right = torch.where(off, right, wide).reshape(-1, width)
    recomputed = Recomputed(got.reshape(-1, width), Reference(right, (), exact=True))
    judgement = judge(recomputed.y, recomputed.reference)
    pattern = classify(Evidence.of("residual", recomputed, judgement))
    return ArithmeticFault(name, (), (), _effect(wide[off], right.reshape(off.shape)[off], off), judgement, pattern)


def _effect(got: Tensor, expected: Tensor, off: Tensor) -> str:
    """Describe in a few words how the wrong results differ from the correct ones."""
    ratio = got / expected
    middle = float(ratio.median())
    steady = bool(ratio.isfinite().all()) and float((ratio - middle).abs().median()) < 0.1 * abs(middle - 1)
    share = float(off.double().mean())
    which = "results" if share > 0.99 else f"{100 * share:.2f} % of the results"
    if steady and 0 < middle != 1:
        return f"{which} {100 * abs(middle - 1):.2g} % too {'large' if middle > 1 else 'small'}"
    gap = (got - expected).abs().nan_to_num(math.inf)
    return f"{which} differ from the host's by up to {float(gap.max()):.3g}"


def _joined(faults: list[ArithmeticFault]) -> ArithmeticFault:
    """Merge the faults of one operation: keep the one with the most wrong elements, with all shapes and dtypes."""
    worst = max(faults, key=lambda fault: fault.judgement.bad / max(1, fault.judgement.elements))
    shapes = tuple(dict.fromkeys(shape for fault in faults for shape in fault.shapes))
    dtypes = tuple(dict.fromkeys(dtype for fault in faults for dtype in fault.dtypes))
    return dataclasses.replace(worst, shapes=shapes, dtypes=dtypes)


# -- suspects


def with_self_test(found: Verdict, faults: Sequence[ArithmeticFault]) -> Verdict:
    """Put the self-test's suspects first, and mark later suspects that use a wrong operation as a consequence."""
    if not faults:
        return found
    names = " and ".join(fault.operation for fault in faults)
    own = [_suspect(fault, number) for number, fault in enumerate(faults)]
    later = [_as_consequence(suspect, names) for suspect in found.suspects]
    return dataclasses.replace(found, verdict="faulty", suspects=ranked((*own, *later)))


def _suspect(fault: ArithmeticFault, number: int) -> Suspect:
    pattern = fault.pattern
    return Suspect(
        Site(ELEMENTWISE, DEVICE, fault.operation),
        pattern.fault_class,
        0.99,
        f"{fault}; {fault.judgement.words}; {pattern.text}",
        _SCORE - 0.01 * number,
        pattern.channels,
        pattern.period,
        {"shapes": list(fault.shapes), "dtypes": list(fault.dtypes), "class_confidence": pattern.confidence},
    )


def _as_consequence(suspect: Suspect, operations: str) -> Suspect:
    site = suspect.site
    if not (site.operator in _MADE_OF_THEM or site.tensor == "input" or site.place == "rotary"):
        return suspect
    evidence = f"{suspect.evidence}; probably caused by the device's {operations}"
    return dataclasses.replace(suspect, evidence=evidence, details={**suspect.details, "consequence_of": operations})


def self_test_note(faults: list[ArithmeticFault]) -> str:
    """The result of the self-test, for the notes of a verdict."""
    if faults:
        return f"self-test of elementwise arithmetic: {'; '.join(str(fault) for fault in faults)}"
    return f"self-test of elementwise arithmetic: {len(OPERATIONS)} kinds of operations match the host bit for bit"
