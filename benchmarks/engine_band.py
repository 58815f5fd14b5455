"""Do healthy pairs of transformers and vLLM lie inside the round-off band that is measured on transformers?

    python benchmarks/engine_band.py MODEL --dtype bfloat16 --data gsm8k_test.jsonl -o results/engine_band.json

Runs in the virtual environment of `make engines`. vLLM's log-probabilities are asked for directly: of prompts one by
one, eight at a time and in chunks, and of prompts with sampled answers, one by one and eight at a time. Each pair is a
set of four prompts. Rows of other models, dtypes and ways in the file of -o are kept.
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from noisescope.api.roundoff import measure_band
from noisescope.comparison.roundoff import Array, RoundoffBand, gap_between
from noisescope.data.dataset import read_data
from noisescope.data.tokens import encode
from noisescope.engines.protocol import open_engine

Ids = tuple[int, ...]
ANSWER = 24  # sampled tokens per prompt
# way: (arguments of vLLM, sampled tokens)
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "one by one": ({"max_num_seqs": 1}, 0),
    "batch of 8": ({"max_num_seqs": 8}, 0),
    "chunks of 40 tokens": ({"max_num_seqs": 8, "max_num_batched_tokens": 40}, 0),
    "answers one by one": ({"max_num_seqs": 1}, ANSWER),
    "answers in batches of 8": ({"max_num_seqs": 8}, ANSWER),
}
SET = 4


def vllm_rows(model: str, dtype: str, way: str, prompts: list[Ids]) -> list[tuple[Ids, list[float]]]:
    """Each text and its log-probabilities by vLLM, all prompts in one call; in a process that ends with it."""
    arguments, answer = WAYS[way]
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING",
                      VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_NO_USAGE_STATS="1")  # fmt: skip
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype=dtype, max_model_len=256, enforce_eager=True, disable_log_stats=True,
              enable_prefix_caching=False, enable_chunked_prefill=True, **arguments)  # fmt: skip
    settings = SamplingParams(max_tokens=answer or 1, temperature=1.0, prompt_logprobs=0, logprobs=0, ignore_eos=True,
                              detokenize=False)  # fmt: skip
    found = []
    for ids, out in zip(
        prompts, llm.generate([{"prompt_token_ids": list(p)} for p in prompts], settings, use_tqdm=False), strict=True
    ):
        text = tuple(out.outputs[0].token_ids) if answer else ()
        rows = [*out.prompt_logprobs[1:], *(out.outputs[0].logprobs if answer else ())]
        whole = (*ids, *text)
        found.append((whole, [row[token].logprob for row, token in zip(rows, whole[1:], strict=True)]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96, help="of a prompt")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    name = Path(options.model).name
    data = read_data(options.data, limit=SET * options.sets)
    encoded = encode(data, AutoTokenizer.from_pretrained(options.model), max_tokens=options.tokens)
    prompts = [group[0].ids for group in encoded.sequences]
    told = {}
    for way in options.ways.split(","):  # one model in memory at a time
        given = prompts if not WAYS[way][1] else [ids[: options.tokens // 2] for ids in prompts]
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            told[way] = pool.submit(vllm_rows, options.model, options.dtype, way, given).result()
    a: Any = open_engine("transformers", options.model, {"dtype": options.dtype})

    @cache
    def band_of(texts: tuple[Ids, ...]) -> RoundoffBand:
        return measure_band(a.subject, texts)

    @cache
    def mine(ids: Ids) -> Array:
        found: Array = a.reported(ids).tokens.double().numpy()
        return found

    rows: list[dict[str, Any]] = []
    for way, answers in told.items():
        for part in (answers[first : first + SET] for first in range(0, len(answers), SET)):
            texts = tuple(ids for ids, _ in part)
            band = band_of(texts)
            assert band.expected.value
            gap = gap_between([mine(ids) for ids in texts], [np.array(row) for _, row in part])
            rows.append({"model": name, "way": way, "dtype": options.dtype, "tokens": band.tokens, "gap": gap.value,
                         "expected": band.expected.value, "low": band.low, "high": band.high,
                         "ratio": (gap.value or 0.0) / band.expected.value, "verdict": band.judge(gap)})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
        if options.o:
            kept = json.loads(options.o.read_text("utf-8")) if options.o.exists() else []
            kept = [row for row in kept if (row["model"], row["dtype"], row["way"]) != (name, options.dtype, way)]
            options.o.write_text(json.dumps(kept + [r for r in rows if r["way"] == way], indent=1) + "\n", "utf-8")
    ratios = [row["ratio"] for row in rows]
    inside = sum(row["low"] <= row["gap"] <= row["high"] for row in rows)
    called = sum(row["verdict"] != "round-off" for row in rows)
    print(f"{len(rows)} pairs, {len({row['gap'] for row in rows})} different: {inside} inside the band, {called} not "
          f"called round-off; gap / expected {min(ratios):.2f} to {max(ratios):.2f}, median {median(ratios):.2f}; "
          f"{torch.get_num_threads()} threads")  # fmt: skip


if __name__ == "__main__":
    main()
