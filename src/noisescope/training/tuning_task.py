"""Any model and any data with answers as a task of `noisescope experiment phases`: LoRA or full, SFT or GRPO.

Trained are the tokens of the answers (supervised), or rewards for right answers (GRPO). Tested are the final answers of
held-out problems: teacher-forced, right where each of their tokens is the likeliest, or generated. LoRA adapters are
merged into the weights before a test, as they are when a model is served.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from noisescope.data import tokens as tokenised
from noisescope.data.answers import answers_match
from noisescope.data.dataset import DataSet, Item, gather
from noisescope.data.generation import generate
from noisescope.errors import InvalidInput, MissingExtra
from noisescope.model.anatomy import MODULE
from noisescope.model.forwards import evaluating
from noisescope.model.loading import Subject, load
from noisescope.names_in_trial_ids import registered

HELD_OUT = 16  # problems on which the loss is followed while training
_EVALUATED = 16  # problems in one forward
IGNORED = tokenised.IGNORED


@dataclass(frozen=True)
class Files:
    """What a task is made of, as it lies on this machine."""

    model: str
    tokenizer: Any
    train: DataSet
    test: DataSet


@registered("noisescope.training.Tuning")
@dataclass(frozen=True)
class Tuning:
    """A model's weights and data by their fingerprints, and how it is trained and tested."""

    weights: str
    train: str
    test: str
    samples: int
    examples: int
    steps: int
    batch: int
    rate: float
    lora: int = 8  # rank of the adapters; 0 trains every weight
    method: str = "supervised"
    max_tokens: int = 256
    longest_answer: int = 0  # tokens to generate in a test; 0 tests teacher-forced
    completions: int = 8
    temperature: float = 1.0
    files: Files = field(metadata={"identity": False}, kw_only=True)

    @property
    def epoch_ends(self) -> tuple[int, ...]:
        length = max(1, self.examples // self.batch)
        return (*range(length, self.steps, length), self.steps)

    @property
    def curve_points(self) -> int:
        return 10

    def about(self) -> dict[str, Any]:
        names = ("method", "steps", "batch", "rate", "lora", "examples", "max_tokens", "longest_answer")
        by_rewards = {"completions": self.completions} if self.method == "grpo" else {}
        found = {name: getattr(self, name) for name in names}
        return {**found, **by_rewards, "warm_up": self.warm_up, "start": "the model's own weights"}

    @property
    def warm_up(self) -> int:
        return max(1, self.steps // 10)

    def model_name(self) -> str:
        return Path(self.files.model).name

    def data_name(self) -> str:
        return f"{Path(self.files.test.source).name}, {self.samples} problems"

    def prepare(self, folder: Path, *, workers: int) -> Path:
        return folder  # data are read as they are

    def begin(self, seed: int, *, device: str, cache: Path) -> TuningLoop:
        """A model before its first step: adapters and the order of problems are those of the seed."""
        subject = load_quietly(self.files.model, device=device, dtype="float32")
        model = subject.model
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.lora:
                config = _peft().LoraConfig(r=self.lora, lora_alpha=2 * self.lora, target_modules=adapted(subject))
                model = _peft().get_peft_model(model, config)
        return TuningLoop(self, model, _encoded(self.files.train, subject.tokenizer, self.max_tokens), seed, device)

    def save(self, model: Any, folder: Path) -> None:
        model.save_pretrained(folder, **({"save_embedding_layers": False} if self.lora else {}))
        self.tokenizer().save_pretrained(folder)

    def load(self, folder: Path, *, device: str) -> nn.Module:
        if not self.lora:
            whole: nn.Module = load_quietly(folder, device=device, dtype="float32").model
            return whole
        model = load_quietly(self.files.model, device=device, dtype="float32").model
        merged: nn.Module = _peft().PeftModel.from_pretrained(model, folder).merge_and_unload()
        return merged

    def tokenizer(self) -> Any:
        return self.files.tokenizer

    def cut(self) -> list[str]:
        """Which problems are longer than allowed, as sentences; rewards are for whole ones."""
        parts = {"training": self.files.train, "testing": self.files.test} if self.method == "supervised" else {}
        read = functools.partial(tokenised.encode, tokenizer=self.tokenizer(), max_tokens=self.max_tokens)
        return [f"{use}: {note}" for use, data in parts.items() for note in read(data).notes]

    @torch.no_grad()
    def held_out_loss(self, loop: TuningLoop) -> float:
        """Of the answers' tokens, on problems that are not trained on."""
        rows = _encoded(self.files.test, self.tokenizer(), self.max_tokens)[:HELD_OUT]
        with evaluating(loop.model):
            parts = [answer_loss(loop.model, ids, labels) for ids, labels, _ in _batches(rows, loop.device)]
        return float(torch.stack([loss for loss, _ in parts]).sum() / sum(count for _, count in parts))

    @torch.no_grad()
    def right(
        self,
        model: Any,
        name_rows: Callable[[Iterable[int]], None] = lambda samples: None,
        texts: list[str] | None = None,
    ) -> list[bool]:
        """Whether each test problem is answered; `name_rows` gets the problems of the next forward, `texts` answers."""
        device, data = str(next(model.parameters()).device), self.files.test
        told = [] if texts is None else texts
        if self.longest_answer:
            told += generate(
                model,
                self.tokenizer(),
                tokenised.prompts(data, self.tokenizer()),
                max_new_tokens=self.longest_answer,
                batch_size=_EVALUATED,
                device=device,
                samples=list(range(self.samples)),
                on_batch=lambda names, length: name_rows(names),
            )
            return [answers_match(text, _answer(item)) for text, item in zip(told, data.items, strict=True)]
        found: list[bool] = []
        for ids, _, finals in _batches(_encoded(data, self.tokenizer(), self.max_tokens, end=False), device):
            name_rows(range(len(found), len(found) + len(ids)))
            with evaluating(model):
                likeliest = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
            asked = finals[:, 1:] != IGNORED
            found += ((likeliest == ids[:, 1:]) | ~asked).all(1).tolist()
            told += [self.tokenizer().decode(row[chosen]) for row, chosen in zip(likeliest, asked, strict=True)]
        return found

    def questions(self, loop: TuningLoop) -> list[dict[str, str]]:
        """The training problems as text: "prompt" and "answer"."""
        data = self.files.train
        asked = tokenised.prompts(data, self.tokenizer())
        return [{"prompt": prompt, "answer": _answer(item)} for prompt, item in zip(asked, data.items, strict=True)]

    @staticmethod
    def reward(completion: str, answer: str) -> bool:
        return answers_match(completion, answer)

    def dtype(self, device: str) -> torch.dtype:
        on_gpu = torch.device(device).type == "cuda" and self.method == "supervised"
        return torch.bfloat16 if on_gpu else torch.float32


class TuningLoop:
    """A model in training, a step at a time. Epochs go through all problems, each in an order of its own."""

    def __init__(self, task: Tuning, model: Any, rows: Sequence[Row], seed: int, device: str) -> None:
        self.task, self.model, self.rows, self.seed, self.device = task, model, rows, seed, device
        self.trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.optimizer = torch.optim.AdamW(self.trained.values(), lr=task.rate, weight_decay=0.0)
        self.step = 0

    def advance(self) -> dict[str, Tensor]:
        """One step: the loss of the answers, and "gradient_norm" before clipping."""
        task = self.task
        left = 1 - self.step / task.steps
        for group in self.optimizer.param_groups:
            group["lr"] = task.rate * min((self.step + 1) / task.warm_up, left)
        ids, labels, _ = _padded(self._chosen(), self.device)
        kind = torch.device(self.device).type
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.random.fork_rng(devices=[self.device] if kind == "cuda" else []):
            torch.manual_seed(self.seed * 1_000_003 + self.step)  # dropout is that of the step
            with torch.autocast(kind, torch.bfloat16, enabled=task.dtype(self.device) == torch.bfloat16):
                total, count = answer_loss(self.model, ids, labels)
            loss = total / count
            loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {"answer": loss.detach(), "gradient_norm": norm}

    def _chosen(self) -> list[Row]:
        per_epoch = max(1, len(self.rows) // self.task.batch)
        epoch, at = divmod(self.step, per_epoch)
        order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(self.seed * 1_000_003 + epoch))
        return [self.rows[row] for row in order[at * self.task.batch : (at + 1) * self.task.batch].tolist()]

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "step": self.step,
            "weights": {name: weight.detach() for name, weight in self.trained.items()},
            "optimizer": self.optimizer.state_dict(),
        }

    @torch.no_grad()
    def resume(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        for name, weight in self.trained.items():
            weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


def answer_loss(model: Any, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss summed over the answers' tokens, and their number."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    targets = labels[:, 1:]
    total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total, (targets != IGNORED).sum()


def _answer(item: Item) -> str:
    return item.messages[-1][1] if item.messages else item.answer


Row = tuple[tuple[int, ...], int, int]  # ids, where the answer begins, where the final answer begins


def _encoded(data: DataSet, tokenizer: Any, max_tokens: int, *, end: bool = True) -> list[Row]:
    """Of each problem; with `end` the token that ends a text is learned, too."""
    last = () if tokenizer.eos_token_id is None or not end else (tokenizer.eos_token_id,)
    found = tokenised.encode(data, tokenizer, max_tokens=max_tokens).sequences
    return [(one.ids + last, one.start, one.final) for (one,) in found]


def _batches(rows: Sequence[Row], device: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for at in range(0, len(rows), _EVALUATED):
        yield _padded(rows[at : at + _EVALUATED], device)


def _padded(rows: Sequence[Row], device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels of answers and labels of final answers [B, T]. Padded on the right: no mask, as attention is causal.

    With a mask attention would leave its fast kernel.
    """
    longest = max(len(ids) for ids, _, _ in rows)
    ids = torch.zeros((len(rows), longest), dtype=torch.long)
    labels, finals = torch.full_like(ids, IGNORED), torch.full_like(ids, IGNORED)
    for at, (row, start, final) in enumerate(rows):
        ids[at, : len(row)] = torch.tensor(row)
        labels[at, start : len(row)] = ids[at, start : len(row)]
        finals[at, final : len(row)] = ids[at, final : len(row)]
    return ids.to(device), labels.to(device), finals.to(device)


def load_quietly(source: str | Path, **options: Any) -> Subject:
    """Without the loader's own progress bars: there is one for all trainings."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return load(source, **options)


def adapted(subject: Subject) -> list[str]:
    """Every linear of the blocks; routers and experts that share one tensor have no adapters."""
    wanted = (unit for unit in subject.anatomy.units if unit.kind == MODULE and unit.component != "router")
    return [unit.module for unit in wanted if isinstance(unit.place, int) and "linear" in unit.operators]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise MissingExtra("training LoRA adapters needs peft: pip install 'noisescope[peft]'") from error
    return peft


RATES = {("supervised", True): 2e-4, ("supervised", False): 2e-5, ("grpo", True): 2e-5, ("grpo", False): 2e-6}


def tuning(
    subject: Subject,
    source: str,
    data: DataSet,
    held_out: DataSet | None,
    *,
    weights: str,
    samples: int,
    epochs: int,
    lora: int,
    method: str,
    longest_answer: int,
    max_tokens: int,
    examples: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    rate: float | None = None,
) -> Tuning:
    """The task of a loaded model that lies at `source`; `weights` is its fingerprint."""
    if lora:
        _peft()  # is there, or raises here, not once for each training
    train, test = split(data, held_out, samples, examples)
    size = min(batch or 8, len(train.items))
    return Tuning(
        weights,
        train.fingerprint,
        test.fingerprint,
        samples=len(test.items),
        examples=len(train.items),
        steps=steps or epochs * max(1, len(train.items) // size),
        batch=size,
        rate=rate or RATES[method, bool(lora)],
        lora=lora,
        method=method,
        max_tokens=max_tokens,
        longest_answer=longest_answer,
        files=Files(source, subject.tokenizer, train, test),
    )


def split(data: DataSet, held_out: DataSet | None, samples: int, examples: int | None) -> tuple[DataSet, DataSet]:
    """Problems to train on and to test on: the last of the data where no others are given, at most half of them."""
    for one in (data, held_out or data):
        if one.kind not in ("answer", "chat"):
            raise InvalidInput(f"{one.source} is of kind {one.kind}: training needs prompts with answers, or chats")
    if held_out is not None:
        return data.take(examples or len(data.items)), held_out.take(samples)
    count = min(samples, len(data.items) // 2)
    if not count:
        raise InvalidInput(f"{data.source} has one problem: give more, or others to test on (--held-out)")
    trained = data.take(min(examples or len(data.items), len(data.items) - count))
    return trained, gather(data.items[-count:], data.source)
