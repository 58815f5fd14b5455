"""The phases experiment on a model and data of the user's: LoRA and full, files, second arms, the same noise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import noisescope as ns
from noisescope import api
from noisescope.cli import app
from noisescope.data.dataset import read_data
from noisescope.demo import train, training_data
from noisescope.errors import InvalidInput
from noisescope.model.loading import load
from noisescope.testing import tiny_model
from noisescope.training import phases_experiment, schedules
from noisescope.training.criteria import criteria
from noisescope.training.phases_experiment import Arm, Design, Job
from noisescope.training.tuning_task import Tuning, adapted, split, tuning

PROBLEMS = [{"ask": f"Tom has {n} red apples. He gets 3 more. How many now?", "say": str(n + 3)} for n in range(2, 26)]


def folder_of(path: Path, seed: int, layers: int = 2) -> Path:
    """A tiny random model with the bundled tokenizer, as a Hugging Face folder."""
    torch.manual_seed(seed)
    words = training_data.make_tokenizer()
    train.make_model(layers, 32, len(words)).save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    folder_of(home / "model", 0)
    folder_of(home / "larger", 1, layers=3)
    (home / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS), "utf-8")
    return home


def asked(home: Path, **changes: Any) -> dict[str, Any]:
    fields = {"prompt_field": "ask", "answer_field": "say", "noise_levels": (0.05,), "noise_seeds": 1}
    own = {"model": str(home / "model"), "data": home / "data.jsonl", "arms": ("none", "forward"), "seeds": 1}
    return {**fields, **own, "samples": 6, "epochs": 2, "batch": 6, "lora": 2, **changes}


@pytest.fixture
def make(home: Path) -> Any:
    def task(**changes: Any) -> Tuning:
        subject = load(home / "model", dtype="float32")
        text = (home / "data.jsonl").read_text("utf-8").replace('"ask"', '"prompt"').replace('"say"', '"answer"')
        (home / "plain.jsonl").write_text(text, "utf-8")
        settings = {"samples": 6, "epochs": 2, "lora": 2, "method": "supervised", "longest_answer": 0, "batch": 6}
        return tuning(subject, str(home / "model"), read_data(home / "plain.jsonl"), None, weights="w",
                      max_tokens=64, **{**settings, **changes})  # fmt: skip

    return task


def job(task: Tuning, folder: Path, arm: str = "none", **changes: Any) -> Job:
    design = Design(task, (Arm.of(arm, 0.05),), (0,), (0.0, 0.05), noise_seeds=1)
    return Job(design, design.arms[0], 0, folder, folder / f"{arm}.checkpoint", **changes)


def test_problems_that_are_tested_are_not_trained_on(home: Path) -> None:
    """The last of the data are held out; half of them at most; data without answers are refused."""
    data = api_data(home)
    trained, tested = split(data, None, 6, None)
    assert [item.answer for item in tested.items] == [row["say"] for row in PROBLEMS[-6:]]
    assert len(trained.items) == 18 and not {i.prompt for i in trained.items} & {i.prompt for i in tested.items}
    assert len(split(data, None, 1000, 5)[1].items) == 12 and len(split(data, None, 1000, 5)[0].items) == 5
    assert split(data, tested, 4, None)[0].items == data.items
    with pytest.raises(InvalidInput, match="of kind text"):
        split(dataclasses.replace(data, kind="text"), None, 6, None)


def api_data(home: Path) -> Any:
    from noisescope.options.shared import DataFile

    return read_data(DataFile(home / "data.jsonl", "ask", "say"))


@pytest.mark.parametrize("lora", [2, 0])
def test_weights_of_each_epoch_are_files_that_are_tested(make: Any, tmp_path: Path, lora: int) -> None:
    """Two epochs, two folders; the columns of the first begin with its name; a test of the files trains nothing."""
    pytest.importorskip("peft")
    task = make(lora=lora)
    keep = tmp_path / "kept"
    result = phases_experiment.run(job(task, tmp_path, "forward", keep=keep))
    assert result is not None and task.epoch_ends == (3, 6)
    assert list(result.values) == ["epoch 1: 0/0", "epoch 1: 0.05/0", "0/0", "0.05/0"]
    first, last = (task.load(keep / f"epoch-{number}", device="cpu").state_dict() for number in (1, 2))
    assert any(not torch.equal(first[name], last[name]) for name in last)
    lines = [json.loads(line) for line in (keep / "epoch-2" / "answers.jsonl").read_text("utf-8").splitlines()]
    assert len(lines) == 2 * 6 and {"test", "problem", "right", "answer"} == set(lines[0])
    assert [line["right"] for line in lines if line["test"] == "0.05/0"] == [v == 1 for v in result.values["0.05/0"]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases_experiment, "train", lambda job: pytest.fail("trained again"))
        again = phases_experiment.run(job(task, tmp_path, "forward", keep=keep))
    assert again is not None and again.values == result.values and again.facts == result.facts


def test_only_adapters_are_trained_and_arms_differ_by_noise_alone(make: Any, tmp_path: Path) -> None:
    """With LoRA the model's own weights stay; two runs of an arm are one, and noise makes another."""
    pytest.importorskip("peft")
    task = make()
    loop = task.begin(0, device="cpu", cache=tmp_path)
    assert loop.trained and all("lora_" in name for name in loop.trained)
    curves = []
    for arm in ("none", "none", "forward", "backward"):
        trained = phases_experiment.train(job(task, tmp_path / f"{len(curves)}", arm))
        assert trained is not None
        curves.append([point["loss"] for point in trained.curve])
    assert curves[0] == curves[1] and curves[0] != curves[2] and curves[0] != curves[3]
    assert curves[0][0] == pytest.approx(curves[3][0], rel=1e-5)  # attention is unfused, and its loss the same


