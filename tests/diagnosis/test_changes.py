"""Two stored runs side by side: what is paired, what counts as a change, and what can't be compared."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

import noisescope as ns
from noisescope import api, stats
from noisescope.api.reports import read_run
from noisescope.diagnosis.change_rows import (
    UNCHANGED,
    AskedDifferently,
    ChangeCounts,
    ChangeRow,
    ChangeVerdict,
    ComparedRuns,
    FailedInjection,
    RunChanges,
    SeedCounts,
)
from noisescope.diagnosis.changes import compare_runs, sign_test
from noisescope.diagnosis.report import Asked, DataFacts, ModelFacts, SettingsFacts
from noisescope.diagnosis.stored_trials import (
    CLEAN,
    StoredInjection,
    StoredRun,
    label_of,
    noise_of,
    order_of,
    stored_injection,
    stored_run,
    stored_trial,
    target_of,
)
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.jsonform import from_json, to_json
from noisescope.probe.formats import Format
from noisescope.probe.noise import Gaussian, Uniform
from noisescope.stats.multiple_comparisons import smallest_unpaired, unpaired, unpaired_p
from noisescope.trials import Conditions, Result, Slice, Trial, canonical

GEMM = Injection(Gaussian(0.05), operators=frozenset({"gemm"}), phases=frozenset({"forward"}))
Scores = Mapping[Any, Mapping[str, Any]]  # injection, or None for the clean model -> metric -> [seeds, samples]


def gemm_at(**changes: Any) -> Injection:
    return dataclasses.replace(GEMM, **changes)


SOFTMAX = gemm_at(operators={"softmax"}, places={3})


def run(
    name: str,
    scores: Scores,
    *,
    seeds: tuple[int, ...] = (0, 1),
    data: str = "d",
    size: int = 100,
    measure: str = "score",
    metric: str = "accuracy",
    settings: Mapping[str, Any] | None = None,
    errors: Mapping[Any, str] | None = None,
    **conditions: Any,
) -> StoredRun:
    """A stored run with these values, in slices of `size`."""
    where = Conditions(
        **{"model": name, "dtype": "float32", "device": "cpu", "attention": "sdpa", "engine": 2, **conditions}
    )
    trials = []
    for injection, columns in scores.items():
        table = {metric: np.atleast_2d(np.asarray(values, dtype=float)) for metric, values in columns.items()}
        count = next(iter(table.values())).shape[1]
        for row, seed in enumerate(seeds if injection is not None else (0,)):
            noise = None if injection is None else dataclasses.replace(injection, seed=seed)
            for start in range(0, count, size):
                samples = tuple(range(start, min(start + size, count)))
                trial = Trial(where, measure, Slice(data, start, samples[-1] + 1), noise, settings or {})
                values = {m: tuple(map(number, v[row][list(samples)])) for m, v in table.items()}
                error = (errors or {}).get(injection, "")
                result = Result(error=error) if error else Result(samples, values)
                trials.append(stored_trial(json.loads(trial.content()), result))
    asked = Asked(
        ModelFacts(name, "x", where.model, 4, ()),
        DataFacts("file", "task", count, 10 * count, data, "", measure),
        SettingsFacts(
            "Gaussian(0.05)", 0.05, ("layer",), ("gemm",), ("gemm",), 3, 1, 10.0, seeds, "full", 2, 0.1, 0.2, 8
        ),
        metric,
        where,
        "cpu",
        1e-10,
    )
    return StoredRun(name, asked, trials)


def number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def compared(a: StoredRun, b: StoredRun) -> RunChanges:
    return compare_runs(a, b).comparison


def rows_of(a: StoredRun, b: StoredRun) -> dict[tuple[str, str], ChangeRow]:
    return {(row.label, row.metric): row for row in compared(a, b).rows}


def chances(count: int = 60, *, lost: float = 0.0, seed: int = 0) -> dict[Injection | None, dict[str, Any]]:
    """A model's scores: samples differ much in how hard they are, and `lost` of the answers turn wrong."""
    dice = np.random.default_rng(7)
    hard, luck, divergence = dice.random(count), dice.random((2, count)), dice.lognormal(-3, 1.5, count)
    wrong = np.random.default_rng(seed + 1).random(count) < lost
    right = ((luck > 0.8 * hard) & ~wrong).astype(float)
    return {
        None: {"accuracy": [~wrong], "nll": [0.1 + hard + wrong], "agreement": [np.ones(count)]},
        GEMM: {"accuracy": right, "kl": divergence * (1 + 3 * wrong) * (1 + 0.1 * luck), "agreement": right},
    }


