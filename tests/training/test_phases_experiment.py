"""The experiment of phases in miniature: trials, resuming, processes, the report."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from noisescope import api, progress
from noisescope.api.experiment import outcome
from noisescope.atomic_write import read_sealed, write_sealed
from noisescope.cli import app
from noisescope.demo import experiment_tasks as demo_task
from noisescope.demo import problems, train, training_data
from noisescope.demo.experiment_tasks import Arithmetic, arithmetic
from noisescope.errors import InvalidInput, NoiseRoundsAway
from noisescope.runs.store import Store
from noisescope.training import phases_experiment, trial_processes
from noisescope.training.phases_experiment import Arm, Design, Job
from noisescope.trials import Result

TINY = {"steps": 3, "batch": 8, "examples": 60, "layers": 2, "width": 32}
LEVELS = (0.0, 0.05)
NONE = {"forward": 0, "backward": 0}
SHORT: dict[str, Any] = {"arms": ("none", "both"), "seeds": 1, "start": "scratch", "samples": 10, **TINY}


@pytest.fixture(autouse=True)
def few_held_out(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is followed on 16 problems instead of 256, where no other process has to agree."""
    if request.node.get_closest_marker("slow") is None:
        monkeypatch.setattr(demo_task, "HELD_OUT", 16)


@pytest.fixture
def task() -> Arithmetic:
    return arithmetic("scratch", tests=10, **TINY)


@pytest.fixture
def cache(task: Arithmetic, tmp_path: Path) -> Path:
    return task.prepare(tmp_path, workers=1)


def job(task: Any, cache: Path, arm: str, **changes: Any) -> Job:
    design = Design(task, (Arm.of(arm, 0.05),), (0,), LEVELS, factors={"adaptive": {0: 0.5, 1: 2.0}})
    return Job(design, design.arms[0], 0, cache, cache.parent / f"{arm}.checkpoint", **changes)


@pytest.mark.parametrize("text", ["none", "forward@0.025", "both@0.05:staged", "norm@0.01", "adaptive@0.05"])
def test_an_arm_is_its_name(text: str) -> None:
    """A name gives an arm, and the arm its name."""
    assert str(Arm.of(text, 0.05)) == text


@pytest.mark.parametrize(("text", "why"), [("sideways", "Allowed: none, both"), ("both@x", "must be a number"),
                                           ("both:slowly", "unknown schedule"), ("both@-1", "at least 0"),
                                           ("both@0", "no noise"), ("norm@0:staged", "no noise")])  # fmt: skip
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
    ask = phases_experiment.evaluate

    def asked(job: Job, trained: Any) -> Any:
        finals.append(job.design.task.load(job.folder / "epoch-1", device="cpu").state_dict())
        return ask(job, trained)

    monkeypatch.setattr(phases_experiment, "evaluate", asked)
    whole = phases_experiment.run(job(task, cache, arm))
    broken, pieces = None, 0
    while broken is None:
        clock = iter([0.0])  # the job starts in time, and after its first step the time is up
        monkeypatch.setattr(time, "time", lambda clock=clock: next(clock, 2.0))
        broken, pieces = phases_experiment.run(job(task, cache, arm, deadline=1.0)), pieces + 1
    assert pieces == TINY["steps"]
    assert whole is not None and broken.values == whole.values
    assert broken.facts == whole.facts
    assert all(torch.equal(finals[0][name], finals[1][name]) for name in finals[0])
    assert not list(cache.parent.glob("*.checkpoint")) and not list(cache.parent.glob("*.weights"))


