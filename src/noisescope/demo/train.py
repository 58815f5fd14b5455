"""Make the bundled model from nothing.

    python -m noisescope.demo.train OUT_DIR

About 4 minutes on an H200 with 16 cores: one to make the problems and to start, two to train. On a CPU only for trying
out: --steps 5 --device cpu. Writes OUT_DIR/model (Hugging Face folder, bfloat16 safetensors, tokenizer), test.jsonl,
calibration.jsonl and training.json (settings, losses, exact match on the held-out problems with and without noise).
Data and order are the same each time; weights are not quite, since a GPU adds in varying order.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import noisescope as ns
from noisescope.demo import problems, training_data
from noisescope.demo.problems import Problem
from noisescope.demo.training_data import BOS, EOS, NO_VALUE, PAD, SENTENCES, Batch, training_set
from noisescope.model.forwards import evaluating
from noisescope.names_in_trial_ids import registered

NOISE_LEVELS = (0.02, 0.05, 0.1)
TEST_SEED, CALIBRATION_SEED = 1_000_003, 1_000_033
STORY = 0.1  # weight of the story's loss beside the answer's 1
LOG_EVERY = 100

Compiler = Callable[[nn.Module], Any]


@registered("noisescope.demo.Settings")
@dataclass(frozen=True)
class Settings:
    """Everything that decides the outcome, the machine apart; the defaults made the bundled model."""

    layers: int = 16
    width: int = 96
    examples: int = 1_000_000
    steps: int = 2700
    batch: int = 512
    rate: float = 2e-3
    warm_up: int = 500  # steps
    running: float = 0.5  # weight of the losses of the running value
    seconds: float = 3600.0  # training ends by then at the latest, with a learning rate that falls sooner
    tests: int = 1000
    calibrations: int = 256


def make_model(layers: int, width: int, vocabulary: int) -> LlamaForCausalLM:
    heads = width // 32
    # Not Qwen2: for that type transformers puts its own pre-tokenizer in place of the one saved beside the model.
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=-(-width * 8 // 3 // 32) * 32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        initializer_range=0.03,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return LlamaForCausalLM(config)


def _as_it_is(block: nn.Module) -> nn.Module:
    return block


class TrainingLosses(nn.Module):
    """The training losses, with heads that read the running value inside the model and are thrown away afterwards.

    What a token finds out in the last block no later token can use, so the value after sentence k has to be there
    early: it is asked for at depth (k + 1) / (SENTENCES + 1) of the blocks, which leaves some for the answer.
    """

    def __init__(self, model: LlamaForCausalLM, compiler: Compiler = _as_it_is) -> None:
        super().__init__()
        self.model = model
        layers, width = len(model.model.layers), model.config.hidden_size
        self.depths = [round(layers * (k + 1) / (SENTENCES + 1)) for k in range(SENTENCES)]
        self.heads = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), nn.Linear(width, problems.LARGEST + 1)) for _ in self.depths
        )
        self.blocks = [compiler(block) for block in model.model.layers]  # a plain list: the model owns the parameters

    def logits(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, T, V] and the hidden states [B, T, D] before each block and after the last."""
        body = self.model.model
        hidden = body.embed_tokens(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            hidden = hidden.bfloat16()  # the residual stream as it will be when the model is used
        rotary = body.rotary_emb(hidden, torch.arange(tokens.shape[1], device=tokens.device)[None])
        states = [hidden]
        for block in self.blocks:
            hidden = block(hidden, attention_mask=None, position_embeddings=rotary)  # no mask: causal, padded right
            states.append(hidden)
        return self.model.lm_head(body.norm(hidden)), states

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Means over tokens: "answer", "story", and "value0" ... of the sentences."""
        logits, states = self.logits(batch.tokens)
        target = batch.tokens[:, 1:]
        loss = cross_entropy(logits[:, :-1].float().flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        answer = training_data.answer_mask(batch.tokens)
        story = (target != PAD) & ~answer
        losses = {"answer": (loss * answer).sum() / answer.sum(), "story": (loss * story).sum() / story.sum()}
        rows = torch.arange(len(target), device=target.device)
        for k, (depth, head) in enumerate(zip(self.depths, self.heads, strict=True)):
            values = head(states[depth][rows, batch.ends[:, k]].float()).float()
            known = (batch.values[:, k] != NO_VALUE).sum().clamp(min=1)
            losses[f"value{k}"] = (
                cross_entropy(values, batch.values[:, k], ignore_index=NO_VALUE, reduction="sum") / known
            )
        return losses


class TrainingLoop:
    """A model in training, a step at a time. The state after a step can be saved, and resumed by another."""

    def __init__(
        self, model: LlamaForCausalLM, data: Batch, settings: Settings, *, device: str, compiler: Compiler = _as_it_is
    ) -> None:
        self.model, self.data, self.settings, self.device = model, data, settings, device
        self.on_gpu = torch.device(device).type == "cuda"
        self.losses = TrainingLosses(model, compiler).to(device)
        self.optimizer = torch.optim.AdamW(
            self.losses.parameters(), lr=settings.rate, weight_decay=0.05, betas=(0.9, 0.98), fused=self.on_gpu
        )
        self.order = torch.Generator().manual_seed(settings.steps)
        self.step = 0

    def advance(self, progress: float | None = None) -> dict[str, Tensor]:
        """One step: the parts of the loss, and "gradient_norm" before clipping.

        The learning rate and the losses follow the share of the run that is over after this step.
        """
        settings = self.settings
        progress = (self.step + 1) / settings.steps if progress is None else progress
        rate = settings.rate * min(1.0, (self.step + 1) / settings.warm_up, max(0.005, 1.25 * (1 - progress)))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = torch.randint(0, len(self.data.tokens), (settings.batch,), generator=self.order)
        with torch.autocast("cuda" if self.on_gpu else "cpu", torch.bfloat16, enabled=self.on_gpu):  # slow on a CPU
            parts = self.losses(self.data.pick(rows.to(self.device)))
        loss = parts["answer"] + STORY * parts["story"]
        if progress < 0.8 and settings.running:
            values = [part for name, part in parts.items() if name.startswith("value")]
            loss = loss + settings.running * torch.stack(values).mean()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.losses.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {**parts, "gradient_norm": norm}

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "step": self.step,
            "losses": self.losses.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.losses.load_state_dict(state["losses"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.order.set_state(state["order"].cpu())


def fit(model: LlamaForCausalLM, data: Batch, settings: Settings, *, device: str) -> list[dict[str, Any]]:
    """Train in place; returns a line of losses now and then."""
    started = time.monotonic()
    compiler = functools.partial(torch.compile, dynamic=False) if device == "cuda" else _as_it_is
    loop = TrainingLoop(model, data, settings, device=device, compiler=compiler)
    lines: list[dict[str, Any]] = []
    progress = 0.0
    while progress < 1:
        progress = max((loop.step + 1) / settings.steps, (time.monotonic() - started) / settings.seconds)
        parts = loop.advance(progress)
        if loop.step % LOG_EVERY == 0 or progress >= 1:
            seconds = round(time.monotonic() - started)
            numbers = {name: round(part.item(), 4) for name, part in parts.items()}
            lines.append({"step": loop.step, "seconds": seconds, **numbers})
            print(lines[-1], flush=True)
    return lines


def build(out: Path, settings: Settings, *, device: str, workers: int) -> dict[str, Any]:
    """Data, training, files, evaluation; returns what is written to training.json."""
    tests = problems.held_out(settings.tests, TEST_SEED)
    seen = frozenset(item.prompt for item in tests)
    calibration = problems.held_out(settings.calibrations, CALIBRATION_SEED, without=seen)
    data = training_set(settings.examples, seen | {item.prompt for item in calibration}, workers=workers)
    torch.manual_seed(0)
    words = training_data.make_tokenizer()
    model = make_model(settings.layers, settings.width, len(words)).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data.tokens):,} problems", flush=True)
    losses = fit(model, data.to(device), settings, device=device)
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out / "model")
    words.save_pretrained(out / "model")
    (out / "model" / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    for name, items in (("test.jsonl", tests), ("calibration.jsonl", calibration)):
        lines = [json.dumps({"prompt": item.prompt, "answer": item.answer}) + "\n" for item in items]
        (out / name).write_text("".join(lines), "utf-8")
    report = {
        "settings": dataclasses.asdict(settings),
        "machine": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "torch": torch.__version__,
        "seconds": losses[-1]["seconds"],  # of training, without making the problems and evaluating
        **evaluate(out / "model", tests, device=device),
        "losses": losses,
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return report


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default, help="%(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="%(default)s")
    parser.add_argument("--workers", type=int, default=5, help="processes that make the problems, %(default)s")
    options = vars(parser.parse_args(arguments))
    out, device, workers = options.pop("out"), options.pop("device"), options.pop("workers")
    report = build(out, Settings(**options), device=device, workers=workers)
    print(json.dumps({name: report[name] for name in ("n", "exact_match_by_noise", "clean_exact_match_by_steps")}))


if __name__ == "__main__":
    main()