# -- verdicts


def test_identical_runs_do_not_differ() -> None:
    """Every difference is 0, nothing is significant, the notes say "the same"; JSON and back is the same value."""
    whole = compare_runs(run("a", chances()), run("a", chances()))
    found = whole.comparison
    assert whole.schema_version == 2 and found.differs == ()
    assert {(row.label, row.metric) for row in found.rows} == {
        (CLEAN, "accuracy"), (CLEAN, "nll"), ("gemm at 0.05", "accuracy"), ("gemm at 0.05", "kl")
    }  # fmt: skip
    for row in found.rows:
        change = row.difference
        assert change.value == 0 and change.n == 60
        assert row.verdict == UNCHANGED and row.paired and row.identical
        if row.metric == "kl":  # that the median of the changes is 0 is exact
            assert (row.statistic, change.low, change.high, row.smallest_detectable) == ("median", 0.0, 0.0, None)
        else:
            assert row.statistic == "mean" and change.low < 0 < change.high and row.smallest_detectable > 0
    assert found.verdict.word == UNCHANGED
    assert "bit for bit" in found.notes[0]
    assert from_json(ComparedRuns, json.loads(json.dumps(to_json(whole), allow_nan=False))) == whole


def test_a_degraded_model_is_worse_and_pairs_are_sharper() -> None:
    """The same loss on the same samples and on others: found either way, but the paired interval is narrower."""
    a = run("a", chances())
    paired, apart = (rows_of(a, run("b", chances(lost=0.3), data=data)) for data in ("d", "other"))
    for key in [(CLEAN, "accuracy"), (CLEAN, "nll"), ("gemm at 0.05", "accuracy")]:
        assert paired[key].verdict == "worse" and paired[key].p_corrected >= paired[key].p
    noisy, loose = paired["gemm at 0.05", "accuracy"], apart["gemm at 0.05", "accuracy"]
    assert noisy.paired and not loose.paired and loose.difference.note == "unpaired"
    assert noisy.difference.value == pytest.approx(loose.difference.value) and noisy.a == loose.a
    assert width(noisy) < 0.8 * width(loose) and noisy.p < loose.p
    back = rows_of(run("b", chances(lost=0.3)), a)
    assert back[CLEAN, "nll"].verdict == "better" and (CLEAN, "nll") not in apart


def width(row: ChangeRow) -> float:
    return float(row.difference.high - row.difference.low)


def test_a_divergence_is_compared_by_its_median() -> None:
    """A larger divergence of most samples is worse; of a few, however large, it is not: they decide the mean alone."""
    dice = np.random.default_rng(5)
    before = dice.lognormal(-3, 1.5, (2, 60))
    grown, burst = before * 1.3, before.copy()
    burst[:, :4] *= 1e4
    a, most, few = (run(n, {GEMM: {"kl": v}}, metric="kl") for n, v in (("a", before), ("b", grown), ("c", burst)))
    row = rows_of(a, most)["gemm at 0.05", "kl"]
    change = grown.mean(0) - before.mean(0)
    assert row.verdict == "worse" and row.difference.value == pytest.approx(np.median(change))
    assert row.p == pytest.approx(binomtest(0, 60).pvalue) and row.a.value == pytest.approx(np.median(before.mean(0)))
    row = rows_of(a, few)["gemm at 0.05", "kl"]
    assert row.verdict == UNCHANGED and row.difference.value == 0 and burst.mean() > 100 * before.mean()
    apart = rows_of(a, run("b", {GEMM: {"kl": before * 20}}, metric="kl", data="other"))["gemm at 0.05", "kl"]
    assert apart.verdict == "worse" and not apart.paired and apart.b.value == pytest.approx(20 * apart.a.value)


