"""The gate's decision on made-up numbers: regressions fail, noise does not, and a gate without power says so."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from noisescope.diagnosis.report import GivenCommand
from noisescope.diagnosis.section_types import GateNumbers
from noisescope.errors import InvalidInput
from noisescope.findings.pass_fail import headline, overall
from noisescope.jsonform import from_json, to_json
from noisescope.plans.gate import (
    conditions_row,
    counts_of,
    decide,
    refuse_architecture,
    refuse_kind,
    refuse_other_samples,
)
from noisescope.plans.gate_rows import Decision, GateBaseline, GateResult, SampleCounts, headline_of

NUMBER = itertools.count()


def section(
    n: int = 50,
    *,
    factor: float = 1.0,
    sd: float = 0.3,
    seed: int = 0,
    loss: float = 0.05,
    clean: float = 0.96,
    names: list[str] | None = None,
    **more: Any,
) -> GateNumbers:
    """Log-normal divergences, as those of real models are, and an accuracy."""
    draw = np.random.default_rng(seed)
    dice = draw.random(n)
    spread = draw.normal(0, sd, (3, n))
    known: dict[str, Any] = {
        "samples": tuple(names or [f"sample {next(NUMBER)}" for _ in range(n)]),
        "noise": "Gaussian(scale=0.05)",
        "seeds": (0,),
        "metric": "accuracy",
        "chance": 0.0,
        "predicted_kl": {"gemm": tuple(0.04 * factor * np.exp(spread[0])), "softmax": tuple(1e-3 * np.exp(spread[1]))},
        "kl": {"gemm": tuple(0.05 * factor * np.exp(spread[2]))},
        "accuracy": {
            "clean": tuple((dice < clean).astype(float)),
            "gemm": tuple((dice < clean * (1 - loss)).astype(float)),
        },
        "nonfinite": 0,
    }
    return GateNumbers(**{**known, **more})


def test_unchanged_models_hardly_ever_fail():
    """Other samples of the same model fail in at most 5 of 100 re-runs, and are decided."""
    verdicts = [decide(section(seed=2 * i), section(seed=2 * i + 1)).verdict for i in range(100)]
    assert verdicts.count("fail") <= 5 and verdicts.count("pass") >= 95


def test_twice_the_limit_is_caught():
    """A model that diverges 1.4 times as far fails in at least 95 of 100 re-runs on other samples."""
    results = [decide(section(seed=2 * i), section(seed=2 * i + 1, factor=1.4)) for i in range(100)]
    assert sum(result.verdict == "fail" for result in results) >= 95
    assert all(result.worst.operator == "gemm" for result in results if result.verdict == "fail")


def test_a_large_difference_within_noise_is_no_regression():
    """Ten samples with a wide spread: a ratio above the limit does not fail, and the row says what it can detect."""
    before, after = section(10, sd=1.5), section(10, sd=1.5, seed=1, factor=1.5)
    row = decide(before, after).divergence[0]
    assert row.verdict == "undecided" and row.ratio.low < 1 < row.ratio.high
    assert row.smallest_detectable > 1.4 and "could only have detected" in row.message


def test_what_is_certainly_better_passes_without_power():
    """An interval that ends below the limit decides, however wide it is."""
    row = decide(section(12, sd=0.8), section(12, sd=0.8, seed=1, factor=0.1)).divergence[0]
    assert row.smallest_detectable > 1.4 and row.ratio.high < 1.2 and row.verdict == "pass"


def test_it_says_what_was_compared():
    """The pairs, not what either side has; of other samples there are none."""
    before = section(9)
    assert decide(before, before).n == SampleCounts(9, 9, 9)
    assert decide(before, section(8)).n == SampleCounts(9, 8, 0)
    assert str(counts_of(before.samples, before.samples[:1])) == "1 sample in pairs, of 9 before and 1 now"
    assert str(SampleCounts(9, 1, 0)) == "1 other sample than the baseline's 9"


def test_a_significant_difference_below_the_limit_passes():
    """10 % worse, on the same samples, is measured as such and allowed."""
    before = section()
    worse = tuple(1.1 * kl for kl in before.predicted_kl["gemm"])
    result = decide(before, replace(before, predicted_kl={"gemm": worse}, kl={}))
    assert result.paired and result.verdict == "pass"
    assert result.divergence[0].ratio.value == pytest.approx(1.1) and result.divergence[0].ratio.low > 1.05


def test_the_same_samples_are_paired():
    """A subset of the baseline's samples, in another order, is compared pair by pair: sharper than other samples."""
    before = section(60, sd=1.0)
    some = list(range(40))[::-1]
    worse = {
        measure: {name: tuple(1.3 * values[i] for i in some) for name, values in getattr(before, measure).items()}
        for measure in ("predicted_kl", "kl")
    }
    after = section(40, names=[before.samples[i] for i in some], **worse)
    paired, apart = decide(before, after), decide(before, replace(after, samples=tuple(f"other {i}" for i in some)))
    assert paired.paired and not apart.paired
    assert paired.verdict == "fail" and apart.verdict != "fail"
    assert paired.divergence[0].ratio.value == pytest.approx(1.3) and paired.divergence[0].ratio.n == 40


