"""The bundled model's problems as tasks of `noisescope experiment phases`: learned from answers, or from rewards.

Answers are judged teacher-forced: greedy decoding gives the answer exactly where each of its tokens, the end among
them, is the likeliest after the right tokens before it. So one forward shows what generation would give, with the same
draws of noise token by token.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from noisescope.atomic_write import read_sealed, write_sealed
from noisescope.demo import folder, problems, train, training_data
from noisescope.errors import InvalidInput, unknown, whole_number
from noisescope.model.forwards import evaluating
from noisescope.names_in_trial_ids import registered
from noisescope.trials import content_id

STARTS = ("bundled", "scratch")
HELD_OUT = 256  # problems on which the loss is followed while training, from the calibration's seed
_EVALUATED = 500  # problems in one forward


@registered("noisescope.demo.Arithmetic")
@dataclass(frozen=True)
class Arithmetic:
    """What is learned, how long, and on how many held-out problems it is asked. Nothing here depends on the machine."""

    settings: train.Settings
    start: str = "bundled"

    @property
    def method(self) -> str:
        return "supervised"

    def __post_init__(self) -> None:
        if self.start not in STARTS:
            raise unknown("start", self.start, STARTS)
        for name in ("steps", "batch", "examples", "tests", "layers", "width"):
            whole_number(vars(self.settings)[name], name)
        if self.settings.width not in (32, 96) and self.settings.width % 64:
            raise InvalidInput(
                f"width must be 32, 96 or a multiple of 64 (heads of 32 that share keys two by two), got "
                f"{self.settings.width}"
            )
        if not (math.isfinite(self.settings.rate) and self.settings.rate > 0):
            raise InvalidInput(f"rate must be finite and above 0, got {self.settings.rate}")

    @property
    def steps(self) -> int:
        return self.settings.steps

    @property
    def samples(self) -> int:
        return self.settings.tests

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        return (self.settings.steps,)  # problems are drawn at random: one piece

    @property
    def curve_points(self) -> int:
        return 40 if self.method == "supervised" else 10

    def about(self) -> dict[str, Any]:
        details = asdict(self)
        return {"method": self.method, **details.pop("settings"), **details}

    def model_name(self) -> str:
        return "the bundled model, trained on" if self.start == "bundled" else "a new model, from scratch"

    def prepare(self, folder: Path, *, workers: int) -> Path:
        """Make the training problems once, for all processes; the file is whole or not there."""
        cache = folder / f"problems-{content_id([self.settings.examples, self.settings.tests])[:12]}.npz"
        if read_sealed(cache) is None:
            tests = problems.held_out(self.settings.tests, train.TEST_SEED)
            calibration = problems.held_out(HELD_OUT, train.CALIBRATION_SEED)
            without = frozenset(item.prompt for item in [*tests, *calibration])
            data = training_data.training_set(self.settings.examples, without, workers=workers)
            buffer = io.BytesIO()
            np.savez_compressed(buffer, tokens=data.tokens, ends=data.ends, values=data.values)
            write_sealed(cache, buffer.getvalue())
        return cache

    def begin(self, seed: int, *, device: str, cache: Path) -> train.TrainingLoop:
        """A model before its first step: weights (from scratch) and the order of problems are those of the seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            data = _training_data(cache, device)
            loop = train.TrainingLoop(self._model().to(device), data, self.settings, device=device)
        loop.order.manual_seed(seed)
        return loop

    def save(self, model: LlamaForCausalLM, folder: Path) -> None:
        model.save_pretrained(folder)
        self.tokenizer().save_pretrained(folder)

    def load(self, folder: Path, *, device: str) -> nn.Module:
        loaded: nn.Module = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        return loaded.to(device)

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return training_data.make_tokenizer()

    @torch.no_grad()
    def held_out_loss(self, loop: train.TrainingLoop) -> float:
        """The answer's loss on problems that are not trained on."""
        batch = _encoded(train.CALIBRATION_SEED, HELD_OUT, loop.device)
        with evaluating(loop.losses):
            return float(loop.losses(batch.pick(torch.arange(HELD_OUT, device=loop.device)))["answer"])

    @torch.no_grad()
    def right(
        self,
        model: nn.Module,
        name_rows: Callable[[Iterable[int]], None] = lambda samples: None,
        texts: list[str] | None = None,
    ) -> list[bool]:
        """Whether each test problem is answered; `name_rows` gets the problems of the next forward, `texts` answers."""
        device = str(next(model.parameters()).device)
        tokens = _encoded(train.TEST_SEED, self.settings.tests, device).tokens.long()
        found: list[bool] = []
        for start in range(0, len(tokens), _EVALUATED):
            part = tokens[start : start + _EVALUATED]
            name_rows(range(start, start + len(part)))
            with evaluating(model):
                logits = model(input_ids=part, use_cache=False).logits
            likeliest, asked = logits[:, :-1].argmax(-1), training_data.answer_mask(part)
            found += ((likeliest == part[:, 1:]) | ~asked).all(1).tolist()
            if texts is not None:
                answers = torch.where(asked, likeliest, training_data.PAD)
                texts += self.tokenizer().batch_decode(answers, skip_special_tokens=True)
        return found

    def data_name(self) -> str:
        """A name for this task's test problems."""
        return f"arithmetic, seed {train.TEST_SEED}, {self.settings.tests} problems"

    def dtype(self, device: str) -> torch.dtype:
        """What products are computed in while training (train.TrainingLoop)."""
        return torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32

    def _model(self) -> LlamaForCausalLM:
        if self.start == "bundled":
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder(), dtype=torch.float32))
            model.load_state_dict(load_file(folder() / "model.safetensors"), strict=False)  # the head is the embedding
            return model
        return train.make_model(self.settings.layers, self.settings.width, len(training_data.make_tokenizer()))


