"""Trials on Ray: actors load the model from its source and run trials; only this process stores results.

An actor is sent the model's source, token sequences, the caller's metric and trials; results come back. No model ever
travels.

The numbers are those of a run in this process. For that, every actor computes with as many threads as this process
(`torch.get_num_threads()`): the order of a sum, and so its last bits, depends on their number. Runs under the same
OMP_NUM_THREADS agree, whoever carries them out. Machines of different kinds in one cluster may still differ.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from noisescope.errors import InvalidInput, MissingExtra, NoisescopeError, whole_number
from noisescope.model.fingerprint import accelerators, source_of
from noisescope.model.loading import Subject
from noisescope.options.shared import ExecutionOptions
from noisescope.runs.batches import Material
from noisescope.runs.ray_worker import Answer, Arithmetic, Job, Ready, Worker, prompt_tokens_id
from noisescope.trials import Conditions, Result, Slice, Trial

if TYPE_CHECKING:
    from noisescope.runs.store import Store
    from noisescope.runs.trial_runner import Executor, Progress

# Threads that wait for the next operator let others have the core, instead of spinning on it: where two processes of
# two threads share two cores, products of 192 x 576 x 1536 ran 5.5 times as fast. No number depends on it.
_CROWDED = {"OMP_WAIT_POLICY": "PASSIVE"}
_RESOURCES = {"npu": "NPU", "hpu": "HPU"}  # Ray's name of a torch device; all others are GPU
_OBJECT_STORE = 256 << 20  # bytes: tokens and results are small, and Ray would take 30 % of the memory
_USAGE = "RAY_USAGE_STATS_ENABLED"
MOST_DEATHS = 3  # of workers on one trial, or in a row while loading, before it is given up


@contextlib.contextmanager
def on_ray(
    subject: Subject, materials: Iterable[Material], metric: Callable[..., Any] | None, options: ExecutionOptions
) -> Iterator[tuple[Executor, Callable[[], tuple[float, list[str]]]]]:
    """(execute, cost) on a Ray cluster (`ray_cluster`), which is joined with the first trial.

    At the end, also after an interrupt, the actors are killed and a cluster that was started here is shut down; stored
    results stay, so the same call continues from there.
    """
    ray = import_ray("the ray executor needs the ray package")
    whole_number(options.workers, "workers")
    with contextlib.ExitStack() as stack:
        executor = RayExecutor(ray, stack, subject, tuple(materials), metric, options)
        yield executor.execute, executor.cost


class TrialQueue:
    """Waiting trials by slice: an actor keeps the clean forward of one slice, so it stays with it while it can."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self._waiting: dict[Slice, deque[Trial]] = {}
        for trial in trials:
            self._waiting.setdefault(trial.slice, deque()).append(trial)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, own: Slice | None, taken: Collection[Slice | None]) -> Trial | None:
        """The next trial for an actor at slice `own`: of it, of one that no actor is at, or the last of the longest.

        The only trial that waits in a slice is left to the actor that is at it.
        """
        if own is not None and self._waiting.get(own):
            return self._waiting[own].popleft()
        for part, waiting in self._waiting.items():
            if waiting and part not in taken:
                return waiting.popleft()
        longest = max(self._waiting.values(), key=len)
        return longest.pop() if len(longest) > 1 else None

    def put_back(self, trial: Trial) -> None:
        self._waiting[trial.slice].appendleft(trial)


@dataclass
class ActorState:
    """One actor, as this process sees it."""

    actor: Any
    call: Any  # what it is busy with, loading where it has no trial; None: idle
    trial: Trial | None = None
    slice: Slice | None = None
    ready: Ready | None = None