@pytest.mark.parametrize(
    ("loss", "limit", "verdict"), [(0.4, 0.15, "fail"), (0.2, 0.15, "undecided"), (0.02, 0.3, "pass")]
)
def test_the_absolute_limit_is_decided_with_the_interval(loss, limit, verdict):
    """Above it fails, below it passes, and an interval that includes it decides nothing."""
    result = decide(section(loss=loss, clean=1.0), section(seed=1, loss=loss, clean=1.0), max_degradation=limit)
    (row,) = result.limits
    assert row.verdict == verdict and result.max_degradation == row.degradation.value
    assert result.verdict == ("fail" if verdict == "fail" else "pass")


def test_checks_are_named_by_the_metric():
    """Which is not always the accuracy."""
    (row,) = decide(section(metric="next_token_accuracy"), section(seed=1, metric="next_token_accuracy")).limits
    assert row.name == "next-token accuracy under noise: gemm"


def test_a_model_at_chance_is_not_robust():
    """What noise costs can't be measured there: undecided, never passed."""
    (row,) = decide(section(), section(seed=1, clean=0.25, chance=0.25)).limits
    assert row.degradation.value is None and row.verdict == "undecided" and "chance" in row.message


def test_a_model_that_answers_nothing_fails():
    """However little noise changes what it says. A drop that may be chance decides nothing."""
    result = decide(section(), section(seed=1, clean=0.0))
    assert result.verdict == "fail" and result.clean_score.verdict == "fail"
    assert "0.0 % now" in result.clean_score.message and "would have been detected" in result.clean_score.message
    assert decide(section(), section(seed=1, clean=0.9)).clean_score.verdict == "undecided"
    assert decide(section(clean=0.0), section(seed=1)).clean_score.verdict == "undecided"
    before = section()
    assert decide(before, before).clean_score.verdict == "pass"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_handful_of_samples_has_no_power(n):
    """Finite outputs alone pass no model, and a row would detect no less than it says."""
    result = decide(section(n), section(n, seed=1))
    assert result.verdict == "undecided" and result.finite.verdict == "pass"
    smallest = result.divergence[0].smallest_detectable
    assert smallest is None or smallest > 1.4


def test_one_row_that_decides_is_enough():
    """The verdict is undecided only where none does; the headline counts the undecided ones."""
    before, after = section(12, sd=3.0), section(12, sd=3.0, seed=1)
    after = replace(after, predicted_kl={**after.predicted_kl, "softmax": (1e-9,) * 12})
    result = decide(before, after)
    assert [row.verdict for row in result.divergence] == ["undecided", "pass", "undecided"]
    assert result.verdict == "pass"
    assert headline("pass", [row.verdict for row in result.compared]) == "passed; 4 of 5 checks undecided"
    assert [overall(rows) for rows in (["undecided", "fail"], ["undecided"], [])] == ["fail", "undecided", "undecided"]
    assert headline("fail", ["fail", "pass", "undecided"]) == "failed: 1 of 3 checks; 1 of 3 checks undecided"


def test_outputs_that_are_not_finite_fail():
    """Where the baseline's were finite; samples without a KL are left out of the ratio and counted."""
    broken = section(seed=1, nonfinite=3)
    broken = replace(broken, kl={"gemm": (None,) * 3 + broken.kl["gemm"][3:]})
    result = decide(section(), broken)
    assert result.verdict == "fail" and result.finite.verdict == "fail"
    assert result.divergence[2].left_out == 3
    assert decide(section(nonfinite=1), broken).finite.verdict == "pass"


def test_a_baseline_near_zero_is_no_regression():
    """Divergences below the floor of the arithmetic are all alike: no ratio is made of them."""
    before, after = section(kl={"gemm": (0.0,) * 50}), section(seed=1, kl={"gemm": (9e-11,) * 50})
    assert decide(before, after).divergence[2].ratio.value == 1.0
    assert decide(before, after).verdict == "pass"


def test_accuracy_is_reported_with_its_power():
    """A drop it could not have shown decides nothing, and the smallest that would have shown is there."""
    result = decide(section(), section(seed=1, clean=0.9))
    clean, noisy = result.accuracy
    assert clean.under_noise_in == "clean" and noisy.under_noise_in == "gemm"
    assert result.accuracy_under_noise == (noisy,)  # the clean score is a check
    assert clean.difference.value < 0 and 0.05 < clean.smallest_detectable < 0.3
    assert all(row.name and row.message for row in result.checks) and len(result.checks) == 6


