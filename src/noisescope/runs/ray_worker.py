"""The code inside a Ray actor: a model loaded once, and trials run on it. Depends neither on Ray nor on a store."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from noisescope.errors import NoisescopeError
from noisescope.model.fingerprint import Source
from noisescope.model.loading import Subject
from noisescope.runs.batches import Material
from noisescope.runs.trial_runner import TrialRunner, conditions
from noisescope.trials import Conditions, Result, Trial, content_id


@dataclass(frozen=True)
class Arithmetic:
    """Settings of a process that change the last bits of its numbers."""

    threads: int
    float32_matmul: str
    deterministic: int  # torch's debug mode: 0 off, 1 warn, 2 raise

    @classmethod
    def current(cls) -> Arithmetic:
        deterministic = torch.get_deterministic_debug_mode()
        return cls(torch.get_num_threads(), torch.get_float32_matmul_precision(), deterministic)

    def apply(self) -> None:
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.float32_matmul)
        torch.set_deterministic_debug_mode(self.deterministic)


@dataclass(frozen=True)
class Job:
    """What an actor receives once."""

    source: Source
    materials: tuple[Material, ...]
    metric: Callable[..., Any] | None
    arithmetic: Arithmetic
    memory: float | None = None


@dataclass(frozen=True)
class Ready:
    """An actor that has loaded the model, or the reason (`refusal`) why it could not."""

    host: str
    pid: int
    conditions: Conditions | None = None
    tokens: str = ""
    refusal: str = ""


@dataclass(frozen=True)
class Answer:
    """A trial's result and cost; `identity` is the trial's id as the actor computes it."""

    identity: str
    result: Result
    seconds: float = 0.0
    forwards: float = 0.0
    notes: tuple[str, ...] = ()


class Worker:
    """The actor class: loads the model in `start`, then runs trials."""

    def start(self, pickled: bytes) -> Ready:
        who = (socket.gethostname(), os.getpid())
        try:
            job: Job = pickle.loads(pickled)
        except Exception as error:  # whatever the caller's own modules raise
            return Ready(*who, refusal=f"the metric can't be imported there ({type(error).__name__}: {error})")
        job.arithmetic.apply()
        try:
            subject = job.source.load()
        except NoisescopeError as error:
            return Ready(*who, refusal=f"{error} (every machine of the cluster needs the model at that path)")
        self.runner = TrialRunner(subject, job.materials, metric=job.metric, memory=job.memory).__enter__()
        return Ready(*who, conditions(subject), prompt_tokens_id(subject, job.materials))

    def run(self, pickled: bytes) -> Answer:
        trial: Trial = pickle.loads(pickled)
        forwards, notes, started = self.runner.forwards, len(self.runner.notes), time.perf_counter()
        result = self.runner.run(trial)
        seconds = time.perf_counter() - started
        added = tuple(self.runner.notes[notes:])
        return Answer(content_id(trial), result, seconds, self.runner.forwards - forwards, added)


def prompt_tokens_id(subject: Subject, materials: Iterable[Material]) -> str:
    """Fingerprint of the prompts as the subject's tokenizer reads them; "" where nothing is generated."""
    prompts = [prompt for material in materials for prompt in material.prompts]
    return content_id([list(subject.tokenizer(prompt)["input_ids"]) for prompt in prompts]) if prompts else ""