@dataclass
class RayExecutor:
    """The actors of one run, started with its first trial."""

    ray: Any
    stack: contextlib.ExitStack
    subject: Subject
    materials: tuple[Material, ...]
    metric: Callable[..., Any] | None
    options: ExecutionOptions
    actors: list[ActorState] = field(default_factory=list)
    forwards: float = 0.0
    notes: list[str] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)  # by trial id; "" is loading

    def cost(self) -> tuple[float, list[str]]:
        """Full forwards that produced a result, and notes on what happened."""
        return self.forwards, list(dict.fromkeys(self.notes))

    def execute(self, trials: list[Trial], store: Store, progress: Progress) -> None:
        """An Executor: this process stores the results in the order in which they arrive."""
        if not self.actors:
            self._start(trials[0].conditions)
        waiting = TrialQueue(trials)
        while len(waiting) or any(state.trial for state in self.actors):
            self._hand_out(waiting)
            busy = {state.call: state for state in self.actors if state.call is not None}
            (ended,), _ = self.ray.wait(list(busy), num_returns=1)
            state = busy[ended]
            trial = state.trial
            try:
                answer = self.ray.get(ended)
            except self.ray.exceptions.RayTaskError:  # what a run in this process would raise, too
                raise
            except self.ray.exceptions.RayError as error:
                answer = self._replace(state, error)
                if trial is not None and answer is None:
                    waiting.put_back(trial)
            state.call = state.trial = None
            if isinstance(answer, Ready):
                self._check(answer)
                state.ready = answer
            elif trial is not None and answer is not None:
                self._store(trial, answer, store, progress)

    def _hand_out(self, waiting: TrialQueue) -> None:
        for state in self.actors:
            if state.call is None and len(waiting):
                trial = waiting.take(state.slice, {other.slice for other in self.actors if other is not state})
                if trial is not None:
                    state.trial, state.slice = trial, trial.slice
                    state.call = state.actor.run.remote(pickled(trial, "the metric or the perturbation"))

    def _store(self, trial: Trial, answer: Answer, store: Store, progress: Progress) -> None:
        if answer.identity != trial.id:
            raise NoisescopeError(
                f"a worker computes another id for trial {trial.id[:12]}: its noisescope, or the module of the metric "
                "or perturbation, is a different version. Install the same version on every machine of the cluster"
            )
        self.forwards += answer.forwards
        self.notes += answer.notes
        store.put(trial, answer.result, answer.seconds)
        progress.step(trial, answer.result, answer.seconds)

    # -- actors come and go

    def _start(self, expected: Conditions) -> None:
        source = source_of(self.subject, expected.model, self._model_folder)
        if self.subject.loading is None and self.options.output is not None:
            self.notes.append(f"the model was written to {source.path} for the workers")
        arithmetic, devices = Arithmetic.current(), accelerators(self.subject.model)
        job = pickled(Job(source, self.materials, self.metric, arithmetic, self.options.memory), "the metric")
        self.expected, self.tokens = expected, prompt_tokens_id(self.subject, self.materials)
        self.stack.enter_context(ray_cluster(self.ray, self.options.address, self.options.workers))
        self.stack.callback(lambda: [self.ray.kill(state.actor) for state in self.actors])
        reserved = actor_options(self.ray, self.options.workers, devices)
        if arithmetic.threads > reserved["num_cpus"] and not devices:
            reserved["runtime_env"] = {"env_vars": dict(_CROWDED)}
            self.notes.append(
                f"each worker used {arithmetic.threads} threads, like this process, on {reserved['num_cpus']} "
                f"reserved cores; setting OMP_NUM_THREADS={reserved['num_cpus']} everywhere may be faster"
            )
        self.actor_class = self.ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **reserved)
        self.job = self.ray.put(job)
        self.actors += [self._new_actor() for _ in range(self.options.workers)]

    def _model_folder(self) -> Path:
        """Where a wrapped model is saved."""
        if self.options.output is not None:
            return Path(self.options.output)
        return Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="noisescope-")))

    def _new_actor(self) -> ActorState:
        actor = self.actor_class.remote()
        return ActorState(actor, actor.start.remote(self.job))

    def _check(self, ready: Ready) -> None:
        """The worker must have this model and tokenise prompts as this process does; otherwise the run ends."""
        who = f"worker {ready.pid} on {ready.host}"
        if ready.refusal:
            raise InvalidInput(f"{who} can't start: {ready.refusal}")
        for name in (known.name for known in fields(self.expected)):
            here, there = getattr(self.expected, name), getattr(ready.conditions, name)
            if here != there:
                raise InvalidInput(
                    f"{who} loaded a different model: {name} is {there} there and {here} here. If you changed the "
                    f"model after loading, pass noisescope.wrap(model, tokenizer); otherwise compare files and "
                    f"versions on the two machines"
                )
        if ready.tokens != self.tokens:
            raise InvalidInput(
                f"the tokenizer of {who} tokenises the prompts differently: was it changed after loading?"
            )
        self.deaths[""] = 0

    def _replace(self, state: ActorState, error: Exception) -> Answer | None:
        """Start another actor for one that died; returns a failed result for a trial that killed too many."""
        self.ray.kill(state.actor)  # where it only can't be reached
        what = state.trial.id if state.trial is not None else ""
        self.deaths[what] += 1
        given_up = self.deaths[what] == MOST_DEATHS
        if given_up and not what:
            raise NoisescopeError(f"{MOST_DEATHS} workers in a row died while loading: {first_line(error)}")
        self.actors[self.actors.index(state)] = self._new_actor()
        if given_up:
            return Answer(what, Result(error=f"{MOST_DEATHS} workers died on this trial: {first_line(error)}"))
        self.notes.append(f"a worker died and was replaced, and its trial was run again: {first_line(error)}")
        return None


