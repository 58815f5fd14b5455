"""The Ray executor: the same ids and the same report as in this process, whatever happens to the workers.

Most tests run the actor's own code behind `Rehearsal`, which has the face of Ray; the last ones run on a real cluster.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.api import Options, diagnose, prepare
from noisescope.diagnosis import all_levels
from noisescope.diagnosis.context import Settings
from noisescope.errors import InvalidInput, MissingExtra, NoisescopeError
from noisescope.reports.saved_report import Report
from noisescope.runs import ray_executor
from noisescope.runs.ray_worker import Answer, Ready, Worker, prompt_tokens_id
from noisescope.runs.store import Store
from noisescope.runs.trial_runner import NoProgress
from noisescope.testing import tiny_model
from noisescope.trials import Result, Trial

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.ray

TWO = Options(executor="ray", workers=2)
NODE = {"Alive": True, "Resources": {"CPU": 2.0}}


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def batches(count: int = 4) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 64, (2, 12), generator=generator)} for _ in range(count)]


def prepared(subject: Any, metric: Any = "accuracy") -> Any:
    """Eight samples in two slices."""
    return prepare(
        subject,
        batches(),
        calibration=None,
        settings=Settings(ns.Gaussian(0.05), levels=("operator",), operators=("softmax", "norm"), seeds=(0,)),
        samples=100,
        calibration_samples=0,
        metric=metric,
        generate=False,
        max_tokens=64,
        max_new_tokens=8,
        slice_samples=4,
    )


def measured(subject: Any, *, options: Options, **settings: Any) -> Report:
    """Three levels of the same eight samples."""
    return diagnose(
        subject, batches(), seeds=1, slice_samples=4, calibration_samples=4, options=options, window=1, **settings
    )


class Seen(NoProgress):
    """Progress that remembers, and does something at each step."""

    def __init__(self, then: Callable[[int], None] = lambda steps: None) -> None:
        self.ids: list[str] = []
        self.then = then

    def step(self, trial: Trial, result: Result, seconds: float) -> None:
        self.ids.append(trial.id)
        self.then(len(self.ids))


@pytest.fixture(scope="module")
def subject() -> Any:
    return ns.load("tiny:llama")


# -- without a cluster


class Rehearsal:
    """Ray's face on actors that live in this process; `deaths` says at which calls (from 1) the actor dies."""

    exceptions = ray.exceptions

    def __init__(
        self, *, deaths: Callable[[int, str], bool] = lambda number, method: False, nodes: Any = (NODE,)
    ) -> None:
        self.deaths, self._nodes = deaths, nodes
        self.calls = itertools.count(1)
        self.started = self.killed = 0
        self.reserved: dict[str, Any] = {}
        self.answers: Callable[[Any], Any] = lambda answer: answer

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> Any:
        return self._nodes

    def put(self, value: Any) -> Any:
        return value

    def remote(self, kind: type) -> Any:
        def start() -> Any:
            self.started += 1
            return _Handle(kind())

        def options(**reserved: Any) -> Any:
            self.reserved = reserved
            return type("Actors", (), {"remote": staticmethod(start)})

        return type("Class", (), {"options": staticmethod(options)})

    def wait(self, calls: list[Any], *, num_returns: int) -> Any:
        return calls[-1:], calls[:-1]  # the last one to start ends first

    def get(self, call: tuple[str, Callable[[], Any]]) -> Any:
        name, answer = call
        if self.deaths(next(self.calls), name):
            raise ray.exceptions.ActorDiedError()
        return self.answers(answer())

    def kill(self, actor: Any) -> None:
        self.killed += 1


class _Handle:
    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def __getattr__(self, method: str) -> Any:
        def call(*arguments: Any) -> Any:
            return (method, lambda: getattr(self.worker, method)(*arguments))

        return type("Method", (), {"remote": staticmethod(call)})


@contextlib.contextmanager
def rehearsed(stage: Any, what: Any, options: Options = TWO) -> Iterator[ray_executor.RayExecutor]:
    with contextlib.ExitStack() as stack:
        yield ray_executor.RayExecutor(stage, stack, what.subject, what.materials, what.metric, options)


