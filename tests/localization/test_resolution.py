"""The table of resolutions, and calls whose bounds are too wide to be judged."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from noisescope.localization.audit import audit
from noisescope.localization.resolution import MOST, ResolutionTable, in_one_line
from noisescope.localization.roundoff_floors import mean_bound
from noisescope.reports.locate_report import as_text, verdict_lines
from noisescope.testing import tiny_model


@pytest.fixture(scope="module")
def verdict():
    return audit(tiny_model("llama").bfloat16())


def test_every_class_has_a_row_with_its_bounds(verdict):
    rows = {(row.name, row.dtype): row for row in verdict.coverage.resolution}
    linear, norm = rows["Linear", "bfloat16"], rows["LlamaRMSNorm", "bfloat16"]
    assert 2**-10 < linear.smallest <= linear.largest < 2**-6  # about one rounding: 2^-8
    assert norm.driven is not None and norm.driven < norm.smallest and linear.driven is None
    assert rows["scaled_dot_product_attention", "bfloat16"].driven < 2**-9
    assert rows["LlamaMLP", "bfloat16"].largest == 0  # code between operators: to the bit
    assert all(row.not_judged == 0 and row.calls > 0 for row in rows.values())
    assert [row.largest for row in rows.values()] == sorted((row.largest for row in rows.values()), reverse=True)


def test_it_is_in_json_and_folded_in_pages_and_one_line_in_the_terminal(verdict):
    stored = verdict.to_dict()["coverage"]["resolution"]
    assert {row["name"] for row in stored} >= {"Linear", "LlamaRMSNorm", "LlamaMLP"}
    markdown, page = as_text(verdict, ".md"), as_text(verdict, ".html")
    assert "<details><summary>" in markdown and "| LlamaRMSNorm | bfloat16 |" in markdown
    assert "<details><summary>" in page and "LlamaRMSNorm" in page
    lines = list(verdict_lines(verdict))
    assert sum("kinds of calls are checked bit for bit" in line for line in lines) == 1
    assert not any("LlamaRMSNorm | bfloat16" in line for line in lines)


class Amplifier(nn.Module):
    """Differences of large exponentials: what 16 bits leave of them is mostly round-off."""

    def __init__(self):
        super().__init__()
        self.register_buffer("wrong", torch.tensor(0.0))

    def forward(self, x):
        large = torch.exp(x.tanh() + 3)
        return (large + 0.5 * x) - torch.exp(x.tanh() + 3) + self.wrong


def test_a_bound_above_five_per_cent_is_not_judged(blocks_around):
    """On another device the bits differ, within such a bound: that says nothing, and coverage names the class."""
    model = blocks_around(Amplifier()).bfloat16()
    inner = model.layers[0].inner
    batch = {"x": torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).bfloat16()}
    assert not audit(model, batch).coverage.not_judged  # the same bits as the host's
    inner.forward = lambda x: type(inner).forward(inner, x) + 2**-6
    found = audit(model, batch)
    named = [each for each in found.coverage.not_judged if each.module_class == "Amplifier"]
    assert named and "rounding may explain" in named[0].reason and not found.suspects
    row = next(row for row in found.coverage.resolution if row.name == "Amplifier")
    assert row.not_judged > 0 and row.largest > MOST


def test_mean_bound_counts_each_element_up_to_the_rms():
    values = torch.tensor([3.0, -3.0, 3.0, -3.0], dtype=torch.float64)
    assert mean_bound(torch.full((4,), 0.03), values) == pytest.approx(0.01)
    assert mean_bound(torch.tensor([math.inf, 0.0, 0.0, 0.0]), values) == pytest.approx(0.25)
    assert mean_bound(torch.zeros(4), torch.zeros(4)) == 0.0


def test_mean_bound_leaves_out_what_is_not_finite():
    """NaN on both sides has no bound, and that of the other elements stays what it is."""
    values = torch.tensor([3.0, math.nan, -3.0, math.inf], dtype=torch.float64)
    assert mean_bound(torch.tensor([0.03, math.nan, 0.03, math.inf]), values) == pytest.approx(0.01)
    assert mean_bound(torch.full((2,), math.nan), torch.full((2,), math.nan)) == 0.0


def test_the_table_keeps_what_was_not_judged_apart():
    table = ResolutionTable()
    assert table.add("Linear", torch.bfloat16, 0.004) and not table.add("Linear", torch.bfloat16, 0.2)
    assert table.add("Scan", torch.bfloat16, 0.3, equal=True)  # the host's own bits are right whatever the bound
    table.add_driven("Linear", torch.bfloat16, 0.001)
    scan, linear = table.rows()
    assert (linear.calls, linear.not_judged, linear.smallest, linear.largest) == (1, 1, 0.004, 0.004)
    assert (linear.dtype, linear.driven) == ("bfloat16", 0.001) and scan.largest == 0.3
    assert in_one_line(table.rows()) == (
        "0 of 2 kinds of calls are checked bit for bit; in the others, errors below 30 % of the output can hide in "
        "rounding (worst: Scan in bfloat16); inside 16-bit operators, errors below 0.1 % can hide"
    )
    assert in_one_line(()) == ""
