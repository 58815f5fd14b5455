"""A whole diagnosis: resumable, reproducible, and honest about what it measured."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import random
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope import api
from noisescope.api.preparation import encode_data
from noisescope.diagnosis import all_levels
from noisescope.errors import InvalidInput
from noisescope.reports.saved_report import Report
from noisescope.runs.store import Store
from noisescope.testing import tiny_model
from noisescope.trials import Result, Trial

BATCHES = list(torch.randint(1, 60, (6, 10), generator=torch.Generator().manual_seed(4)).split(3))
QUICK: dict[str, Any] = {"window": 2, "seeds": 2, "slice_samples": 4, "metric": "agreement"}


def subject() -> ns.Subject:
    return ns.wrap(tiny_model("llama", layers=2))


class Counting:
    """Progress that remembers every trial run, and may stop the run."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.started: list[str] = []
        self.ran: list[str] = []
        self.stop_after = stop_after

    def wave(self, trials: int) -> None:
        assert trials > 0

    def start(self, trial: Trial) -> None:
        self.started.append(trial.id)

    def step(self, trial: Trial, result: Result, seconds: float) -> None:
        assert trial.id in self.started
        self.ran.append(trial.id)
        if self.stop_after is not None and len(self.ran) >= self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def unbroken() -> Report:
    return api.diagnose(subject(), BATCHES, **QUICK)


def test_the_report_has_its_parts(unbroken: Report) -> None:
    """The keys of the design, JSON without NaN, Markdown with every section; nothing failed."""
    assert list(unbroken)[:3] == ["schema_version", "run", "executive_summary"]
    for key in (
        "operator_analysis",
        "layer_analysis",
        "channel_analysis",
        "metrics",
        "correlations",
        "recommendations",
    ):
        assert key in unbroken
    json.loads(unbroken.to_json(), parse_constant=lambda name: pytest.fail(name))
    rows = [*unbroken["operator_analysis"].values(), *unbroken["layer_analysis"]["windows"]]
    assert {row["evidence"] for row in rows} == {"injected", "absent"}
    assert all(
        row["total_injections"] > 0 and row["degradation"]["n"] == 6 for row in rows if row["evidence"] == "injected"
    )
    text = unbroken.to_markdown()
    for title in ("Summary", "Operators", "Layers", "Channels", "Metrics", "Correlations", "could not see", "Method"):
        assert title in text
    assert unbroken["run"]["cost"]["trials"] == unbroken["run"]["cost"]["trials_run_now"] > 50
    assert unbroken["run"]["data"]["source"] == "tokenised batches"


def test_a_second_run_says_the_same(unbroken: Report, conclusions: Any) -> None:
    """Only `run` may differ."""
    again = api.diagnose(subject(), BATCHES, **QUICK)
    assert conclusions(unbroken) == conclusions(again) and unbroken["run"] != again["run"]


@pytest.mark.parametrize("stop_after", [1, 7, 60])
def test_an_interrupted_run_is_resumed(unbroken: Report, tmp_path: Path, stop_after: int, conclusions: Any) -> None:
    """Ctrl-C anywhere: the store keeps what was measured, nothing of it runs again, the report is the same."""
    first, second, third = Counting(stop_after), Counting(), Counting()
    with pytest.raises(KeyboardInterrupt):
        api.diagnose(subject(), BATCHES, **QUICK, options=api.Options(output=tmp_path, progress=first))
    model = subject()
    report = api.diagnose(model, BATCHES, **QUICK, options=api.Options(output=tmp_path, progress=second))
    assert conclusions(unbroken) == conclusions(report) and not set(first.ran) & set(second.ran)
    assert len(first.ran) == stop_after and len(first.ran) + len(second.ran) == report["run"]["cost"]["trials"]
    api.diagnose(model, BATCHES, **QUICK, options=api.Options(output=tmp_path, progress=third))
    assert third.ran == []
    assert not [m for m in model.model.modules() if "forward" in m.__dict__]


def test_a_bigger_question_reuses_the_store(tmp_path: Path) -> None:
    """Full effort into the folder of a screen runs only what is new."""
    screen, full = Counting(), Counting()
    api.diagnose(subject(), BATCHES, effort="screen", **QUICK, options=api.Options(output=tmp_path, progress=screen))
    api.diagnose(subject(), BATCHES, effort="full", **QUICK, options=api.Options(output=tmp_path, progress=full))
    assert screen.ran and not set(screen.ran) & set(full.ran)


