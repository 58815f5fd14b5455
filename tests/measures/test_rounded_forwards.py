"""Round-off measured by `Rounding`, against kernel paths that really differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import noisescope as ns
from noisescope.api.preparation import encode_data
from noisescope.comparison.roundoff import band_of, gap_between
from noisescope.errors import InvalidInput
from noisescope.measures.rounded_forwards import RoundoffRuns, ScoredTokens, run_rounded


@pytest.fixture(scope="module")
def subject() -> ns.Subject:
    return ns.load("demo", dtype="bfloat16")


@pytest.fixture(scope="module")
def sequences(subject: ns.Subject) -> list[ScoredTokens]:
    material, _ = encode_data(subject, None, 12, 128, which="test")
    return [ScoredTokens(group[0].sample, group[0].ids, 1) for group in material.encoded.sequences]


@pytest.fixture(scope="module")
def runs(subject: ns.Subject, sequences: list[ScoredTokens]) -> RoundoffRuns:
    return run_rounded(subject.model, sequences, seeds=(0, 1), batch=4, anatomy=subject.anatomy)


def logprobs(model: Any, sequences: list[ScoredTokens]) -> list[np.ndarray]:
    found = []
    with torch.no_grad():
        for one in sequences:
            ids = torch.tensor(one.ids)
            rows = model(ids[None]).logits[0, :-1].float().log_softmax(-1)
            found.append(rows.gather(1, ids[1:, None])[:, 0].double().numpy())
    return found


def test_the_band_holds_for_plain_attention_and_a_wrong_weight_lies_above_it(
    subject: ns.Subject, sequences: list[ScoredTokens], runs: RoundoffRuns
) -> None:
    """Fused against plain attention is round-off and near the expected size; one weight matrix 3 % too large is not."""
    model: Any = subject.model
    band = band_of(runs.logprobs, runs.differences, dtype="bfloat16")
    clean = logprobs(model, sequences)
    model.set_attn_implementation("eager")
    eager = logprobs(model, sequences)
    model.set_attn_implementation("sdpa")
    gap = gap_between(clean, eager)
    assert band.judge(gap) == "round-off"
    assert 0.6 < gap.value / band.expected.value < 1.4
    assert band.judge(gap_between(clean, clean)) == "identical"
    weight = model.model.layers[3].mlp.down_proj.weight
    with torch.no_grad():
        kept = weight.clone()
        weight.mul_(1.3)
        wrong = logprobs(model, sequences)
        weight.copy_(kept)
    assert band.judge(gap_between(clean, wrong)) == "more than round-off"


def test_batches_change_nothing_but_kernels(
    subject: ns.Subject, sequences: list[ScoredTokens], runs: RoundoffRuns
) -> None:
    """The drawn moves are those of the sample: a batch of one is much nearer to the same seed than to another."""
    alone = run_rounded(subject.model, sequences[:3], seeds=(0,), batch=1, anatomy=subject.anatomy, blocks=False)
    for one, together in zip(alone.differences, runs.differences, strict=False):
        assert np.abs(one[0] - together[0]).mean() < 0.5 * np.abs(one[0] - together[1]).mean()


def test_digits_fall_along_the_blocks(runs: RoundoffRuns) -> None:
    errors = [float(np.median(np.concatenate(runs.block_errors[block]))) for block in sorted(runs.block_errors)]
    assert len(errors) == 16 and 1e-3 < errors[0] < errors[-1] < 0.05
    assert runs.flipped[0].shape == runs.differences[0].shape == (2, len(runs.logprobs[0]))


def test_nothing_to_score_is_refused(subject: ns.Subject) -> None:
    with pytest.raises(InvalidInput, match="at least one scored token"):
        run_rounded(subject.model, [ScoredTokens(0, (1, 2), 2)], seeds=(0,))
