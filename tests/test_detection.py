"""The fault-finding benchmark: its grid covers what it says, stays blind, and its tallies are right."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import noisescope as ns
from noisescope.faults import FAMILIES, Bias, Gain, Where, faulty
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.model.loading import wrap
from noisescope.sites import Site
from noisescope.testing import tiny_model


@pytest.fixture(scope="module")
def bench(benchmark_module):
    return benchmark_module("detection")


@pytest.fixture(scope="module")
def cells_of(benchmark_module):
    return benchmark_module("detection_grid")


@pytest.fixture(scope="module")
def tables(benchmark_module):
    return benchmark_module("detection_tables")


@pytest.fixture(scope="module")
def subject():
    return wrap(tiny_model("llama", layers=4))


@pytest.fixture(scope="module")
def cells(cells_of, subject):
    return cells_of.grid({"tiny:llama": subject.anatomy}, ["float32"], tiny=())


@pytest.fixture(scope="module")
def sample(cells):
    return cells[:70]


def verdict_of(site: Site, fault_class: str) -> Verdict:
    return Verdict("faulty", "fake", (Suspect(site, fault_class, 0.9, "it said so", 1.0),), forwards=1.0)


def run(bench, cells, locator, tmp_path, subject, tag="a"):
    return bench.run(cells, {"fake": locator}, tmp_path / "runs.jsonl", tag, lambda model, dtype: subject)


# -- the grid


def test_every_family_operator_layer_and_dtype_occurs(cells_of, subject):
    """Nothing of the grid's axes is left out, and each cell is there once."""
    found = cells_of.grid({"tiny:llama": subject.anatomy}, tiny=["gpt2"])
    faults = [cell for cell in found if cell.fault]
    assert len({cell.id for cell in found}) == len(found)
    assert {cell.fault.family for cell in faults} == set(FAMILIES) == set(cells_of.SIZES)
    assert {cell.dtype for cell in faults} == set(cells_of.DTYPES)
    assert {cell.where.place for cell in faults} == {0, 1, 2, 3, "embed", "final_norm", "lm_head"}
    assert {cell.where.operator for cell in faults} == subject.anatomy.operators()
    notes = {(c.fault.family, c.where.place, c.density, c.severity) for c in faults if c.part == "notes"}
    assert len(notes) == 4 * 2 * sum(len(cells_of.SIZES[family]) for family in cells_of.NOTES)
    assert len({cell.fault.seed for cell in faults}) > 0.99 * len(faults)


def test_one_cell_in_five_is_a_healthy_control(cells_of, subject, cells):
    """Controls are enough, differ in prompt, and the whole grid of the demo model has over two hundred."""
    controls = [cell for cell in cells if cell.fault is None]
    assert len(controls) >= len(cells) / 5 and len({cell.prompt for cell in controls}) == len(controls)
    demo = cells_of.grid({"demo": ns.load("demo").anatomy})
    assert sum(cell.fault is None for cell in demo) >= max(200, len(demo) / 5)


def test_the_order_is_shuffled_and_always_the_same(cells_of, subject, cells):
    """A prefix of the order is a mixture, and another call gives the same."""
    assert cells == cells_of.grid({"tiny:llama": subject.anatomy}, ["float32"], tiny=())
    assert len({cell.part for cell in cells[:30]}) == 3
    assert len({cell.fault.family for cell in cells[:80] if cell.fault}) > 10


def test_quick_is_a_fixed_part_of_the_same_cells(cells_of, cells):
    """About one cell in twenty, whatever else is in the grid."""
    quick = [cell for cell in cells if cells_of.is_quick(cell)]
    assert 0.02 < len(quick) / len(cells) < 0.09
    assert quick == [cell for cell in cells[::-1] if cells_of.is_quick(cell)][::-1]