@given(st.lists(st.integers(-3, 3), min_size=6, max_size=40), st.floats(0.8, 0.99))
def test_the_sign_test_fits_the_interval_of_the_median(changes: list[int], level: float) -> None:
    """p is below 1 - level exactly where the interval leaves 0 out, ties included."""
    values = np.array(changes, dtype=float)
    found = stats.median(values, level)
    assert (sign_test(values) <= 1 - level) == (found.above(0.0) or found.below(0.0))


def test_a_p_of_zero_is_significant() -> None:
    """A loss so clear that its p underflows to 0.0 is worse, not unchanged."""
    right, wrong = np.ones((2, 3000)), np.zeros((2, 3000))
    row = rows_of(run("a", {GEMM: {"accuracy": right}}), run("b", {GEMM: {"accuracy": wrong}}))[
        "gemm at 0.05", "accuracy"
    ]
    assert row.p == row.p_corrected == 0.0 and row.significant and row.verdict == "worse"


def test_the_verdict_is_corrected_for_every_look() -> None:
    """A p of 0.02 is a change by itself and none among twenty rows that hold nothing."""
    still = np.tile(np.arange(40) % 2, (2, 1))
    moved = still.copy()
    moved[:, :12:2] = 1
    alone = compared(run("a", {GEMM: {"accuracy": still}}), run("b", {GEMM: {"accuracy": moved}}))
    others = [gemm_at(layers=frozenset({layer})) for layer in range(20)]
    many = compared(
        run("a", {GEMM: {"accuracy": still}} | {other: {"accuracy": still} for other in others}),
        run("b", {GEMM: {"accuracy": moved}} | {other: {"accuracy": still} for other in others}),
    )
    first = alone.rows[0]
    again = next(row for row in many.rows if row.label == "gemm at 0.05")
    assert 0.002 < first.p == again.p < 0.05 and again.p_corrected == pytest.approx(21 * first.p)
    assert alone.verdict.word == "better" and first.verdict == "better"
    assert many.verdict.word == UNCHANGED and again.verdict == UNCHANGED
    assert again.smallest_detectable is None or again.smallest_detectable > (first.smallest_detectable or 0)


def test_worse_here_and_better_there_is_mixed() -> None:
    """Significant changes come first, each kind by size."""
    up, down = np.zeros((2, 60)), np.zeros((2, 60))
    up[:, :30], down[:, :40] = 1, 1
    a = run("a", {None: {"accuracy": [up[0]]}, GEMM: {"accuracy": up}, SOFTMAX: {"accuracy": down}})
    b = run("b", {None: {"accuracy": [up[0]]}, GEMM: {"accuracy": 1 - 0 * up}, SOFTMAX: {"accuracy": 0 * down}})
    found = compared(a, b)
    assert found.verdict == ChangeVerdict("mixed", 1, 1, 0, 3, {"accuracy": ChangeCounts(1, 1, 0, 3)})
    assert [row.label for row in found.rows] == ["softmax, layer 3 at 0.05", "gemm at 0.05", CLEAN]
    assert [row.order for row in found.rows] == [2, 1, 0]


