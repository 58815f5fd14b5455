"""How accurate are vLLM's operators in float32, each on its own inputs, and the log-probabilities that it reports?

    python benchmarks/engine_operators.py MODEL --data gsm8k_test.jsonl [--layers 4] [-o results/engine_operators.json]

Runs in the virtual environment of `make engines`. Printed per operator: relative L2 to the same operator in float64, of
vLLM and of torch on the same inputs (median over calls, and the largest); for attention the largest |score| too. Last,
how far reported log-probabilities are from the log-softmax of vLLM's own logits in float64, and in which direction.
For models with one kind of attention over all tokens (Llama, Qwen2).
"""

from __future__ import annotations

import argparse
import functools
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from noisescope.data.dataset import read_data
from noisescope.engines.vllm_engine import VllmEngine, _effective_weight

LAYER = re.compile(r"\blayers\.(\d+)\.")
Found = dict[str, list[tuple[float, float]]]


def off(y: Tensor, exact: Tensor) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, size: int) -> tuple[Tensor, Tensor]:
    """Plain causal attention of one prompt [T, heads * size], and its scores."""
    q, k, v = (x.view(len(x), -1, size).transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(k), 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(later, -torch.inf).softmax(-1) @ v).transpose(0, 1).flatten(1), scores


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def gated(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Listener:
    """Compares calls with float64 as they are made."""

    def __init__(self, model: Any, layers: int) -> None:
        self.found: Found = defaultdict(list)
        self.scores = 0.0
        self._inputs: dict[str, list[Tensor]] = {}
        self._weight = functools.cache(_effective_weight)
        for name, module in model.named_modules():
            inside = LAYER.search(name)
            if inside and int(inside[1]) < layers:
                module.register_forward_pre_hook(functools.partial(self._before, name), with_kwargs=True)
                module.register_forward_hook(functools.partial(self._after, name))

    def _before(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        self._inputs[name] = [x.clone() for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]

    def _after(self, name: str, module: Any, args: Any, output: Any) -> None:
        kind, given = type(module).__name__, self._inputs.get(name, [])
        y = output[0] if isinstance(output, tuple) else output
        if not given or len(given[0]) < 3:  # the one generated token
            return
        if kind == "Attention":
            exact, scores = attention(*(x.double() for x in given[:3]), module.impl.scale, module.head_size)
            other, _ = attention(*given[:3], module.impl.scale, module.head_size)
            self.scores = max(self.scores, float(scores.abs().max()))
        elif "Linear" in kind:
            weight, bias = self._weight(module), module.bias
            wide = None if bias is None else bias.double()
            exact, other = F.linear(given[0].double(), weight.double(), wide), F.linear(given[0], weight, bias)
        elif kind == "RMSNorm":
            x, settings = sum(given[1:], given[0]), (module.weight, module.variance_epsilon)
            exact, other = norm(x.double(), settings[0].double(), settings[1]), norm(x, *settings)
        elif kind == "SiluAndMul":
            exact, other = gated(given[0].double()), gated(given[0])
        else:
            return
        short = name.rpartition(".")[2]
        layer = LAYER.search(name)
        if kind == "Attention" and layer:
            short = f"attention of layer {layer[1]}"
        self.found[short].append((off(y.view_as(exact), exact), off(other, exact)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    engine = VllmEngine(options.model, dtype="float32", max_model_len=256, max_num_seqs=1)
    prompts = engine.encode(read_data(options.data, limit=options.prompts), 40)
    reports = []
    for ids in prompts:
        rows = engine.logits(ids)[:-1].double().log_softmax(-1)
        own = rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        reports.append(engine.reported(ids).tokens - own)
    listener = Listener(engine.model, options.layers)
    with torch.no_grad():
        for ids in prompts:
            engine.generate(ids, 1)
    result: dict[str, Any] = {"model": Path(options.model).name, "prompts": len(prompts), "layers": options.layers}
    for name, pairs in listener.found.items():
        sides = list(zip(*pairs, strict=True))
        result[name] = {"calls": len(pairs), "vllm": [median(sides[0]), max(sides[0])],
                        "torch": [median(sides[1]), max(sides[1])]}  # fmt: skip
    report = torch.cat(reports)
    result |= {"largest score": listener.scores, "tokens": len(report), "reported - own": float(report.mean()),
               "|reported - own|": float(report.abs().mean())}  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.o:
        kept = json.loads(options.o.read_text("utf-8")) if options.o.exists() else []
        kept = [row for row in kept if row["model"] != result["model"]]
        options.o.write_text(json.dumps([*kept, result], indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
