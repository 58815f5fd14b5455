"""Noise in spawned workers, by environment variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from noisescope import noisy_ops
from noisescope.compat.noisy_ops.environment import read_environment
from noisescope.compat.noisy_ops.state import state
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.training import launch

WORKERS = """
import json, os, sys, torch
import transformers.models.llama.modeling_llama  # once for all: what is forked has it
for rank in range(2):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    os.environ["RANK"] = str(rank)
    from noisescope import noisy_ops
    from noisescope.testing import tiny_model
    model, tokens = tiny_model("llama"), torch.arange(1, 13).reshape(2, 6)
    with torch.no_grad():
        clean = model(tokens).logits.sum().item()
    before = noisy_ops.get_injection_stats()["total_forward"]
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    print(json.dumps([clean, before, loss.item()]), flush=True)
    sys.exit()
"""


def workers(variables: dict[str, str]) -> list[list[float]]:
    """What two processes that import noisescope each find."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("NOISESCOPE", "VERL"))}
    done = subprocess.run([sys.executable, "-c", WORKERS], env={**clean, **variables}, check=True, capture_output=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"[")]


@pytest.mark.slow
def test_workers_differ_and_are_confirmed(tmp_path: Path) -> None:
    """Two ranks start from the same clean model, train under different noise, and both are counted."""
    variables = launch.environment(0.1, seed=3, tally=tmp_path, phases=("forward",))
    first, second = workers(variables)
    assert first[0] == second[0] and first[1] == second[1] == 0  # nothing fell without gradients
    assert first[2] != second[2]
    tally = variables["NOISESCOPE_TALLY"]
    assert [counts["forward"] for counts in launch.confirm(tally, workers=2).values()] == [19, 19]
    with pytest.raises(NothingInjected, match="2 of 3 workers"):
        launch.confirm(tally, workers=3)


def test_variables_say_what_was_asked() -> None:
    """Phases, operators, seed and folder become variables that noisy_ops reads."""
    found = launch.environment(0.02, phases={"backward"}, operators=["rms_norm", "softmax"], seed=7, tally="x")
    assert found["NOISESCOPE_BACKWARD_ONLY"] == "1" and found["NOISESCOPE_FORWARD_ONLY"] == "0"
    assert found["NOISESCOPE_OPERATORS"] == "norm,softmax" and found["NOISESCOPE_SEED"] == "7"
    assert float(found["NOISESCOPE_SCALE"]) == 0.02 and Path(found["NOISESCOPE_TALLY"]).is_absolute()
    assert launch.environment(without_gradients=True)["NOISESCOPE_TRAINING_ONLY"] == "0"
    assert launch.environment(operators="softmax")["NOISESCOPE_OPERATORS"] == "softmax"
    assert launch.environment(phases="forward")["NOISESCOPE_FORWARD_ONLY"] == "1"


def test_what_workers_inherit_is_overridden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise both ways on all products is that also where the launcher's own environment says otherwise."""
    inherited = {"NOISESCOPE_FORWARD_ONLY": "1", "VERL_NOISY_OPS_BACKWARD_ONLY": "1", "NOISESCOPE_OPERATORS": "softmax"}
    seen = []
    monkeypatch.setattr(noisy_ops, "set_noise_phases", lambda **phases: seen.append(phases))
    monkeypatch.setattr(noisy_ops, "set_selective_operators", seen.append)
    monkeypatch.setattr(noisy_ops, "enable_noisy_ops", lambda *settings: None)
    monkeypatch.setattr(state, "change", lambda **changes: None)
    for name, value in {**inherited, **launch.environment(0.1)}.items():
        monkeypatch.setenv(name, value)
    read_environment()
    assert seen == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"phases": ["sideways"]}, "unknown phase"),
        ({"phases": []}, "phases is empty"),
        ({"operators": []}, "operators is empty"),
        ({"operators": "softmx"}, "Did you mean 'softmax'"),
        ({"scale": 0.0}, "scale 0 means no noise"),
        ({"seed": "x"}, "seed must be an int"),
    ],
)
def test_refusals(arguments: dict[str, Any], words: str) -> None:
    """What no worker could use is refused where it is written."""
    with pytest.raises(InvalidInput, match=words):
        launch.environment(**arguments)


def test_each_run_has_counts_of_its_own(tmp_path: Path) -> None:
    """The files of an earlier run in the same folder don't confirm a later one."""
    earlier, later = (launch.environment(tally=tmp_path)["NOISESCOPE_TALLY"] for _ in range(2))
    Path(earlier).mkdir()
    (Path(earlier) / "rank0-1.json").write_text(json.dumps({"rank": 0, "forward": 5, "backward": 0}))
    assert launch.confirm(earlier, workers=1)
    for folder in (later, tmp_path):
        with pytest.raises(NothingInjected, match="0 of 1 workers reported"):
            launch.confirm(folder, workers=1)


def test_confirm_says_who_is_missing(tmp_path: Path) -> None:
    """Too few workers, too many, silent ones, and several with one rank are told apart."""

    def write(name: str, rank: int, forward: int) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"rank": rank, "forward": forward, "backward": 0}))

    write("rank0-1", 0, 5)
    with pytest.raises(NothingInjected, match="1 of 2 workers reported"):
        launch.confirm(tmp_path, workers=2)
    write("rank1-2", 1, 0)
    with pytest.raises(NothingInjected, match="rank1-2 injected nothing"):
        launch.confirm(tmp_path, workers=2)
    write("rank1-2", 0, 5)
    with pytest.raises(InvalidInput, match="same rank"):
        launch.confirm(tmp_path, workers=2)
    write("rank1-2", 1, 5)
    assert launch.confirm(tmp_path, workers=2)["rank1-2"]["forward"] == 5
    with pytest.raises(InvalidInput, match=r"2 workers reported in .* but 1 were expected"):
        launch.confirm(tmp_path, workers=1)