def test_a_divergence_below_the_floor_is_no_change() -> None:
    """Rounding that always falls the same way is significant and means nothing."""
    tiny = np.full((2, 60), 1e-13) * (1 + np.random.default_rng(0).random((2, 60)))
    rows = rows_of(run("a", {GEMM: {"kl": 0.01 * tiny}}, metric="kl"), run("b", {GEMM: {"kl": tiny}}, metric="kl"))
    assert rows["gemm at 0.05", "kl"].p < 1e-6 and rows["gemm at 0.05", "kl"].verdict == UNCHANGED


# -- what is paired with what


def test_other_data_falls_to_unpaired() -> None:
    """Another fingerprint means other samples, though their ids are the same numbers; the notes say what to do."""
    found = compared(run("a", chances()), run("b", chances(50), data="other"))
    assert not any(row.paired for row in found.rows) and "--data" in found.notes[0]
    row = next(row for row in found.rows if row.label == CLEAN)
    assert (row.a.n, row.b.n, row.difference.n) == (60, 50, 50)


def test_generation_pairs_on_prompts_and_answers() -> None:
    """Another tokenizer makes other tokens of the same questions: they are the same samples."""
    scores = {None: {"accuracy": [np.arange(20) % 2]}}
    texts = {"max_new_tokens": 8, "texts": "t"}
    a = run("a", scores, measure="generate", settings=texts)
    same = run("b", scores, measure="generate", settings=texts, data="other tokens")
    other = run("b", scores, measure="generate", settings={**texts, "texts": "u"})
    longer = run("b", scores, measure="generate", settings={**texts, "max_new_tokens": 9})
    assert rows_of(a, same)[CLEAN, "accuracy"].paired and not rows_of(a, other)[CLEAN, "accuracy"].paired
    with pytest.raises(InvalidInput, match="no injection in common"):
        compare_runs(a, longer)


def test_other_seeds_are_paired_on_samples_alone() -> None:
    """Without a common seed each run keeps its own draws: still paired, wider, and said; common seeds are preferred."""
    scores, luck = chances(), np.random.default_rng(3).permuted(chances()[GEMM]["accuracy"], axis=1)
    a, moved = run("a", scores), {**scores, GEMM: {**scores[GEMM], "accuracy": luck}}
    found = compared(a, run("a", moved, seeds=(5, 6)))
    row = next(row for row in found.rows if (row.label, row.metric) == ("gemm at 0.05", "accuracy"))
    assert row.paired and row.seeds == SeedCounts(a=2, b=2, common=0) and row.verdict == UNCHANGED
    assert any("no seed in common" in note for note in found.notes)
    half = {**scores, GEMM: {"accuracy": np.stack([scores[GEMM]["accuracy"][1], luck[0]])}}
    partly = rows_of(a, run("a", half, seeds=(1, 9)))["gemm at 0.05", "accuracy"]
    assert partly.seeds.common == 1 and partly.identical and not row.identical


