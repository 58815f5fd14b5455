"""Planted causes: does `compare` name each, and are its nats those that taking the cause out removes?

    python benchmarks/compare_causes.py                   both systems in transformers, the bundled model
    python benchmarks/compare_causes.py --healthy         pairs without a cause
    python benchmarks/compare_causes.py --vllm MODEL      a few causes, and healthy pairs, between transformers and vLLM
    python benchmarks/compare_causes.py --vllm MODEL --healthy      the healthy pairs alone

Causes are planted by other means than noisescope's: weights and buffers edited, forwards replaced, reports altered. The
truth is measured by plain forwards of both models before and after the cause is taken out.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisescope as ns
from noisescope import demo
from noisescope.api.systems import roundoff_band
from noisescope.comparison.system_comparison import Sampling, SystemComparison
from noisescope.data.dataset import DataSet, Item, built_in, gather, read_data
from noisescope.engines.compare import compare_systems
from noisescope.engines.protocol import Engine, Reported
from noisescope.engines.transformers_engine import TransformersEngine

PROMPTS, TOKENS = 8, 48
WITHIN = 1.5


@dataclass(frozen=True)
class Plant:
    """A cause: how b is made, what it must be called, and whether its size is one of tokens alone."""

    name: str
    make: Callable[[], tuple[Engine, Engine]]
    stage: str
    called: str  # part of the name of at least one cause
    by_token: bool = False
    chat: bool = False


def engine(dtype: str = "float32", sampling: Sampling | None = None, attention: str = "sdpa") -> TransformersEngine:
    return TransformersEngine(ns.load("demo", dtype=dtype, attn_implementation=attention), sampling)


def edited(change: Callable[[Any], None], **settings: Any) -> Callable[[], tuple[Engine, Engine]]:
    """Both the same, and b's model changed."""

    def make() -> tuple[Engine, Engine]:
        a, b = engine(**settings), engine(**settings)
        with torch.no_grad():
            change(b.model)
        return a, b

    return make


class Altered(TransformersEngine):
    """An engine whose reports or inputs are altered on the way to the user."""

    def __init__(self, change: Callable[[Reported], Reported] | None = None, cut: int = 0) -> None:
        super().__init__(ns.load("demo", dtype="float32"))
        self.change, self.cut = change, cut

    def reported(self, ids: tuple[int, ...]) -> Reported:
        found = super().reported(ids)
        return found if self.change is None else self.change(found)

    def encode(self, data: DataSet, max_tokens: int) -> tuple[tuple[int, ...], ...]:
        return tuple(ids[self.cut :] for ids in super().encode(data, max_tokens))


def altered(change: Callable[[Reported], Reported]) -> Callable[[], tuple[Engine, Engine]]:
    return lambda: (engine(), Altered(change))


def shifted(found: Reported) -> Reported:
    return Reported(torch.cat((found.tokens[:1], found.tokens[:-1])), found.rows)


def with_zeros(found: Reported) -> Reported:
    tokens = found.tokens.clone()
    tokens[::7] = 0.0
    return Reported(tokens, found.rows)


def penalised(found: Reported) -> Reported:
    rows = found.rows.clone()
    rows[:, ::3] -= 0.5
    rows = rows.log_softmax(-1)
    return Reported(found.tokens, rows)


def layers(model: Any) -> Any:
    return model.model.layers


def short(module: nn.Linear, dtype: torch.dtype = torch.bfloat16) -> None:
    weight = module.weight
    module.forward = lambda x: F.linear(x.to(dtype), weight.to(dtype)).to(x.dtype)  # type: ignore[assignment]


def gate_and_up_in_bf16(model: Any) -> None:
    for layer in layers(model):
        short(layer.mlp.gate_proj)
        short(layer.mlp.up_proj)


def norms_round_between(model: Any) -> None:
    """x / rms rounded to bfloat16 before the weight is applied."""
    for name, module in model.named_modules():
        if name.endswith("layernorm"):

            def forward(x: Tensor, module: Any = module) -> Tensor:
                wide = x.float()
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
                return module.weight * wide.bfloat16().to(x.dtype)

            module.forward = forward


