"""Two devices compared: where they diverge, round-off that is called so, limits that hold, and costs in nats."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

import noisescope as ns
from noisescope.comparison.compare import Comparison, compare_records, describe, verdict_of
from noisescope.comparison.priorities import difference_costs
from noisescope.comparison.rows import Logits
from noisescope.diagnosis.report import Cost, DataFacts, Diagnosis, ModelFacts, Run, SettingsFacts
from noisescope.diagnosis.rows import CellEffect, Divergence, LayerAnalysis, LayerEffect
from noisescope.diagnosis.section_types import ExecutiveSummary, Metrics, PlainWords, PrimaryMetrics, SecondaryMetrics
from noisescope.errors import InvalidInput
from noisescope.findings import Risk
from noisescope.jsonform import from_json
from noisescope.stats import Estimate
from noisescope.testing import tiny_model
from noisescope.trials import Conditions

LAYERS = 4
PROMPTS = [[(7 * p + 5 * t) % 60 + 3 for t in range(32)] for p in range(8)]


@pytest.fixture(scope="module")
def subject():
    return ns.wrap(tiny_model("llama", layers=LAYERS))


@pytest.fixture(scope="module")
def good(subject, tmp_path_factory):
    return ns.record(subject, output=tmp_path_factory.mktemp("good") / "a", prompts=PROMPTS, detail="full")


@pytest.fixture
def broken(subject, tmp_path):
    """Records the model with a fault in it."""

    def record(fault: str, **options):
        with ns.faulty(subject.model, fault, anatomy=subject.anatomy):
            return ns.record(subject, output=tmp_path / f"{len(list(tmp_path.iterdir()))}", prompts=PROMPTS, **options)

    return record


def test_a_device_is_identical_to_itself(subject, good, tmp_path):
    """No site diverges, whatever the batches; nothing costs anything."""
    again = ns.record(subject, output=tmp_path / "b", prompts=PROMPTS, detail="full", batch=8)
    found = ns.compare(good, again, max_mape=0.0)
    assert (found.verdict, found.first, found.passed) == ("identical", None, True)
    assert found.logits == Logits(kl=0.0, worst_kl=0.0, agreement=1.0, max_error=0.0, n=8, nonfinite=0)
    assert found.tokens == () and len(found.sites) == len(good.sites) and found.words.endswith("in every element.")
    assert (found.undecided, found.outcome) == (0, "pass")


@pytest.mark.parametrize("detail", ["sketch", "full"])
@pytest.mark.parametrize("scale", [3e-7, 1e-6])
def test_round_off_is_called_round_off(subject, good, tmp_path, detail, scale):
    """Errors of a few ulps in every operator grow from layer to layer and diverge nowhere.

    The words say from which size on a fault would have been seen.
    """
    noise = ns.Injection(ns.Gaussian(scale), operators={"linear", "norm", "silu"}, seed=1)
    with ns.inject(subject.model, noise):
        other = ns.record(subject, output=tmp_path / "b", prompts=PROMPTS, detail=detail, batch=3)
    found = ns.compare(good, other)
    assert found.verdict == "round-off" and "looks like round-off: in float32" in found.words
    assert [block.layer for block in found.blocks] == list(range(LAYERS))
    assert 0 < found.blocks[-1].relative_l2 < 20 * scale
    least, most = (f(row.smallest_detectable for row in found.sites) for f in (min, max))
    assert least == pytest.approx(3 * 32 * 2.0**-24) and most >= 3 * found.blocks[-2].relative_l2
    assert (
        f"detected if it adds a relative L2 above {least:.2g}" in found.words
        and ("a gain common to all elements if") in found.words
    )


FAULTS = [
    ("gain:0.01@2/linear/down_proj", (2, "linear", "model.layers.2.mlp.down_proj")),
    ("bias:0.3@0/linear/q_proj", (0, "linear", "model.layers.0.self_attn.q_proj")),
    ("dead_zone:0.3@1", (1, "residual", "model.layers.1")),
    ("exp_table@3/softmax", (3, "attention", "model.layers.3.self_attn")),
    ("gain:0.01@1/silu", (1, "silu", "model.layers.1.mlp.act_fn")),
    ("gain:0.01@2/norm/post_attention_layernorm", (2, "norm", "model.layers.2.post_attention_layernorm")),
    ("swapped_channels@lm_head", (("lm_head"), "linear", "lm_head")),
]


@pytest.mark.parametrize(("fault", "where"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_a_fault_on_one_side_is_named(good, broken, fault, where):
    """Layer, operator and module, from sketches alone and from whole tensors."""
    for detail in ("sketch", "full"):
        found = ns.compare(good, broken(fault, detail=detail))
        assert found.verdict == "diverged"
        assert (found.first.site.place, found.first.site.operator, found.first.site.module) == where
        assert str(found.first.site) in found.words


@pytest.mark.parametrize("detail", ["sketch", "full"])
def test_a_gain_is_named_in_16_bits(tmp_path, detail):
    """Round-off of percents hides it by size, but round-off has no gain; without the fault nothing diverges."""
    subject = ns.wrap(tiny_model("llama", layers=LAYERS).bfloat16())
    good = ns.record(subject, output=tmp_path / "good", prompts=PROMPTS, detail=detail)
    noise = ns.Injection(ns.Gaussian(0.006), operators={"linear", "norm", "silu"}, seed=1)
    with ns.inject(subject.model, noise):
        other = ns.record(subject, output=tmp_path / "other", prompts=PROMPTS, detail=detail)
        with ns.faulty(subject.model, "gain:0.02@2/linear/down_proj", anatomy=subject.anatomy):
            bad = ns.record(subject, output=tmp_path / "bad", prompts=PROMPTS, detail=detail)
    healthy, found = ns.compare(good, other), ns.compare(good, bad)
    assert healthy.verdict == "round-off" and healthy.blocks[-1].relative_l2 > 0.007
    first = found.first
    assert first.site.module == "model.layers.2.mlp.down_proj" and first.too_large and not first.too_far
    assert first.gain == pytest.approx(0.02, abs=0.004) and "a gain of +" in found.words


def test_errors_at_random_are_no_gain(good, broken):
    """A part of a large error may lie along the reference by chance; the size alone decides then."""
    rows = ns.compare(good, broken("noise:0.3@2/linear/down_proj", detail="full")).sites
    named = next(row for row in rows if row.diverges)
    assert named.too_far and not named.too_large and named.gain == 0


def test_sketches_agree_with_whole_tensors(good, broken):
    """Relative L2 and cosine of every site that differs, within 10 % and 0.01."""
    other = broken("gain:0.05@1/linear/down_proj", detail="full")
    exact = ns.compare(good, other)
    sketched = ns.compare(good, broken("gain:0.05@1/linear/down_proj"))
    pairs = [(a, b) for a, b in zip(exact.sites, sketched.sites, strict=True) if a.relative_l2 > 0]
    assert len(pairs) > 20 and all(b.mae is None and b.relative_error < 0.07 for _, b in pairs)
    errors = [b.relative_l2 / a.relative_l2 - 1 for a, b in pairs]
    assert max(map(abs, errors)) < 0.2 and np.sqrt(np.mean(np.square(errors))) < 0.1  # 248 numbers a site


@dataclass(frozen=True)
class NaNFromToken20:
    """In the last prompt of a batch."""

    def __call__(self, t, draw):
        t = t.clone()
        t[-1, 20:] = float("nan")
        return t


@pytest.fixture(scope="module")
def with_nan(subject, tmp_path_factory):
    """Records of the model with NaN in layer 2's down_proj (prompts 3 and 7 of 8), by detail."""
    nan = ns.Injection(NaNFromToken20(), operators={"linear"}, modules=("model.layers.2.mlp.down_proj",))
    folder = tmp_path_factory.mktemp("nan")
    with ns.inject(subject.model, nan):
        return {
            detail: ns.record(subject, output=folder / detail, prompts=PROMPTS, detail=detail, batch=4)
            for detail in ("sketch", "full")
        }


