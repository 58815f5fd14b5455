"""Other planted causes than those of compare_causes.py: written after the rules, to see what `compare` says of them.

    python benchmarks/compare_held_out.py -o results/compare_held_out.json

What a cause must be called was written down before the first run. It counts as named where its stage is right and its
name, its description or the places that it gives have those words in them.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compare_causes import (
    PROMPTS,
    TOKENS,
    WITHIN,
    Altered,
    Plant,
    altered,
    data_of,
    edited,
    engine,
    layers,
    truth,
)
from torch import nn

import noisescope as ns
from noisescope.data.dataset import DataSet
from noisescope.engines.compare import compare_systems
from noisescope.engines.protocol import Engine, Ids, Reported
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.testing import tiny_model

Pair = tuple[Engine, Engine]


class OtherIds(TransformersEngine):
    """An engine that makes other token ids of the same texts."""

    def __init__(self, change: Callable[[Ids], Ids], longest: int) -> None:
        super().__init__(ns.load("demo", dtype="float32"))
        self.change, self.longest = change, longest

    def encode(self, data: DataSet, max_tokens: int) -> tuple[Ids, ...]:
        return tuple(self.change(ids) for ids in super().encode(data, self.longest or max_tokens))


def other_end() -> Pair:
    """Of long texts a keeps the beginning, b the end, both behind the same first token."""
    return OtherIds(lambda ids: ids[:32], TOKENS), OtherIds(lambda ids: (ids[0], *ids[-31:]), TOKENS)


def other_ids(change: Callable[[Ids], Ids]) -> Callable[[], Pair]:
    return lambda: (engine(), OtherIds(change, 0))


def tiny(change: Callable[[Any], None], name: str = "llama", **settings: Any) -> Callable[[], Pair]:
    def make() -> Pair:
        models = [tiny_model(name, layers=3, **settings) for _ in range(2)]
        with torch.no_grad():
            change(models[1])
        a, b = (TransformersEngine(ns.wrap(model)) for model in models)
        return a, b

    return make


def in_log2(found: Reported) -> Reported:
    return Reported(found.tokens / math.log(2), found.rows / math.log(2))


class Penalised(Altered):
    """log-probabilities after a repetition penalty of 1.3 on tokens that came before."""

    def reported(self, ids: Ids) -> Reported:
        logits = self.logits(ids)[:-1].double()
        for at in range(len(logits)):
            seen = torch.tensor(sorted(set(ids[: at + 1])))
            old = logits[at, seen]
            logits[at, seen] = torch.where(old > 0, old / 1.3, old * 1.3)
        rows = logits.log_softmax(-1)
        return Reported(rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], rows)


def rope_scaling_ignored() -> Pair:
    """a's checkpoint asks for linear scaling by 2, which b does not read."""
    a, b = engine(), engine()
    for table in (a.model.model.rotary_emb.inv_freq, a.model.model.rotary_emb.original_inv_freq):
        table.div_(2)
    return a, b


def head_not_tied(model: Any) -> None:
    """The head keeps what it had at some earlier time, while the embedding it should share is new."""
    generator = torch.Generator().manual_seed(0)
    weight = model.lm_head.weight.detach()
    model.lm_head.weight = nn.Parameter(weight + 0.05 * weight.std() * torch.randn(weight.shape, generator=generator))


def keys_and_values_swapped(model: Any) -> None:
    attention = layers(model)[3].self_attn
    k, v = attention.k_proj.weight, attention.v_proj.weight
    kept = k.clone()
    k.copy_(v)
    v.copy_(kept)


def eps_five(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.variance_epsilon = 1e-5


def not_causal(model: Any) -> None:
    """Attention of layer 5 sees later tokens."""
    attention = layers(model)[5].self_attn
    inner = attention.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        kwargs["attention_mask"] = torch.zeros(1, 1, 1, 1)
        return inner(*args, **kwargs)

    attention.forward = forward


def rotary_interleaved(model: Any) -> None:
    """Pairs (0, 1), (2, 3) ... are rotated in layer 2 instead of (i, i + half)."""
    attention = layers(model)[2].self_attn
    inner, width = attention.forward, attention.head_dim
    order = torch.arange(width).view(2, -1).T.reshape(-1)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cos, sin = kwargs["position_embeddings"]
        kwargs["position_embeddings"] = (cos[..., order], sin[..., order])
        return inner(*args, **kwargs)

    attention.forward = forward


def branch_scaled(model: Any) -> None:
    """Layer 6 adds 0.9 times its MLP's output."""
    mlp = layers(model)[6].mlp
    inner = mlp.forward
    mlp.forward = lambda x: 0.9 * inner(x)


def logits_capped(model: Any) -> None:
    inner = model.lm_head.forward
    model.lm_head.forward = lambda x: 10 * torch.tanh(inner(x) / 10)


def embedding_scaled(model: Any) -> None:
    inner = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: 1.1 * inner(ids)


def heads_mismatched(model: Any) -> None:
    """Query heads of layer 1 use the keys and values of the other group."""
    attention = layers(model)[1].self_attn
    for name in ("k_proj", "v_proj"):
        projection = getattr(attention, name)
        inner = projection.forward
        projection.forward = lambda x, inner=inner, d=attention.head_dim: inner(x).roll(d, -1)


def bias_dropped(model: Any) -> None:
    for layer in layers(model):
        layer.self_attn.q_proj.bias.zero_()


def gate_and_up_exchanged(model: Any) -> None:
    """The fused projection of layer 4 is split in the wrong order."""
    mlp = layers(model)[4].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.up_proj(x)) * mlp.gate_proj(x))


