"""The bundled model's problems learned from rewards: the task of `noisescope experiment phases --method grpo`.

The bundled model answers 98 % of them, and who is always right learns nothing from rewards. So its weights are worn
first, every matrix by 1 + wear z with z standard normal: at 15 % about 75 % of the answers are left, and practice has
to bring back the rest. Held-out problems, and how they are judged, are those of the supervised task.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from noisescope.demo import tokenizer, train
from noisescope.demo.task import Arithmetic, arithmetic
from noisescope.errors import InvalidInput
from noisescope.identity import registered


@registered("noisescope.demo.Practice")
@dataclass(frozen=True)
class Practice(Arithmetic):
    """settings.batch problems a step, each answered `completions` times."""

    completions: int = 8
    temperature: float = 1.0
    wear: float = 0.15

    method = "grpo"

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return tokenizer.make()

    def questions(self, fitting: train.Fitting) -> list[dict[str, str]]:
        """The training problems as text: "prompt" and "answer"."""
        texts = self.tokenizer().batch_decode(fitting.data.tokens.long(), skip_special_tokens=True)
        parts = (text.partition("?") for text in texts)
        return [{"prompt": story + mark, "answer": answer.strip()} for story, mark, answer in parts]

    def dtype(self, device: str) -> torch.dtype:
        return torch.float32  # the Trainer is told to use nothing else

    @torch.no_grad()
    def _model(self) -> LlamaForCausalLM:
        """Worn by the random state of the caller, which `begin` sets to the seed."""
        model = super()._model()
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(1 + self.wear * torch.randn_like(weight))
        return model


def practice(start: str, **settings: float | None) -> Practice:
    """The task with settings that train in about five minutes on one core."""
    if start != "bundled":
        raise InvalidInput(
            f"start {start!r} can't be trained by GRPO: rewards teach a model that is right now and then; use bundled"
        )
    given = {name: value for name, value in settings.items() if value is not None}
    base = {"steps": 100, "batch": 16, "rate": 2e-5, "examples": 2000}
    return Practice(arithmetic(start, **{**base, **given}).settings, start)  # type: ignore[arg-type]
