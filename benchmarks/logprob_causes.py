"""Planted causes in log-probability files: which are named, how many nats they get, what healthy pairs are called.

    python benchmarks/logprob_causes.py [--seeds 3] [--held-out]          synthetic distributions
    python benchmarks/logprob_causes.py --model FOLDER --data FILE        real ones: fused against plain attention, bf16

A plant is right where its cause is the largest one named. Nats are compared with what undoing the plant removes: the
gap of the planted files less that of the healthy pair. See logprob_plants.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from logprob_plants import HEALTHY, HELD_OUT, TUNED, Rows, Sequence, World, synthetic, variants

from noisescope.comparison.logprob_files import read_logprobs
from noisescope.comparison.logprobs import LogprobComparison, compare_logprobs


def judged(a: Rows, b: Rows) -> LogprobComparison:
    """Through files, as a user would."""
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for name, rows in (("a", a), ("b", b)):
            file = Path(folder) / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            files.append(read_logprobs(file))
        return compare_logprobs(*files)


def largest(found: LogprobComparison) -> str:
    if not found.causes:
        return "none"
    return max(found.causes, key=lambda cause: (cause.nats.value is None, abs(cause.nats.value or 0.0))).name


def real_world(folder: str, data: str | None, rows: int, tokens: int) -> World:
    """A model samples tokens from the nucleus of 0.8 within the 20 likeliest; both sides then read them in bfloat16."""
    import torch

    import noisescope as ns
    from noisescope.api.preparation import encode_data

    subject = ns.load(folder, dtype="bfloat16")
    model = subject.model.eval()
    material, _ = encode_data(subject, data, rows, 256, which="test")
    prompts = [
        group[0].ids[: min(group[0].start if group[0].start > 1 else 24, 32)] for group in material.encoded.sequences
    ]
    torch.manual_seed(0)
    world: World = []
    with torch.no_grad():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            settings = {"do_sample": True, "top_p": 0.8, "top_k": 20, "temperature": 1.0}
            whole = model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens // 2, **settings)[0]
            start, picked = len(prompt), whole[len(prompt) :].numpy()
            if len(picked) < 16:
                continue
            sides = []
            for attention in ("sdpa", "eager"):
                model.set_attn_implementation(attention)
                logits = model(whole[None]).logits[0, start - 1 : -1].double().numpy()
                sides.append(variants(logits, picked))
            model.set_attn_implementation("sdpa")
            world.append(Sequence(picked.tolist(), *sides))
    return world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--noise", type=float, default=0.02)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--data")
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    if options.model:
        worlds = [real_world(options.model, options.data, options.rows, options.tokens)]
    else:
        worlds = [synthetic(100 * options.held_out + seed, noise=options.noise) for seed in range(options.seeds)]
    plants = HELD_OUT if options.held_out else TUNED
    right = count = 0
    for name, (cause, plant) in plants.items():
        for number, world in enumerate(worlds):
            draw = np.random.default_rng(7 + number)
            found = judged(*plant(world, draw))
            base = judged(*HEALTHY["ids, steps, tokens"](world, draw)).gap.value or 0.0
            mended = (found.gap.value or 0.0) - base
            nats = sum(one.nats.value or 0.0 for one in found.causes if one.name == cause)
            named = largest(found)
            count, right = count + 1, right + (named == cause)
            shown = ", ".join(f"{one.name} {one.nats.value or float('nan'):.3g}" for one in found.causes)
            ratio = nats / mended if mended > 0 else float("nan")
            mark = "ok   " if named == cause else "WRONG"
            print(f"{mark} {name:<42} nats / true {ratio:5.2f}  left {found.remainder.value or 0:.3g}  [{shown}]")
    print(f"\n{right} of {count} plants named")
    alarms = [
        (name, [cause.name for cause in found.causes])
        for number, world in enumerate(worlds)
        for name, plant in HEALTHY.items()
        if (found := judged(*plant(world, np.random.default_rng(number)))).causes
    ]
    print(f"{len(alarms)} of {len(worlds) * len(HEALTHY)} healthy pairs called a cause {alarms}")


if __name__ == "__main__":
    main()
