"""What `ns.Rounding` costs: a forward under it over a clean one, in interleaved pairs, with a clean/clean arm.

    python benchmarks/rounding.py [--model FOLDER]      # CPU: that model, else SmolLM2-135M's shape; processor time
    python benchmarks/rounding.py --device cuda         # a 7B shape in bfloat16, eager and as CUDA-graph replay

Arms: linears (what the round-off band uses) and every operator that rounds without opening attention. Timed as in
overhead.py: the forward alone, not entering the scope. Target: at most 1.5 times a clean forward.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from overhead import compare, device_seconds, llama, replayed, show

import noisescope as ns

Run = Callable[[], Any]
CASES = {"linears": {"linear"}, "every operator outside attention": {"linear", "norm", "silu", "residual"}}
TARGET = 1.5


class Scoped:
    """A run inside a scope that is entered and left around the clock; its first call, which looks at what changed,
    is not timed."""

    def __init__(self, model: torch.nn.Module, operators: set[str], run: Run) -> None:
        self.model, self.injection, self.run = model, ns.Injection(ns.Rounding(), operators=operators), run

    def __call__(self) -> None:
        self.run()

    def seconds(self, clock: Callable[[Run], float]) -> float:
        with ns.inject(self.model, self.injection):
            self.run()
            return clock(self.run)


def processor_seconds(run: Run) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def timed(clock: Callable[[Run], float]) -> Callable[[Run], float]:
    def seconds(run: Run) -> float:
        if isinstance(run, Scoped):
            return run.seconds(clock)
        run()
        return clock(run)

    return seconds


def on_cpu(folder: str | None, pairs: int, dtype: str) -> None:
    model = llama(30, 576, 1536, 9, 3, 49152) if folder is None else ns.load(folder).model
    model = model.to(getattr(torch, dtype)).eval()
    tokens = torch.randint(0, 1000, (4, 128))
    run = lambda: model(tokens)  # noqa: E731
    arms: dict[str, Run] = {name: Scoped(model, operators, run) for name, operators in CASES.items()}
    rows = compare(arms, run, pairs, timed(processor_seconds))
    show(f"{folder or 'SmolLM2-135M shape'}, 4 x 128 tokens, {dtype}, CPU", rows, dict.fromkeys(CASES, TARGET))


def on_cuda(pairs: int) -> None:
    config = transformers.Qwen2Config(
        hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.Qwen2ForCausalLM(config).eval()
        tokens = torch.randint(0, 1000, (8, 256))
    torch.set_default_dtype(torch.float32)
    run = lambda: model(tokens, use_cache=False)  # noqa: E731
    arms: dict[str, Run] = {name: Scoped(model, operators, run) for name, operators in CASES.items()}
    rows = compare(arms, run, pairs, timed(device_seconds))
    show("7B shape, bfloat16, 8 x 256 tokens, eager", rows, dict.fromkeys(CASES, TARGET))
    clean, graphs = replayed(run), {}
    for name, operators in CASES.items():
        with ns.inject(model, ns.Injection(ns.Rounding(), operators=operators)):
            graphs[name] = replayed(run)
    rows = compare(graphs, clean, pairs, device_seconds)
    show("the same, CUDA-graph replay", rows, dict.fromkeys(CASES, TARGET))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", help="a model folder, on the CPU")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        if options.device == "cpu":
            on_cpu(options.model, options.pairs, options.dtype)
        else:
            on_cuda(options.pairs)


if __name__ == "__main__":
    main()
