"""Quantiles of channels in memory that does not grow."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import noisescope as ns
from noisescope.probe.capture import BINS, ChannelStatistics, LogHistogram, capture


@settings(max_examples=30)
@given(st.integers(0, 10_000), st.sampled_from([0.5, 0.9, 0.99]), st.floats(1e-5, 1e4))
def test_quantiles_are_right_to_a_bin(seed: int, q: float, size: float) -> None:
    """Normal values of any size: within a bin's width of the exact quantile, and closer on average."""
    x = torch.randn(4000, 3, generator=torch.Generator().manual_seed(seed)) * size
    histogram = LogHistogram(3, x.device)
    for part in x.split(700):
        histogram.add(part)
    exact = x.abs().double().quantile(q, dim=0)
    assert torch.allclose(histogram.quantile(q), exact, rtol=0.2)


def test_zeros_and_giants_have_bins() -> None:
    """Exact zeros lie below every quantile bin, numbers beyond the range above all; NaN counts as above."""
    histogram = LogHistogram(1, torch.device("cpu"))
    histogram.add(torch.tensor([[0.0], [0.0], [0.0], [1e30], [float("nan")]]))
    assert int(histogram.counts.sum()) == 5 and int(histogram.counts[0, 0]) == 3
    assert float(histogram.quantile(0.5)) == 0.0 and int(histogram.counts[0, BINS - 1]) == 2


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_share_below(share: float) -> None:
    """Sparsity: small values are told from others by an absolute size."""
    x = torch.ones(1000, 2)
    x[: int(1000 * share)] = 1e-9
    histogram = LogHistogram(2, x.device)
    histogram.add(x)
    assert histogram.share_below(1e-6) == pytest.approx(share, abs=0.01)
    assert histogram.share_below(0.0) == 0.0


def test_relative_sparsity_sees_what_an_absolute_threshold_misses() -> None:
    """Values of 1e-3 beside values of 1: an absolute 1e-6 finds nothing, 1 % of the rms finds them."""
    x = torch.ones(100, 4)
    x[:60] = 1e-3
    statistics = ChannelStatistics(histogram=LogHistogram(4, x.device))
    statistics.add(x)
    assert statistics.histogram is not None
    statistics.histogram.add(x)
    assert statistics.histogram.share_below(1e-6) == 0.0
    assert statistics.relative_sparsity() == pytest.approx(0.6, abs=0.01)


def test_capture_keeps_quantiles_of_the_samples_chosen(llama: torch.nn.Module) -> None:
    """Masked tokens and samples left out are not in the histogram; statistics still see all samples."""
    scope = capture(llama, operators={"linear"}, layers={0}, quantiles=True)
    with scope as captured, torch.no_grad():
        scope.tokens(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))
        scope.quantile_rows(torch.tensor([True, False]))
        llama(torch.arange(1, 9).reshape(2, 4))
    for statistics in captured.statistics.values():
        assert statistics.count == 7 and statistics.histogram is not None
        assert int(statistics.histogram.counts.sum()) == 3 * statistics.histogram.counts.shape[0]


def test_what_was_captured_is_freed_without_the_garbage_collector(llama: torch.nn.Module) -> None:
    """On a GPU, tensors in a cycle of references would stay until it runs."""
    gc.disable()
    try:
        with torch.no_grad(), ns.capture(llama, operators={"linear"}, keep="both") as captured:
            llama(torch.arange(1, 7)[None])
        kept = [weakref.ref(y) for pairs in captured.raw.values() for _, y in pairs]
        assert kept
        del captured
        assert all(found() is None for found in kept)
    finally:
        gc.enable()
