"""The gate's decision on made-up numbers: regressions fail, noise does not, and a gate without power says so."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from noisescope.errors import InvalidInput
from noisescope.plans.comparable import (
    conditions_row,
    refuse_architecture,
    refuse_kind,
    refuse_other_samples,
    samples_of,
    samples_told,
)
from noisescope.plans.gate import checks, decide

NUMBER = itertools.count()


def section(
    n: int = 50,
    *,
    factor: float = 1.0,
    sd: float = 0.3,
    seed: int = 0,
    loss: float = 0.05,
    clean: float = 0.96,
    chance: float = 0.0,
    names: list[str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Log-normal divergences, as those of real models are, and an accuracy."""
    draw = np.random.default_rng(seed)
    dice = draw.random(n)
    spread = draw.normal(0, sd, (3, n))
    return {
        "samples": names or [f"sample {next(NUMBER)}" for _ in range(n)],
        "noise": "Gaussian(scale=0.05)",
        "chance": chance,
        "predicted_kl": {"gemm": [*(0.04 * factor * np.exp(spread[0]))], "softmax": [*(1e-3 * np.exp(spread[1]))]},
        "kl": {"gemm": [*(0.05 * factor * np.exp(spread[2]))]},
        "accuracy": {"clean": [*(dice < clean).astype(float)], "gemm": [*(dice < clean * (1 - loss)).astype(float)]},
        "nonfinite": 0,
        **more,
    }


def test_unchanged_models_hardly_ever_fail():
    """Other samples of the same model fail in at most 5 of 100 re-runs, and are decided."""
    verdicts = [decide(section(seed=2 * i), section(seed=2 * i + 1))["verdict"] for i in range(100)]
    assert verdicts.count("fail") <= 5 and verdicts.count("pass") >= 95


def test_twice_the_limit_is_caught():
    """A model that diverges 1.4 times as far fails in at least 95 of 100 re-runs on other samples."""
    results = [decide(section(seed=2 * i), section(seed=2 * i + 1, factor=1.4)) for i in range(100)]
    assert sum(result["verdict"] == "fail" for result in results) >= 95
    assert all(result["worst"]["operator"] == "gemm" for result in results if result["verdict"] == "fail")


def test_a_large_difference_within_noise_is_no_regression():
    """Ten samples with a wide spread: a ratio above the limit passes for nothing, and the gate says what it can see."""
    before, after = section(10, sd=1.5), section(10, sd=1.5, seed=1, factor=1.5)
    result = decide(before, after)
    row = result["divergence"][0]
    assert result["verdict"] == "undecided" and row["ratio"]["low"] < 1 < row["ratio"]["high"]
    assert row["smallest_detectable"] > 1.4 and "could only have caught" in row["message"]


def test_what_is_surely_better_passes_without_power():
    """An interval that ends below the limit decides, however wide it is."""
    result = decide(section(12, sd=0.8), section(12, sd=0.8, seed=1, factor=0.1))
    row = result["divergence"][0]
    assert row["smallest_detectable"] > 1.4 and row["ratio"]["high"] < 1.2 and row["verdict"] == "pass"


def test_it_says_what_was_compared():
    """The pairs, not what either side has; of other samples there are none."""
    before = section(9)
    one = {**before, "samples": before["samples"][:1]}
    assert decide(before, before)["n"] == {"baseline": 9, "candidate": 9, "pairs": 9}
    assert decide(before, section(8))["n"] == {"baseline": 9, "candidate": 8, "pairs": 0}
    assert samples_told(samples_of(before["samples"], one["samples"])) == "1 sample in pairs, of 9 before and 1 now"
    assert samples_told({"baseline": 9, "candidate": 1, "pairs": 0}) == "1 other sample than the baseline's 9"