@given(size=st.integers(1, 70), order=st.randoms(use_true_random=False), count=st.integers(2, 70))
@settings(max_examples=25)
def test_slices_and_their_order_do_not_matter(size: int, order: Any, count: int) -> None:
    """Rows are of samples, however they were cut; those that only one run has are left out."""
    a = run("a", chances())
    b = run("b", chances(lost=0.2), size=size)
    kept = [trial for trial in b.trials if trial.result.samples[0] < count]
    order.shuffle(kept)
    cut = min(60, -(-count // size) * size)
    shorter = {i: {m: np.asarray(v)[..., :cut] for m, v in c.items()} for i, c in chances(lost=0.2).items()}
    assert rows_of(a, dataclasses.replace(b, trials=kept)) == rows_of(a, run("b", shorter))


@given(lost=st.floats(0.05, 0.6), seed=st.integers(0, 50), data=st.sampled_from(["d", "other"]))
@settings(max_examples=25)
def test_the_other_way_round_says_the_opposite(lost: float, seed: int, data: str) -> None:
    """Differences turn their sign, ends change places, worse becomes better."""
    a, b = run("a", chances()), run("b", chances(lost=lost, seed=seed), data=data)
    there, back = rows_of(a, b), rows_of(b, a)
    turned = {"worse": "better", "better": "worse", UNCHANGED: UNCHANGED}
    assert there.keys() == back.keys()
    for key, row in there.items():
        change, other = row.difference, back[key].difference
        assert (change.value, change.low, change.high) == pytest.approx(
            (-other.value, -other.high, -other.low), abs=1e-9
        )
        assert back[key].verdict == turned[row.verdict] and row.p == pytest.approx(back[key].p, abs=1e-9)


def test_only_the_last_question_of_a_folder_counts() -> None:
    """A folder may hold trials of another model, another data set and another measure: they are not the run."""
    a, b = run("a", chances()), run("b", chances(lost=0.3))
    strangers = [
        *run("earlier", chances(lost=0.9)).trials,
        *run("b", chances(lost=0.9), data="earlier").trials,
        *run("b", chances(lost=0.9), dtype="bfloat16").trials,
        *run("b", {None: {"accuracy": [np.zeros(60)]}}, measure="generate").trials,
        *run("b", {None: {"accuracy": [np.zeros(60)]}}, measure="screen").trials,
    ]
    assert rows_of(a, dataclasses.replace(b, trials=[*b.trials, *strangers])) == rows_of(a, b)


# -- what is left out


def test_broken_values_are_wrong_answers_or_left_out() -> None:
    """A score that is not finite counts as wrong; a divergence has no such number and leaves its pair."""
    scores = chances()
    broken = {None: scores[None], GEMM: {m: np.array(v, dtype=float) for m, v in scores[GEMM].items()}}
    broken[GEMM]["accuracy"][:, :15] = np.nan
    broken[GEMM]["kl"][0, :10] = np.nan
    found = compared(run("a", scores), run("b", broken))
    rows = {(row.label, row.metric): row for row in found.rows}
    score, divergence = rows["gemm at 0.05", "accuracy"], rows["gemm at 0.05", "kl"]
    assert score.difference.n == 60 and score.verdict == "worse" and score.left_out == 0
    assert divergence.difference.n == divergence.a.n == 50 and divergence.left_out == 10
    assert any("were excluded" in note for note in found.notes)
    broken[GEMM]["kl"][:] = np.nan
    found = compared(run("a", scores), run("b", broken))
    lost = next(row for row in found.rows if row.metric == "kl")
    assert lost.verdict == "not measurable" and lost.difference.value is None and lost.p is None
    assert (found.verdict.undecided, found.verdict.metrics["kl"].undecided) == (1, 1)


def test_undecided_only_where_no_row_decides() -> None:
    """One measurable row decides, whatever the others are; without any the verdict does not say "no difference"."""
    fine = {"accuracy": np.ones((2, 20)), "kl": np.full((2, 20), np.nan)}
    partly = compared(run("a", {GEMM: fine}), run("b", {GEMM: fine})).verdict
    assert (partly.word, partly.undecided, partly.comparisons) == (UNCHANGED, 1, 2)
    nothing = {"accuracy": np.full((2, 20), np.nan)}
    runs = [run(n, {GEMM: nothing}, measure="custom", metric="mine") for n in ("a", "b")]
    assert compared(*runs).verdict.word == "undecided"


def test_failed_and_lonely_injections_are_named() -> None:
    """What failed, and what only one run has, is listed and not compared."""
    a = run("a", {**chances(), SOFTMAX: chances()[GEMM]}, errors={SOFTMAX: "NothingInjected: why"})
    b = run("b", {**chances(), SOFTMAX: chances()[GEMM], gemm_at(layers={0, 1, 2}): chances()[GEMM]})
    found = compared(a, b)
    assert found.failed == (FailedInjection("softmax, layer 3 at 0.05", a="NothingInjected: why", b=""),)
    assert found.only_in_a == () and found.only_in_b == ("gemm, layers 0-2 at 0.05",)
    assert {row.label for row in found.rows} == {CLEAN, "gemm at 0.05"} and found.a.failed == 2


def test_nothing_in_common_says_what_to_do() -> None:
    """Other noise, another measure, nothing measured: an error with the cure; two screens have the clean model."""
    clean = {None: chances()[None]}
    a = run("a", chances())
    for b, words in (
        (
            run("b", {**clean, SOFTMAX: chances()[GEMM]}),
            "no injection in common.*softmax, layer 3 at 0.05.*--noise-scale",
        ),
        (run("b", clean), "no injection in common.*the second no injection"),
        (run("b", chances(), measure="generate"), "'score' and b by 'generate'.*--generate"),
        (dataclasses.replace(a, name="b", trials=[]), "b has measured nothing yet.*runs resume b"),
    ):
        with pytest.raises(InvalidInput, match=words):
            compare_runs(a, b)
    found = compared(run("a", clean), run("b", clean))
    assert len(found.rows) == 2 and any("only the clean models" in note for note in found.notes)


def test_what_was_asked_differently() -> None:
    """By dotted name, both values; other metrics and engines are noted."""
    a = run("a", chances(), seeds=(0, 1))
    b = run("b", chances(), seeds=(1, 2), metric="agreement", engine=3, dtype="bfloat16")
    found = compared(a, b)
    assert {row.what for row in found.differs} == {
        "model.source", "model.fingerprint", "settings.seeds", "metric", "conditions.engine", "conditions.dtype"
    }  # fmt: skip
    assert AskedDifferently("settings.seeds", [0, 1], [1, 2]) in found.differs
    assert found.metric == "accuracy" and sum("engine" in n or "different metrics" in n for n in found.notes) == 2
    both = compared(run("a", chances(), metric="agreement"), run("b", chances(), metric="agreement"))
    assert {(r.label, r.metric) for r in both.rows} >= {(CLEAN, "accuracy"), ("gemm at 0.05", "agreement")}


def test_a_metric_of_ones_own() -> None:
    """Its scores have no unit and no failure value: pairs with a broken one leave."""
    scores = 5 + np.random.default_rng(0).normal(size=(2, 30))
    worse = scores - 1
    worse[0, 0] = np.nan
    settings = {"metric": len}
    a, b = (run(n, {GEMM: {"accuracy": v}}, measure="custom", metric="hash", settings=settings)
            for n, v in (("a", scores), ("b", worse)))  # fmt: skip
    row = rows_of(a, b)["gemm at 0.05", "custom"]
    assert row.difference.value == pytest.approx(-1) and row.difference.n == 29 and row.statistic == "mean"
    assert row.verdict == "worse" or row.smallest_detectable


# -- words


@pytest.mark.parametrize(
    ("injection", "words"),
    [
        (GEMM, "gemm at 0.05"),
        (gemm_at(layers={0, 1, 2}), "gemm, layers 0-2 at 0.05"),
        (gemm_at(layers={0, 2, 3}), "gemm, layers 0, 2-3 at 0.05"),
        (SOFTMAX, "softmax, layer 3 at 0.05"),
        (gemm_at(operators=None, places={"lm_head"}), "lm_head at 0.05"),
        (gemm_at(operators=None), "every operator at 0.05"),
        (
            gemm_at(operators=None, layers={1}, places={"embed"}),
            "every operator, layer 1, embed at 0.05",
        ),
        (gemm_at(operators={"norm", "linear"}), "linear + norm at 0.05"),
        (
            gemm_at(operators={"linear"}, places={0}, modules=("m.q_proj",), channels=(7,)),
            "linear, m.q_proj, channel 7 at 0.05",
        ),
        (gemm_at(tensor="weight", channels=(1, 2)), "gemm, channels 1-2, tensor weight at 0.05"),
        (gemm_at(layer_multipliers={3: 2.0}), "gemm, layer_multipliers 3: 2 at 0.05"),
        (gemm_at(perturbation=Uniform(0.1, "rms")), "gemm at Uniform relative_to=rms 0.1"),
        (gemm_at(perturbation=Format("fp8_e4m3")), "gemm as Format name=fp8_e4m3"),
        (gemm_at(perturbation=json.dumps), "gemm by "),
    ],
)
def test_injections_in_plain_words(injection: Injection, words: str) -> None:
    """From the stored content: where it falls, and what falls; anything unusual is said."""
    found = stored_injection(json.loads(json.dumps(canonical(injection))))
    assert label_of(found).startswith(words) and label_of(found) == f"{target_of(found)} {noise_of(found)}"


def test_the_order_of_the_model() -> None:
    """Clean, everywhere, embed, blocks with windows after their first layer, the head, single channels."""
    injections = [
        None,
        GEMM,
        gemm_at(operators=None, places={"embed"}),
        gemm_at(layers={0}),
        gemm_at(layers={0, 1, 2}),
        gemm_at(layers={2}),
        gemm_at(layers={10}),
        gemm_at(operators=None, places={"lm_head"}),
        gemm_at(places={0}, modules=("m",), channels=(1,)),
    ]
    found = [None if one is None else stored_injection(canonical(one)) for one in injections]
    backwards = found[::-1]
    assert sorted(backwards, key=order_of) == found


@dataclasses.dataclass(frozen=True)
class Twin:
    """Noise with the fields of the usual one and another name."""

    scale: float
    relative_to: str = "element"

    def __call__(self, t: Any, draw: Any) -> Any:
        return t


def test_stored_injections_are_equal_where_they_are_the_same() -> None:
    """Whatever the seed; another class with the same fields is another noise, a block by layer or place is one."""

    def stored(injection: Injection) -> StoredInjection:
        return stored_injection(json.loads(json.dumps(canonical(injection))))

    assert stored(gemm_at(seed=7)) == stored(GEMM) and hash(stored(gemm_at(seed=7))) == hash(stored(GEMM))
    assert stored(gemm_at(perturbation=Twin(0.05))) != stored(GEMM)
    assert label_of(stored(gemm_at(perturbation=Twin(0.05)))) == "gemm at Twin relative_to=element 0.05"
    assert stored(gemm_at(layers={3})) == stored(gemm_at(places={3})) != stored(gemm_at(layers={2}))
    assert stored(gemm_at(layer_multipliers={3: 2.0})) != stored(gemm_at(layer_multipliers={3: 2.5}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"measure": 3}, "trial.measure: text was expected, got 3"),
        ({"injection": "x"}, 'trial.injection: an object was expected, got "x"'),
        ({"injection": {"type": "noisescope.Injection"}}, "trial.injection has no 'perturbation'"),
        ({"slice": {"data": "d"}}, "trial.slice has no 'start'"),
    ],
)
def test_a_damaged_trial_is_refused(change: Mapping[str, Any], words: str) -> None:
    """With the run and the part that does not fit."""
    where = Conditions("m", "float32", "cpu", "sdpa", 2)
    content = json.loads(Trial(where, "score", Slice("d", 0, 2), GEMM).content()) | change
    with pytest.raises(InvalidInput, match=f"out holds no run that can be compared: {words}"):
        stored_run("out", to_json(run("a", chances()).asked), [(content, Result())])