def import_ray(needed: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtra(f"{needed}: pip install 'noisescope[ray]'") from error
    return ray


@contextlib.contextmanager
def ray_cluster(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """Run inside a cluster: the current one, `address`, RAY_ADDRESS, or a new local one.

    What was joined or started here is left or stopped at the end. A cluster started here reports no usage statistics,
    unless the environment asks for them.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {}
    if address == "local":
        cores = max(os.cpu_count() or 1, workers)
        settings = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    unset = _USAGE not in os.environ
    try:
        _check_reachable(address)
        os.environ.setdefault(_USAGE, "0")
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"no Ray cluster can be used at {address!r}: {first_line(error)}") from error
    finally:
        if unset:
            os.environ.pop(_USAGE, None)
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise if nothing listens at host:port: Ray itself would keep trying for more than six minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def actor_options(ray: Any, workers: int, devices: list[torch.device]) -> dict[str, Any]:
    """What one actor reserves, as Ray's options: its share of the cores, and an accelerator for each of `devices`."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    need = {"CPU": max(1, int(sum(node.get("CPU", 0) for node in nodes)) // workers)}
    if devices:
        need[_RESOURCES.get(devices[0].type, "GPU")] = len(devices)

    def room() -> int:
        return sum(min(int(node.get(name, 0) // count) for name, count in need.items()) for node in nodes)

    while room() < workers and need["CPU"] > 1:  # shares are whole, and none spans two machines
        need["CPU"] -= 1
    if room() < workers:
        one = " and ".join(f"{count} {name}" for name, count in need.items())
        raise InvalidInput(
            f"the Ray cluster has room for {room()} workers of {one} each, but {workers} were requested: lower "
            f"--workers, or give the address of a larger cluster"
        )
    return {"num_cpus": need.pop("CPU"), "num_gpus": need.pop("GPU", 0), "resources": need}


def pickled(value: Any, own: str) -> bytes:
    """The value in cloudpickle's bytes; `own` names the part of it that is the caller's own code."""
    from ray import cloudpickle

    class WithoutModels(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, nn.Module) and any(True for _ in item.parameters()):
                raise InvalidInput(
                    f"{own} holds a model ({type(item).__name__}), but models can't be sent to Ray workers: use the "
                    f"model passed to it as an argument"
                )
            return super().reducer_override(item)

    buffer = io.BytesIO()
    try:
        WithoutModels(buffer).dump(value)
    except InvalidInput:
        raise
    except Exception as error:  # whatever the caller's own objects raise
        raise InvalidInput(
            f"{own} can't be sent to Ray workers ({type(error).__name__}: {first_line(error)}): keep open files, "
            "locks and connections out of it, or use --executor local"
        ) from error
    return buffer.getvalue()


def first_line(error: BaseException) -> str:
    """The first line of Ray's messages, which are paragraphs."""
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:300] if lines else type(error).__name__
