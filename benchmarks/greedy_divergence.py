"""Greedy texts of two real kernel paths: after how many tokens do they differ, and what did `Rounding` predict?

    python benchmarks/greedy_divergence.py MODEL --data FILE [--prompts 200] [--tokens 128] [--device cuda]

The reference decodes greedily in bfloat16 with fused attention, one prompt at a time. Three other paths decode the same
prompts: plain attention, a batch of 8, and both. Their texts are compared token by token with the reference's: measured
is the median number of tokens until the first difference, a text that ends or is cut before one counting as censored
(Kaplan-Meier), in each pair and over all. Predicted is `ns.Rounding`'s median, by forwards over the reference's texts.
Target: within 25 %.
"""

from __future__ import annotations

import argparse
import functools
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

import noisescope as ns
from noisescope import stats
from noisescope.api.preparation import encode_data
from noisescope.api.roundoff import with_ends
from noisescope.comparison.roundoff import forecast
from noisescope.data.generation import end_tokens, generate_tokens
from noisescope.measures.rounded_forwards import ScoredTokens, run_rounded

PATHS = {"eager, batch 1": ("eager", 1), "sdpa, batch 8": ("sdpa", 8), "eager, batch 8": ("eager", 8)}
REFERENCE = ("sdpa", 1)
SHARE = 8  # prompts of a task: the largest batch
PROMPT = 48  # tokens of a sample that are the prompt, at most


def wait(mine: list[int], other: list[int]) -> tuple[int, bool]:
    """Tokens until the first difference, and whether there was one; texts hold the token that ended them."""
    for at, (x, y) in enumerate(zip(mine, other, strict=False)):
        if x != y:
            return at + 1, True
    return max(min(len(mine), len(other)), 1), False


@functools.cache
def loaded(model: str, dtype: str, device: str) -> ns.Subject:
    return ns.load(model, dtype=dtype, device=device)


@torch.no_grad()
def generated(
    where: tuple[str, str, str], prompts: list[list[int]], attention: str, batch: int, tokens: int
) -> list[list[int]]:
    """The greedy texts of some prompts by one path."""
    subject = loaded(*where)
    model: Any = subject.model.eval()
    model.set_attn_implementation(attention)
    ends = end_tokens(model, subject.tokenizer)
    found = generate_tokens(model, prompts, max_new_tokens=tokens, batch_size=batch, device=where[-1], ends=ends)
    return with_ends(found, ends, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="that generate side by side, each with its own model")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    subject = ns.load(options.model, dtype=options.dtype, device=options.device)
    model: Any = subject.model.eval()
    material, _ = encode_data(subject, options.data, options.prompts, 512, which="test")
    groups = material.encoded.sequences
    prompts = [list(one.ids[: min(one.start if one.start > 1 else PROMPT, len(one.ids) - 1)]) for (one, *_) in groups]
    shares = [prompts[first : first + SHARE] for first in range(0, len(prompts), SHARE)]
    with ProcessPoolExecutor(options.processes, get_context("spawn")) as pool:
        where = options.model, options.dtype, options.device
        asked = {
            way: [pool.submit(generated, where, share, *way, options.tokens) for share in shares]
            for way in (REFERENCE, *PATHS.values())
        }
        found = {way: [text for part in parts for text in part.result()] for way, parts in asked.items()}
    reference = found[REFERENCE]
    scored = [
        ScoredTokens(number, (*prompt, *text), len(prompt))
        for number, (prompt, text) in enumerate(zip(prompts, reference, strict=True))
        if text
    ]
    runs = run_rounded(model, scored, seeds=range(options.seeds), anatomy=subject.anatomy, blocks=False)
    predicted = forecast(runs.flipped, watched=options.tokens)
    print(f"predicted: {_shown(predicted.median_tokens)}; {100 * (predicted.per_token.value or 0):.2f} % of tokens")
    table, flags = [], []
    for name, way in PATHS.items():
        waits = [wait(mine, other) for mine, other in zip(reference, found[way], strict=True)]
        table.append([steps for steps, _ in waits])
        flags.append([happened for _, happened in waits])
        apart = stats.median_wait(np.array(table[-1:]).T, np.array(flags[-1:]).T)
        print(f"{name}: {_shown(apart)}", flush=True)
    share = [float(np.mean(rows)) for rows in (flags, [one.any(1) for one in runs.flipped])]
    print(f"texts that differ within {options.tokens} tokens: {share[0]:.0%} measured, {share[1]:.0%} predicted")
    measured = stats.median_wait(np.array(table).T, np.array(flags).T)
    print(f"measured over all pairs: {_shown(measured)}")
    if measured.value and predicted.median_tokens.value:
        ratio = predicted.median_tokens.value / measured.value
        print(f"predicted / measured {ratio:.2f}: {'within' if abs(ratio - 1) <= 0.25 else 'NOT within'} 25 %")


def _shown(found: stats.Estimate) -> str:
    ends = ("?" if end is None else f"{end:.0f}" for end in (found.value, found.low, found.high))
    return "{} tokens [{}, {}], n = {}".format(*ends, found.n)


if __name__ == "__main__":
    main()
