"""The gate on a tiny model: the same model passes, a more sensitive one fails, and every verdict is kept."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import noisescope as ns
from noisescope.api.gates import gate, keep, measure_baseline
from noisescope.api.plan_trials import find_data
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.jsonform import from_json
from noisescope.model.loading import Subject
from noisescope.plans.gate_rows import Difference, GateResult
from noisescope.runs.store import Store


def answered_by(model: Any, rows: int = 24, seed: int = 0) -> list[dict[str, Tensor]]:
    """Random prompts with the model's own answer of one token, which alone is scored."""
    ids = torch.randint(3, 64, (rows, 8), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        answers = model(ids).logits[:, -1:].argmax(-1)
    labels = torch.cat([torch.full_like(ids, -100), answers], 1)
    return [{"input_ids": torch.cat([ids, answers], 1), "labels": labels}]


@pytest.fixture(scope="module")
def subject() -> Subject:
    return ns.load("tiny:llama")


@pytest.fixture(scope="module")
def baseline(subject: Subject) -> Diagnosis:
    return ns.diagnose(subject, answered_by(subject.model), levels=("operator",), seeds=1, samples=24).diagnosis


@pytest.fixture(scope="module")
def sharper(subject: Subject) -> Subject:
    """The same answers, but the same noise moves the output further."""
    model = copy.deepcopy(subject.model)
    with torch.no_grad():
        model.model.norm.weight *= 2
    return ns.wrap(model)


def test_the_report_keeps_what_a_gate_needs(baseline):
    """Every token of each sample counts, not the answer alone; values are per sample and by operator."""
    kept = baseline.gate
    assert len(set(kept.samples)) == 24 and kept.seeds == (0,)
    assert set(kept.predicted_kl) == {"gemm", "softmax", "silu", "norm"} and set(kept.kl) == {"gemm"}
    assert all(len(values) == 24 and min(values) > 0 for values in kept.predicted_kl.values())
    assert set(kept.accuracy) >= {"clean", "gemm"} and kept.nonfinite == 0
    answers = baseline.operator_analysis["gemm"].kl.mean.value
    assert baseline.operator_analysis["gemm"].nats == baseline.operator_analysis["gemm"].kl.typical.value > 0
    assert sum(kept.kl["gemm"]) / 24 != pytest.approx(answers, rel=0.01)


def test_the_same_model_passes(subject, baseline):
    """On the same samples with the same seeds nothing differs, to the last bit."""
    result = gate(subject, baseline, answered_by(subject.model), samples=24, max_degradation=0.9)
    assert result.verdict == "pass" and result.paired and result.model == "tiny:llama"
    assert result.headline.startswith("passed") and not result.failed
    assert all(row.ratio.value == pytest.approx(1.0, rel=1e-5) for row in result.divergence)


def test_a_more_sensitive_model_fails_though_it_answers_the_same(subject, baseline, sharper):
    """Paired on the same samples, and on others; the accuracy shows nothing of it."""
    for seed in (0, 1):
        data = answered_by(subject.model, seed=seed)
        result = gate(sharper, baseline, data, samples=24, max_degradation=0.9, other_samples=seed > 0)
        assert result.paired == (seed == 0) and result.verdict == "fail"
        assert result.worst.ratio.low > 1 and result.accuracy[0].difference.value == 0


def test_every_operator_is_held_to_the_limit(subject, baseline):
    """With effort standard noise goes into each, and the largest loss is named."""
    data = answered_by(subject.model)
    quick, whole = (gate(subject, baseline, data, samples=24, effort=effort) for effort in ("screen", "standard"))
    assert [row.operator for row in quick.limits] == ["gemm"]
    assert {row.operator for row in whole.limits} == {"gemm", "softmax", "silu", "norm"}
    assert whole.max_degradation == max(row.degradation.value for row in whole.limits)


def test_history_and_trend(subject, baseline, tmp_path):
    """Verdicts add up in the store, and the trend is drawn of all of them."""
    for step in (100, 200):
        result = gate(subject, baseline, answered_by(subject.model), samples=24, step=step)
        paths = keep(result, tmp_path / "gates")
    assert {path.name for path in paths} == {f"gate-{name}.{form}" for name in ("divergence", "degradation")
                                             for form in ("png", "svg")}  # fmt: skip
    assert "limit" in (tmp_path / "gates" / "trend" / "gate-divergence.svg").read_text()
    with Store(tmp_path / "gates", create=False) as store:
        history = store.gates()
    assert [row["step"] for row in history] == [100, 200] and from_json(GateResult, history[1]) == result


def test_strangers_are_refused_and_conditions_reported(subject, baseline):
    """Another architecture and other samples before anything is measured; another dtype beside the verdict."""
    with pytest.raises(InvalidInput, match="GPT2LMHeadModel"):
        gate(ns.load("tiny:gpt2"), baseline, answered_by(subject.model))
    with pytest.raises(InvalidInput, match=r"0 of these 24 samples .* --other-samples"):
        gate(subject, baseline, answered_by(subject.model, seed=1))
    half = ns.wrap(copy.deepcopy(subject.model).bfloat16())
    result = gate(half, baseline, answered_by(subject.model), samples=24, max_degradation=0.9)
    assert result.conditions.verdict == "undecided" and result.checks[0] is result.conditions
    assert result.conditions.differences == (Difference("dtype", "float32", "bfloat16"),)
    assert result.headline.endswith("; conditions differ from the baseline's")


def test_what_can_not_be_gated_is_refused(subject, baseline, tmp_path):
    """A report without the numbers, of another noise, of data that is gone; an effort that is none; a broken model."""
    data = answered_by(subject.model)
    with pytest.raises(InvalidInput, match="noisescope diagnose"):
        gate(subject, replace(baseline, gate=None), data)
    with pytest.raises(InvalidInput, match="Uniform"):
        gate(subject, replace(baseline, gate=replace(baseline.gate, noise="Uniform(scale=0.05)")), data)
    with pytest.raises(InvalidInput, match="tokenised batches, which is not there"):
        gate(subject, baseline)
    with pytest.raises(InvalidInput, match="effort"):
        gate(subject, baseline, data, effort="full")
    broken = copy.deepcopy(subject.model)
    broken.forward = lambda **_: 1 / 0
    with pytest.raises(NoisescopeError, match="ZeroDivisionError"):
        measure_baseline(ns.wrap(broken), data, samples=4, seeds=1)


def test_data_are_found_again(baseline, tmp_path):
    """The demo's problems, the built-in text, or the file that the report names."""
    file = tmp_path / "data.jsonl"
    file.write_text("")

    def made_on(source: str) -> Any:
        return find_data(replace(baseline, run=replace(baseline.run, data=replace(baseline.run.data, source=source))))

    assert str(made_on("demo")).endswith("test.jsonl") and made_on("built-in text").kind == "text"
    assert made_on(str(file)) == str(file)