@registered("noisescope.demo.Practice")
@dataclass(frozen=True)
class Practice(Arithmetic):
    """The problems learned from rewards (GRPO): settings.batch problems per step, each answered `completions` times.

    The bundled model answers 98 % of them, and a model that is always right learns nothing from rewards. So its weights
    are worn first, every matrix by 1 + wear z with z standard normal: at 15 % about 75 % of the answers are left, and
    practice has to bring back the rest. Held-out problems, and how they are judged, are those of the supervised task.
    """

    completions: int = 8
    temperature: float = 1.0
    wear: float = 0.15

    longest_answer = 3  # tokens: two digits and the end

    @property
    def method(self) -> str:
        return "grpo"

    @staticmethod
    def reward(completion: str, answer: str) -> bool:
        return completion.strip() == answer

    def questions(self, loop: train.TrainingLoop) -> list[dict[str, str]]:
        """The training problems as text: "prompt" and "answer"."""
        texts = self.tokenizer().batch_decode(loop.data.tokens.long(), skip_special_tokens=True)
        parts = (text.partition("?") for text in texts)
        return [{"prompt": story + mark, "answer": answer.strip()} for story, mark, answer in parts]

    def dtype(self, device: str) -> torch.dtype:
        return torch.float32  # the Trainer is configured to use nothing else

    @torch.no_grad()
    def _model(self) -> LlamaForCausalLM:
        """Worn by the random state of the caller, which `begin` sets to the seed."""
        model = super()._model()
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.mul_(1 + self.wear * torch.randn_like(weight))
        return model


def arithmetic(start: str, *, steps: int | None = None, rate: float | None = None, **settings: int) -> Arithmetic:
    """The task with the settings that suit its start: a short, gentle run on from the bundled model, or a full one."""
    given = {"steps": steps, "rate": rate, **settings}
    given = {name: value for name, value in given.items() if value is not None}
    base = train.Settings(steps=600, rate=3e-4, warm_up=50, running=0.0, examples=200_000)
    if start == "scratch":
        base = train.Settings(examples=400_000)
    elif {"layers", "width"} & set(given):
        raise InvalidInput(
            "layers and width apply only to a model trained from scratch: add --start scratch, or omit them"
        )
    chosen = replace(base, **given)  # type: ignore[arg-type]
    return Arithmetic(replace(chosen, warm_up=min(chosen.warm_up, max(1, chosen.steps // 5))), start)


def practice(start: str, **settings: float | None) -> Practice:
    """The task with settings that train in about five minutes on one core."""
    if start != "bundled":
        raise InvalidInput(
            f"start {start!r} can't be trained with GRPO, which needs a model that is already right some of the "
            f"time: use bundled"
        )
    given = {name: value for name, value in settings.items() if value is not None}
    base = {"steps": 100, "batch": 16, "rate": 2e-5, "examples": 2000}
    return Practice(arithmetic(start, **{**base, **given}).settings, start)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4)
def _training_data(cache: Path, device: str) -> training_data.Batch:
    with np.load(io.BytesIO(read_sealed(cache) or b"")) as arrays:
        parts = [torch.from_numpy(arrays[name]) for name in ("tokens", "ends", "values")]
    return training_data.Batch(*parts).to(device)


@functools.lru_cache(maxsize=8)
def _encoded(seed: int, count: int, device: str) -> training_data.Batch:
    return training_data.encode(problems.held_out(count, seed)).to(device)