def test_strangers_are_refused():
    """Another noise, or limits that are none."""
    with pytest.raises(InvalidInput, match="noisescope diagnose"):
        decide(section(), section(noise="Gaussian(scale=0.1)"))
    for wrong in ({"worse_than": 0.2}, {"worse_than": float("nan")}, {"max_degradation": 15}, {"max_degradation": 0}):
        with pytest.raises(InvalidInput, match=r"multiple of the baseline|share between 0 and 1"):
            decide(section(), section(), **wrong)


@pytest.mark.parametrize(
    ("what", "now"), [("dtype", "float32"), ("device", "cuda"), ("attention", "eager"), ("engine", 2), ("seeds", 3)]
)
def test_other_conditions_are_reported(made, what, now):
    """As a check that is neither passed nor failed, with both sides by name; the same ones pass."""
    sides = section(8), section(8, seeds=(0, 1, 2) if what == "seeds" else (0,))
    row = conditions_row(made.asked(), made.asked(**{} if what == "seeds" else {what: now}), sides)
    (one,) = row.differences
    assert row.verdict == "undecided" and one.candidate == now and what in one.what
    assert f"{one.baseline} before, {now} now: a difference may come from that" in row.message
    alike = conditions_row(made.asked(), made.asked(), (sides[0], sides[0]))
    assert alike.verdict == "pass" and not alike.differences and "dtype bfloat16, device cpu" in alike.message


def test_a_whole_gate_is_json_and_back(made):
    """With its conditions first among the checks, and named in the headline."""
    before, after = section(), section(seed=1)
    row = conditions_row(made.asked(), made.asked(dtype="float32"), (before, after))
    decision = decide(before, after)
    result = GateResult(
        **vars(decision), headline=headline_of(decision, row), model="m", baseline=GateBaseline("b", "today"),
        step=None, finished="now", seconds=1.0, conditions=row,
    )  # fmt: skip
    assert result.checks[0] is row and result.verdict == "pass" and not result.failed
    undecided = sum(check.verdict == "undecided" for check in result.compared)
    assert result.headline == f"passed; {undecided} of 5 checks undecided; conditions differ from the baseline's"
    plain = to_json(result)
    assert from_json(GateResult, plain) == result and from_json(Decision, to_json(decision)) == decision
    assert plain["schema_version"] == 2 and plain["worst"]["ratio"]["value"] == result.worst.ratio.value


def test_the_headline_counts_what_was_compared(made):
    """Three divergences, a limit and the clean score: neither the conditions nor finite outputs are among them."""
    before = section()
    alike = conditions_row(made.asked(), made.asked(), (before, before))
    same = decide(before, before, max_degradation=0.5)
    assert len(same.compared) == 5 and headline_of(same, alike) == "passed"
    worse = tuple(3 * kl for kl in before.kl["gemm"])
    assert headline_of(decide(before, replace(before, kl={"gemm": worse}), max_degradation=0.5), alike) == (
        "failed: 1 of 5 checks"
    )
    broken = decide(before, replace(before, nonfinite=2), max_degradation=0.5)
    assert broken.verdict == "fail"
    assert headline_of(broken, alike) == "failed: outputs are not finite; 0 of 5 checks failed, 0 undecided"


def test_the_samples_are_counted(made):
    """In pairs, of how many, or other ones."""
    few, many = (section(n, names=[f"s{i}" for i in range(n)]) for n in (5, 8))
    run = made.asked()
    assert "5 samples in pairs, of 8 before and 5 now" in conditions_row(run, run, (many, few)).message
    assert conditions_row(run, run, (few, few)).message.endswith("5 samples in pairs")
    assert "6 other samples than the baseline's 5" in conditions_row(run, run, (few, section(6))).message


def test_what_is_not_comparable_is_refused(made):
    """Another architecture or depth, data of another kind, samples that are not the baseline's."""
    run, other = made.asked(blocks=4), made.asked(data="b.txt", kind="text")
    refuse_architecture(run.model, "LlamaForCausalLM", 4)
    for model in (("GPT2LMHeadModel", 4), ("LlamaForCausalLM", 6)):
        with pytest.raises(InvalidInput, match=rf"describes LlamaForCausalLM with 4 blocks.*with {model[1]}:"):
            refuse_architecture(run.model, *model)
    refuse_kind(run.data, run.data)
    with pytest.raises(InvalidInput, match=r"kind answer \(gsm8k.jsonl\), but this is text \(b.txt\)"):
        refuse_kind(run.data, other.data)
    whole = made.diagnosis(made.about(blocks=4)).run
    refuse_other_samples(whole, run.data, (["a", "b", "c"], ["c", "a"]))
    with pytest.raises(InvalidInput, match=r"1 of these 2 samples .* --other-samples"):
        refuse_other_samples(whole, run.data, (["a", "b", "c"], ["c", "d"]))
    cut = replace(whole, command=GivenCommand("diagnose", {"max_tokens": 64}, ()))
    with pytest.raises(InvalidInput, match=r"--max-tokens \(the baseline has --max-tokens 64\), or"):
        refuse_other_samples(cut, run.data, (["a", "b", "c"], ["c", "d"]))