def norms_round_once(model: Any) -> None:
    """In a bfloat16 model: weight applied in float32, one rounding, where transformers rounds twice."""
    for name, module in model.named_modules():
        if name.endswith("layernorm"):

            def forward(x: Tensor, module: Any = module) -> Tensor:
                wide = x.float()
                wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.variance_epsilon)
                return (module.weight.float() * wide).to(x.dtype)

            module.forward = forward


def stale_layer(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in layers(model)[5].parameters():
        parameter += 0.02 * parameter.std() * torch.randn(parameter.shape, generator=generator)


def trained_further(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter += 0.01 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator)


def quantised(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            scale = module.weight.abs().amax(1, keepdim=True) / 7
            module.weight.copy_((module.weight / scale).round() * scale)


def layer_swapped(model: Any) -> None:
    layers(model)[4].load_state_dict(copy.deepcopy(layers(model)[9].state_dict()))


def keys_are_values(model: Any) -> None:
    layers(model)[3].self_attn.k_proj.weight.copy_(layers(model)[3].self_attn.v_proj.weight)


def wrong_rope_base(model: Any) -> None:
    rotary = model.model.rotary_emb
    n = rotary.inv_freq.numel()
    for table in (rotary.inv_freq, rotary.original_inv_freq):
        table.copy_(20000.0 ** (-torch.arange(n) / n))


def scale_off(model: Any) -> None:
    for layer in layers(model):
        layer.self_attn.scaling *= 1.1


def eps_off(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.variance_epsilon = 1e-2


def around_q(model: Any, change: Callable[[Tensor], Tensor], which: str = "q_proj") -> None:
    """Attention's own code wrong: what its projection gives is altered after the module was left."""
    for layer in layers(model):
        attention = layer.self_attn
        inner = attention.forward

        def forward(*args: Any, attention: Any = attention, inner: Any = inner, **kwargs: Any) -> Any:
            projection = getattr(attention, which)
            call = type(projection).__call__

            class Changed(type(projection)):  # type: ignore[misc]
                def __call__(self, *given: Any, **named: Any) -> Tensor:
                    return change(call(self, *given, **named))

            kept, projection.__class__ = projection.__class__, Changed
            try:
                return inner(*args, **kwargs)
            finally:
                projection.__class__ = kept

        attention.forward = forward


def scale_off_in_code(model: Any) -> None:
    around_q(model, lambda q: q * 1.1)


def values_in_bf16(model: Any) -> None:
    around_q(model, lambda v: v.bfloat16().to(v.dtype), "v_proj")


def act_of(model: Any, function: Callable[[Tensor], Tensor]) -> None:
    for layer in layers(model):
        layer.mlp.act_fn.forward = function


def act_approximated(model: Any) -> None:
    act_of(model, lambda x: x * torch.sigmoid(1.02 * x))


def blocks_in_bf16(model: Any) -> None:
    for layer in layers(model):
        inner = layer.forward
        layer.forward = lambda *args, inner=inner, **kwargs: _rounded(inner(*args, **kwargs))


def _rounded(y: Any) -> Any:
    return (y[0].bfloat16().float(), *y[1:]) if isinstance(y, tuple) else y.bfloat16().float()


def head_in_bf16(model: Any) -> None:
    short(model.lm_head)


def window_off_by_one() -> tuple[Engine, Engine]:
    """Sliding windows of 4 and 5 tokens, as one layer's own setting."""
    from noisescope.testing import tiny_model

    a, b = (TransformersEngine(ns.wrap(tiny_model("mistral", layers=3, sliding_window=size))) for size in (4, 5))
    return a, b


def cast_weights() -> tuple[Engine, Engine]:
    a, b = engine(), engine()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for mine, its in zip(a.model.parameters(), b.model.parameters(), strict=True):
            mine *= 1 + 1e-3 * torch.randn(mine.shape, generator=generator)  # the bundled weights are bfloat16
            its.copy_(mine.bfloat16())
    return a, b


def other_template() -> tuple[Engine, Engine]:
    a, b = engine(), engine()
    for one, words in ((a, "Then "), (b, "Soon There ")):  # words that the bundled tokenizer knows
        one.subject.tokenizer.chat_template = (
            "{% for m in messages %}{% if m['role'] == 'user' %}" + words + "{{ m['content'] }} "
            "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
        )
    return a, b


def sampled(b: Sampling, a: Sampling | None = None) -> Callable[[], tuple[Engine, Engine]]:
    return lambda: (engine(sampling=a), engine(sampling=b))


PLANTS = (
    Plant("temperature 0.8 in b's report", sampled(Sampling(0.8, processed=True)), "semantics", "temperature"),
    Plant("temperature applied twice", sampled(Sampling(0.49, processed=True), Sampling(0.7, processed=True)),
          "semantics", "temperature"),
    Plant("top-p 0.9, renormalised", sampled(Sampling(top_p=0.9, processed=True)), "semantics", "truncation"),
    Plant("top-k 5, renormalised", sampled(Sampling(top_k=5, processed=True)), "semantics", "truncation"),
    Plant("token values off by one", altered(shifted), "semantics", "alignment", by_token=True),
    Plant("missing values as 0", altered(with_zeros), "semantics", "missing values", by_token=True),
    Plant("a penalty in b's report", altered(penalised), "semantics", "other processing"),
    Plant("b lacks the first token", lambda: (engine(), Altered(cut=1)), "semantics", "special tokens"),
    Plant("another chat template", other_template, "semantics", "template", chat=True),
    Plant("one stale layer", edited(stale_layer), "state", "stale layer"),
    Plant("a layer has another's weights", edited(layer_swapped), "state", "another layer's weights"),
    Plant("keys have the values' weights", edited(keys_are_values), "state", "another layer's weights"),
    Plant("rope base 20000", edited(wrong_rope_base), "state", "rotary"),
    Plant("attention scale x 1.1", edited(scale_off), "state", "scaling"),
    Plant("norm eps 1e-2", edited(eps_off), "state", "variance_epsilon"),
    Plant("sliding window off by one", window_off_by_one, "state", "sliding_window"),
    Plant("weights cast to bfloat16", cast_weights, "state", "cast"),
    Plant("another training step", edited(trained_further), "state", "another checkpoint"),
    Plant("int4 checkpoint", edited(quantised), "state", "quantised"),
    Plant("gate and up in bfloat16", edited(gate_and_up_in_bf16), "operators", "gate_proj"),
    Plant("norms cast before the weight", edited(norms_round_between), "operators", "layernorm"),
    Plant("norm cast order in bfloat16", edited(norms_round_once, dtype="bfloat16"), "round-off", "layernorm"),
    Plant("attention scale x 1.1 in code", edited(scale_off_in_code), "operators", "self_attn"),
    Plant("values in bfloat16 in attention", edited(values_in_bf16), "operators", "self_attn"),
    Plant("another activation", edited(act_approximated), "operators", "mlp"),
    Plant("residual stream in bfloat16", edited(blocks_in_bf16), "operators", "block"),
    Plant("head in bfloat16", edited(head_in_bf16), "operators", "lm_head"),
)  # fmt: skip


# Two causes at once, in the order in which they are mended.
PAIRS = (
    ("stale layer, then head in bfloat16", (stale_layer, head_in_bf16), "state", "operators"),
    ("rope base, then attention scale in code", (wrong_rope_base, scale_off_in_code), "state", "operators"),
    ("training step, then another activation", (trained_further, act_approximated), "state", "operators"),
    ("swapped layer, then gates in bfloat16", (layer_swapped, gate_and_up_in_bf16), "state", "operators"),
    ("norm eps, then values in bfloat16", (eps_off, values_in_bf16), "state", "operators"),
)


def run_pair(name: str, changes: tuple[Callable[[Any], None], ...], stages: tuple[str, str]) -> dict[str, Any]:
    """The first cause is what goes when it is taken out of both; the second what the other alone makes."""
    a = engine()
    ids = a.encode(read_data(demo.test_file(), limit=PROMPTS), TOKENS)
    both, second = engine(), engine()
    with torch.no_grad():
        for change in changes:
            change(both.model)
        changes[1](second.model)
    found = compare_systems(a, both, (ids, ids))
    whole, rest = (truth_by_logits(a, one, ids) for one in (both, second))
    real = (whole - rest, rest)
    nats = [sum(c.nats.value or 0.0 for c in found.causes if c.stage == stage) for stage in stages]
    ratios = [mine / its for mine, its in zip(nats, real, strict=True)]
    return {"name": name, "nats": nats, "truth": real, "ratios": ratios, "named": [c.name for c in found.causes]}


def data_of(plant: Plant) -> DataSet:
    if not plant.chat:
        return read_data(demo.test_file(), limit=PROMPTS)
    items = read_data(demo.test_file(), limit=PROMPTS).items
    turns = [(("user", item.prompt), ("assistant", item.answer)) for item in items]
    return gather([Item(0, messages=messages) for messages in turns], "chat")


def truth(a: Any, b: Any, plant: Plant, prompts: tuple[Any, Any]) -> float:
    """KL(b || a) or the mean |difference| of token values of what users see, by plain forwards."""
    mine, its = prompts
    found = []
    for ids, other in zip(mine, its, strict=True):
        left, right = a.reported(ids), b.reported(other)
        tail = min(len(ids), len(other)) - 1
        if plant.chat:  # the answer is the same text: its tokens are the last
            tail = next((n for n in range(1, tail) if ids[-n - 1] != other[-n - 1]), tail)
        rows_a, rows_b = left.rows[-tail:].double(), right.rows[-tail:].double()
        if plant.by_token:
            found.append(float((left.tokens - right.tokens).abs().mean()))
        else:
            found.append(kl(rows_a, rows_b))
    return sum(found) / len(found)


def run(plant: Plant) -> dict[str, Any]:
    a, b = plant.make()
    data = data_of(plant)
    if "sliding" in plant.name:
        generator = torch.Generator().manual_seed(0)
        ids = tuple(tuple(torch.randint(3, 64, (24,), generator=generator).tolist()) for _ in range(PROMPTS))
        prompts: tuple[Any, Any] = (ids, ids)
    else:
        longest = 2 * TOKENS if plant.chat else TOKENS  # too long a chat loses its beginning
        prompts = (a.encode(data, longest), b.encode(data, longest))
    start = time.process_time()
    found = compare_systems(a, b, prompts, chat=plant.chat)
    seconds = time.process_time() - start
    return {**judged(plant, found, truth(a, b, plant, prompts)), "seconds": seconds}


def judged(plant: Plant, found: SystemComparison, real: float) -> dict[str, Any]:
    if plant.stage == "round-off":
        top = found.sources[0] if found.sources else None
        named = not found.causes and top is not None and plant.called in top.role
        nats = found.round_off.value
        others = [cause.name for cause in found.causes]
    else:
        mine = [cause for cause in found.causes if cause.stage == plant.stage]
        named = any(plant.called in cause.name for cause in mine)
        values = [cause.token_gap.value if plant.by_token else cause.nats.value for cause in mine]
        nats = sum(value or 0.0 for value in values)
        others = [cause.name for cause in found.causes if cause.stage != plant.stage]
    ratio = nats / real if nats and real else None
    return {"name": plant.name, "named": named, "nats": nats, "truth": real, "ratio": ratio, "others": others,
            "words": found.words}  # fmt: skip


def healthy() -> Iterator[tuple[str, Any, Any, int]]:
    """(what, a, b, first prompt): other attention kernels, other dtypes' own pairs, other prompts."""
    for dtype in ("float32", "bfloat16", "float16"):
        a, b = engine(dtype), engine(dtype, attention="eager")
        for first in range(0, 40, 8):
            yield f"sdpa and eager, {dtype}", a, b, first
    threads = engine(), engine()
    for first in range(0, 40, 8):
        yield "the same", *threads, first


def run_healthy() -> list[dict[str, Any]]:
    found = []
    for what, a, b, first in healthy():
        data = read_data(demo.test_file(), limit=first + PROMPTS)
        ids = a.encode(data, TOKENS)[first:]
        result = compare_systems(a, b, (ids, ids))
        found.append({"pair": what, "verdict": result.verdict, "nats": result.total.value,
                      "remainder": result.remainder.value, "causes": [c.words for c in result.causes]})  # fmt: skip
        print(found[-1], flush=True)
    return found


def vllm_plants(model: str, dtype: str, *, healthy_alone: bool) -> list[dict[str, Any]]:
    """Healthy pairs on several prompts, then causes planted in vLLM's own modules."""
    from noisescope.engines.vllm_engine import VllmEngine

    b = VllmEngine(model, dtype=dtype, max_model_len=256)
    a = TransformersEngine(ns.load(model, dtype=dtype))
    texts = built_in().items
    rows: list[dict[str, Any]] = []
    base = 0.0

    def compare(name: str, first: int, count: int, length: int, stage: str = "", called: str = "") -> None:
        data = gather(texts[first : first + count], "built-in text")
        prompts = (a.encode(data, length), b.encode(data, length))
        plant = Plant(name, lambda: (a, b), stage, called)
        band = roundoff_band(a, prompts[0])
        assert band is not None
        found = compare_systems(a, b, prompts, band=band)
        real = truth_by_logits(a, b, prompts[0]) - (base if called else 0.0)
        row = judged(plant, found, real) if called else {"name": name, "nats": found.total.value, "truth": real}
        rows.append(
            {
                **row,
                "verdict": found.verdict,
                "token_gap": found.token_gap.value,
                "causes": [c.words for c in found.causes],
                "gap": found.unexplained_gap.value,
                "expected": band.expected.value,
                "high": band.high,
                "allowed": [note for note in found.notes if "allowed for" in note],
            }
        )
        print(rows[-1], flush=True)

    for first in range(0, 24, 4):
        compare(f"healthy, {dtype}", first, 4, 24 + first)
    if healthy_alone:
        return rows
    base = truth_by_logits(a, b, a.encode(gather(texts[:4], "built-in text"), 40))  # the round-off that stays
    block = b.model.model.layers[7]
    scale = block.self_attn.attn.impl.scale
    block.self_attn.attn.impl.scale = 1.2 * scale
    compare("attention scale of layer 7 x 1.2", 0, 4, 40, "state", "scaling")
    block.self_attn.attn.impl.scale = scale
    kept = block.mlp.gate_up_proj.cpu_linear
    block.mlp.gate_up_proj.cpu_linear = lambda x, w, bias: kept(x.half().to(x.dtype), w, bias).half().to(x.dtype)
    if dtype == "float32":
        compare("gate and up of layer 7 in float16", 0, 4, 40, "operators", "_proj")
    block.mlp.gate_up_proj.cpu_linear = kept
    name = "model.layers.12.mlp.down_proj.weight"
    healthy_weight = dict(b.tensors())[name].clone()
    b.write(name, dict(a.tensors())["model.layers.3.mlp.down_proj.weight"])
    compare("layer 12 has layer 3's down_proj", 0, 4, 40, "state", "another layer's weights")
    b.write(name, healthy_weight)
    forward = block.self_attn.rotary_emb.forward
    block.self_attn.rotary_emb.forward = lambda positions, q, k: forward(positions // 2, q, k)
    compare("rotary positions halved", 0, 4, 40, "operators", "self_attn")
    block.self_attn.rotary_emb.forward = forward
    compare(f"healthy again, {dtype}", 0, 4, 40)
    return rows


def kl(a: Tensor, b: Tensor) -> float:
    """The mean of KL(b || a) over rows."""
    terms = F.kl_div(a, b, log_target=True, reduction="none")
    return float(terms.nan_to_num(0).sum(-1).mean())


def truth_by_logits(a: Any, b: Any, prompts: Any) -> float:
    found = []
    for ids in prompts:
        left, right = (one.logits(ids)[:-1].double().log_softmax(-1) for one in (a, b))
        found.append(kl(left, right))
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--healthy", action="store_true")
    parser.add_argument("--vllm", metavar="MODEL")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", default="")
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.vllm:
        rows = vllm_plants(options.vllm, options.dtype, healthy_alone=options.healthy)
    elif options.healthy:
        rows = run_healthy()
        faults = sum(row["verdict"] not in ("identical", "round-off") for row in rows)
        print(f"{len(rows)} healthy pairs, {faults} called a fault")
    else:
        rows = []
        for plant in PLANTS:
            if options.only in plant.name:
                rows.append(run(plant))
                print(json.dumps(rows[-1]), flush=True)
        close = sum(row["ratio"] is not None and 1 / WITHIN <= row["ratio"] <= WITHIN for row in rows)
        named = sum(row["named"] for row in rows)
        print(f"{named} of {len(rows)} named; nats within a factor {WITHIN} for {close}")
        for name, changes, *stages in PAIRS:
            if options.only in name:
                rows.append(run_pair(name, changes, (stages[0], stages[1])))
                print(json.dumps(rows[-1]), flush=True)
    if options.o:
        options.o.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