@pytest.mark.parametrize("detail", ["sketch", "full"])
def test_nan_on_one_side_is_critical(subject, good, with_nan, detail):
    """It diverges, has no figure but its count, is first to fix and within no tolerance; JSON stays JSON."""
    found = ns.compare(
        good, with_nan[detail], sensitivity=report(good.model), max_mape=10 if detail == "full" else None
    )
    row, width = found.first, subject.model.config.hidden_size
    assert found.verdict == "diverged" and found.first.site.module == "model.layers.2.mlp.down_proj"
    count, of = (24 * width, f"of {256 * width} elements") if detail == "full" else (2, "prompts")
    assert f"{count} {of} are NaN or infinite on one side only, which is critical" in found.words
    assert row.critical and row.diverges and set(vars(row.bands).values()) == {"not measurable"}
    assert {row.mae, row.mape, row.pearson, row.relative_l2} == {None} and row.infinite
    assert row.nonfinite == count
    crossing = found.sensitivity
    assert [(cell.layer, cell.operator) for cell in crossing.fix_first[:2]] == [(2, "linear"), (2, "residual")]
    within = {row.layer: (row.within, row.unmeasurable > 0) for row in crossing.tolerances}
    assert within == {0: (True, False), 1: (True, False), 2: (False, True), 3: (False, True)}
    assert found.passed in (False, None) and found.logits.nonfinite == 2 and "2 more have NaN" in found.words
    assert found.tokens[0].nonfinite and (found.tokens[0].prompt, found.tokens[0].token) == (3, 20)
    assert from_json(Comparison, json.loads(found.to_json())) == found


