"""What was done to logits is read from the values: each setting alone, together, and from a few tokens of each row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from noisescope.engines.logprob_processing import CLOSE, find_processing, reported_rows
from noisescope.engines.protocol import Sampling

LOGITS = 3 * torch.randn(40, 50, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(0.7, processed=True),
        Sampling(1.5, processed=True),
        Sampling(top_k=5, processed=True),
        Sampling(top_p=0.9, processed=True),
        Sampling(0.7, top_k=8, processed=True),
        Sampling(0.7, top_p=0.95, processed=True),
    ],
)
@pytest.mark.parametrize("shown", [50, 12])
def test_settings_are_read_back(sampling, shown):
    """From all tokens, or from those that an engine lists; a share is known to what lies between two tokens."""
    rows = reported_rows(LOGITS, sampling)
    if shown < 50:
        last = rows.sort(-1, descending=True).values[:, shown - 1 : shown]
        rows = torch.where((rows >= last) & rows.isfinite(), rows, torch.nan)
    found = find_processing(rows, LOGITS)
    assert found.temperature == pytest.approx(sampling.temperature, rel=1e-3)
    assert found.top_k == sampling.top_k and found.top_p == pytest.approx(sampling.top_p, abs=0.02)
    assert found.off <= CLOSE and found.truncates == (sampling.top_k > 0 or sampling.top_p < 1)


@settings(max_examples=20)
@given(st.floats(0.3, 3.0))
def test_any_temperature(temperature):
    found = find_processing(reported_rows(LOGITS, Sampling(temperature, processed=True)), LOGITS)
    assert found.temperature == pytest.approx(temperature, rel=3e-3)


def test_probabilities_of_what_is_kept_sum_to_one():
    for sampling in (Sampling(top_k=3, processed=True), Sampling(0.5, 0.6, processed=True)):
        rows = reported_rows(LOGITS, sampling)
        assert torch.allclose(rows.exp().sum(-1), torch.ones(40, dtype=torch.float64))
        assert bool((rows == -torch.inf).any())
    assert int(reported_rows(LOGITS, Sampling(top_k=3, processed=True)).isfinite().sum(-1).max()) == 3


@pytest.mark.parametrize("base", [2, 10])
def test_the_base_of_logarithms_is_read_back(base):
    rows = reported_rows(LOGITS, Sampling())
    assert find_processing(rows / math.log(base), LOGITS).base == base
    assert find_processing(rows, LOGITS).base is None


def test_what_no_setting_explains_is_off():
    """A penalty on some tokens; logits in place of log-probabilities; and nothing at all."""
    penalised = (LOGITS.double() - 0.7 * (torch.arange(50) % 3 == 0)).log_softmax(-1)
    found = find_processing(penalised, LOGITS)
    assert found.off > 0.1 and not found.truncates
    assert find_processing(LOGITS + 2, LOGITS).unnormalised
    assert find_processing(torch.full((2, 50), math.nan), LOGITS[:2]).off == 0