def test_noise_in_the_head_is_the_heads() -> None:
    """A head that amplifies: lm_head stands out, the last block does not."""
    model = tiny_model("llama", layers=2)
    report = api.diagnose(ns.wrap(model), BATCHES, **{**QUICK, "window": 1}, effort="full", levels=("layer",))
    layers = report["layer_analysis"]
    head, last = layers["places"]["lm_head"], layers["layers"][-1]
    alone = ns.Injection(ns.Gaussian(0.05), layers={1}, operators={"gemm"}, phases={"forward"})
    with ns.inject(model, alone) as tally, torch.no_grad():
        model(BATCHES[0])
    assert tally.per_operator["linear"].forward == 7 and "lm_head" not in tally.per_layer
    assert head["kl"]["typical"]["value"] != last["kl"]["typical"]["value"]
    assert head["total_injections"] < last["total_injections"]


def test_the_users_own_metric(tmp_path: Path) -> None:
    """A callable scores every sample; there is no screen, and the rest is a diagnosis like any other."""
    report = api.diagnose(subject(), BATCHES, **{**QUICK, "metric": mean_logit}, levels=("operator",))
    row = report["operator_analysis"]["softmax"]
    assert row["evidence"] == "injected" and row["predicted_kl"] is None and row["baseline_acc"] != row["noisy_acc"]


def mean_logit(model: Any, batches: Any) -> list[float]:
    with torch.no_grad():
        return [5 + float(row.mean()) for batch in batches for row in model(**batch).logits]


def test_robustness_by_level() -> None:
    """More noise, less agreement; the clean level keeps everything."""
    report = api.robustness(subject(), BATCHES, noise_levels=(0, 0.05, 0.5), metric="agreement", seeds=2)
    values = [row["accuracy"]["value"] for row in report["robustness"]["levels"]]
    assert values[0] == 1.0 and values[2] < 1.0 and values == sorted(values, reverse=True)
    assert "Robustness" in report.to_markdown()


def test_what_a_run_would_cost() -> None:
    """The estimate counts the trials that a real run makes, give or take what its results decide."""
    prepared = api.prepare_diagnosis(subject(), BATCHES, **QUICK)
    cost = prepared.cost(all_levels)
    real = prepared.run(all_levels, api.Options())[0].cost
    assert cost.trials == pytest.approx(real.trials, rel=0.35) and cost.memory > cost.weights > 0
    assert "trials, about" in str(cost)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"metric": "accurracy"}, "accuracy"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"generate": True}, "generation needs prompts"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"seeds": 10**20}, "seeds must be at most 100000"),
        ({"effort": "max"}, "standard"),
        ({"executor": "slurm"}, "ray"),
        ({"noise_scal": 0.1}, "unknown keyword 'noise_scal'.*Did you mean 'noise_scale'"),
        ({"sample": 8}, "Did you mean 'samples'"),
        ({"slice": 4}, "slice is given twice"),
    ],
)
def test_wrong_settings_are_one_clear_error(wrong: dict[str, Any], words: str) -> None:
    """What came, what is allowed."""
    with pytest.raises(InvalidInput, match=words):
        api.diagnose(subject(), BATCHES, **{**QUICK, **wrong})


def test_a_model_without_tokenizer_needs_tokens() -> None:
    """Built-in text can't be fed to a bare model."""
    with pytest.raises(InvalidInput, match="tokenised batches"):
        api.diagnose(subject())