def test_nan_on_both_sides_is_reported(subject, with_nan):
    """With its count, and not as round-off; the finite rest is compared."""
    full, width = with_nan["full"], subject.model.config.hidden_size
    found = ns.compare(full, full, max_mape=0.05)
    assert found.verdict == "identical" and found.passed is True and found.first is None
    assert "were ignored at" in found.words and found.undecided == 0
    assert f"{24 * width} of {256 * width} elements at linear at block 2" in found.words
    sketched = ns.compare(with_nan["sketch"], with_nan["sketch"])
    assert "2 prompts at linear at block 2" in sketched.words


def test_what_has_nothing_finite_is_undecided(subject, tmp_path):
    """NaN everywhere on both sides from some layer on: these sites are counted, and the others decide.

    Where no site is left that decides, the verdict and the limit are undecided: neither round-off nor passed.
    """
    hook = subject.model.get_submodule("model.layers.2").register_forward_hook(lambda module, args, y: y * math.nan)
    record = ns.record(subject, output=tmp_path / "x", prompts=PROMPTS, detail="full")
    hook.remove()
    found = ns.compare(record, record, max_mape=0.05, sensitivity=report(record.model))
    lost = sum(site.place in (3, "final_norm", "lm_head") for site in record.sites)
    assert (found.verdict, found.passed, found.undecided) == ("identical", True, lost)
    assert f"{lost} of {len(record.sites)} sites are undecided, norm at block 3" in found.words
    assert [row.within for row in found.sensitivity.tolerances] == [True, True, True, None]
    assert found.logits.nonfinite == 8 and found.logits.kl is None and found.tokens == ()
    here = ns.compare(record, record, layers=[3], max_mape=0.05)
    assert (here.worst_mape, here.passed, here.outcome) == (None, None, "undecided")
    nowhere = replace(found.sites[-1], nonfinite_both=7)
    assert verdict_of([nowhere], None) == "undecided"
    assert describe([nowhere], None, "float32", 1).startswith("None of the 1 sites has finite values on both")