def test_every_trial_runs_once_and_the_driver_stores_it(subject: Any) -> None:
    """Two actors answer what one runner in this process answers, and each trial is stored once."""
    what, stage, seen = prepared(subject), Rehearsal(), Seen()
    trials = what.context.ask(None) + what.context.ask(what.context.injection(operators={"softmax"}))
    with Store(None) as store, rehearsed(stage, what) as executor:
        executor.execute(trials, store, seen)
        forwards, notes = executor.cost()
        assert sorted(seen.ids) == sorted(trial.id for trial in trials) == sorted(store)
        assert not any(result.failed for result in store.values())
        assert stage.started == 2 and forwards > 2 and notes == []
        with what._executor(Options()) as (execute, _), Store(None) as local:
            execute(trials, local, NoProgress())
            assert {identity: result.values for identity, result in store.items()} == {
                identity: result.values for identity, result in local.items()
            }
    assert stage.killed == 2


def test_a_dead_workers_trial_runs_again(subject: Any) -> None:
    """A worker that dies on a trial, or while it loads, is replaced, and nothing is missing or stored twice."""
    what, seen = prepared(subject), Seen()
    stage = Rehearsal(deaths=lambda number, method: number in (1, 4, 5))
    trials = what.context.ask(None) + what.context.ask(what.context.injection(operators={"softmax"}))
    with Store(None) as store, rehearsed(stage, what) as executor:
        executor.execute(trials, store, seen)
        assert sorted(seen.ids) == sorted(trial.id for trial in trials)
        assert not any(result.failed for result in store.values())
        assert stage.started == 5 and "died and was replaced" in executor.cost()[1][0]


def test_a_trial_that_kills_three_workers_is_a_failed_row(subject: Any) -> None:
    """Two deaths are followed by another try, the third becomes a result that says so; the other trials go on."""
    what, seen = prepared(subject), Seen()
    first, second = what.context.ask(None)
    stage = Rehearsal()
    with Store(None) as store, rehearsed(stage, what, Options(workers=1)) as executor:
        stage.deaths = lambda number, method: method == "run" and executor.actors[0].trial.id == first.id  # type: ignore[union-attr]
        executor.execute([first, second], store, seen)
        assert store[first.id].error.startswith("3 workers died on this trial") and not store[second.id].failed
        assert stage.started == 4 and seen.ids == [first.id, second.id]


def test_workers_that_die_while_loading_end_the_run(subject: Any) -> None:
    """Actors that never come up are not replaced for ever."""
    what, stage = prepared(subject), Rehearsal(deaths=lambda number, method: True)
    with Store(None) as store:
        with (
            pytest.raises(NoisescopeError, match="3 workers in a row died while loading"),
            rehearsed(stage, what) as executor,
        ):
            executor.execute(what.context.ask(None), store, NoProgress())
        assert len(store) == 0


def test_a_worker_with_another_model_is_refused(subject: Any) -> None:
    """A model that was changed after loading is not the one that a worker loads from the path."""
    changed = ns.load("tiny:llama")
    with torch.no_grad():
        changed.model.lm_head.weight[0, 0] += 1
    what = prepared(changed)
    with (
        Store(None) as store,
        pytest.raises(
            InvalidInput,
            match=r"loaded a different model: model is .* changed the model after loading, pass "
            r"noisescope.wrap",
        ),
        rehearsed(Rehearsal(), what) as executor,
    ):
        executor.execute(what.context.ask(None), store, NoProgress())