def test_a_run_that_asked_something_else_is_refused() -> None:
    """Nothing, an experiment with training, an older report: one line."""
    with pytest.raises(InvalidInput, match="out does not say what was asked"):
        stored_run("out", None, [])
    with pytest.raises(InvalidInput, match="out holds no run that can be compared: asked has no 'metric'"):
        stored_run("out", {name: v for name, v in to_json(run("a", chances()).asked).items() if name != "metric"}, [])


# -- without pairs


@pytest.mark.parametrize("kind", ["right or wrong", "nats", "medians"])
def test_unpaired_intervals_cover(kind: str) -> None:
    """About 95 % of them hold the true difference, for shares and for skewed values; p fits the interval.

    Medians do so for a tail (lognormal, sigma 3) that leaves the mean without any interval.
    """
    dice = np.random.default_rng(0)
    truth = {"right or wrong": -0.15, "nats": float(np.exp(0.5)), "medians": 1.0}[kind]
    held, runs, centre = 0, 300, stats.median if kind == "medians" else stats.mean
    for _ in range(runs):
        if kind == "right or wrong":
            x, y = dice.binomial(1, 0.9, (80, 1)).astype(float), dice.binomial(1, 0.75, (120, 1)).astype(float)
        else:
            sigma = 1 if kind == "nats" else 3
            x, y = dice.lognormal(0, sigma, (80, 1)), 2 * dice.lognormal(0, sigma, (120, 1))
        found = unpaired(x, y, centre=centre)
        assert found.low is not None and found.high is not None
        held += found.low <= truth <= found.high
    assert 0.92 <= held / runs <= 0.99
    p = unpaired_p(x, y, centre=centre)
    for level in (1 - 0.8 * p, 1 - 1.2 * p):
        edge = unpaired(x, y, level=level, centre=centre)
        assert edge.low is not None and edge.high is not None
        assert kind == "medians" or (edge.low <= 0 <= edge.high) == (level > 1 - p)


