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


class _Ours(torch.autograd.Function):
    """A kernel that is there for float32 alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise RuntimeError("float32 only")
        return x


def test_in_float32_the_distance_to_float64_is_measured(sequences: list[ScoredTokens]) -> None:
    """Sums in other orders differ by about as much as is expected; without float64, by what `Rounding` gives."""
    subject = ns.load("demo", dtype="float32")
    model: Any = subject.model
    runs = run_rounded(model, sequences[:4], seeds=(0, 1), anatomy=subject.anatomy)
    assert runs.method == "float64" and len(runs.differences[0]) == 1 and len(runs.block_errors) == 16
    band = band_of(runs.logprobs, runs.differences, dtype="float32", method=runs.method)
    clean = logprobs(model, sequences[:4])
    linear = torch.nn.Linear.forward
    try:
        torch.nn.Linear.forward = lambda self, x: torch.nn.functional.linear(x.flip(-1), self.weight.flip(-1))
        other = logprobs(model, sequences[:4])
    finally:
        torch.nn.Linear.forward = linear
    assert 0.25 < gap_between(clean, other).value / band.expected.value < 2.5
    model.model.norm.register_forward_hook(lambda module, args, y: _Ours.apply(y))
    drawn = run_rounded(model, sequences[:4], seeds=(0, 1), anatomy=subject.anatomy, blocks=False)
    assert drawn.method == "rounding" and len(drawn.differences[0]) == 2


def test_what_engines_report_has_the_error_of_their_log_softmax(sequences: list[ScoredTokens]) -> None:
    """It is computed in float32 from the logits: by the same amount, the band for reported values is another."""
    subject = ns.load("demo", dtype="float32")
    model: Any = subject.model
    few = sequences[:2]
    with_report, of_logits = (
        run_rounded(model, few, seeds=(0,), batch=1, anatomy=subject.anatomy, blocks=False, reported=one)
        for one in (True, False)
    )
    with torch.no_grad():
        for row, one in enumerate(few):
            logits = model(torch.tensor([one.ids])).logits[0, :-1]
            errors = logits.log_softmax(-1).double() - logits.double().log_softmax(-1)
            expected = errors.gather(1, torch.tensor(one.ids)[1:, None])[:, 0].numpy()
            added = with_report.differences[row][0] - of_logits.differences[row][0]
            np.testing.assert_allclose(added, expected, rtol=0, atol=1e-12)
            assert np.abs(expected).max() > 1e-8