def test_batches_do_not_change_the_mape(subject, tmp_path):
    """The floor is a tenth of the rms over all prompts, though they were recorded one by one."""
    good = ns.record(subject, output=tmp_path / "a", prompts=PROMPTS, detail="full", batch=1)
    with ns.faulty(subject.model, "gain:0.2@2/linear/down_proj", anatomy=subject.anatomy):
        bad = ns.record(subject, output=tmp_path / "b", prompts=PROMPTS, detail="full", batch=1)
    for number, row in enumerate(ns.compare(good, bad).sites):
        a, b = (record.whole(number, 0, len(PROMPTS)).values.astype(np.float64) for record in (good, bad))
        expected = (np.abs(a - b) / np.maximum(np.abs(a), 0.1 * np.sqrt((a * a).mean()))).mean()
        assert row.mape == pytest.approx(expected)


def test_the_mape_decides(good, broken):
    """Of the chosen layers, where whole tensors are; a sketch is no pass."""
    other = broken("gain:0.2@2/linear/down_proj", full_layers={1, 2})
    assert ns.compare(good, other, layers=[1], max_mape=0.05).passed is True
    found = ns.compare(good, other, layers=[2], max_mape=0.05)
    assert found.passed is False and found.worst_mape > 0.05 and found.worst_mape_site.place == 2
    assert {row.place for row in found.sites} == {2} and found.outcome == "fail"
    partly = ns.compare(good, other, max_mape=0.05)
    assert partly.passed is False and any("the others were recorded as sketches" in note for note in partly.notes)
    with pytest.raises(InvalidInput, match="MAPE needs full tensors"):
        ns.compare(good, other, layers=[3], max_mape=0.05)
    for layers in ([9], [1, 9]):
        with pytest.raises(
            InvalidInput, match="no site of layers 9 is in both records: choose from the blocks 0, 1, 2, 3"
        ):
            ns.compare(good, other, layers=layers, max_mape=0.05)
    with pytest.raises(InvalidInput, match="no layers selected: choose from the blocks 0, 1, 2, 3"):
        compare_records(good, other, layers=[])
    for limit in (math.nan, math.inf, -0.1):
        with pytest.raises(InvalidInput, match="at least 0, such as"):
            compare_records(good, other, max_mape=limit)


def test_sites_of_another_shape_do_not_pass(good, subject, tmp_path):
    """They are named, and the limit does not hold for their layer; where the rest is alike, words say so."""
    record = ns.record(subject, output=tmp_path / "b", prompts=PROMPTS, detail="full", batch=8)
    lost = next(at for at, site in enumerate(record.sites) if site.module == "model.layers.1.self_attn.q_proj")
    (batch,) = record.batches

    def cut(name):
        found = batch.read(name)
        return replace(found, values=found.values[..., :-1]) if name == f"{lost}.output" else found

    other = replace(record, batches=(replace(batch, read=lambda n: None if n in ("sketch", "size") else cut(n)),))
    found = ns.compare(good, other, max_mape=0.05)
    assert found.passed is False and found.worst_mape == 0
    assert [site.module for site in found.uncompared] == ["model.layers.1.self_attn.q_proj"]
    assert f"{len(good.sites) - 1} of {len(good.sites)} sites could be compared" in found.words
    assert any("1 sites were not compared" in note and "q_proj" in note for note in found.notes)
    assert found.uncompared[0].place == 1 and len(found.sites) == len(good.sites) - 1
    assert ns.compare(good, other, layers=[1], max_mape=0.05).passed is False
    assert ns.compare(good, other, layers=[2], max_mape=0.05).passed is True


def without(record, *modules):
    """A record that lacks some sites: its tensors are found by the numbers that are left."""
    kept = [number for number, site in enumerate(record.sites) if site.module not in modules]

    def read(batch, name):
        number, dot, tensor = name.partition(".")
        found = batch.read(f"{kept[int(number)]}.{tensor}" if dot else name)
        return replace(found, values=found.values[kept]) if name in ("sketch", "size") else found

    batches = tuple(replace(batch, read=partial(read, batch)) for batch in record.batches)
    return replace(record, sites=tuple(record.sites[number] for number in kept), batches=batches)