def test_a_sample_is_spread_over_families_dtypes_and_operators(cells_of, subject):
    """Every family and dtype before any has two; notes in every size and density; controls on every model."""
    found = cells_of.grid({"tiny:llama": subject.anatomy}, tiny=["gpt2"])
    few = cells_of.sample(found, 90)
    operators = [cell for cell in few if cell.part == "operators"]
    assert len(operators) == 90
    assert {(c.fault.family, c.dtype) for c in operators} == {(f, d) for f in FAMILIES for d in cells_of.DTYPES}
    assert len({cell.where.operator for cell in operators}) >= 6
    notes = {(c.fault.family, c.density, c.severity) for c in few if c.part == "notes"}
    assert len(notes) == 2 * sum(len(cells_of.SIZES[family]) for family in cells_of.NOTES)
    controls = {(cell.model, cell.dtype) for cell in few if cell.part == "control"}
    assert controls == {(model, dtype) for model in ("tiny:gpt2", "tiny:llama") for dtype in cells_of.DTYPES}
    assert few == cells_of.sample(found, 90)
    assert set(cells_of.sample(found, len(found))) == set(found)


# -- runs


def test_a_locator_that_cheats_scores_everything(bench, tables, sample, subject, tmp_path, monkeypatch):
    """Who can see the open fault names place, operator, module and class each time, and raises no false alarm."""
    opened = []

    @contextlib.contextmanager
    def spied(model, fault, where, **kwargs):
        with faulty(model, fault, where, **kwargs) as scope:
            opened.append((fault, where))
            try:
                yield scope
            finally:
                opened.clear()

    def cheat(model, inputs, seed):
        for batch in bench.batches_for(model.model, None, inputs, seed):
            model.model(**batch)
        if not opened:
            return Verdict("healthy", "fake", forwards=2.0)
        ((fault, where),) = opened
        return verdict_of(
            Site(where.operator, where.place, where.module, occurrence=where.occurrence), fault.fault_class
        )

    monkeypatch.setattr(bench, "faulty", spied)
    rows = run(bench, sample, cheat, tmp_path, subject)
    found = tables.summary(rows, "fake")
    assert found["crashed"] == 0 and found["faults"]["n"] > 35 and found["controls"]["n"] > 8
    for name in ("top1_place", "top1_operator", "top1_module", "top3_place", "class_right"):
        assert found["faults"][name] == 1.0
    assert found["controls"]["false_alarms"] == 0
    assert all(row["limit"] is not None for row in found["limits"])
    assert all(set(said) == {wanted} for wanted, said in found["confusion"].items())


def test_a_locator_that_knows_nothing_scores_near_nothing(bench, tables, sample, subject, tmp_path):
    """Who draws a site and a class by chance is right by chance, and blames every healthy run."""
    draw = random.Random(0)
    sites = [unit.site(operator) for unit in subject.anatomy.units for operator in unit.operators]

    def guess(model, inputs, seed):
        with torch.no_grad():
            model.model(**bench.batches_for(model.model, None, inputs, seed)[0])
        return verdict_of(draw.choice(sites), draw.choice(["noise", "gain", "bias", "spike"]))

    found = tables.summary(run(bench, sample, guess, tmp_path, subject), "fake")
    assert found["faults"]["top1_operator"] < 0.2 and found["faults"]["top1_module"] < 0.1
    assert found["faults"]["class_right"] < 0.4
    assert found["controls"]["false_alarms"] == found["controls"]["n"] and found["controls"]["bound_95"] == 1.0
    assert found["no_ops"]["healthy"] == 0


def test_a_run_goes_on_where_it_stopped(bench, sample, subject, tmp_path):
    """Rows in the store are not run again, but under another tag they are; a line cut off is run again."""
    asked = []

    def count(model, inputs, seed):
        asked.append(seed)
        with torch.no_grad():
            model.model(**bench.batches_for(model.model, None, inputs, seed)[0])
        return Verdict("healthy", "fake")

    first = run(bench, sample[:6], count, tmp_path, subject)
    assert len(asked) == 6
    assert run(bench, sample[:8], count, tmp_path, subject)[:6] == first and len(asked) == 8
    store = tmp_path / "runs.jsonl"
    store.write_text(store.read_text()[:-20])
    run(bench, sample[:8], count, tmp_path, subject)
    assert len(asked) == 9
    run(bench, sample[:8], count, tmp_path, subject, tag="b")
    assert len(asked) == 17