@pytest.mark.filterwarnings("ignore:at step . noise of scale")
def test_a_piece_whose_noise_rounds_away_is_no_failure(
    task: Arithmetic, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schedule that ends below the resolution was noise at first; noise that never survives fails at once."""
    result = None
    for _ in range(TINY["steps"]):  # the scales are 1e-7, 5e-8 and 1e-9, and float32 resolves 6e-8
        assert result is None
        clock = iter([0.0])
        monkeypatch.setattr(time, "time", lambda clock=clock: next(clock, 2.0))
        result = phases_experiment.run(job(task, cache, "both@1e-7:linear", deadline=1.0))
    assert result is not None and result.facts["training_injections"]["forward"] > 0
    with pytest.raises(NoiseRoundsAway):
        phases_experiment.run(job(task, cache, "both@1e-9", deadline=3.0))


def test_a_killed_training_goes_on_from_its_last_checkpoint(
    task: Arithmetic, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed without warning: what was done up to the checkpoint is not done again, and the end is the same."""
    advance, steps = train.TrainingLoop.advance, []

    def watched(self: train.TrainingLoop) -> Any:
        if len(steps) == TINY["steps"] - 1:
            steps.append(None)
            raise KeyboardInterrupt  # no Exception: nothing here catches it, as a kill would not be
        steps.append(self.step)
        return advance(self)

    whole = phases_experiment.run(job(task, cache, "both"))
    monkeypatch.setattr(train.TrainingLoop, "advance", watched)
    with pytest.raises(KeyboardInterrupt):
        phases_experiment.run(job(task, cache, "both"))
    broken = phases_experiment.run(job(task, cache, "both"))
    assert steps == [0, 1, None, 2]
    assert whole is not None and broken is not None
    assert broken.values == whole.values and broken.facts == whole.facts


def test_the_seconds_of_all_pieces_count(task: Arithmetic, cache: Path) -> None:
    """A training that was broken off took what its pieces took together."""
    first = job(task, cache, "none", deadline=time.time() + 1e6)
    with pytest.MonkeyPatch.context() as patch:
        clock = iter([0.0])
        patch.setattr(time, "time", lambda: next(clock, 2e9))
        assert trial_processes.attempt(dataclasses.replace(first, deadline=1.0))[0] is None
    kept = torch.load(io.BytesIO(read_sealed(first.checkpoint) or b""), weights_only=True)
    assert 0 < kept["seconds"] < 100
    buffer = io.BytesIO()
    torch.save({**kept, "seconds": 1000.0}, buffer)
    write_sealed(first.checkpoint, buffer.getvalue())
    result, seconds = trial_processes.attempt(first)
    assert result is not None and 1000 < seconds < 1100


@pytest.mark.parametrize("place", [0.001, 0.5, 0.999])
def test_a_damaged_checkpoint_is_not_believed(task: Arithmetic, cache: Path, place: float) -> None:
    """One flipped bit, which torch reads without a word: the training starts anew and ends as a whole one."""
    whole = phases_experiment.run(job(task, cache, "none"))
    first = job(task, cache, "none", deadline=1.0)
    with pytest.MonkeyPatch.context() as patch:
        clock = iter([0.0])
        patch.setattr(time, "time", lambda: next(clock, 2.0))
        assert phases_experiment.run(first) is None
    raw = bytearray(first.checkpoint.read_bytes())
    raw[int(place * len(raw))] ^= 4
    first.checkpoint.write_bytes(raw)
    assert phases_experiment.seconds_before(first) == 0
    again = phases_experiment.run(job(task, cache, "none"))
    assert whole is not None and again is not None and (again.values, again.facts) == (whole.values, whole.facts)


def test_training_problems_are_whole_or_made_again(
    task: Arithmetic, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file cut short by a kill is made again, and a writer that is killed leaves no file of that name."""
    content = cache.read_bytes()
    cache.write_bytes(content[: len(content) // 2])
    task.prepare(cache.parent, workers=1)
    assert cache.read_bytes() == content
    cache.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    task.prepare(cache.parent, workers=1)
    assert cache.read_bytes() == content
    written = cache.stat().st_mtime_ns
    task.prepare(cache.parent, workers=1)
    assert cache.stat().st_mtime_ns == written

    def killed(file: Any, **arrays: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("numpy.savez_compressed", killed)
    cache.write_bytes(b"")
    with pytest.raises(KeyboardInterrupt):
        task.prepare(cache.parent, workers=1)
    assert cache.read_bytes() == b""


def test_noise_below_the_resolution_is_told(task: Arithmetic) -> None:
    """In bfloat16, as a GPU trains, and in float32; norm weights stay in float32; factors make a scale smaller."""

    def rounding(arm: str, device: str) -> str:
        design = Design(
            task, (Arm.of(arm, 0.05),), (0,), LEVELS, factors={"adaptive": {0: 0.25, 1: 4.0}}, device=device
        )
        return phases_experiment.rounding(design, design.arms[0])

    assert "in 3 of 3 steps the scale is below 0.0039, half the spacing of bfloat16" in rounding("both@0.003", "cuda")
    assert "in 1 of 3 steps" in rounding("both:linear", "cuda")  # 0.05, 0.025, 0.0005
    assert "some layers" in rounding("adaptive@0.01", "cuda")
    assert "float32" in rounding("both@1e-9", "cpu")
    for arm, device in (("both", "cuda"), ("none", "cuda"), ("norm@0.003", "cuda"), ("both@0.003", "cpu")):
        assert rounding(arm, device) == ""


def test_arms_of_a_seed_share_all_but_the_noise(task: Arithmetic, cache: Path) -> None:
    """Two runs of one seed are the same run; noise and another seed make another."""
    found = {}
    for name, seed in (("none", 0), ("none", 0), ("none", 1), ("both", 0)):
        result = phases_experiment.run(dataclasses.replace(job(task, cache, name), seed=seed))
        assert result is not None
        found.setdefault((name, seed), []).append([point["held_out"] for point in result.facts["curve"]])
    first, second = found["none", 0]
    assert first == second
    assert first != found["none", 1][0] and first != found["both", 0][0]


def test_what_a_trial_keeps(task: Arithmetic, cache: Path) -> None:
    """Answers for each level and draw of noise, the curve, and how often noise fell in training and asking."""
    result = phases_experiment.run(job(task, cache, "both"))
    assert result is not None
    assert set(result.values) == {"0/0", "0.05/0", "0.05/1"} and result.samples == tuple(range(10))
    assert set(result.facts["training_injections"]) == {"forward", "backward"}
    per_step = 2 * (7 + 2) + 1
    assert result.facts["training_injections"] == {"forward": 3 * per_step, "backward": 3 * per_step}
    assert result.facts["asking_injections"] == {"0.05/0": per_step, "0.05/1": per_step}
    assert outcome(result, LEVELS).answers[0.05].shape == (10, 2)


def test_progress_moves_inside_a_training(task: Arithmetic, cache: Path) -> None:
    """Step by step, then test by test, up to the whole."""
    shares: list[float] = []
    nothing = SimpleNamespace(planned=print, begun=print, stepped=print, ended=print)
    with progress.shown_by(SimpleNamespace(**vars(nothing), advanced=shares.append)):
        phases_experiment.run(job(task, cache, "none"))
    assert len(shares) > TINY["steps"] and shares == sorted(shares) and shares[-1] == 1


def test_teacher_forced_is_what_greedy_decoding_gives() -> None:
    """On the bundled model both judge every problem alike."""
    task = arithmetic("bundled", tests=40, steps=1, examples=10)
    model = task._model().eval()
    items = problems.held_out(40, train.TEST_SEED)
    assert task.right(model) == train.exact_match(model, training_data.make_tokenizer(), items)


def test_one_arm_at_odd_levels_has_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without criteria to judge, with a level of many digits, and without a process where none was asked for."""
    monkeypatch.setattr(
        trial_processes, "_in_processes", lambda *rest: pytest.fail("a script would need a guard for that")
    )
    asked: dict[str, Any] = {"start": "scratch", "samples": 4, **TINY, "steps": 1}
    report = api.phases(arms=("forward",), seeds=2, noise_levels=(0.0333333333,), options=api.Options(), **asked)
    assert report["hypotheses"] == [] and report["trained"] == {"done": 2, "failed": 0, "of": 2}
    assert report["levels"] == [0.0, 0.0333333333] and set(report["arms"][0]["accuracy"]) == {"0", "0.0333333"}
    with pytest.raises(InvalidInput, match="first six digits"):
        api.phases(noise_levels=(0.0333333333, 0.03333333334), **asked)


def test_columns_of_older_stores_are_found() -> None:
    """Levels used to be kept with six digits."""
    rows = {"0/0": (1.0, 0.0), "0.0333333/0": (0.0, 0.0), "0.1/0": (1.0, 1.0)}
    found = outcome(Result((0, 1), rows, {"curve": [], "training_injections": {}}), (0.0, 0.0333333333, 0.1))
    assert {level: values.mean() for level, values in found.answers.items()} == {0.0: 0.5, 0.0333333333: 0.0, 0.1: 1.0}


@pytest.fixture(scope="module")
def alone() -> Any:
    """The report of this process alone."""
    return api.phases(**SHORT)


@pytest.mark.slow
def test_processes_and_one_process_agree(alone: Any, tmp_path: Path, conclusions: Any) -> None:
    """Two worker processes give the very report of this process alone."""
    several = api.phases(**SHORT, workers=2, output=tmp_path)
    assert conclusions(several) == conclusions(alone)


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
    assert report["seeds"] == [0, 1] and report["n"] == 8 and report["trained"] == {"done": 6, "failed": 0, "of": 6}
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


def test_all_failed_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every training failed the command says why, writes its report, and exits with 1."""
    monkeypatch.setattr(phases_experiment, "train", lambda job: {}["lost"])
    tiny = " ".join(f"--{name} {value}" for name, value in TINY.items())
    command = f"experiment phases --arms none,both --seeds 1 --start scratch --samples 4 {tiny} -o {tmp_path}"
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 1 and "failed: none, seed 0: KeyError" in result.output
    assert (tmp_path / "report.md").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda can be had here")
def test_a_device_is_needed_to_train_only(tmp_path: Path, task: Arithmetic) -> None:
    """A finished run of another machine is reported here; one that is not finished names the missing device."""
    arms, asked = ("none", "both"), {"start": "scratch", "samples": 10, "noise_levels": LEVELS, **TINY}
    options: dict[str, Any] = {"device": "cuda", "options": api.Options(output=tmp_path)}
    design = Design(task, tuple(Arm.of(name, 0.05) for name in arms), (0,), LEVELS, device="cuda")
    columns = dict.fromkeys(("0/0", "0.05/0", "0.05/1"), (1.0,) * 10)
    facts = {"curve": [{"step": 1, "gradient_norm": 1.0, "held_out": 1.0}], "training_injections": dict(NONE)}
    with Store(tmp_path) as store:
        for trial, _, _ in design.trials():
            store.put(trial, Result(tuple(range(10)), columns, facts), 1.0)
    assert api.phases(arms=arms, seeds=1, **asked, **options)["trained"]["done"] == 2
    with pytest.raises(InvalidInput, match="can't train on device 'cuda'"):
        api.phases(arms=arms, seeds=2, **asked, **options)


def test_what_the_command_refuses(tmp_path: Path) -> None:
    """Wrong arms, starts and numbers are one line and exit code 2."""
    scratch = ["--start", "scratch"]
    for options, why in (
        (["--steps", "0"], "steps must be at least 1, got 0"),
        (["--examples", "0"], "examples must be at least 1, got 0"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--rate", "-1"], "rate must be above 0, got -1"),
        ([*scratch, "--layers", "0"], "layers must be at least 1, got 0"),
        ([*scratch, "--width", "30"], "width must be 32, 96 or a multiple of 64"),
        ([*scratch, "--width", "160"], "width must be 32, 96 or a multiple of 64"),
        (["--layers", "2"], "apply only to a model trained from scratch"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--executor", "slurm"], "unknown executor"),
        (["--workers", "0"], "at least 1"),
        (["--seconds", "0"], "seconds must be above 0"),
        (["--noise-scale", "0"], "injects nothing"),
        (["--arms", "upward"], "unknown arm"),
        (["--start", "nowhere"], "unknown start"),
        (["--seeds", "0"], "at least 1"),
        (["--arms", "adaptive", "--start", "scratch", "--layers", "2"], "bundled model of 16 layers"),
    ):
        result = CliRunner().invoke(app, ["experiment", "phases", *options])
        assert result.exit_code == 2 and why in result.output, result.output


@pytest.mark.slow
@pytest.mark.ray
def test_ray_and_one_process_agree(alone: Any, tmp_path: Path, conclusions: Any) -> None:
    """Trials on Ray give the very report of this process alone."""
    pytest.importorskip("ray")
    several = api.phases(**SHORT, output=tmp_path, workers=2, executor="ray", address="local")
    assert conclusions(several) == conclusions(alone)
