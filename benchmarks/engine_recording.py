"""What does recording in vLLM cost? Sketches of every operator's output, against the same prompts without a hook.

    python benchmarks/engine_recording.py path/to/smollm2 --tokens 256 -o results/engine_recording.json

Runs in the virtual environment of `make engines`, in one process. Plain and recorded runs alternate; processor time, so
that other work on the machine hardly counts. Plain runs once report the log-probabilities of the prompt (the head runs
on all tokens, as in a recording) and once generate one token only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from noisescope.engines.protocol import EngineCall, Ids
from noisescope.engines.vllm_engine import VllmEngine
from noisescope.runs.device_record_writer import Detail, Recording, write_batches
from noisescope.sites import WHOLE


def record(engine: VllmEngine, prompts: tuple[Ids, ...]) -> None:
    """As `noisescope record --engine vllm` does."""

    def run(ids: torch.Tensor, recording: Recording) -> torch.Tensor:
        def add(call: EngineCall) -> None:
            if call.site.operator != WHOLE:
                recording.add(call.site, call.output[None], call.inputs[None] if call.inputs.dim() > 1 else None)

        return engine.logits(tuple(ids[0].tolist()), add)[None, -1]

    with tempfile.TemporaryDirectory() as folder:
        about: dict[str, Any] = {"model": {"blocks": 1}, "notes": []}
        write_batches(run, prompts, Path(folder) / "x.record", detail=Detail(), batch=1, about=about, fingerprint=str)


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    engine = VllmEngine(options.model, dtype=options.dtype, max_model_len=options.tokens + 8)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(3, 30000, (options.prompts, options.tokens), generator=generator).tolist()
    prompts = tuple(tuple(row) for row in rows)
    ways: dict[str, Callable[[], object]] = {
        "log-probabilities": lambda: [engine._run(ids, prompt_logprobs=0) for ids in prompts],
        "one token": lambda: [engine._run(ids) for ids in prompts],
        "recorded": lambda: record(engine, prompts),
        "log-probabilities again": lambda: [engine._run(ids, prompt_logprobs=0) for ids in prompts],
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(options.rounds + 1):
        for name, work in ways.items():
            took = seconds(work)
            if round_:  # the first warms up
                taken[name].append(took)
    ratios = {
        name: [recorded / plain for recorded, plain in zip(taken["recorded"], taken[name], strict=True)]
        for name in ("log-probabilities", "one token")
    }
    again = [x / y for x, y in zip(taken["log-probabilities again"], taken["log-probabilities"], strict=True)]
    found = {"model": Path(options.model).name, "dtype": options.dtype, "tokens": options.tokens,
             "prompts": options.prompts, "rounds": options.rounds, "threads": torch.get_num_threads(),
             "seconds": {name: median(values) for name, values in taken.items()},
             **{f"recorded / {name}": [median(values), min(values), max(values)] for name, values in ratios.items()},
             "plain / plain": [median(again), min(again), max(again)]}  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.o:
        options.o.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