@pytest.mark.parametrize("swapped", [False, True])
def test_sites_that_one_side_lacks_do_not_pass(good, swapped):
    """On either side, in their layer; the words say how many were compared before they say identical."""
    lost = ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj")
    pair = (good, without(good, *lost))
    pair = pair[::-1] if swapped else pair
    found = ns.compare(*pair, max_mape=0.05)
    assert found.passed is False and found.worst_mape == 0
    assert [site.module for site in found.uncompared] == list(lost)
    total = len(good.sites)
    assert found.words.startswith("The sites that could be compared are identical")
    assert f"{total - 2} of {total} sites could be compared" in found.words
    assert any("2 sites were not compared" in note and "down_proj" in note for note in found.notes)
    assert ns.compare(*pair, layers=[1], max_mape=0.05).passed is False
    assert ns.compare(*pair, layers=[2], max_mape=0.05).passed is True


def test_attention_taken_apart_is_not_missing(subject, good, tmp_path):
    """One side has fused calls, the other none at all, which is no fault; one fused call that lacks is."""
    subject.model.set_attn_implementation("eager")
    other = ns.record(subject, output=tmp_path / "eager", prompts=PROMPTS, detail="full")
    subject.model.set_attn_implementation("sdpa")
    assert len(other.sites) == len(good.sites) - LAYERS
    for pair in ((good, other), (other, good)):
        found = ns.compare(*pair, max_mape=0.05)
        assert found.passed is True and found.uncompared == ()
        assert f"{len(other.sites)} of {len(good.sites)} sites could be compared" in found.words
    assert ns.compare(good, without(good, "model.layers.1.self_attn"), max_mape=0.05).passed is False


def test_an_error_is_put_beside_what_came_in(subject, good, broken, tmp_path):
    """Beside round-off where nothing did, and never said to be that many times nothing."""
    words = ns.compare(good, broken("gain:0.5@2/linear/down_proj", detail="full")).words
    assert "times round-off" in words and "error of its inputs" not in words
    noise = ns.Injection(ns.Gaussian(1e-4), operators={"embedding"}, seed=1)
    with ns.inject(subject.model, noise):
        noisy = ns.record(subject, output=tmp_path / "noisy", prompts=PROMPTS, detail="full")
        worse = broken("gain:0.5@2/linear/down_proj", detail="full")
    rows = ns.compare(good, worse).sites
    assert "times round-off" in ns.compare(good, noisy).words
    later = next(row for row in rows if row.site.module == "model.layers.2.mlp.down_proj")
    assert "times the error of its inputs" in describe([later], None, "float32", 1)


def test_few_numbers_show_no_gain(subject, tmp_path):
    """It is not known then, which is not the same as none, and a note says what to do."""
    few, enough = ([prompt[:16] for prompt in PROMPTS[:count]] for count in (1, 8))
    for prompts, known in ((few, False), (enough, True)):
        record = ns.record(subject, output=tmp_path / str(known), prompts=prompts)
        found = ns.compare(record, record)
        assert (record.numbers() >= 40) is known
        assert {row.gain for row in found.sites} == ({0.0} if known else {None})
        assert any("can't detect a gain" in note for note in found.notes) is not known


def test_logits_are_compared_as_distributions(subject, good, broken):
    """KL(reference || other) of the last token in nats, as torch computes it."""
    other = broken("gain:0.2@2/linear/down_proj")
    found = ns.compare(good, other).logits
    p, q = (torch.tensor(record.logits()).log_softmax(-1) for record in (good, other))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)
    assert found.kl == pytest.approx(float(kl.mean())) and found.worst_kl == pytest.approx(float(kl.max()))


def test_tokens_are_ranked(subject, good, tmp_path):
    """A prompt that one side computed wrongly is named, also from sketches."""
    for detail in ("sketch", "full"):
        hook = subject.model.get_submodule("model.layers.1").register_forward_hook(_only_prompt_five)
        other = ns.record(subject, output=tmp_path / detail, prompts=PROMPTS, detail=detail, batch=8)
        hook.remove()
        found = ns.compare(good, other)
        first = found.tokens[0]
        assert first.prompt == 5 and first.token >= 9 and first.id == PROMPTS[5][first.token]
        size, score = first.relative_l2, first.score
        assert (size > 0 and score is None) if detail == "full" else (size is None and score > 0)