def final_norm_skipped(model: Any) -> None:
    model.model.norm.forward = lambda x: x


PLANTS = (
    Plant("b adds the first token twice", other_ids(lambda ids: (ids[0], *ids)), "semantics", "special tokens"),
    Plant("b adds an end token", other_ids(lambda ids: (*ids, 2)), "semantics", "special tokens"),
    Plant("b keeps the end of long prompts", other_end, "semantics", "truncation"),
    Plant("b reports log2", altered(in_log2), "semantics", "base"),
    Plant("repetition penalty in b's report", lambda: (engine(), Penalised()), "semantics", "other processing"),
    Plant("rope scaling ignored", rope_scaling_ignored, "state", "rotary"),
    Plant("head no longer tied", edited(head_not_tied), "state", "lm_head"),
    Plant("k and v swapped in layer 3", edited(keys_and_values_swapped), "state", "layers.3.self_attn"),
    Plant("norm eps 1e-5 for 1e-6", edited(eps_five), "state", "variance_epsilon"),
    Plant("biases of q dropped", tiny(bias_dropped, "qwen2", biases=0.1), "state", "q_proj.bias"),
    Plant("layer 5 not causal", edited(not_causal), "operators", "layers.5.self_attn"),
    Plant("rotary interleaved in layer 2", edited(rotary_interleaved), "operators", "layers.2.self_attn"),
    Plant("MLP of layer 6 x 0.9", edited(branch_scaled), "operators", "layers.6"),
    Plant("logits capped at 10", edited(logits_capped), "operators", "lm_head"),
    Plant("embedding x 1.1", edited(embedding_scaled), "operators", "embed"),
    Plant("groups of key heads exchanged", tiny(heads_mismatched, num_key_value_heads=2), "operators",
          "layers.1.self_attn"),
    Plant("gate and up exchanged in layer 4", edited(gate_and_up_exchanged), "operators", "layers.4.mlp"),
    Plant("final norm skipped", edited(final_norm_skipped), "operators", "norm"),
)  # fmt: skip


def run(plant: Plant) -> dict[str, Any]:
    a, b = plant.make()
    generator = torch.Generator().manual_seed(0)
    if getattr(a, "subject", None) is not None and a.subject.tokenizer is None:  # type: ignore[attr-defined]
        ids = tuple(tuple(torch.randint(3, 64, (24,), generator=generator).tolist()) for _ in range(PROMPTS))
        prompts: tuple[Any, Any] = (ids, ids)
    else:
        data = data_of(plant)
        prompts = (a.encode(data, TOKENS), b.encode(data, TOKENS))
    found = compare_systems(a, b, prompts)
    mine = [cause for cause in found.causes if cause.stage == plant.stage]
    named = any(plant.called in " ".join((cause.name, cause.words, *cause.where)) for cause in mine)
    real = None if plant.stage == "semantics" else truth(a, b, plant, prompts)
    nats = sum(cause.nats.value or 0.0 for cause in mine)
    return {"name": plant.name, "named": named, "nats": nats, "truth": real, "ratio": nats / real if real else None,
            "causes": [f"{cause.stage}: {cause.name}: {cause.words}" for cause in found.causes],
            "remainder": found.remainder.value, "verdict": found.verdict}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for plant in PLANTS:
        if options.only in plant.name:
            rows.append(run(plant))
            print(json.dumps(rows[-1]), flush=True)
    named = sum(row["named"] for row in rows)
    sized = [row["ratio"] for row in rows if row["ratio"] is not None]
    close = sum(1 / WITHIN <= ratio <= WITHIN for ratio in sized)
    print(f"{named} of {len(rows)} named; nats within a factor {WITHIN} for {close} of {len(sized)}")
    if options.o:
        options.o.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
