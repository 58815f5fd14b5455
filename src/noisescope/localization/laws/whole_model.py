"""Laws of the whole model: is it repeatable, and unaffected by batch order, later tokens and the key-value cache?

Errors of all layers add up here, so the tolerance is the model's own response to round-off: a forward in which the
output of every operator is moved randomly by one unit in the last place.
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
from noisescope.localization.judge import TINY, Judgement, judge_law, judge_size
from noisescope.localization.laws.table import Law
from noisescope.localization.roundoff_floors import number_format
from noisescope.localization.tensors import rms, same_numbers
from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.model.forwards import without_cache
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import Site

# Times the model's answer to one unit in the last place. Null: two healthy runs differ by sqrt(2) 0.425 u at every
# operator, one unit is 2 u, and a deep model amplifies both alike: so healthy answers reach 0.3 / 8 = 0.04 of the limit
# where roundings decide, and more where float32 sums are longer than a few hundred terms (their error is above one
# rounding). Largest seen: 0.11 in 96 tests (benchmarks/healthy_limits.py).
_SAFETY = 8.0
_SEED = 45
CACHE_LAWS = (Law.CAUSALITY, Law.DECODE_EQUALS_PREFILL)
_JITTERED = ("linear", "norm", "silu", "gelu")


def run(model: nn.Module, batch: Mapping[str, Any], **changed: Any) -> Any:
    """One forward without a key-value cache, where the model has one."""
    return model(**{**batch, **without_cache(model), **changed})


def answer(output: Any) -> Tensor:
    """Logits, or the first tensor returned, on the host."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            return getattr(output, name).detach().cpu()  # type: ignore[no-any-return]
    first = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(first, Tensor):
        first = next(value for value in output.values() if isinstance(value, Tensor))
    return first.detach().cpu()


def is_causal(model: nn.Module) -> bool:
    """Whether this is a causal language model, by its class and config."""
    config = getattr(model, "config", None)
    name = type(model).__name__
    return not getattr(config, "is_encoder_decoder", False) and ("ForCausalLM" in name or "LMHeadModel" in name)


@contextlib.contextmanager
def block_outputs(model: nn.Module, anatomy: Anatomy, *, jitter: bool = False) -> Iterator[dict[int, Tensor]]:
    """The blocks' outputs; with `jitter`, operator outputs are moved by one unit in the last place."""
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


def repeatability(first: Tensor, flipped: Tensor, again: Tensor) -> dict[Law, Judgement]:
    """Two runs, and another batch order, of the whole model: bit for bit, sizes relative to the rms."""
    others = {Law.REPEAT: again, Law.ROW_ORDER: flipped.flip(0)}
    return {law: judge_law(law, other.double(), first.double()) for law, other in others.items()}


@dataclass(frozen=True)
class Nudged:
    """The model's output when every operator's output is moved by one unit in the last place."""

    answer: Tensor
    blocks: dict[int, Tensor]


def nudge(model: nn.Module, anatomy: Anatomy, batch: Batch) -> Nudged:
    with block_outputs(model, anatomy, jitter=True) as outputs:
        return Nudged(answer(run(model, batch)), outputs)


def beyond_round_off(first: Tensor, other: Tensor, nudged: Nudged) -> bool:
    """Whether two outputs differ by more than the model's response to round-off."""
    return _within(Law.REPEAT, other, first, nudged.answer).alarm


def cache_laws(
    model: nn.Module,
    anatomy: Anatomy,
    batch: Batch,
    whole: Mapping[int, Tensor],
    logits: Tensor,
    nudged: Callable[[], Nudged],
) -> tuple[dict[Law, Judgement], Site | None]:
    """Causality and the cache: the prompt without its last token, then that token through the cache.

    Returns the results and the first wrong block; `nudged` is used only if something differs.
    """
    ids = batch["input_ids"]
    late = ids.shape[1] - 1
    with block_outputs(model, anatomy) as prefix:
        output = model(input_ids=ids[:, :late], use_cache=True)
    with block_outputs(model, anatomy) as decode:
        last = model(input_ids=ids[:, late:], past_key_values=output.past_key_values, use_cache=True)
    early, step = answer(output), answer(last)
    if same_numbers(early, logits[:, :late]) and same_numbers(step, logits[:, late:]):
        return {law: Judgement({law: 0.0}, tests=logits.numel()) for law in CACHE_LAWS}, None
    near = nudged()
    moved = near.answer
    with host_arithmetic():
        found = {
            Law.CAUSALITY: _within(Law.CAUSALITY, early, logits[:, :late], moved[:, :late]),
            Law.DECODE_EQUALS_PREFILL: _within(Law.DECODE_EQUALS_PREFILL, step, logits[:, late:], moved[:, late:]),
        }
        site = None
        parts = (prefix, slice(0, late)), (decode, slice(late, None))
        for law, (watched, part) in zip(CACHE_LAWS, parts, strict=True):
            for index in range(len(anatomy.blocks)) if found[law].alarm and site is None else ():
                got, nudged_block = watched[index], near.blocks[index]
                if _within(law, got, whole[index][:, part], nudged_block[:, part]).alarm:
                    site = Site("residual", index, anatomy.blocks[index])
                    break
    return found, site


def _within(law: Law, got: Tensor, expected: Tensor, moved: Tensor) -> Judgement:
    """Token by token, against the round-off response of the most sensitive token."""
    got, expected, moved = got.double(), expected.double(), moved.double()
    error = (got - expected).square().mean(-1).sqrt()
    floor = _SAFETY * float((moved - expected).square().mean(-1).sqrt().amax().clamp_min(1e-30))
    worst = float(error.nan_to_num(torch.inf).max())
    return judge_size(law, worst, floor, max(rms(expected), TINY), got.numel())
