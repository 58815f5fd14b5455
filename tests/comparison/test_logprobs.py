"""Planted causes of disagreement between log-probability files, and healthy pairs. The plants know no noisescope."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from noisescope.comparison.logprob_files import read_logprobs
from noisescope.comparison.logprobs import LogprobComparison, compare_logprobs
from noisescope.comparison.roundoff import band_of
from noisescope.errors import InvalidInput


@pytest.fixture(scope="module")
def plants(benchmark_module: Any) -> ModuleType:
    return benchmark_module("logprob_plants")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def world(plants: ModuleType) -> Any:
    return plants.synthetic(11, rows=40, tokens=48, vocabulary=200)


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    def compare(rows: tuple[list[Any], list[Any]], **options: Any) -> LogprobComparison:
        files = []
        for name, side in zip("ab", rows, strict=True):
            file = tmp_path / f"{name}.jsonl"
            file.write_text("".join(json.dumps(row) + "\n" for row in side), encoding="utf-8")
            files.append(read_logprobs(file))
        return compare_logprobs(*files, **options)

    return compare


def test_planted_causes_are_named(plants: ModuleType, world: Any, compared: Any) -> None:
    """Each as the largest cause, and nats within a factor of 1.5 of what undoing it removes."""
    base = compared(plants.HEALTHY["ids, steps, tokens"](world, np.random.default_rng(0))).gap.value
    missed, off = [], []
    for name, (cause, plant) in {**plants.TUNED, **plants.HELD_OUT}.items():
        found = compared(plant(world, np.random.default_rng(5)))
        assert found.verdict == "diverged" and found.outcome == "fail", name
        largest = max(found.causes, key=lambda one: (one.nats.value is None, one.nats.value or 0.0))
        if largest.name != cause:
            missed.append((name, [one.name for one in found.causes]))
        true = (found.gap.value or 0.0) - base
        if largest.nats.value and true > 0.2 * base and not 1 / 1.5 < largest.nats.value / true < 1.5:
            off.append((name, largest.nats.value, true))
    assert not missed and not off


def test_healthy_pairs_have_no_cause(plants: ModuleType, world: Any, compared: Any) -> None:
    for name, plant in plants.HEALTHY.items():
        found = compared(plant(world, np.random.default_rng(1)))
        assert not found.causes and found.verdict == found.outcome == "undecided", name


def test_a_band_and_a_limit_decide(plants: ModuleType, world: Any, compared: Any) -> None:
    """Round-off by a band of that size, more than round-off by a smaller one; a limit of one's own."""
    rows = plants.HEALTHY["ids, steps, tokens"](world, np.random.default_rng(2))
    logprobs = [one.a[""] for one in world]
    differences = [np.stack([one.b[""] - one.a[""]] * 2) for one in world]
    fits = compared(rows, band=band_of(logprobs, differences, dtype="bfloat16"))
    assert (fits.verdict, fits.outcome) == ("round-off", "pass") and "false-alarm rate 1 %" in fits.words
    small = compared(rows, band=band_of(logprobs, [one / 4 for one in differences], dtype="bfloat16"))
    assert (small.verdict, small.outcome) == ("diverged", "fail") and "more than round-off" in small.words
    assert compared(rows, max_gap=0.1).outcome == "pass" and compared(rows, max_gap=0.001).outcome == "fail"
    same = compared((rows[0], rows[0]))
    assert (same.verdict, same.outcome, same.gap.value) == ("identical", "pass", 0.0)


def test_two_causes_are_mended_one_after_the_other(plants: ModuleType, world: Any, compared: Any) -> None:
    """Off by one and zeros: each is named, what remains is the healthy gap."""
    a, b = plants.shifted(1)(world, np.random.default_rng(3))
    draw = np.random.default_rng(4)
    for row in b:
        gone = draw.random(len(row["logprobs"])) < 0.05
        row["logprobs"] = [0.0 if lost else value for lost, value in zip(gone, row["logprobs"], strict=True)]
    found = compared((a, b))
    base = compared(plants.HEALTHY["ids, steps, tokens"](world, draw)).gap.value
    assert [cause.name for cause in found.causes] == ["misaligned", "missing values"]
    assert found.remainder.value == pytest.approx(base, rel=0.1)
    assert found.gap.value == pytest.approx(sum(c.nats.value for c in found.causes) + found.remainder.value, rel=0.05)


def test_other_tokens_are_named_and_left_out(plants: ModuleType, world: Any, compared: Any) -> None:
    a, b = plants.rows_of(world, "a"), plants.rows_of(world, "b")
    for row in b:
        row["token_ids"] = [row["token_ids"][0] + 1, *row["token_ids"][1:]]
        row["logprobs"] = [row["logprobs"][0] - 3.0, *row["logprobs"][1:]]
    (cause,) = compared((a, b)).causes
    assert cause.name == "different tokens" and cause.tokens == len(world)


def test_files_without_a_common_value_are_refused(compared: Any) -> None:
    rows = [{"logprobs": [-1.0, -2.0]}]
    with pytest.raises(InvalidInput, match="no token with a value on both sides"):
        compared((rows, [{"logprobs": [None, None]}]))


def test_the_result_is_json(plants: ModuleType, world: Any, compared: Any, tmp_path: Path) -> None:
    found = compared(plants.TUNED["temperature 0.7 on one side"][1](world, np.random.default_rng(0)))
    saved = json.loads(found.save(tmp_path / "found.json").read_text())
    assert saved["causes"][0]["name"] == "temperature" and saved["remainder"]["value"] is None
    assert saved["limits"] and "temperature" in saved["remainder"]["note"]


def test_a_notebook_shows_the_causes(plants: ModuleType, world: Any, compared: Any) -> None:
    found = compared(plants.TUNED["temperature 0.7 on one side"][1](world, np.random.default_rng(0)))
    assert found.verdict in found._repr_html_() and "temperature" in found._repr_html_()
    assert found.to_csv("causes").splitlines()[1].startswith("temperature,")