def _only_prompt_five(module, args, y):
    changed = y.clone()
    changed[5, 9] *= 1.5
    return changed


NO = "not measurable"


def nats(size: float) -> Divergence:
    return Divergence(Estimate(size, None, None, 50), Estimate(size, None, None, 50))


def report(model: str, scale: float = 0.1) -> Diagnosis:
    """What costs come from: layer 2 is a hundred times as sensitive as the others; the rest says nothing."""
    cells = [
        CellEffect(layer=layer, operator=operator, predicted_kl=nats((1.0 if layer == 2 else 0.01) * scale**2))
        for layer in range(LAYERS)
        for operator in ("linear", "matmul", "norm")
    ]
    settings = SettingsFacts("noise", scale, ("layer",), (), (), 3, 1, 10.0, (0,), "screen", 1, 0.1, 0.2, 8)
    run = Run(
        ModelFacts("x", "x", model, LAYERS, ()), DataFacts("x", "text", 50, 500, "", "", "score"), settings, "accuracy",
        Conditions(model, "float32", "cpu", "sdpa", 2), "cpu", 0.0, Cost(0.0, 0, 0, 0.0), (), "", {}, "", None,
    )  # fmt: skip
    nothing = Risk("report_risk", 0.0, "LOW", "", ())
    summary = ExecutiveSummary(
        (), (), 0, (), 0, None, "LOW", "", nothing, nothing, (), "", PlainWords(risk="", work="", success="")
    )
    primary, secondary = PrimaryMetrics(None, NO, None, NO, None), SecondaryMetrics(None, NO, NO, 20.0, None, None)
    return Diagnosis(
        run=run, executive_summary=summary, operator_analysis=None,
        layer_analysis=LayerAnalysis(
            operators=(), window=3, step=1, windows=(), layers=(), places={}, map=tuple(cells), avalanche_points=(),
            compounding=(), point_rule_avalanches=(), prediction_scale=1.0,
        ), channel_analysis=None,
        metrics=Metrics(primary, secondary, {}, None, None, None, nothing), correlations={}, format_scores=None,
        gate=None, findings=(), recommendations=(), could_not_see=(),
    )  # fmt: skip


def mapped(diagnosis: Diagnosis, cells: list[CellEffect]) -> Diagnosis:
    return replace(diagnosis, layer_analysis=replace(diagnosis.layer_analysis, map=tuple(cells)))


def test_differences_have_a_cost(good, broken):
    """KL = k r^2; the costliest first, and only what is far off, sensitive and too costly is to be fixed first."""
    other = broken("gain:0.5@2/linear/down_proj", detail="full")
    found = ns.compare(good, other, sensitivity=report(good.model)).sensitivity
    linears = [row.relative_l2 for row in ns.compare(good, other).sites if row.place == 2]
    top = found.cells[0]
    assert (top.layer, top.operator, top.fix_first) == (2, "linear", True)
    assert top.nats == pytest.approx(top.relative_l2**2) and top.relative_l2 <= max(linears)
    assert {(cell.layer, cell.fix_first) for cell in found.fix_first} == {(2, True)}
    allowed = {row.layer: row for row in found.tolerances}
    assert allowed[2].affordable_relative_l2 == pytest.approx(math.sqrt(0.01 / 3))
    assert allowed[0].affordable_relative_l2 == pytest.approx(math.sqrt(0.01 / 0.03))
    assert (allowed[0].within, allowed[2].within) == (True, False)


def test_the_prediction_is_preferred_to_an_injection(good, broken):
    """It is quadratic by construction; where only one of them is known, that one is taken; without both, no cell."""
    diagnosis = report(good.model)
    cells = diagnosis.layer_analysis.map
    both = [replace(cell, kl=nats(4.0)) for cell in cells]
    only = [replace(cell, predicted_kl=None, kl=nats(4.0)) for cell in cells]
    none = [replace(cell, predicted_kl=None) for cell in cells]
    rows = ns.compare(good, broken("gain:0.5@2/linear/down_proj", detail="full")).sites
    for mixed, expected in ((both, 1.0), (only, 400.0)):
        found = difference_costs(rows, mapped(diagnosis, [*mixed[6:9], *none[:6]]), good.model, 0.01)
        assert {cell.layer for cell in found.cells} == {2}
        assert [cell.nats_per_square for cell in found.cells] == pytest.approx([expected] * 3)