def test_a_sure_difference_below_the_limit_passes():
    """10 % worse, on the same samples, is seen for what it is and allowed."""
    before = section()
    after = {**before, "predicted_kl": {"gemm": [1.1 * kl for kl in before["predicted_kl"]["gemm"]]}, "kl": {}}
    result = decide(before, after)
    assert result["paired"] and result["verdict"] == "pass"
    assert result["divergence"][0]["ratio"]["value"] == pytest.approx(1.1)
    assert result["divergence"][0]["ratio"]["low"] > 1.05


def test_the_same_samples_are_paired():
    """A part of the baseline's samples, in another order, is compared pair by pair: sharper than other samples."""
    before = section(60, sd=1.0)
    part = list(range(40))[::-1]
    after = section(40, names=[before["samples"][i] for i in part])
    for measure in ("predicted_kl", "kl"):
        after[measure] = {name: [1.3 * before[measure][name][i] for i in part] for name in before[measure]}
    paired, apart = decide(before, after), decide(before, {**after, "samples": [f"other {i}" for i in part]})
    assert paired["paired"] and not apart["paired"]
    assert paired["verdict"] == "fail" and apart["verdict"] != "fail"
    assert (
        paired["divergence"][0]["ratio"]["value"] == pytest.approx(1.3) and paired["divergence"][0]["ratio"]["n"] == 40
    )


@pytest.mark.parametrize(
    ("loss", "limit", "verdict"), [(0.4, 0.15, "fail"), (0.2, 0.15, "undecided"), (0.02, 0.3, "pass")]
)
def test_the_absolute_limit_is_decided_with_the_interval(loss, limit, verdict):
    """Surely over fails, surely under passes, and what the interval holds is not sure."""
    result = decide(section(loss=loss, clean=1.0), section(seed=1, loss=loss, clean=1.0), max_degradation=limit)
    (row,) = result["limits"]
    assert row["verdict"] == verdict and result["max_degradation"] == row["degradation"]["value"]
    assert result["verdict"] == ("fail" if verdict == "fail" else "pass")


def test_a_model_at_chance_is_not_robust():
    """What noise costs can't be measured there: undecided, never passed."""
    (row,) = decide(section(), section(seed=1, clean=0.25, chance=0.25))["limits"]
    assert row["degradation"]["value"] is None and row["verdict"] == "undecided" and "chance" in row["message"]


def test_a_model_that_answers_nothing_fails():
    """However little noise changes what it says; a drop that may be chance does not."""
    result = decide(section(), section(seed=1, clean=0.0))
    assert result["verdict"] == "fail" and result["clean_score"]["verdict"] == "fail"
    assert "0.0 % now" in result["clean_score"]["message"]
    assert decide(section(), section(seed=1, clean=0.9))["clean_score"]["verdict"] == "pass"
    assert decide(section(clean=0.0), section(seed=1))["clean_score"]["verdict"] == "undecided"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_handful_of_samples_has_no_power(n):
    """What it says that it would have caught is no smaller than what it catches."""
    result = decide(section(n), section(n, seed=1))
    assert result["verdict"] == "undecided"
    caught = result["divergence"][0]["smallest_detectable"]
    assert caught is None or caught > 1.4


def test_outputs_that_are_not_finite_fail():
    """Where the baseline's were finite; samples without a KL are left out of the ratio and counted."""
    broken = section(seed=1, nonfinite=3)
    broken["kl"]["gemm"][:3] = [None] * 3
    result = decide(section(), broken)
    assert result["verdict"] == "fail" and result["finite"]["verdict"] == "fail"
    assert result["divergence"][2]["left_out"] == 3
    assert decide(section(nonfinite=1), broken)["finite"]["verdict"] == "pass"


def test_a_baseline_near_zero_is_no_regression():
    """Divergences below the floor of the arithmetic are all alike: no ratio is made of them."""
    before, after = section(), section(seed=1)
    before["kl"]["gemm"], after["kl"]["gemm"] = [0.0] * 50, [9e-11] * 50
    assert decide(before, after)["divergence"][2]["ratio"]["value"] == 1.0
    assert decide(before, after)["verdict"] == "pass"