def test_dropout_is_that_of_the_step(make: Any, tmp_path: Path) -> None:
    """Whatever else drew random numbers: a training is made once more by its seed."""
    task, losses = make(lora=0), []
    for seed in (0, 1):
        loop = task.begin(0, device="cpu", cache=tmp_path)
        for module in loop.model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.5
        torch.manual_seed(seed)
        losses.append([loop.advance()["answer"].item() for _ in range(2)])
        assert torch.initial_seed() == seed
    assert losses[0] == losses[1]


def test_routers_and_fused_experts_get_no_adapters() -> None:
    wanted = adapted(ns.wrap(tiny_model("mixtral")))
    assert len(wanted) == 2 * 4 and all("self_attn" in name for name in wanted)


def test_problems_that_are_cut_are_counted(home: Path, tmp_path: Path) -> None:
    report = api.phases(**asked(home, arms=("none",), lora=0, steps=1, max_tokens=8), output=tmp_path)
    assert {
        "training: 18 of 18 items are longer than 8 tokens (--max-tokens) and lost their beginning",
        "testing: 6 of 6 items are longer than 8 tokens (--max-tokens) and lost their beginning",
    } <= set(report["could_not_see"])


def test_training_learns(make: Any, tmp_path: Path) -> None:
    """With a high rate and every weight the loss of the answers falls."""
    task = make(lora=0, epochs=10, rate=3e-3)
    trained = phases_experiment.train(job(task, tmp_path))
    assert trained is not None and trained.curve[-1]["loss"] < 0.7 * trained.curve[0]["loss"]


