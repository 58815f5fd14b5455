"""`noisescope record` and `noisescope compare`: what a user sees, and exit codes that a script can rely on."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import noisescope as ns
from noisescope.cli import app


def call(*arguments: Any, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    """The demo's record, and that of one with a fault in layer 7."""
    folder = tmp_path_factory.mktemp("records")
    call("record", "demo", "-o", folder / "good.record", "--samples", 4, "--full-layers", "6,7")
    subject = ns.load("demo")
    with ns.faulty(subject.model, "gain:0.2@7/linear/down_proj"):
        ns.record(subject, None, folder / "bad.record", samples=4, full_layers={6, 7})
    return folder


def test_a_record_says_what_it_is(tmp_path: Path) -> None:
    """Sites, prompts, device and size; with --json for machines."""
    folder = tmp_path / "x.record"
    printed = json.loads(call("record", "demo", "-o", folder, "--samples", 2, "--dtype", "bfloat16", "--json").stdout)
    assert printed["prompts"] == 2 and printed["dtype"] == "bfloat16" and printed["sites"] > 190
    assert printed["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
    assert "is not empty" in call("record", "demo", "-o", folder, code=2).output
    assert "whole numbers" in call("record", "demo", "-o", tmp_path / "y", "--full-layers", "six", code=2).output


def test_an_interrupted_record_says_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, with the folder to remove where there is something in it; the same command again says so too."""
    folder = tmp_path / "x.record"

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    for at, left in (
        ("api.records.encode_data", ""),
        ("runs.device_record_writer.model_fingerprint", "holds an unfinished"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"noisescope.{at}", interrupted)
            output = call("record", "demo", "-o", folder, "--samples", 2, code=130).output
        assert output.splitlines()[-1].startswith("interrupted.") and (
            left in output if left else "unfinished" not in output
        )
    output = call("record", "demo", "-o", folder, "--samples", 2, code=2).output
    assert output.endswith(f"error: {folder} holds an unfinished record: remove it, or choose another folder with -o\n")


def test_the_fault_is_named(records: Path) -> None:
    """A verdict, the first site that diverges, a table with bands."""
    output = call("compare", records / "good.record", records / "bad.record", code=1).output
    assert "diverged. The devices diverge at linear at block 7 (model.layers.7.mlp.down_proj)" in output
    assert "diverges here" in output and "needs full detail" in output and "nats" in output
    same = call("compare", records / "good.record", records / "good.record").output
    assert "identical" in same and "none differs" in same and "rel. L2" not in same


def test_max_mape_decides_the_exit_code(records: Path, tmp_path: Path) -> None:
    """1 where it is exceeded, 0 where it holds, 2 where it can't be checked."""
    pair = (records / "good.record", records / "bad.record")
    assert "exceeded" in call("compare", *pair, "--layers", "7", "--max-mape", 0.05, code=1).output
    assert "passed" in call("compare", *pair, "--layers", "6", "--max-mape", 0.05).output
    assert "MAPE needs full tensors" in call("compare", *pair, "--layers", "9", "--max-mape", 0.05, code=2).output
    file = tmp_path / "new" / "folder" / "c.json"
    printed = call("compare", *pair, "--layers", "7", "--max-mape", 0.05, "--json", "-o", file, code=1).stdout
    found = json.loads(printed)
    assert found == json.loads(file.read_text()) and found["passed"] is False
    assert found["first_divergence"]["module"] == "model.layers.7.mlp.down_proj"


def test_what_can_not_be_meant_is_refused(records: Path, tmp_path: Path) -> None:
    """Layers that the records lack, a limit that is no number, a cost without a report, a place that is a file."""
    pair = (records / "good.record", records / "good.record")
    refused = {
        ("--layers", "7,99", "--max-mape", "0.05"): "no site of layers 99 is in both records",
        ("--layers", ""): "--layers is empty: give a list of whole numbers such as 9,10",
        ("--max-mape", "nan"): "--max-mape must be finite, got nan",
        ("--affordable", "0.1"): "--affordable needs --sensitivity",
        ("-o", str(records / "good.record" / "record.json" / "x.json")): "can't write",
    }
    for options, reason in refused.items():
        assert reason in " ".join(call("compare", *pair, *options, code=2).output.split())
    file = records / "good.record" / "record.json"
    assert "two records (folders)" in " ".join(call("compare", file, pair[1], code=2).output.split())
    text = records / "note.txt"
    text.write_text("no record", encoding="utf-8")
    assert "is a file: a record is the folder" in " ".join(call("compare", text, pair[1], code=2).output.split())


def test_sketches_rank_tokens_without_sizes(tmp_path: Path) -> None:
    """What the largest of many rough estimates would say is not printed as a size."""
    subject = ns.load("demo")
    bad = tmp_path / "bad.record"
    with ns.faulty(subject.model, "gain:0.2@7/linear/down_proj"):
        ns.record(subject, None, bad, samples=4)
    call("record", "demo", "-o", tmp_path / "good.record", "--samples", 4)
    output = call("compare", tmp_path / "good.record", bad, code=1).output
    assert "tokens that differ most, by sketch (sizes need full detail):" in output
    assert not any("relative L2" in line for line in output.splitlines() if line.startswith("  token"))


@dataclass(frozen=True)
class NaNChannel:
    """One channel is NaN in every token."""

    def __call__(self, t: Any, draw: Any) -> Any:
        t = t.clone()
        t[..., 3] = float("nan")
        return t


def test_nan_is_printed_as_critical(records: Path, tmp_path: Path) -> None:
    """With its count; the limit does not hold, and what is NaN on both sides is said."""
    subject = ns.load("demo")
    nan = ns.Injection(NaNChannel(), operators={"linear"}, modules=("model.layers.7.mlp.down_proj",))
    with ns.inject(subject.model, nan):
        ns.record(subject, None, tmp_path / "nan.record", samples=4, full_layers={6, 7})
    pair = (records / "good.record", tmp_path / "nan.record")
    output = call("compare", *pair, "--layers", "7", "--max-mape", 0.05, code=1).output
    assert (
        "CRITICAL: " in output
        and "not measurable" in output
        and "not passed, 2 sites have NaN or infinite numbers on one side" in output
    )
    both = call("compare", pair[1], pair[1], "--layers", "7", "--max-mape", 0.05).output
    assert "were ignored at" in both and "NaN or infinite on both sides, left out" in both


@dataclass(frozen=True)
class AllNaN:
    """Nothing finite is left."""

    def __call__(self, t: Any, draw: Any) -> Any:
        return t * float("nan")


def test_undecided_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """3 where no site of the layer has a finite number; 0 with --allow-undecided, or where other sites decide."""
    subject = ns.load("demo")
    nan = ns.Injection(AllNaN(), operators={"residual"}, layers={6})
    with ns.inject(subject.model, nan):
        ns.record(subject, None, tmp_path / "nan.record", samples=4, full_layers={6, 7})
    pair = (tmp_path / "nan.record", tmp_path / "nan.record", "--max-mape", 0.05)
    output = call("compare", *pair, "--layers", "7", code=3).output
    assert "allowed 0.05: undecided, no site has a finite number on both sides" in output
    assert "sites are undecided" in output.split("\n\n")[1]
    call("compare", *pair, "--layers", "7", "--allow-undecided")
    assert "allowed 0.05: passed; " in call("compare", *pair, "--layers", "6,7").output


def test_costs_come_from_a_diagnosis(records: Path, tmp_path: Path) -> None:
    """The report of the same model: what to fix first, and what each layer can afford."""
    call("diagnose", "demo", "--samples", 4, "--effort", "screen", "--level", "operator,layer", "-o", tmp_path / "out")
    pair = (records / "good.record", records / "bad.record")
    output = call(
        "compare", *pair, "--sensitivity", tmp_path / "out" / "report.json", "--affordable", 1e-5, code=1
    ).output
    assert "nats (relative L2" in output and "layer  affordable" in output
    assert "), predicted" in output or "), injected, not linear there" in output
    assert "no report" in call("compare", *pair, "--sensitivity", tmp_path / "none.json", code=2).output


def test_a_replay_from_the_command_line(tmp_path: Path) -> None:
    """`locate --reference` gives modules the record's inputs."""
    folder = tmp_path / "good.record"
    call("record", "demo", "-o", folder, "--samples", 2, "--full-layers", "7")
    assert call("locate", "demo", "--reference", folder).stdout.startswith("healthy: no fault in")
    fault = "gain:0.01@7/linear/down_proj"
    output = call("locate", "demo", "--reference", folder, "--simulate", fault).output
    assert "linear at block 7 (model.layers.7.mlp.down_proj): gain" in output and "): found" in output
    assert "is not a record" in call("locate", "demo", "--reference", tmp_path, code=2).output


def logprob_file(path: Path, *, shift: int = 0, noise: float = 0.0) -> Path:
    """20 sequences of 30 log-probabilities, the values moved or blurred."""
    draw, lines = random.Random(0), []
    blur = random.Random(1)
    for number in range(20):
        values = [-draw.expovariate(0.5) for _ in range(30)]
        values = values[30 - shift :] + values[: 30 - shift]
        values = [value * (1 + noise * blur.gauss(0, 1)) for value in values]
        lines.append(json.dumps({"id": number, "rollout_log_probs": values, "old_log_probs": values}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_log_probability_files_have_causes_and_exit_codes(tmp_path: Path) -> None:
    """1 where a cause is found, 3 where nothing says what may remain, 0 within a limit; 2 for what is no such file."""
    a, b = logprob_file(tmp_path / "a.jsonl"), logprob_file(tmp_path / "b.jsonl", shift=1, noise=0.01)
    output = call("compare", a, b, code=1).output
    assert "diverged. Cause found: misaligned" in output and "next: Check the shift" in output and "remains" in output
    healthy = logprob_file(tmp_path / "c.jsonl", noise=0.01)
    assert "robustness MODEL --rounding" in call("compare", a, healthy, code=3).output
    call("compare", a, healthy, "--allow-undecided")
    assert "pass" in call("compare", a, healthy, "--max-gap", "0.1").output
    found = json.loads(call("compare", a, healthy, "--json", "-o", tmp_path / "x.json", code=3).stdout)
    assert found == json.loads((tmp_path / "x.json").read_text()) and found["causes"] == []
    same = call("compare", a, a, "--fields", "rollout_log_probs,old_log_probs").output
    assert "identical" in same and "identical" in call("compare", a, a).output
    assert "is for records" in call("compare", a, b, "--layers", "1", code=2).output
    assert "two names" in call("compare", a, b, "--fields", "old_log_probs", code=2).output
    assert "no such" not in call("compare", a, tmp_path, code=2).output


def test_two_systems_are_compared(tmp_path: Path) -> None:
    """A table of parts in words, the whole as JSON; exit code 1 where they differ."""
    file = tmp_path / "found.json"
    both = ("transformers:demo", "transformers:demo", "--samples", 2, "--max-tokens", 24)
    assert "identical. Both systems give identical distributions." in call("compare", *both).output
    output = call("compare", *both, "--engine-args", "b.temperature=0.7", "-o", file, code=1).output
    assert "different. One cause: semantics: a reports at temperature 1, b at 0.7" in output
    rows = [line.split() for line in output.splitlines()]
    assert any(row[:1] == ["semantics"] and row[-1] == "temperature" for row in rows)
    assert any(row[:2] == ["remainder", "0"] for row in rows)
    assert json.loads(file.read_text())["causes"][0]["name"] == "temperature"
    output = call("compare", *both, "--engine-args", "b.dtype=bfloat16", code=1).output
    assert "round-off of " in output and "% of elements differ" in output
    assert "2 prompts, 50 tokens" in call("compare", *both, "--generated", 2).output  # of 46 without
    kernels = call("compare", *both, "--engine-args", "b.attn_implementation=eager").output
    assert "round-off. Weights and settings are identical" in kernels and "for 99 % of pairs" in kernels


def test_a_quantised_checkpoint_is_shown_layer_by_layer(tmp_path: Path) -> None:
    """The costliest layers first; JSON has all of them in order."""
    subject, file = ns.load("demo"), tmp_path / "found.json"
    with torch.no_grad():
        for module in (m for block in subject.model.model.layers for m in block.modules()):
            if isinstance(module, torch.nn.Linear):
                step = module.weight.abs().amax(1, keepdim=True) / 7
                module.weight.copy_((module.weight / step).round() * step)
    for part in (subject.model, subject.tokenizer):
        part.save_pretrained(tmp_path / "rounded")
    both = ("transformers:demo", f"transformers:{tmp_path / 'rounded'}", "--samples", 2, "--max-tokens", 24)
    output = call("compare", *both, "-o", file, code=1).output
    assert "a with b's weights in one layer alone, the 12 costliest of 16:" in output
    costs = json.loads(file.read_text())["weight_costs"]
    assert [row["layer"] for row in costs] == list(range(16)) and all(row["tensors"] == 7 for row in costs)
    first = max(costs, key=lambda row: row["nats"]["value"])
    rows = [line.split() for line in output.splitlines()]
    assert rows[1 + next(i for i, row in enumerate(rows) if row[:2] == ["layer", "nats"])][:2] == [
        str(first["layer"]), f"{first['nats']['value']:.3g}",
    ]  # fmt: skip


def test_mistakes_about_systems(records: Path) -> None:
    def refused(*words: Any) -> str:
        return " ".join(call("compare", *words, code=2).output.split())

    record = records / "good.record"
    assert "are of one kind: two records" in refused("transformers:demo", record)
    assert "--max-mape is for records, and these are systems" in refused(
        "transformers:demo", "transformers:demo", "--max-mape", 1
    )
    assert "--engine-args is for systems such as vllm:MODEL" in refused(
        record, record, "--engine-args", "dtype=float32"
    )
    assert "unknown engine 'vlm'" in refused("vlm:demo", "transformers:demo")
    assert "there is no file or folder './none'" in refused("transformers:./none", "transformers:demo")
    fault = call("record", "demo", "--engine", "vllm", "--simulate", "gain:0.1@3", "-o", records / "x", code=2)
    assert "--simulate is for the engine transformers" in fault.output