def test_unpaired_edges() -> None:
    """One sample, or values that do not vary, give no interval and no certainty; equal means give p = 1."""
    single = unpaired(np.array([[0.3]]), np.array([[0.5], [0.6]]))
    assert single.low is None and single.value == pytest.approx(0.25) and single.n == 1
    flat = np.full((5, 1), 0.5)
    assert unpaired(flat, flat + 0.1).low is None and unpaired_p(flat, flat + 0.1) == 1.0
    assert smallest_unpaired(unpaired(flat, flat + 0.1), 3) is None
    half = np.array([[0.0], [1.0]] * 20)
    assert unpaired_p(half, half) == 1.0 and 0.3 < (smallest_unpaired(unpaired(half, half), 1) or 0) < 0.4


# -- real runs


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo twice, with other seeds, and with perturbed weights: 16 samples at one noise level."""
    folder = tmp_path_factory.mktemp("runs")

    def measure(name: str, subject: ns.Subject, **other: Any) -> None:
        asked = {"noise_levels": (0, 0.05), "samples": 16, "seeds": 1, "generate": False, **other}
        api.robustness(subject, **asked, options=api.Options(output=folder / name))

    demo = ns.load("demo")
    measure("healthy", demo)
    measure("again", demo, slice_samples=7)
    measure("seeds", demo, seeds=(5,))
    dice = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in demo.model.parameters():
            if weight.dim() == 2:
                weight.add_(0.3 * weight.std() * torch.randn(weight.shape, generator=dice))
    measure("degraded", demo)
    return folder


def test_stored_runs(stores: Path) -> None:
    """Measured, stored and read back: the same run in other slices, other seeds, and a degraded model."""
    healthy, again, seeds, degraded = (read_run(stores / name) for name in ("healthy", "again", "seeds", "degraded"))
    same = rows_of(healthy, again)
    assert all(abs(row.difference.value) < 1e-5 and row.verdict == UNCHANGED for row in same.values())
    assert all(row.verdict == UNCHANGED and row.paired for row in rows_of(healthy, seeds).values())
    worse = rows_of(healthy, degraded)
    assert worse[CLEAN, "accuracy"].verdict == worse[CLEAN, "nll"].verdict == "worse"
    assert worse[CLEAN, "accuracy"].paired and "better" not in {row.verdict for row in worse.values()}
    assert compared(healthy, degraded).differs[0].what == "model.fingerprint"
