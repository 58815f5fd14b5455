"""Perplexity as a metric: what it is, its paired interval, and what noise takes of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from noisescope import stats
from noisescope.cli import app
from noisescope.diagnosis import perplexity
from noisescope.diagnosis.context import Answer
from noisescope.trials import Result


def answer(losses: np.ndarray) -> Answer:
    """Losses [seeds, samples] as an answer."""
    return Answer(tuple((Result(tuple(range(len(row))), {"nll": tuple(map(float, row))}),) for row in losses))


def test_perplexity_is_the_exponential_of_the_mean_loss() -> None:
    found = perplexity.of_losses(np.array([1.0, 2.0, 3.0]))
    assert found.value == pytest.approx(math.exp(2.0)) and found.n == 3
    assert found.low is not None and found.high is not None and found.low < found.value < found.high


def test_the_share_lost_is_that_of_the_inverse() -> None:
    """A rise of the loss by 0.1 nats in every sample takes 1 - exp(-0.1), as the ratio of both perplexities says."""
    losses = np.linspace(1.0, 3.0, 40)
    scores = perplexity.linear_scores(answer(losses[None]), answer(np.stack([losses + 0.05, losses + 0.15])))
    lost = perplexity.share_lost(stats.degradation(*scores))
    ratio = perplexity.of_losses(losses).value / perplexity.of_losses(losses + 0.1).value  # type: ignore[operator]
    assert lost.value == pytest.approx(1 - ratio) == pytest.approx(1 - math.exp(-0.1))
    assert perplexity.share_kept(stats.retention(*scores)).value == pytest.approx(ratio)


def test_the_interval_is_paired_and_covers() -> None:
    """Between samples losses differ by far more than noise adds: only pairs see it. 95 of 100 intervals cover."""
    rng, covered, widths = np.random.default_rng(0), 0, []
    for _ in range(200):
        losses = rng.normal(2.0, 1.0, 50)
        rises = rng.gamma(2.0, 0.05, 50)  # mean 0.1, skewed
        scores = perplexity.linear_scores(answer(losses[None]), answer((losses + rises)[None]))
        lost = perplexity.share_lost(stats.degradation(*scores))
        assert lost.low is not None and lost.high is not None
        covered += lost.low <= 1 - math.exp(-0.1) <= lost.high
        widths.append(lost.high - lost.low)
    assert covered >= 184 and np.mean(widths) < 0.08  # 92 %: three standard errors below 95 %


def test_a_sample_that_is_not_finite_counts_as_the_worst() -> None:
    """And as a nat at least: it is no sample without a loss."""
    clean, noisy = answer(np.array([[1.0, 1.0, 1.0]])), answer(np.array([[1.0, 4.0, np.nan]]))
    before, after = perplexity.linear_scores(clean, noisy)
    assert before.tolist() == [1.0, 1.0, 1.0] and after[:, 0].tolist() == [1.0, -2.0, -2.0]
    noisy = answer(np.array([[1.0, 1.0, np.nan]]))
    assert perplexity.linear_scores(clean, noisy)[1][:, 0].tolist() == [1.0, 1.0, 0.0]


def test_a_command_plans_and_measures_perplexity(tmp_path: Path) -> None:
    """Its cost is planned with made-up results, which need losses as well; four samples can lose perplexity."""
    text = tmp_path / "t.txt"
    text.write_text("\n\n".join(f"There are {n} apples and {n + 1} pears on the table." for n in range(4)))
    words = ["diagnose", "demo", "--data", str(text), "--metric", "perplexity", "--samples", "4", "--level", "operator"]
    words += ["--operators", "softmax", "--seeds", "1", "--calibration-samples", "0", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "above chance" not in result.output and "--metric perplexity" in (tmp_path / "out" / "report.md").read_text()
