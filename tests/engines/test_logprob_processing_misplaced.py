"""Token values against their own distributions."""

from __future__ import annotations

import pytest
import torch

from noisescope.engines.logprob_processing import TokenValues, find_misplaced, mend_tokens

EXPECTED = -3 * torch.rand(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1


@pytest.mark.parametrize("shift", [1, -1, 2, -2])
def test_a_shift_is_found_and_mended(shift):
    moved = EXPECTED.roll(shift)
    found = find_misplaced(moved, EXPECTED)
    assert found == TokenValues(shift)
    mended = mend_tokens(moved, found)
    known = ~mended.isnan()
    assert int(known.sum()) == 30 - abs(shift) and torch.equal(mended[known], EXPECTED[known])


def test_values_in_their_places_are_left_alone():
    """Also with the round-off of another engine, and where a token is certain: 0 is its log-probability."""
    assert find_misplaced(EXPECTED + 1e-5, EXPECTED) == TokenValues()
    certain = torch.cat((EXPECTED, torch.zeros(3)))
    assert find_misplaced(certain, certain) == TokenValues()


def test_missing_values():
    zeros, gaps = EXPECTED.clone(), EXPECTED.clone()
    zeros[::5], gaps[::5] = 0.0, torch.nan
    assert find_misplaced(zeros, EXPECTED) == TokenValues(0, 6, zeros=True)
    assert find_misplaced(gaps, EXPECTED) == TokenValues(0, 6)
    assert mend_tokens(zeros, TokenValues(0, 6, zeros=True)).isnan().sum() == 6
