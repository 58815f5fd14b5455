"""The experiment of phases in miniature: trials, resuming, processes, the report."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from noisescope import api
from noisescope.api.experimenting import outcome
from noisescope.cli import app
from noisescope.demo import evaluate, problems, tokenizer, train
from noisescope.demo.task import Arithmetic, arithmetic
from noisescope.errors import InvalidInput
from noisescope.runs.store import Store
from noisescope.training import phases
from noisescope.training.phases import Arm, Design, Job

TINY = {"steps": 3, "batch": 8, "examples": 60, "layers": 2, "width": 32}
LEVELS = (0.0, 0.05)


@pytest.fixture
def task() -> Arithmetic:
    return arithmetic("scratch", tests=10, **TINY)


@pytest.fixture
def cache(task: Arithmetic, tmp_path: Path) -> Path:
    task.prepare(tmp_path / "problems.npz", workers=1)
    return tmp_path / "problems.npz"


def job(task: Any, cache: Path, arm: str, **changes: Any) -> Job:
    design = Design(task, (Arm.of(arm, 0.05),), (0,), LEVELS, factors={0: 0.5, 1: 2.0})
    return Job(design, design.arms[0], 0, cache, cache.parent / f"{arm}.checkpoint", **changes)


@pytest.mark.parametrize("text", ["none", "forward@0.025", "both@0.05:staged", "norm@0.01", "adaptive@0.05"])
def test_an_arm_is_its_name(text: str) -> None:
    """A name gives an arm, and the arm its name."""
    assert str(Arm.of(text, 0.05)) == text


@pytest.mark.parametrize(("text", "why"), [("sideways", "Allowed: none, both"), ("both@x", "must be a number"),
                                           ("both:slowly", "unknown schedule"), ("both@-1", "at least 0")])  # fmt: skip
def test_arms_that_make_no_sense(text: str, why: str) -> None:
    """A wrong name is refused with what is allowed."""
    with pytest.raises(InvalidInput, match=why):
        Arm.of(text, 0.05)


def test_a_trial_is_known_by_its_content(task: Arithmetic) -> None:
    """Arm, seed, task, levels and device are in a trial's id; folders and workers are not."""
    design = Design(task, (Arm.of("both", 0.05), Arm.of("none", 0.05)), (0, 1), LEVELS)
    ids = {trial.id for trial, _, _ in design.trials()}
    assert len(ids) == 4
    assert {trial.id for trial, _, _ in dataclasses.replace(design).trials()} == ids
    for change in ({"levels": (0.0, 0.1)}, {"device": "cuda"}, {"noise_seeds": 3}, {"operators": {"linear"}}):
        other = dataclasses.replace(design, **change)  # type: ignore[arg-type]
        assert not ids & {trial.id for trial, _, _ in other.trials()}