def test_where_the_prediction_failed_the_injection_is_the_price(good, broken):
    """The report measured four times what was predicted: k comes from the injection, and the cell says so.

    A layer that is called nonlinear as a whole makes the predictions of its operators rough.
    """
    diagnosis = report(good.model, scale=0.1)
    odd = Estimate(4.0, 3.0, 5.0, 50)
    cells = [
        replace(cell, evidence="injected", kl=nats(0.04), injected_over_predicted=odd)
        if (cell.layer, cell.operator) == (2, "linear")
        else cell
        for cell in diagnosis.layer_analysis.map
    ]
    rows = ns.compare(good, broken("gain:0.5@2/linear/down_proj", detail="full")).sites
    found = difference_costs(rows, mapped(diagnosis, cells), good.model, 0.01)
    prices = {(cell.layer, cell.operator): cell for cell in found.cells}
    odd_one, other = prices[2, "linear"], prices[2, "matmul"]
    assert (odd_one.nats_per_square, odd_one.priced_by, odd_one.nonlinear) == (pytest.approx(4.0), "injected", True)
    assert odd_one.nats == pytest.approx(4 * odd_one.relative_l2**2)
    assert (other.nats_per_square, other.priced_by, other.nonlinear) == (pytest.approx(1.0), "predicted", False)
    assert [row.nonlinear for row in found.tolerances] == [False, False, True, False]
    layer = LayerEffect(layer=1, evidence="injected", injected_over_predicted=odd)
    section = replace(diagnosis.layer_analysis, layers=(layer,))
    found = difference_costs(rows, replace(diagnosis, layer_analysis=section), good.model, 0.01)
    assert {cell.layer for cell in found.cells if cell.nonlinear} == {1}
    assert {cell.priced_by for cell in found.cells} == {"predicted"}


def test_reports_that_do_not_fit_are_refused(good):
    """Another model's, and one without a map."""
    with pytest.raises(InvalidInput, match="sensitivity report describes a different model"):
        ns.compare(good, good, sensitivity=report("f" * 64))
    with pytest.raises(InvalidInput, match="no layer x operator map"):
        ns.compare(good, good, sensitivity=replace(report(good.model), layer_analysis=None))
    for nats in (0, math.nan):
        with pytest.raises(InvalidInput, match="above 0"):
            compare_records(good, good, sensitivity=report(good.model), affordable=nats)
    with pytest.raises(InvalidInput, match="needs a sensitivity report"):
        compare_records(good, good, affordable=0.1)


def test_a_comparison_is_saved_as_it_is(good, broken, tmp_path):
    """The file holds every field, every row its bands; it is read back as the same value, or refused."""
    found = ns.compare(good, broken("gain:0.2@2/linear/down_proj", detail="full"))
    file = found.save(tmp_path / "new" / "c.json")
    saved = json.loads(file.read_text())
    assert saved["first_divergence"]["place"] == 2 and saved["sites"][0]["bands"]["mape"] == "EXCELLENT"
    assert saved["first_divergence"]["diverges"] is True and saved["sides"]["a"]["dtype"] == "float32"
    assert Comparison.load(file) == found
    for change, reason in (
        ({"schema_version": 1}, "has schema version 1; this noisescope reads comparisons of version 2"),
        ({"undecided": "none"}, 'undecided: a whole number was expected, got "none"'),
        ({"verdict": "parted"}, "verdict: 'identical' or 'round-off' or 'diverged'"),
    ):
        file.write_text(json.dumps(saved | change))
        with pytest.raises(InvalidInput, match=re.escape(reason)):
            Comparison.load(file)
    file.write_text("{")
    with pytest.raises(InvalidInput, match="is not a valid comparison"):
        Comparison.load(file)
