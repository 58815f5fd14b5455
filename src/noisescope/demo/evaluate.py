"""How many problems the bundled model solves, clean and under noise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import noisescope as ns
from noisescope.demo import problems
from noisescope.demo.problems import Problem
from noisescope.evaluation import evaluating

NOISE_LEVELS = (0.02, 0.05, 0.1)


@torch.no_grad()
def exact_match(model: Any, words: Any, items: Sequence[Problem], *, batch: int = 250) -> list[bool]:
    """Whether each problem's answer comes out, by greedy decoding from its prompt."""
    right: list[bool] = []
    for start in range(0, len(items), batch):
        part = items[start : start + batch]
        inputs = words([item.prompt for item in part], padding=True, return_tensors="pt").to(model.device)
        asked = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        with evaluating(model):
            out = model.generate(**asked, max_new_tokens=4, do_sample=False)
        texts = words.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right += [text.strip() == item.answer for text, item in zip(texts, part, strict=True)]
    return right


def evaluate(folder: Path, items: Sequence[Problem], *, device: str) -> dict[str, Any]:
    """Exact match of the saved model by noise level (relative Gaussian on every linear's output) and by steps."""
    subject = ns.load(folder, device=device)
    clean = exact_match(subject.model, subject.tokenizer, items)
    by_steps = {
        str(steps): sum(ok for ok, item in zip(clean, items, strict=True) if item.steps == steps)
        / max(1, sum(item.steps == steps for item in items))
        for steps in problems.STEPS
    }
    by_noise = {"0.0": sum(clean) / len(items)}
    for scale in NOISE_LEVELS:
        injection = ns.Injection(ns.Gaussian(scale), operators=frozenset({"linear"}), phases=frozenset({"forward"}))
        with ns.inject(subject.model, injection):
            by_noise[str(scale)] = sum(exact_match(subject.model, subject.tokenizer, items)) / len(items)
    return {"n": len(items), "exact_match_by_noise": by_noise, "clean_exact_match_by_steps": by_steps}