def test_data_are_named_as_they_were_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report is for sharing: it says nothing of folders that nobody typed."""
    (tmp_path / "text.jsonl").write_text('{"text": "3 + 4 = 7"}\n')
    monkeypatch.chdir(tmp_path)
    _, found = encode_data(ns.load("demo"), "text.jsonl", 1, 16, which="test")
    assert found is not None and found.source == "text.jsonl"


def test_reports_are_read_back(unbroken: Report, tmp_path: Path) -> None:
    """From the file or its folder; what is no report is refused."""
    paths = unbroken.save(tmp_path)
    assert [p.name for p in paths] == ["report.json", "report.md", "report.html", "report.pdf"]
    assert dict(Report.load(tmp_path)) == dict(Report.load(paths[0])) == dict(unbroken)
    (tmp_path / "x.json").write_text("[1]")
    for path, words in (
        (tmp_path / "x.json", "no schema_version"),
        (tmp_path / "none", "no report at"),
        (paths[1], "not a valid report: .* Give the report.json that"),
    ):
        with pytest.raises(InvalidInput, match=words):
            Report.load(path)


@pytest.mark.parametrize("operator", ["norm", "linear"])
def test_the_demo_by_generation_and_teacher_forced(operator: str) -> None:
    """One answer token decides, so both ways of scoring give the same answers, noise included."""
    demo = ns.load("demo")
    forced, generated = (
        api.robustness(demo, samples=40, seeds=1, noise_levels=(0, 0.15), operators=(operator,), generate=generate,
                       max_new_tokens=4)
        for generate in (False, True)
    )  # fmt: skip
    first, second = ([row["accuracy"] for row in report["robustness"]["levels"]] for report in (forced, generated))
    assert first == second and 0.3 < first[1]["value"] < 0.9
    assert forced["run"]["data"]["note"] == "the bundled model's own problems"


KILLED = """
import torch
from noisescope import api, wrap
from noisescope.testing import tiny_model

torch.set_num_threads(1)
batches = torch.randint(1, 60, (8, 10), generator=torch.Generator().manual_seed(4)).split(4)
model = wrap(tiny_model("llama", layers=2))
report = api.diagnose(model, batches, seeds=2, slice_samples=4, metric="agreement", options=api.Options(output=folder))
report.save(folder, formats=["json"])
"""


@pytest.mark.slow
def test_killed_at_any_moment_and_resumed(tmp_path: Path, conclusions: Any) -> None:
    """kill -9, three times at random: the store holds whole rows, none is run twice, the report is that of one run."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["noisescope.api.diagnosis", "transformers.models.llama.modeling_llama"])

    def begin(folder: Path) -> Any:
        """A process that diagnoses into this folder, once its store is there."""
        process = processes.Process(target=exec, args=(KILLED, {"folder": folder}))
        process.start()
        while process.is_alive() and not (folder / "run.sqlite").exists():
            time.sleep(0.01)
        return process

    def stored(folder: Path) -> int:
        with contextlib.closing(sqlite3.connect(f"file:{folder / 'run.sqlite'}?mode=ro", uri=True)) as db:
            try:
                return int(db.execute("SELECT count(*) FROM trials").fetchone()[0])
            except sqlite3.OperationalError:  # its tables are not there yet
                return 0

    process = begin(tmp_path / "whole")
    process.join()
    assert process.exitcode == 0
    trials, dice = stored(tmp_path / "whole"), random.Random(5)
    finished: set[str] = set()
    for part in (0.25, 0.5, 0.75):  # by trials, not by seconds, which other work on the machine changes
        process, wanted = begin(tmp_path / "killed"), dice.uniform(part - 0.25, part) * trials
        while process.is_alive() and stored(tmp_path / "killed") < wanted:
            time.sleep(0.001)
        process.kill()
        process.join()
        with Store(tmp_path / "killed", create=False) as store:
            assert finished <= set(store)
            finished = set(store)
    process = begin(tmp_path / "killed")
    process.join()
    assert process.exitcode == 0
    resumed = Report.load(tmp_path / "killed")
    assert 0 < len(finished) < resumed["run"]["cost"]["trials"]
    assert resumed["run"]["cost"]["trials_run_now"] == resumed["run"]["cost"]["trials"] - len(finished)
    assert conclusions(resumed) == conclusions(Report.load(tmp_path / "whole"))


def test_an_operator_that_may_be_there_is_tried() -> None:
    """A hand-written block that calls F.gelu itself: gelu is measured; silu, which it never calls, is absent."""
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.layers = nn.ModuleList([Block(), Block()])
            self.head = nn.Linear(16, 64)

        def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return type("Output", (), {"logits": self.head(x)})

    torch.manual_seed(0)
    report = api.diagnose(ns.wrap(Model().eval()), BATCHES, **QUICK, levels=("operator",))
    found = {name: row["evidence"] for name, row in report["operator_analysis"].items()}
    assert found["gelu"] == "injected" and found["silu"] == "absent" and found["linear"] == "injected"


def test_a_simulated_fault_is_a_scope_in_python() -> None:
    """An option of the command line alone says what to call."""
    with pytest.raises(InvalidInput, match=r"simulate is an option of the command line.*with ns\.faulty\("):
        api.locate(subject(), simulate="gain:0.01@1/linear")
