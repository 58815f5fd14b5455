"""SmoothQuant on SmolLM2-135M: W8A8 before and after, as the model is and with outlier channels planted.

    python benchmarks/smoothquant.py MODEL --calibration GSM8K_TRAIN.jsonl --data GSM8K_TEST.jsonl \\
        -o results/smoothquant.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from screen_setup import read_material, save

import noisescope as ns
from noisescope.measures.smoothquant import rounded_kl, smooth
from noisescope.model.loading import Subject

LENGTH, ITEMS = 128, 4


def smoothquant(subject: Subject, calibration: torch.Tensor, test: torch.Tensor) -> dict[str, Any]:
    """W8A8 before and after: the model as it is, and with outlier channels planted into what its norms give."""
    batches, held_out = list(calibration.split(4)), list(test.split(4))
    rows = {}
    for name in ("as it is", "planted"):
        if name == "planted":
            plant(subject.model)
        before = np.mean(rounded_kl(subject.model, subject.model, held_out, anatomy=subject.anatomy))
        smoothed = smooth(subject.model, batches, anatomy=subject.anatomy)
        after = np.mean(rounded_kl(smoothed.model, subject.model, held_out))
        done = sum(fold.alpha is not None for fold in smoothed.folds)
        rows[name] = {"kl_before": float(before), "kl_after": float(after), "gain": float(before / after),
                      "float_error": smoothed.float_error, "folds": len(smoothed.folds), "smoothed": done,
                      "tokens": test.numel() - len(test)}  # fmt: skip
        print(f"SmoothQuant, {name}: {rows[name]}", flush=True)
    return rows


def plant(model: Any, factor: float = 60.0, channels: tuple[int, ...] = (7, 100, 333)) -> None:
    """Outlier channels that change nothing in floating point: a norm's weight up, the columns that read it down."""
    with torch.no_grad():
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for norm, linears in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[list(channels)] *= factor
                for linear in linears:
                    linear.weight[:, list(channels)] /= factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of SmolLM2-135M")
    parser.add_argument("--calibration", required=True, type=Path, help="GSM8K's training set as JSONL")
    parser.add_argument("--data", required=True, type=Path, help="GSM8K's test set as JSONL")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    subject = ns.load(options.model, dtype="float32")
    texts = [read_material(subject.tokenizer, path, ITEMS, LENGTH) for path in (options.calibration, options.data)]
    tokens = [torch.tensor([group[0].ids for group in text.encoded.sequences]) for text in texts]
    save(options.output, {"torch": torch.__version__, "smoothquant": smoothquant(subject, *tokens)})


if __name__ == "__main__":
    main()
