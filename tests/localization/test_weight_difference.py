"""A factor is named only where it explains the difference."""

from __future__ import annotations

import torch

from noisescope.localization.weight_difference import difference


def test_few_changed_elements_in_16_bits_are_no_factor():
    """A change of a few steps is within the rounding of any factor near 1."""
    stored = torch.linspace(0.5, 1.5, 96).bfloat16()
    found = stored.clone()
    found[40:42] *= torch.tensor([1.01, 0.98]).bfloat16()
    assert difference(found, stored).words.startswith("differs from the checkpoint in 2 of 96 elements")


def test_factors_and_offsets_of_all_elements_are_named():
    stored = torch.linspace(0.5, 1.5, 96).bfloat16()
    assert difference((stored.float() * 1.1).bfloat16(), stored).fault_class == "gain"
    assert difference(torch.linspace(0.5, 1.5, 96) + 1, torch.linspace(0.5, 1.5, 96)).fault_class == "bias"
