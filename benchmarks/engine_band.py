"""Do healthy pairs of transformers and vLLM lie inside the round-off band that is measured on transformers?

    python benchmarks/engine_band.py MODEL --dtype bfloat16 --data gsm8k_test.jsonl

Runs in the virtual environment of `make engines`. vLLM's log-probabilities are asked for directly, prompts one by one,
eight at a time, and in chunks; each pair is a set of four prompts.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from noisescope.api.systems import roundoff_band
from noisescope.comparison.roundoff import Array, gap_between
from noisescope.data.dataset import read_data
from noisescope.engines.opening import open_engine

WAYS: dict[str, dict[str, Any]] = {
    "one by one": {"max_num_seqs": 1},
    "batch of 8": {"max_num_seqs": 8},
    "chunks of 40 tokens": {"max_num_seqs": 8, "max_num_batched_tokens": 40},
}
SET = 4


def logprobs(llm: Any, prompts: list[tuple[int, ...]]) -> list[Array]:
    """By vLLM, all prompts in one call."""
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], settings, use_tqdm=False)
    return [
        np.array([row[token].logprob for row, token in zip(out.prompt_logprobs[1:], ids[1:], strict=True)])
        for out, ids in zip(outputs, prompts, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", type=int, default=5)
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    a = open_engine("transformers", options.model, {"dtype": options.dtype})
    prompts = list(a.encode(read_data(options.data, limit=SET * options.sets), 96))
    sets = [slice(first, last) for first, last in pairwise(range(0, len(prompts) + SET, SET))]
    bands = [roundoff_band(a, tuple(prompts[part])) for part in sets]
    mine = [a.reported(ids).tokens.double().numpy() for ids in prompts]
    rows = []
    for way, arguments in WAYS.items():
        from vllm import LLM

        llm = LLM(options.model, dtype=options.dtype, max_model_len=256, enforce_eager=True, disable_log_stats=True,
                  enable_prefix_caching=False, enable_chunked_prefill=True, **arguments)  # fmt: skip
        its = logprobs(llm, prompts)
        for part, band in zip(sets, bands, strict=True):
            if band is None or band.expected.value is None:
                continue
            gap = gap_between(mine[part], its[part])
            rows.append({"way": way, "dtype": options.dtype, "tokens": band.tokens, "gap": gap.value,
                         "expected": band.expected.value, "low": band.low, "high": band.high,
                         "ratio": (gap.value or 0.0) / band.expected.value, "verdict": band.judge(gap)})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        del llm
    ratios = [row["ratio"] for row in rows]
    inside = sum(row["low"] <= row["gap"] <= row["high"] for row in rows)
    called = sum(row["verdict"] != "round-off" for row in rows)
    print(f"{len(rows)} pairs: {inside} inside the band, {called} not called round-off; gap / expected "
          f"{min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}")  # fmt: skip
    if options.o:
        options.o.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
