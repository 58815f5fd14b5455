"""What noise costs in training: a step under noise over a clean step, in interleaved pairs, with a clean/clean arm.

    python benchmarks/training.py                      # CPU: the bundled model
    python benchmarks/training.py --device cuda        # Qwen2.5-1.5B's shape in bfloat16

A step is forward, loss and backward on the whole model (8 x 512 tokens on a GPU, 8 x 64 on a CPU), and `at(step)` of
the scope. The optimizer is not timed: noise does not touch it, and its time would only make the ratios look smaller. On
a GPU the steps are timed twice: by CUDA-graph replay (the device's work alone: targets are judged there) and eagerly,
with Python's work and `at(step)`. Weights are random there: only time is measured.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from overhead import _sync, compare, device_seconds, host_seconds, replayed, show

import noisescope as ns
from noisescope import training

TARGETS = {"operators, both ways": 1.3, "norm weights": 1.03}
ARMS = {
    "operators, both ways": training.OperatorNoise(frozenset({"linear"})),
    "operators, forward": training.OperatorNoise(frozenset({"linear"}), frozenset({"forward"})),
    "all products, both ways": training.OperatorNoise(),
    "norm weights": training.NormNoise(),
}


class Scoped:
    """Steps inside a scope; entering and leaving happen around the clock, not inside it."""

    def __init__(self, model: Any, noise: Any, step: Callable[[], Any], seconds: Callable[..., float]) -> None:
        self.model, self.aqn, self.step, self.clock = model, training.AQN(noise, training.Constant(0.05)), step, seconds
        self.number = 0

    def __call__(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        with training.noise(self.model, self.aqn, rank=0) as scope:
            self.step()  # a scope's first step also looks at what changed

            def numbered() -> None:
                self.number += 1
                scope.at(self.number)
                self.step()

            return self.clock(numbered)


def clocked(seconds: Callable[..., float]) -> Callable[[Any], float]:
    """A clock that lets a scoped arm place it, and warms a bare one as the scope's first step does."""

    def measure(run: Any) -> float:
        if isinstance(run, Scoped):
            return run.seconds()
        run()
        return seconds(run)

    return measure


def eager(model: Any, step: Callable[[], Any], seconds: Callable[..., float], pairs: int) -> list[dict[str, Any]]:
    arms: dict[str, Any] = {name: Scoped(model, noise, step, seconds) for name, noise in ARMS.items()}
    return compare(arms, step, pairs, clocked(seconds))


def replay(model: Any, step: Callable[[], Any], pairs: int) -> list[dict[str, Any]]:
    clean, arms = replayed(step), {}
    for name, noise in ARMS.items():
        with ExitStack() as scope:
            scope.enter_context(training.noise(model, training.AQN(noise, training.Constant(0.05)), rank=0))
            arms[name] = replayed(step)
    return compare(arms, clean, pairs, device_seconds)


def qwen() -> Any:
    config = transformers.Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, max_position_embeddings=2048, use_cache=False,
        tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = options.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}")
    model = qwen() if cuda else ns.load("demo", dtype="float32").model.train()
    tokens = torch.randint(4, 60, (8, 512 if cuda else 64), device=options.device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        logits = model(tokens, use_cache=False).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    result = {"machine": machine, "torch": torch.__version__, "transformers": transformers.__version__}
    tables: list[dict[str, Any]] = []

    def tell(title: str, rows: list[dict[str, Any]], targets: dict[str, float]) -> None:
        show(title, rows, targets)
        tables.append({"case": title, "rows": rows})
        if options.json:
            options.json.write_text(json.dumps({**result, "tables": tables}, indent=1) + "\n", "utf-8")

    if cuda:
        title = "Qwen2.5-1.5B's shape, bfloat16, 8 x 512, forward and backward, CUDA-graph replay"
        tell(title, replay(model, step, options.pairs), TARGETS)
        title, seconds = "the same, eager, with at(step) (no target)", _sync
    else:
        title, seconds = "the bundled model, float32, 8 x 64, forward and backward (no target)", host_seconds
    tell(title, eager(model, step, seconds, options.pairs), {})


if __name__ == "__main__":
    main()
