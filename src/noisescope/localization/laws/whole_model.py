"""Laws of the whole model: does it repeat itself, do batch order, later tokens and the key-value cache leave it alone?

Errors of all layers add up here, so the floor is the model's own answer to round-off: a forward in which the output of
every operator is moved by one unit in the last place at random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.host_operators import host_arithmetic
from noisescope.localization.inputs import Batch
from noisescope.localization.laws.law_result import LawResult, differing, rms, same_bits
from noisescope.localization.roundoff_floors import number_format
from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.model.forwards import without_cache
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import Site

# Times the model's answer to one unit in the last place. Null: two healthy runs differ by sqrt(2) 0.425 u at every
# operator, one unit is 2 u, and a deep model amplifies both alike: so healthy answers reach 0.3 / 8 = 0.04 of the limit
# where roundings decide, and more where float32 sums are longer than a few hundred terms (their error is above one
# rounding). Largest seen: 0.11 in 96 looks (benchmarks/healthy_limits.py).
_SAFETY = 8.0
_SEED = 45
_JITTERED = ("linear", "norm", "silu", "gelu")


def run(model: nn.Module, batch: Mapping[str, Any], **changed: Any) -> Any:
    """One forward without a key-value cache, where the model has one."""
    return model(**{**batch, **without_cache(model), **changed})


def answer(output: Any) -> Tensor:
    """Logits, or whatever tensor comes first, on the host."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name).detach().cpu()  # type: ignore[no-any-return]
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor):
        first = next(value for value in output.values() if isinstance(value, Tensor))
    return first.detach().cpu()


def looks_back_only(model: nn.Module) -> bool:
    """A causal language model, by its class and its config."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    return not getattr(config, "is_encoder_decoder", False) and ("ForCausalLM" in name or "LMHeadModel" in name)


@contextlib.contextmanager
def block_outputs(model: nn.Module, anatomy: Anatomy, *, jitter: bool = False) -> Iterator[dict[int, Tensor]]:
    """What the blocks give inside; with `jitter` outputs of operators are moved by one unit in the last place."""
    outputs: dict[int, Tensor] = {}
    generator = torch.Generator("cpu").manual_seed(_SEED)

    def where(unit: Unit, operator: str) -> bool:
        wanted = unit.kind == MODULE and unit.component != "router"
        return wanted and (operator == "residual" or (jitter and operator in _JITTERED))

    def on_call(call: RecordedCall) -> Tensor | None:
        y = call.output
        if call.operator == "residual":
            if call.output_tensor is not None and isinstance(call.unit.place, int):
                outputs[call.unit.place] = call.output_tensor.detach().cpu()
            return None
        if not isinstance(y, Tensor) or not y.is_floating_point():
            return None
        signs = torch.randint(0, 2, y.shape, generator=generator, device="cpu") * 2 - 1
        with torch._C.DisableTorchFunction():
            return y * (1 + 2 * number_format(y.dtype).u * signs.to(y.device)).to(y.dtype)

    with watch(model, on_call, where, anatomy=anatomy):
        yield outputs


def repeatability(first: Tensor, turned: Tensor, again: Tensor) -> dict[str, LawResult]:
    """R1 and R2 of the whole model: bit for bit, sizes relative to the rms."""
    found = {}
    for law, other in (("R1", again), ("R2", turned.flip(0))):
        off = differing(first.double(), other.double())
        size = rms((first - other).double()) / max(rms(first.double()), 1e-300)
        found[law] = LawResult(
            law, float(bool(off.any())) * 2, size, 0.0, float(off.double().mean()), (), first.numel()
        )
    return found


@dataclass(frozen=True)
class Nudged:
    """What the model gives where every operator's output is moved by one unit in the last place."""

    answer: Tensor
    blocks: dict[int, Tensor]


def nudge(model: nn.Module, anatomy: Anatomy, batch: Batch) -> Nudged:
    with block_outputs(model, anatomy, jitter=True) as outputs:
        return Nudged(answer(run(model, batch)), outputs)


def beyond_round_off(first: Tensor, other: Tensor, nudged: Nudged) -> bool:
    """Whether two answers differ by more than round-off makes of the model."""
    return _within("R1", other, first, nudged.answer).broken


def cache_laws(
    model: nn.Module,
    anatomy: Anatomy,
    batch: Batch,
    whole: Mapping[int, Tensor],
    logits: Tensor,
    nudged: Callable[[], Nudged],
) -> tuple[dict[str, LawResult], Site | None]:
    """R4 and R5: the prompt without its last token, then that token through the cache.

    Gives the readings and the first block that is off; `nudged` is asked only where something differs at all.
    """
    ids = batch["input_ids"]
    late = ids.shape[1] - 1
    with block_outputs(model, anatomy) as prefix:
        output = model(input_ids=ids[:, :late], use_cache=True)
    with block_outputs(model, anatomy) as decode:
        last = model(input_ids=ids[:, late:], past_key_values=output.past_key_values, use_cache=True)
    acts_as_device, step = answer(output), answer(last)
    if same_bits(acts_as_device, logits[:, :late]) and same_bits(step, logits[:, late:]):
        return {law: LawResult(law, 0.0, elements=logits.numel()) for law in ("R4", "R5")}, None
    near = nudged()
    moved = near.answer
    with host_arithmetic():
        found = {
            "R4": _within("R4", acts_as_device, logits[:, :late], moved[:, :late]),
            "R5": _within("R5", step, logits[:, late:], moved[:, late:]),
        }
        site = None
        for law, watched, part in (("R4", prefix, slice(0, late)), ("R5", decode, slice(late, None))):
            for index in range(len(anatomy.blocks)) if found[law].broken and site is None else ():
                got, nudged_block = watched[index], near.blocks[index]
                if _within(law, got, whole[index][:, part], nudged_block[:, part]).broken:
                    site = Site("residual", index, anatomy.blocks[index])
                    break
    return found, site


def _within(law: str, got: Tensor, expected: Tensor, moved: Tensor) -> LawResult:
    """Token by token, against the answer to round-off of the token that minds it most."""
    got, expected, moved = got.double(), expected.double(), moved.double()
    error = (got - expected).square().mean(-1).sqrt()
    floor = _SAFETY * float((moved - expected).square().mean(-1).sqrt().amax().clamp_min(1e-30))
    scale = max(rms(expected), 1e-300)
    worst = float(error.nan_to_num(torch.inf).max())
    return LawResult(law, worst / floor, worst / scale, floor / scale, 1.0, (), got.numel())