@pytest.mark.parametrize("arm", ["none", "both", "norm", "both:linear"])
def test_a_broken_training_ends_as_an_unbroken_one(
    task: Arithmetic, cache: Path, arm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by the clock after each step and taken up from its checkpoint, a run ends with the same weights."""
    finals: list[dict[str, torch.Tensor]] = []
    ask = phases.ask

    def asked(design: Design, model: Any, *rest: Any) -> Any:
        finals.append(model.state_dict())
        return ask(design, model, *rest)

    monkeypatch.setattr(phases, "ask", asked)
    whole = phases.run(job(task, cache, arm))
    broken, pieces = None, 0
    while broken is None:
        clock = iter([0.0])  # the job starts in time, and after its first step the time is up
        monkeypatch.setattr(time, "time", lambda clock=clock: next(clock, 2.0))
        broken, pieces = phases.run(job(task, cache, arm, deadline=1.0)), pieces + 1
    assert pieces == TINY["steps"]
    assert whole is not None and broken.values == whole.values
    assert broken.facts == whole.facts
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert not list(cache.parent.glob("*.checkpoint"))


def test_arms_of_a_seed_share_all_but_the_noise(task: Arithmetic, cache: Path) -> None:
    """Two runs of one seed are the same run; noise and another seed make another."""
    found = {}
    for name, seed in (("none", 0), ("none", 0), ("none", 1), ("both", 0)):
        result = phases.run(dataclasses.replace(job(task, cache, name), seed=seed))
        assert result is not None
        found.setdefault((name, seed), []).append([point["held_out"] for point in result.facts["curve"]])
    first, second = found["none", 0]
    assert first == second
    assert first != found["none", 1][0] and first != found["both", 0][0]


def test_what_a_trial_keeps(task: Arithmetic, cache: Path) -> None:
    """Answers for each level and draw of noise, the curve, and how often noise fell in training and asking."""
    result = phases.run(job(task, cache, "both"))
    assert result is not None
    assert set(result.values) == {"0/0", "0.05/0", "0.05/1"} and result.samples == tuple(range(10))
    assert set(result.facts["training_injections"]) == {"forward", "backward"}
    per_step = 2 * (7 + 2) + 1
    assert result.facts["training_injections"] == {"forward": 3 * per_step, "backward": 3 * per_step}
    assert result.facts["asking_injections"] == {"0.05/0": per_step, "0.05/1": per_step}
    assert outcome(result, LEVELS).answers[0.05].shape == (10, 2)


def test_teacher_forced_is_what_greedy_decoding_gives() -> None:
    """On the bundled model both judge every problem alike."""
    task = arithmetic("bundled", tests=40, steps=1, examples=10)
    model = task._model().eval()
    items = problems.held_out(40, train.TEST_SEED)
    assert task.right(model) == evaluate.exact_match(model, tokenizer.make(), items)


@pytest.mark.slow
def test_processes_and_one_process_agree(tmp_path: Path) -> None:
    """Two worker processes give the very report of this process alone."""
    asked: dict[str, Any] = {"arms": ("none", "both"), "seeds": 1, "start": "scratch", "samples": 10, **TINY}
    alone = api.phases(**asked)
    several = api.phases(**asked, options=api.Options(output=tmp_path, workers=2))
    assert several.same_as(alone)


def test_the_command_stops_goes_on_and_reports(tmp_path: Path) -> None:
    """With no time left it trains nothing and says so; the same command goes on; then nothing is trained anew."""
    options = "--arms none,both,norm --seeds 2 --start scratch --samples 8 --noise-levels 0,0.05"
    tiny = " ".join(f"--{name} {value}" for name, value in TINY.items())
    command = [*f"experiment phases {options} {tiny}".split(), "-o", str(tmp_path)]
    run = CliRunner().invoke
    first = run(app, [*command, "--seconds", "0.0001"])
    assert first.exit_code == 0 and "6 of 6 trainings are not done yet" in first.output
    second = run(app, [*command, "--json"])
    assert second.exit_code == 0, second.output
    report = json.loads(second.stdout)
    assert [arm["name"] for arm in report["arms"]] == ["none", "both@0.05", "norm@0.01"]
    assert report["seeds"] == [0, 1] and report["n"] == 8 and report["trained"] == {"done": 6, "of": 6}
    with Store(tmp_path, create=False) as store:
        kept = len(store)
    resumed = run(app, ["runs", "resume", str(tmp_path)])
    assert resumed.exit_code == 0 and "6 of 6 models trained" in resumed.output
    drawn = run(app, ["report", str(tmp_path), "--format", "md", "-o", str(tmp_path / "again")])
    assert drawn.exit_code == 0 and (tmp_path / "again" / "report.md").exists()
    with Store(tmp_path, create=False) as store:
        assert len(store) == kept == 6
    text = (tmp_path / "report.md").read_text("utf-8")
    assert "not measurable" in text and "norm@0.01" in text
    assert {path.name for path in tmp_path.glob("report.*")} == {
        "report.json",
        "report.md",
        "report.html",
        "report.pdf",
    }


def test_what_the_command_refuses(tmp_path: Path) -> None:
    """Wrong arms, starts and numbers are one line and exit code 2."""
    for options, why in (
        (["--arms", "upward"], "unknown arm"),
        (["--start", "nowhere"], "unknown start"),
        (["--seeds", "0"], "at least 1"),
        (["--arms", "adaptive", "--start", "scratch", "--layers", "2"], "bundled model of 16 layers"),
    ):
        result = CliRunner().invoke(app, ["experiment", "phases", *options])
        assert result.exit_code == 2 and why in result.output, result.output


@pytest.mark.slow
@pytest.mark.ray
def test_ray_and_one_process_agree(tmp_path: Path) -> None:
    """Trials on Ray give the very report of this process alone."""
    pytest.importorskip("ray")
    asked: dict[str, Any] = {"arms": ("none", "both"), "seeds": 1, "start": "scratch", "samples": 10, **TINY}
    alone = api.phases(**asked)
    several = api.phases(**asked, options=api.Options(output=tmp_path, workers=2, executor="ray", address="local"))
    assert several.same_as(alone)
