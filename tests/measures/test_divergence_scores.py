"""Scores per token against plain loops; broken rows; signal and error; nothing that waits for a device."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from noisescope.errors import InvalidInput
from noisescope.measures.divergence import clean_scores, compare, kl_divergence, powers, token_scores

NAN = math.nan


def logits(rows: int, vocabulary: int = 37, *, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def slow_scores(clean: Tensor, noisy: Tensor, targets: Tensor) -> dict[str, list[float]]:
    """One row at a time in float64."""
    rows = []
    for z, y, target in zip(clean.double(), noisy.double(), targets.tolist(), strict=True):
        first, second = sorted(y.tolist(), reverse=True)[:2]
        best = y.tolist().index(first)
        log_p, log_q = z.log_softmax(-1), y.log_softmax(-1)
        rows.append(
            {
                "kl": float((log_p.exp() * (log_p - log_q)).sum()),
                "agreement": float(best == z.tolist().index(max(z.tolist()))),
                "correct": float(best == target),
                "nll": -float(log_q[target]),
                "margin": first - second,
                "nonfinite": 0.0,
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_those_of_a_plain_loop(dtype: torch.dtype) -> None:
    """Every score of every row; bfloat16 has ties at the top, where the first token counts and the margin is 0."""
    clean = logits(200).to(dtype)
    noisy = (clean + logits(200, seed=1, spread=0.7)).to(dtype)
    noisy[5, :2] = noisy[5].max() + 1
    targets = torch.randint(0, 37, (200,), generator=torch.Generator().manual_seed(2))
    targets[::3] = noisy[::3].float().argmax(-1)
    scores, slow = token_scores(clean, noisy, targets, block_rows=64), slow_scores(clean, noisy, targets)
    assert list(scores) == list(slow)
    for name, values in scores.items():
        assert values.dtype == torch.float32 and values.shape == (200,)
        assert torch.allclose(values.double(), torch.tensor(slow[name], dtype=torch.float64), rtol=1e-5, atol=1e-6), (
            name
        )
    assert scores["margin"][5] == 0
    assert 0 < scores["agreement"].mean() < 1 and 0 < scores["correct"].mean() < 1  # or the comparison says little
    assert torch.equal(scores["kl"], kl_divergence(clean, noisy))
    alone = clean_scores(noisy, targets)
    assert set(alone) == {"correct", "nll", "margin", "nonfinite"}
    for name, values in alone.items():
        assert torch.equal(values, scores[name]), name


def test_an_almost_certain_target_keeps_its_digits() -> None:
    """A target 12 nats ahead of one rival has nll log1p(e^-12), not a rounding error of the log-sum-exp."""
    z = torch.full((1, 2), 30.0)
    z[0, 1] -= 12
    (nll,) = clean_scores(z, torch.tensor([0]))["nll"]
    assert float(nll) == pytest.approx(math.log1p(math.exp(-12)), rel=0.02)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_broken_row_is_a_wrong_answer(bad: float) -> None:
    """kl, nll and margin NaN, agreement and correct 0, nonfinite 1; the other rows don't notice."""
    clean = logits(5)
    noisy = clean.clone()
    targets = clean.argmax(-1)
    whole = token_scores(clean, noisy, targets)
    column = int(targets[3]) if bad > 0 else (int(targets[3]) + 1) % 37  # the argmax stays the target's where it can
    noisy[3, column] = bad
    scores = token_scores(clean, noisy, targets)
    others = torch.tensor([0, 1, 2, 4])
    for name, values in scores.items():
        assert torch.equal(values[others], whole[name][others]), name
    row = {name: float(values[3]) for name, values in scores.items()}
    assert [row["agreement"], row["correct"], row["nonfinite"]] == [0, 0, 1]
    assert all(math.isnan(row[name]) for name in ("kl", "nll", "margin"))


