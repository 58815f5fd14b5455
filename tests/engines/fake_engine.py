"""An engine that is none of ours: a Llama written by hand, with merged projections and (hidden, residual) pairs.

It reads the weights of a transformers model, and knows transformers only by the names of its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.data.dataset import DataSet
from noisescope.engines.protocol import EngineCall, EngineFacts, Ids, OnCall, Reported, Setting
from noisescope.sites import WHOLE, Site

PARTS = ("q_proj", "k_proj", "v_proj")


class FakeEngine:
    """`spoil` may alter what is computed at a step, by its name."""

    def __init__(self, model: Any, spoil: Callable[[str, Tensor], Tensor] | None = None) -> None:
        config = model.config
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.eps, self.layers = config.rms_norm_eps, config.num_hidden_layers
        self.w = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        self.frequencies = model.model.rotary_emb.inv_freq.clone()
        self.scale = (config.hidden_size // self.heads) ** -0.5
        self.spoil = spoil or (lambda name, x: x)
        self._seen: OnCall | None = None
        self._modules: Collection[str] | None = None

    @property
    def facts(self) -> EngineFacts:
        return EngineFacts("fake", "1", "tiny", "by hand", "float32", "cpu", prefix_cache=False)

    @property
    def sites(self) -> tuple[Site, ...]:
        return tuple(_site(name) for name in self._names())

    def _names(self) -> Iterator[str]:
        yield "model.embed_tokens"
        for layer in range(self.layers):
            block = f"model.layers.{layer}"
            names = ("input_layernorm", *(f"self_attn.{part}" for part in PARTS), "self_attn.o_proj", "self_attn",
                     "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp")  # fmt: skip
            yield from (f"{block}.{name}" for name in names)
            yield block
        yield from ("model.norm", "lm_head")

    def encode(self, data: DataSet, max_tokens: int) -> tuple[Ids, ...]:
        return tuple(tuple(3 + ord(letter) % 60 for letter in item.text[:max_tokens]) for item in data.items)

    def logits(self, ids: Ids, on_call: OnCall | None = None, *, modules: Collection[str] | None = None) -> Tensor:
        self._seen, self._modules = on_call, modules
        hidden, residual = self._call("model.embed_tokens", torch.tensor(ids), self._embed), None
        for layer in range(self.layers):
            hidden, residual = self._block(f"model.layers.{layer}", hidden, residual)
        return self._call("lm_head", self._norm("model.norm", hidden + residual), self._linear("lm_head"))

    def _embed(self, ids: Tensor) -> Tensor:
        return self.w["model.embed_tokens.weight"][ids]

    def _call(self, name: str, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        return self._told(name, x, run(x), run)

    def _told(self, name: str, x: Tensor, y: Tensor, again: Callable[[Tensor], Tensor]) -> Tensor:
        if self._seen is None or not (self._modules is None or name in self._modules):
            return y
        new = self._seen(EngineCall(_site(name), x, y, again))
        return y if new is None else new

    def _linear(self, *names: str) -> Callable[[Tensor], Tensor]:
        weight = torch.cat([self.w[f"{name}.weight"] for name in names])
        return lambda x: self.spoil(names[0], x @ weight.T)

    def _merged(self, x: Tensor, names: tuple[str, ...]) -> list[Tensor]:
        """One product, told as the parts that it is."""
        sizes = [len(self.w[f"{name}.weight"]) for name in names]
        parts = self._linear(*names)(x).split(sizes, -1)
        return [self._told(name, x, part, self._linear(name)) for name, part in zip(names, parts, strict=True)]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
            return self.spoil(name, unit * self.w[f"{name}.weight"])

        return self._call(name, x, run)

    def _block(self, name: str, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As engines do: the sum is made where the next norm begins."""
        given = hidden if residual is None else hidden + residual
        attention = self._attention(f"{name}.self_attn", self._norm(f"{name}.input_layernorm", given))
        between = attention + given
        mlp = self._mlp(f"{name}.mlp", self._norm(f"{name}.post_attention_layernorm", between))
        whole = self._told(name, given, mlp + between, self._never)
        return (mlp, between) if torch.equal(whole, mlp + between) else (whole, torch.zeros_like(whole))

    def _attention(self, name: str, x: Tensor) -> Tensor:
        q, k, v = self._merged(x, tuple(f"{name}.{part}" for part in PARTS))
        q, k, v = (part.unflatten(-1, (-1, q.shape[-1] // self.heads)).transpose(0, 1) for part in (q, k, v))
        q, k = (self._turned(part) for part in (q, k))
        k, v = (part.repeat_interleave(self.heads // self.groups, 0) for part in (k, v))
        scores = self.spoil(f"{name}.scores", q @ k.mT * self.scale)
        hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
        context = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        y = self._call(f"{name}.o_proj", context.transpose(0, 1).flatten(1), self._linear(f"{name}.o_proj"))
        return self._told(name, x, y, self._never)

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]), self.frequencies).repeat(1, 2)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = self._merged(x, (f"{name}.gate_proj", f"{name}.up_proj"))
        y = self._call(f"{name}.down_proj", F.silu(gate) * up, self._linear(f"{name}.down_proj"))
        return self._told(name, x, y, self._never)

    def _never(self, x: Tensor) -> Tensor:
        raise AssertionError("a whole module of this engine can't be called again")

    def reported(self, ids: Ids) -> Reported:
        rows = self.logits(ids)[:-1].double().log_softmax(-1)
        return Reported(rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], rows)

    def generate(self, ids: Ids, count: int) -> Ids:
        text = ids
        for _ in range(count):
            text = (*text, int(self.logits(text)[-1].argmax()))
        return text[len(ids) :]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.w.items()
        yield "model.rotary_emb.inv_freq", self.frequencies

    def write(self, name: str, value: Tensor) -> None:
        (self.frequencies if name.endswith("inv_freq") else self.w[name]).copy_(value)

    def settings(self) -> Mapping[str, Setting]:
        return {f"model.layers.{layer}.self_attn.scaling": self.scale for layer in range(self.layers)}

    def set(self, name: str, value: Setting) -> None:
        assert isinstance(value, float)
        self.scale = value

    def apply(self, site: Site, x: Tensor) -> Tensor | None:
        return self._linear(site.module)(x) if site.operator == "linear" else None


def _site(name: str) -> Site:
    parts = name.split(".")
    place: Any = (
        int(parts[2]) if "layers" in parts else {"lm_head": "lm_head", "model.norm": "final_norm"}.get(name, "embed")
    )
    kinds = {"embed_tokens": "embedding", "self_attn": WHOLE, "mlp": WHOLE, "norm": "norm"}
    last = parts[-1]
    operator = "residual" if last.isdigit() else "norm" if last.endswith("layernorm") else kinds.get(last, "linear")
    return Site(operator, place, name, "attention" if "self_attn" in parts else "")