def test_a_broken_training_goes_on(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by the clock after each step, it ends as an unbroken one."""
    pytest.importorskip("peft")
    import time

    task = make()
    whole = phases_experiment.run(job(task, tmp_path / "whole", "both"))
    broken, pieces = None, 0
    while broken is None:
        clock = iter([0.0])
        monkeypatch.setattr(time, "time", lambda clock=clock: next(clock, 2.0))
        broken, pieces = phases_experiment.run(job(task, tmp_path / "broken", "both", deadline=1.0)), pieces + 1
    assert pieces == task.steps
    assert whole is not None and (broken.values, broken.facts) == (whole.values, whole.facts)


def test_generated_answers_are_judged_by_their_number(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right is what holds the answer; the texts are given back, and rows are named for the noise."""
    task = make(longest_answer=4)
    right = [str(item.answer) for item in task.files.test.items]
    monkeypatch.setattr(
        "noisescope.training.tuning_task.generate",
        lambda *given, on_batch, samples, **rest: on_batch(samples, 9) or [f"It is {right[0]}.", *["no"] * 5],
    )
    texts: list[str] = []
    named: list[Any] = []
    assert task.right(load(task.files.model).model, named.append, texts) == [True, *[False] * 5]
    assert texts[1] == "no" and list(named[0]) == list(range(6))


def test_where_things_lie_is_no_part_of_a_trial(make: Any, home: Path) -> None:
    """Another path gives the same id; other weights, data or rates do not."""
    task = make()
    moved = dataclasses.replace(task, files=dataclasses.replace(task.files, model="elsewhere"))

    def trial(task: Tuning) -> str:
        return Design(task, (Arm.of("both", 0.05),), (0,), (0.05,)).trials()[0][0].id

    assert trial(task) == trial(moved)
    others = (dataclasses.replace(task, **change) for change in ({"weights": "v"}, {"train": "t"}, {"rate": 1.0}))
    assert len({trial(task), *map(trial, others)}) == 4


def test_the_whole_experiment_with_its_optional_arms(home: Path, tmp_path: Path) -> None:
    """Two models, two tasks, the training's own noise: every arm is trained and every criterion judged by itself."""
    pytest.importorskip("peft")
    lines = (home / "data.jsonl").read_text("utf-8").replace("Tom", "Anna")
    (tmp_path / "other.jsonl").write_text(lines, "utf-8")
    second = {"second_model": str(home / "larger"), "second_data": tmp_path / "other.jsonl"}
    options = asked(home, **second, seeds=2, epochs=1, same_noise=True)
    report = api.phases(**options, output=tmp_path)
    assert report["trained"] == {"done": 12, "failed": 0, "of": 12}
    names = [arm["name"] for arm in report["arms"]]
    assert names == [f"{arm}{of}" for of in ("", ", second model", ", second task") for arm in ("none", "forward@0.05")]
    judged = {row["name"] for row in report["hypotheses"]}
    assert {"size at 5 % noise", "same noise helps forward@0.05 at 5 % noise, second task"} <= judged
    assert "LoRA adapters of rank 2" in report.to_markdown()
    assert len(list((tmp_path / "checkpoints").glob("*/epoch-1/adapter_model.safetensors"))) == 12


def test_the_command_trains_your_model(home: Path, tmp_path: Path) -> None:
    """From the command line, with fields by name; earlier epochs are in the report; other levels train nothing."""
    pytest.importorskip("peft")
    words = f"--model {home / 'model'} --data {home / 'data.jsonl'} --prompt-field ask --answer-field say"
    command = f"experiment phases {words} --arms none,forward --seeds 1 --samples 6 --epochs 2 --batch 6 --lora 2"
    run = CliRunner().invoke
    first = run(
        app,
        [*f"{command} --noise-levels 0,0.05 --noise-seeds 1 --same-noise --json".split(), "-o", str(tmp_path)],
    )
    assert first.exit_code == 0, first.output
    assert "Loading weights" not in first.stderr
    report = json.loads(first.stdout)
    assert [set(epoch) for epoch in report["arms"][0]["earlier_epochs"]] == [{"0", "0.05"}]
    assert report["run"]["settings"]["training"]["others"]["lora"] == 2
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").glob("*/trained")}
    again = run(app, [*command.split(), "--noise-levels", "0,0.2", "--noise-seeds", "1", "-o", str(tmp_path)])
    assert again.exit_code == 0 and "2 of 2 models trained" in again.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "checkpoints").glob("*/trained")} == written