def test_a_broken_clean_row_leaves_the_noisy_scores() -> None:
    """What needs the clean row is NaN or 0; what is the noisy row's own stays."""
    clean = logits(2)
    noisy = clean.clone()
    clean[1, noisy[1].argmax()] = NAN  # torch's argmax of the clean row stays the same: NaN counts as the largest
    scores = token_scores(clean, noisy, noisy.argmax(-1))
    assert scores["kl"].isnan().tolist() == [False, True]
    assert scores["agreement"].tolist() == [1, 0]
    assert scores["correct"].tolist() == [1, 1] and scores["nonfinite"].tolist() == [0, 0]
    assert scores["nll"].isfinite().all() and scores["margin"].isfinite().all()
    assert clean_scores(clean, noisy.argmax(-1))["nonfinite"].tolist() == [0, 1]


def test_masked_vocabulary_is_no_fault() -> None:
    """-inf on both sides leaves the scores of the tokens that remain."""
    clean, noisy = logits(6), logits(6, seed=1)
    targets = torch.arange(6)
    masked = [torch.cat([z, torch.full((6, 3), -math.inf)], dim=1) for z in (clean, noisy)]
    plain, with_mask = token_scores(clean, noisy, targets), token_scores(*masked, targets)
    for name, values in plain.items():
        assert torch.allclose(values, with_mask[name], rtol=1e-5), name
    assert clean_scores(masked[1], targets)["nonfinite"].sum() == 0


def test_rows_without_a_target() -> None:
    """-100 leaves correct and nll open and the rest as it was."""
    clean, noisy = logits(4), logits(4, seed=1)
    targets = torch.tensor([3, -100, 5, -1])
    scores = token_scores(clean, noisy, targets)
    assert scores["nll"].isnan().tolist() == scores["correct"].isnan().tolist() == [False, True, False, True]
    assert scores["kl"].isfinite().all() and scores["margin"].isfinite().all() and scores["nonfinite"].sum() == 0


def test_inputs_are_only_read() -> None:
    """float32 logits, which need no copy, are as they were."""
    clean, noisy = logits(4), logits(4, seed=1)
    before = clean.clone(), noisy.clone()
    token_scores(clean, noisy, torch.arange(4))
    clean_scores(noisy, torch.arange(4))
    assert torch.equal(clean, before[0]) and torch.equal(noisy, before[1])


def test_no_host_synchronisation() -> None:
    """On tensors without data, anything that looks at a value (item, a boolean index, an if) would fail."""
    with FakeTensorMode():
        z, targets = torch.empty(40, 300, dtype=torch.bfloat16), torch.empty(40, dtype=torch.int64)
        for values in [*token_scores(z, z, targets, block_rows=16).values(), *clean_scores(z, targets).values()]:
            assert values.shape == (40,)


def test_signal_and_error_leave_a_common_shift_out() -> None:
    """Variances over the vocabulary: a constant added to all logits of a row changes neither."""
    clean = logits(6)
    noise = logits(6, seed=1, spread=0.1)
    found = powers(clean + 3.0, clean + noise - 5.0)
    assert torch.allclose(found["signal"], clean.double().var(-1, correction=0).float(), rtol=1e-4)
    assert torch.allclose(found["error"], noise.double().var(-1, correction=0).float(), rtol=1e-3)


def test_compare_picks_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen rows of the noisy logits against the clean ones, in blocks, as token_scores and powers of the same."""
    monkeypatch.setattr("noisescope.measures.divergence._ROWS", 2)
    noisy, rows, targets = logits(9, seed=2), torch.tensor([8, 0, 5, 2, 3]), torch.arange(5)
    clean = noisy[rows] + logits(5, seed=3, spread=0.1)
    expected = {**token_scores(clean, noisy[rows], targets), **powers(clean, noisy[rows])}
    found = compare(clean, noisy, rows, targets)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_refusals() -> None:
    """Targets of the wrong form are named."""
    z = logits(4)
    with pytest.raises(InvalidInput, match=r"one per row for 4 rows, got torch.int64 \(3,\)"):
        token_scores(z, z, torch.arange(3))
    with pytest.raises(InvalidInput, match=r"int64 token ids.*torch.float32"):
        clean_scores(z, torch.zeros(4))