def test_accuracy_is_reported_with_its_power():
    """A drop it could not have shown decides nothing, and the smallest that would have shown is there."""
    result = decide(section(), section(seed=1, clean=0.9))
    clean, noisy = result["accuracy"]
    assert clean["under_noise_in"] == "clean" and noisy["under_noise_in"] == "gemm"
    assert clean["difference"]["value"] < 0 and 0.05 < clean["smallest_detectable"] < 0.3
    assert all(row["name"] and row["message"] for row in checks(result)) and len(checks(result)) == 6


def test_strangers_are_refused():
    """Another noise, or limits that are none."""
    with pytest.raises(InvalidInput, match="noisescope diagnose"):
        decide(section(), section(noise="Gaussian(scale=0.1)"))
    for wrong in ({"worse_than": 0.2}, {"worse_than": float("nan")}, {"max_degradation": 15}, {"max_degradation": 0}):
        with pytest.raises(InvalidInput, match=r"multiple of its baseline|share between 0 and 1"):
            decide(section(), section(), **wrong)


def run(**conditions: Any) -> dict[str, Any]:
    """What a report says of its making."""
    found = {"dtype": "float32", "device": "cpu", "attention": "sdpa", "engine": 1, **conditions}
    return {
        "model": {"architecture": "LlamaForCausalLM", "blocks": 4},
        "data": {"kind": "answer", "source": "a.jsonl"},
        "conditions": found,
    }


@pytest.mark.parametrize(
    ("what", "now"), [("dtype", "bfloat16"), ("device", "cuda"), ("attention", "eager"), ("engine", 2), ("seeds", 3)]
)
def test_other_conditions_are_said(what, now):
    """As a check that is neither passed nor failed, with both sides by name; the same ones pass."""
    sides = section(8, seeds=[0]), section(8, seeds=[0, 1, 2] if what == "seeds" else [0])
    row = conditions_row(run(), run(**{} if what == "seeds" else {what: now}), sides)
    (one,) = row["differences"]
    assert row["verdict"] == "undecided" and one["candidate"] == now and what in one["what"]
    assert f"{one['baseline']} before, {now} now: a difference may come from that" in row["message"]
    alike = conditions_row(run(), run(), (sides[0], sides[0]))
    assert alike["verdict"] == "pass" and not alike["differences"] and "dtype float32, device cpu" in alike["message"]
    result = {**decide(section(), section()), "conditions": row}
    assert checks(result)[0] is row and result["verdict"] != "fail"


def test_the_samples_are_counted():
    """In pairs, of how many, or other ones."""
    few, many = (section(n, seeds=[0], names=[f"s{i}" for i in range(n)]) for n in (5, 8))
    assert "5 samples in pairs, of 8 before and 5 now" in conditions_row(run(), run(), (many, few))["message"]
    assert conditions_row(run(), run(), (few, few))["message"].endswith("5 samples in pairs")
    apart = conditions_row(run(), run(), (few, section(6, seeds=[0])))
    assert "6 other samples than the baseline's 5" in apart["message"]


def test_what_is_not_comparable_is_refused():
    """Another architecture or depth, data of another kind, samples that are not the baseline's."""
    refuse_architecture(run(dtype="bfloat16"), "LlamaForCausalLM", 4)
    for model in (("GPT2LMHeadModel", 4), ("LlamaForCausalLM", 6)):
        with pytest.raises(InvalidInput, match=rf"about LlamaForCausalLM with 4 blocks.*with {model[1]}:"):
            refuse_architecture(run(), *model)
    refuse_kind(run(), run())
    with pytest.raises(InvalidInput, match=r"kind answer \(a.jsonl\), this is text \(b.txt\)"):
        refuse_kind(run(), {**run(), "data": {"kind": "text", "source": "b.txt"}})
    refuse_other_samples(run(), run(), (["a", "b", "c"], ["c", "a"]))
    with pytest.raises(InvalidInput, match=r"1 of these 2 samples .* --other-samples"):
        refuse_other_samples(run(), run(), (["a", "b", "c"], ["c", "d"]))