@pytest.mark.slow
def test_rewards_train_your_model(home: Path, tmp_path: Path) -> None:
    """By GRPO with LoRA: the files are there, and noise fell on the policy."""
    pytest.importorskip("trl")
    pytest.importorskip("peft")
    options = asked(home, method="grpo", steps=2, batch=2, max_new_tokens=3, arms=("forward",))
    report = api.phases(**options, output=tmp_path)
    assert report["trained"]["done"] == 1, report["could_not_see"]
    assert report["arms"][0]["training"]["injections"]["forward"] > 0
    assert "reward for right answers" in report.to_markdown()


@pytest.mark.parametrize(("options", "why"), [
    (["--model", "demo"], "go together"),
    (["--held-out", "{data}"], "needs --model"),
    (["--generate"], "needs --model"),
    (["--model", "demo", "--data", "{data}", "--layers", "2"], "trained from scratch"),
    (["--model", "demo", "--data", "{data}", "--start", "scratch"], "from its weights"),
    (["--model", "demo", "--data", "{data}", "--answer-field", "say"], "needs --prompt-field"),
])  # fmt: skip
def test_what_the_command_refuses(home: Path, options: list[str], why: str) -> None:
    words = [word.format(data=home / "data.jsonl") for word in options]
    result = CliRunner().invoke(app, ["experiment", "phases", *words])
    assert result.exit_code == 2 and why in result.output, result.output


def test_doses_are_matched() -> None:
    """Whatever the schedule, the mean squared scale is that of constant noise; rules cost what uniform noise does."""
    for schedule in ("linear", "cosine", "staged", "rising"):
        plain, matched = (Arm.of(f"both:{schedule}", 0.05, matched=m) for m in (False, True))
        assert plain.dose(100) < 0.049 and matched.dose(100) == pytest.approx(0.05)
    assert Arm.of("both", 0.05, matched=True).dose(7) == pytest.approx(0.05) and Arm.of("none", 0.05).dose(7) == 0
    costs = {0: 4.0, 1: 1.0, 2: 0.25}
    for factors in (
        schedules.concentrated(costs), schedules.equalised(costs),
        schedules.at_uniform_cost({0: 0.5, 1: 1.0, 2: 2.0}, costs),
    ):  # fmt: skip
        assert sum(costs[layer] * factor**2 for layer, factor in factors.items()) == pytest.approx(5.25, rel=1e-4)
    assert schedules.concentrated(costs)[0] > 1 > schedules.concentrated(costs)[2]


def test_each_rule_is_compared_with_uniform_noise() -> None:
    """At every level, against the arm of noise both ways at the same scale; a rule without factors is refused."""
    names = ("none", "both", "adaptive", "methodology", "summary", "sensitive", "both:rising")
    arms = [Arm.of(name, 0.05) for name in names]
    found = {row.name: (row.a, row.b, row.low) for row in criteria(arms, (0.0, 0.1), 0.05)}
    for kind in ("adaptive", "methodology", "summary", "sensitive"):
        assert found[f"{kind} beats uniform at 10 % noise"] == (f"{kind}@0.05", "both@0.05", 0.0)
    assert found["rising beats uniform at 10 % noise"] == ("both@0.05:rising", "both@0.05", 0.0)
    assert not any(name.startswith("constant") for name in found)


def test_factors_come_from_your_model(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a diagnosis on the training data, kept with the run; with matched doses every rule costs the same."""
    options = asked(home, arms=("both", "sensitive", "methodology"), lora=0, steps=1, epochs=1, match_doses=True)
    report = api.phases(**options, output=tmp_path)
    assert report["trained"] == {"done": 3, "failed": 0, "of": 3}
    factors = report["run"]["settings"]["factors"]
    assert set(factors) == {f"{rule} {layer}" for rule in ("sensitive", "methodology") for layer in (0, 1)}
    assert len({factor for name, factor in factors.items() if name.startswith("sensitive")}) == 2
    monkeypatch.setattr("noisescope.api.diagnosis.diagnose", lambda *given, **rest: pytest.fail("asked again"))
    assert api.phases(**options, output=tmp_path)["run"]["settings"]["factors"] == factors