def test_a_worker_that_can_not_load_says_why(tmp_path: Path) -> None:
    """A folder that the worker's machine does not have is named."""
    tiny_model("llama").save_pretrained(tmp_path / "here")
    what = prepared(ns.load(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "gone")
    with (
        Store(None) as store,
        pytest.raises(InvalidInput, match=r"worker \d+ on .* can't start: .*here.*every machine of the cluster"),
        rehearsed(Rehearsal(), what) as executor,
    ):
        executor.execute(what.context.ask(None), store, NoProgress())


def test_another_version_of_a_trial_is_refused(subject: Any) -> None:
    """The actor's id of a trial is compared with the driver's before anything is stored."""
    what, stage = prepared(subject), Rehearsal()
    stage.answers = lambda answer: replace(answer, identity="0" * 64) if isinstance(answer, Answer) else answer
    with Store(None) as store:
        with (
            pytest.raises(NoisescopeError, match="computes another id for trial"),
            rehearsed(stage, what) as executor,
        ):
            executor.execute(what.context.ask(None), store, NoProgress())
        assert len(store) == 0


def test_another_tokenizer_is_refused(subject: Any) -> None:
    """Where answers are generated, the prompts must be read alike."""
    what, stage = prepared(subject), Rehearsal()
    stage.answers = lambda answer: replace(answer, tokens="other") if isinstance(answer, Ready) else answer
    with (
        Store(None) as store,
        pytest.raises(InvalidInput, match="tokenises the prompts differently"),
        rehearsed(stage, what) as executor,
    ):
        executor.execute(what.context.ask(None), store, NoProgress())


def test_tokens_are_those_of_the_prompts() -> None:
    """The fingerprint is of what the tokenizer makes of the prompts, and empty where there are none."""
    subject: Any = SimpleNamespace(tokenizer=lambda prompt: {"input_ids": [len(prompt)]})
    one, two = (SimpleNamespace(prompts=prompts) for prompts in (("a", "bb"), ("c", "ddd")))
    alike: Any = SimpleNamespace(prompts=("x", "yy"))
    assert prompt_tokens_id(subject, [one]) == prompt_tokens_id(subject, [alike]) != prompt_tokens_id(subject, [two])  # type: ignore[list-item]
    assert prompt_tokens_id(subject, []) == ""


def test_exceptions_of_the_metric_come_through(subject: Any) -> None:
    """What a run in this process would raise is raised, too, and not taken for a death."""
    what, stage = prepared(subject), Rehearsal()

    def fail(answer: Any) -> Any:
        if isinstance(answer, Answer):
            raise ray.exceptions.RayTaskError("run", "", ZeroDivisionError("of the metric")).as_instanceof_cause()
        return answer

    stage.answers = fail
    with Store(None) as store, pytest.raises(ZeroDivisionError), rehearsed(stage, what) as executor:
        executor.execute(what.context.ask(None), store, NoProgress())
    assert stage.started == stage.killed == 2


def test_slices_stay_with_their_actor(subject: Any) -> None:
    """An actor takes from its own slice, then from one where no actor is, then the last of the longest."""
    what = prepared(subject)
    one, two = what.context.test
    asked = what.context.ask(what.context.injection(), seeds=(0, 1, 2))
    of = {part: [trial for trial in asked if trial.slice == part] for part in (one, two)}
    waiting = ray_executor.TrialQueue(asked)
    assert waiting.take(None, {None}) is of[one][0] and waiting.take(None, {one}) is of[two][0]
    assert waiting.take(two, {one}) is of[two][1] and waiting.take(two, {one}) is of[two][2]
    assert waiting.take(two, {one}) is of[one][2]  # nothing is left of its own: it takes from the other's end
    assert waiting.take(two, {one}) is None and len(waiting) == 1  # the last one is left to the actor that is there
    waiting.put_back(of[one][0])
    assert [waiting.take(one, {two}), waiting.take(one, {two})] == of[one][:2] and len(waiting) == 0


@pytest.mark.parametrize(
    ("nodes", "workers", "devices", "reserved"),
    [
        ([8], 2, 0, {"num_cpus": 4, "num_gpus": 0}),
        ([2], 1, 0, {"num_cpus": 2, "num_gpus": 0}),
        ([8, 8], 3, 0, {"num_cpus": 4, "num_gpus": 0}),  # 5 each would leave the third without a place
        ([(8, 4)], 2, 2, {"num_cpus": 4, "num_gpus": 2}),
        ([(8, 1)], 2, 1, None),
        ([(8, 1), (8, 1)], 1, 2, None),  # no machine has two
        ([1], 2, 0, None),
    ],
)
def test_an_actor_reserves_its_share(nodes: Any, workers: int, devices: int, reserved: Any) -> None:
    """Cores are shared out so that every actor finds a place; where there is none, that is reported at once."""
    pairs = [node if isinstance(node, tuple) else (node, 0) for node in nodes]
    stage = Rehearsal(nodes=[{"Alive": True, "Resources": {"CPU": float(c), "GPU": float(g)}} for c, g in pairs])
    cuda = [torch.device("cuda", index) for index in range(devices)]
    if reserved is None:
        with pytest.raises(
            InvalidInput, match=f"has room for . workers of .*but {workers} were requested: lower --workers"
        ):
            ray_executor.actor_options(stage, workers, cuda)
    else:
        assert ray_executor.actor_options(stage, workers, cuda) == {**reserved, "resources": {}}


def test_other_accelerators_have_their_own_name() -> None:
    """Ray counts an Ascend NPU as NPU, not as GPU."""
    stage = Rehearsal(nodes=[{"Alive": True, "Resources": {"CPU": 4.0, "NPU": 2.0}}])
    npu: Any = SimpleNamespace(type="npu")
    assert ray_executor.actor_options(stage, 2, [npu]) == {"num_cpus": 2, "num_gpus": 0, "resources": {"NPU": 1}}


def test_more_threads_than_cores_are_told(subject: Any) -> None:
    """Actors keep this process's number of threads, for the bits; a note says what would be faster."""
    what, stage = prepared(subject), Rehearsal()
    torch.set_num_threads(2)
    with Store(None) as store, rehearsed(stage, what) as executor:
        executor.execute(what.context.ask(None), store, NoProgress())
        assert "used 2 threads" in executor.cost()[1][0] and "OMP_NUM_THREADS=1" in executor.cost()[1][0]
    assert stage.reserved["num_cpus"] == 1 and stage.reserved["max_restarts"] == stage.reserved["max_task_retries"] == 0


class Outside:
    """A Ray that this process is not in."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls, self.statistics = error, [], ""  # type: ignore[var-annotated]

    def is_initialized(self) -> bool:
        return False

    def init(self, **settings: Any) -> None:
        self.calls.append(settings)
        self.statistics = os.environ.get("RAY_USAGE_STATS_ENABLED", "")
        if self.error:
            raise self.error

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_only_a_cluster_started_here_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new local cluster is quiet and ends with the run, also after an interrupt; a running one is left alone."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    outside = Outside()
    with pytest.raises(KeyboardInterrupt), ray_executor.ray_cluster(outside, None, 1000):
        assert outside.calls[0]["address"] == "local" and outside.calls[0]["num_cpus"] == 1000
        raise KeyboardInterrupt
    assert outside.calls[1:] == ["shutdown"]
    assert outside.statistics == "0" and "RAY_USAGE_STATS_ENABLED" not in os.environ
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    for asked, used in ((None, "auto"), ("local-name", "local-name")):
        outside = Outside()
        with ray_executor.ray_cluster(outside, asked, 2):
            assert outside.calls == [{"address": used, "log_to_driver": False, "logging_level": logging.ERROR}]
    with ray_executor.ray_cluster(Rehearsal(), None, 2):  # has neither init nor shutdown
        pass


def test_a_cluster_that_is_not_there() -> None:
    """Nobody at the address is reported at once, and so is Ray's own message."""
    with pytest.raises(InvalidInput, match=r"no Ray cluster can be used at 'auto': gone$"):
        ray_executor.ray_cluster(Outside(ConnectionError("gone\nmore")), "auto", 2).__enter__()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        outside = Outside()
        with ray_executor.ray_cluster(outside, f"ray://127.0.0.1:{port}", 2):
            assert outside.calls[0]["address"] == f"ray://127.0.0.1:{port}"
    outside = Outside()
    with pytest.raises(InvalidInput, match=f"no Ray cluster can be used at '127.0.0.1:{port}': .*refused"):
        ray_executor.ray_cluster(outside, f"127.0.0.1:{port}", 2).__enter__()
    assert outside.calls == []


def test_models_never_travel_in_a_pickle(subject: Any) -> None:
    """A metric that holds a model is refused by name, and so is what can't be pickled."""
    with pytest.raises(InvalidInput, match=r"the metric holds a model \(LlamaForCausalLM\)"):
        ray_executor.pickled(Holds(subject), "the metric")
    with pytest.raises(InvalidInput, match=r"the metric can't be sent to Ray workers \(TypeError: .*lock"):
        ray_executor.pickled(Holds(threading.Lock()), "the metric")
    assert pickle.loads(ray_executor.pickled(Holds(torch.nn.Identity()), "the metric")).what.training


@dataclass
class Holds:
    what: Any


def test_a_metric_that_can_not_be_imported_there() -> None:
    """The worker says why, in words, instead of dying."""
    packed = ray_executor.pickled(Fails(), "the metric")
    ready = Worker().start(packed)
    assert ready.refusal == "the metric can't be imported there (ModuleNotFoundError: No module named 'mine')"


class Fails:
    def __reduce__(self) -> Any:
        return (exec, ("raise ModuleNotFoundError(\"No module named 'mine'\")",))


def test_wrong_options(subject: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of workers is checked, and a missing package is named with its pip line."""
    with pytest.raises(InvalidInput, match="workers must be an integer of at least 1, got 0"):
        ray_executor.on_ray(subject, (), None, SimpleNamespace(workers=0, address=None, output=None)).__enter__()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'noisescope\[ray\]'"):
        ray_executor.on_ray(subject, (), None, Options()).__enter__()


# -- on a cluster


@pytest.fixture(scope="module")
def real() -> Iterator[None]:
    """A local cluster of two cores; code of this file travels by value, for workers can't import it."""
    with ray_executor.ray_cluster(ray, "local", 2):
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield
        ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def reference(subject: Any) -> tuple[Report, list[str]]:
    """The report of this process, and the ids of its trials."""
    torch.set_num_threads(1)
    seen = Seen()
    return measured(subject, options=Options(progress=seen)), seen.ids


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> list[ray_executor.RayExecutor]:
    """The executors that were made."""
    made: list[ray_executor.RayExecutor] = []

    class Known(ray_executor.RayExecutor):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(ray_executor, "RayExecutor", Known)
    return made


@pytest.mark.usefixtures("real")
def test_the_report_survives_a_killed_worker(
    subject: Any, reference: tuple[Report, list[str]], executor: list[ray_executor.RayExecutor], conclusions: Any
) -> None:
    """Two workers, one of them killed in the middle: the same ids and the same report, and no trial ran twice."""
    killed: list[int] = []

    def kill(steps: int) -> None:
        loading = [member.call for member in executor[0].actors if member.ready is None]
        if loading:  # one worker alone could do all trials before the other is there to be killed
            ray.wait(loading, num_returns=len(loading))
        busy = [m for m in executor[0].actors if m.ready is not None and m.trial is not None]
        busy = [member for member in busy if ray.wait([member.call], timeout=0)[1]]
        if busy and steps >= 5 and not killed:
            killed.append(busy[0].ready.pid)  # type: ignore[union-attr]
            os.kill(killed[0], signal.SIGKILL)

    seen = Seen(kill)
    report = measured(subject, options=Options(executor="ray", workers=2, progress=seen))
    assert killed and killed[0] != os.getpid()
    assert any("died and was replaced" in note for note in report["run"]["notes"])
    assert len(seen.ids) == len(set(seen.ids)) and set(seen.ids) == set(reference[1])
    assert json.dumps(conclusions(report)) == json.dumps(conclusions(reference[0]))  # the bytes of report.json


@dataclass(frozen=True)
class Witness:
    """A metric that refuses to work in an actor that knows the store, or computes with another number of threads."""

    driver: int
    threads: int

    def __call__(self, model: Any, batches: Any) -> list[float]:
        assert torch.get_num_threads() == self.threads
        if os.getpid() != self.driver:
            assert "noisescope.runs.store" not in sys.modules and os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
        with torch.no_grad():
            return [score for batch in batches for score in model(**batch).logits.amax((1, 2)).tolist()]


@pytest.mark.usefixtures("real")
def test_a_wrapped_model_is_written_once(tmp_path: Path) -> None:
    """Workers load a wrapped model from safetensors beside the results, which only the driver writes."""
    torch.set_num_threads(3)  # Ray's own choice would be the two cores
    what = prepared(ns.wrap(tiny_model("llama", seed=5)), Witness(os.getpid(), 3))
    run, found = what.run(all_levels, Options(output=tmp_path, executor="ray", workers=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "run.lock", "run.sqlite"]
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert found == what.run(all_levels, Options())[1]
    assert run.notes[0] == f"the model was written to {tmp_path / 'model'} for the workers"


@pytest.mark.usefixtures("real")
def test_an_interrupted_run_can_be_resumed(
    subject: Any,
    reference: tuple[Report, list[str]],
    tmp_path: Path,
    executor: list[ray_executor.RayExecutor],
    conclusions: Any,
) -> None:
    """Ctrl-C kills the actors; what was stored stays, and the rest gives the same report."""

    def interrupt(steps: int) -> None:
        if steps == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(subject, options=Options(output=tmp_path, executor="ray", workers=1, progress=Seen(interrupt)))
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(executor[0].actors[0].actor.run.remote(b""))
    seen = Seen()
    report = measured(subject, options=Options(output=tmp_path, progress=seen))
    assert len(seen.ids) == len(reference[1]) - 5
    assert conclusions(report) == conclusions(reference[0])
    again = measured(subject, options=Options(output=tmp_path, executor="ray"))
    assert conclusions(again) == conclusions(report) and not executor[1].actors  # nothing to do