def test_a_locator_that_crashes_is_a_row(bench, tables, sample, subject, tmp_path):
    """A crash is counted, as a miss on faults, and never as healthy."""

    def broken(model, inputs, seed):
        model.model(**bench.batches_for(model.model, None, inputs, seed)[0])
        raise RuntimeError("out of luck")

    rows = run(bench, sample[:20], broken, tmp_path, subject)
    found = tables.summary(rows, "fake")
    assert found["crashed"] == 20 - found["refused"] and found["faults"]["top1_place"] == 0.0
    assert "out of luck" in rows[0]["error"] and len(tables.failures(rows)) >= found["faults"]["n"]


# -- effects and tallies


def effect(bench, cells_of, subject, fault):
    cell = cells_of.Cell("tiny:llama", "float32", "operators", 0, fault, Where(1, "linear", "*down_proj"), "dense")
    return bench.effect_of(cell, subject, bench.batches_for(subject.model, None, None, 0))


def test_the_effect_is_that_at_the_operator(bench, cells_of, tables, subject):
    """A gain of 1 % is 1 % in rms and two hundred thousand units in the last place; a bias of 0 is nothing."""
    found = effect(bench, cells_of, subject, Gain(0.01))
    assert found["rms"] == pytest.approx(0.01, rel=1e-4) and found["elements"] == 3 * 2 * 32 * 32
    assert 0.01 * 2**23 < found["max_ulp"] < 0.0101 * 2**24 and found["mean_ulp"] == pytest.approx(4)
    nothing = effect(bench, cells_of, subject, Bias(0.0))
    assert nothing["changed"] == nothing["max_ulp"] == nothing["rms"] == 0
    assert tables.counts({"changed": 1, "effect": found}) and not tables.counts({"changed": 0, "effect": nothing})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_ulp_is_the_step_to_the_next_number(dtype, benchmark_module):
    """At numbers of every size, zero, subnormal ones and powers of two among them."""
    tiny = torch.finfo(dtype).tiny
    x = torch.tensor([0.0, 1.0, 1.5, 2.0, 3e-5, 300.0, tiny, tiny / 4], dtype=dtype)
    step = torch.nextafter(x, torch.full_like(x, math.inf)).double() - x.double()
    assert torch.equal(benchmark_module("detection_effect").ulp(x.double(), dtype), step)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, False),
        ({"max_ulp": 4.5}, True),
        ({"mean_ulp": -0.5}, True),
        ({"mean_ulp": 0.01}, False),
        ({"rms_ulp": 0.3}, True),
        ({"rms_ulp": 0.05}, False),
    ],
)
def test_what_counts_is_over_four_ulp_or_significant(tables, changes, wanted):
    """One ulp in a few elements need not be found; half an ulp along the sign in all of them must."""
    plain = {"elements": 10_000, "max_ulp": 1.0, "mean_ulp": 0.0, "rms_ulp": 0.0}
    assert tables.counts({"changed": 3, "effect": plain | changes}) is wanted


def test_no_alarm_in_two_hundred_runs_bounds_the_rate_at_one_and_a_half_percent(tables):
    """The figure that is quoted."""
    assert tables.upper_bound(0, 200) == pytest.approx(0.0149, abs=1e-4)
    assert tables.upper_bound(0, 0) == tables.upper_bound(3, 3) == 1.0


@given(st.integers(1, 400), st.data())
def test_the_bound_lies_above_the_share_and_falls_with_n(tables, n, data):
    """As a limit of a proportion must."""
    hits = data.draw(st.integers(0, n - 1))
    assert hits / n < tables.upper_bound(hits, n) <= 1
    assert tables.upper_bound(hits, n + 1) < tables.upper_bound(hits, n)


def test_the_limit_is_the_mildest_size_from_which_on_all_is_found(tables):
    """A lucky hit below a miss does not lower it."""
    found = [True, False, True, True]
    rows = [
        {"family": "gain", "dtype": "float32", "severity": severity, "size": str(severity), "top1_operator": hit}
        for severity, hit in enumerate(found)
        for _ in range(5)
    ]
    assert tables.limits(rows) == [{"family": "gain", "dtype": "float32", "limit": "2", "n": 10}]
    assert tables.limits(rows[5:10])[0]["limit"] is None
