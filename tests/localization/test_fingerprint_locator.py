"""`fingerprint`: a failure recorded elsewhere is matched with the layer whose simulated fault explains it."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import noisescope as ns
from noisescope.comparison.records import Record
from noisescope.comparison.safetensors_reader import Numbers
from noisescope.errors import InvalidInput
from noisescope.faults import faulty
from noisescope.injection import Injection
from noisescope.localization.fingerprint_locator import fingerprint
from noisescope.localization.fingerprint_match import Candidate, blind, coherence, cosines, settings, sketch
from noisescope.localization.prompts import prompt_ids
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.testing import tiny_model

LAYERS = 5


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=LAYERS, initializer_range=0.2)  # blocks that do something


@pytest.fixture(scope="module")
def recorded(model, tmp_path_factory):
    """A function: what the model says now, or with a fault, as a record on disk."""
    folder, numbers = tmp_path_factory.mktemp("recorded"), itertools.count()
    subject, usual = ns.wrap(model), prompt_ids(model, None, None, seed=0, count=12, length=8)

    def record(fault: str | None = None, prompts=usual, batch: int = 16) -> Record:
        def now() -> Record:
            return ns.record(subject, output=folder / str(next(numbers)), prompts=prompts, batch=batch)

        if fault is None:
            return now()
        with faulty(model, fault):
            return now()

    return record


@pytest.fixture(scope="module")
def good(recorded) -> Record:
    return recorded()


def with_logits(record: Record, logits) -> Record:
    """The record, had the device computed something else."""

    def read(first, count):
        return lambda name: Numbers(logits[first : first + count], "float32") if name == "logits" else None

    batches = (dataclasses.replace(b, read=read(b.first, b.count)) for b in record.batches)
    return dataclasses.replace(record, batches=tuple(batches))


@pytest.mark.parametrize(
    ("fault", "layer"),
    [(f, layer) for f in ("dead_zone:0.3", "bias:0.05") for layer in (0, LAYERS - 1)] + [("saturation:0.1", 2)],
)
def test_blind_finds_faults_that_are_functions_of_the_data(model, fault, layer, recorded):
    """The first, a middle and the last block, with family and class, without knowing either."""
    verdict = fingerprint(model, recorded(f"{fault}@{layer}"))
    first = verdict.suspects[0]
    assert (verdict.verdict, first.site.place, first.details["family"]) == ("faulty", layer, fault.partition(":")[0])
    assert first.details["cosine"] > 0.999
    assert first.confidence > 0.9
    assert verdict.method == "fingerprint blind"


def test_a_size_between_the_candidates_is_sought(model, recorded):
    """A dead zone of 0.17 is not among the sizes tried at first."""
    first = fingerprint(model, recorded("dead_zone:0.17@2")).suspects[0]
    assert (first.site.place, first.fault_class) == (2, "dead zone")
    assert first.details["size"] == pytest.approx(0.17, rel=0.15)


@pytest.mark.parametrize("fault", ["noise:0.05", "non_determinism:5"])
def test_blind_places_noise_of_another_seed_nearby(model, fault, recorded):
    """Only the covariance of what arrives can tell: the layer or its neighbour, with a confidence that says so."""
    verdict = fingerprint(model, recorded(f"{fault},seed=99@4"))
    assert verdict.suspects[0].fault_class == "noise"
    assert abs(verdict.suspects[0].site.place - 4) <= 1
    assert "covariance" in verdict.notes[0]
    assert sum(s.confidence for s in verdict.suspects) == pytest.approx(1)


@pytest.mark.parametrize("fault", ["noise:0.05", "spike:0.3"])
def test_the_same_seed_repeats_the_failure_bit_for_bit(model, fault, recorded):
    """The published method: similarity 1 at the right layer, and it is called an identity test."""
    verdict = fingerprint(model, recorded(f"{fault},seed=7@3"), mode="same-seed", seed=7)
    first = verdict.suspects[0]
    assert (first.site.place, first.details["identical"]) == (3, True)
    assert first.score == pytest.approx(1)
    assert "identity test" in verdict.notes[0]


def test_the_published_fault_itself(model, recorded):
    """Relative noise of 0.2 on the products of one layer, candidates of the same scale and seed."""
    noise = Injection(Gaussian(0.2), operators={"gemm"}, layers={1}, phases={"forward"}, seed=7)
    with inject(model, noise):
        record = recorded()
    first = fingerprint(model, record, mode="same-seed", seed=7, families=["relative_gaussian"]).suspects[0]
    assert (first.site.place, first.details["identical"], first.details["size"]) == (1, True, 0.2)


@pytest.mark.parametrize("batch", [5, 16])
def test_prompts_share_forwards_as_they_did_on_the_suspect(model, batch, recorded):
    """In batches of 5, 5 and 2 other numbers are drawn and other maxima taken than in one of 12."""
    verdict = fingerprint(
        model, recorded("noise:0.05,seed=7@3", batch=batch), mode="same-seed", seed=7, families=["noise"], sizes=[0.05]
    )
    assert [s.details["identical"] for s in verdict.suspects] == [True, *[False] * (LAYERS - 1)]


def test_another_seed_is_no_identity(model, recorded):
    """With a seed that is not the failure's, no candidate reproduces it; wrong layers come as near, so none is
    named."""
    verdict = fingerprint(model, recorded("noise:0.05,seed=8@3"), mode="same-seed", seed=7, families=["noise"])
    assert (verdict.verdict, verdict.suspects) == ("undecided", ())
    assert "the logits differ in 12 of 12 prompts" in verdict.notes[0]
    assert "no candidate reproduces" in verdict.notes[1] and "wrong layers" in verdict.notes[1]


@pytest.mark.parametrize("mode", ["blind", "same-seed"])
def test_a_fault_of_no_known_family_is_undecided(model, mode, recorded):
    """The outputs differ, and that is reported, with what was tried and what to do; no layer is blamed."""
    verdict = fingerprint(model, recorded("stuck_bit:bit=22@3/linear/o_proj"), mode=mode)
    assert (verdict.verdict, verdict.suspects) == ("undecided", ())
    assert "the logits differ" in verdict.notes[0] and "dead_zone 0.3, 0.1, 0.05, 0.01" in verdict.notes[0]
    assert "noisescope locate" in verdict.notes[-1]


def test_outputs_within_rounding_are_healthy(model, good):
    """The same outputs, and outputs that differ by an eps; a shift ten times larger than the floor is not healthy."""
    assert fingerprint(model, good).verdict == "healthy"
    logits = good.logits()
    signs = np.sign(np.sin(np.arange(logits.size))).reshape(logits.shape)
    verdict = fingerprint(model, with_logits(good, logits * (1 + 2**-22 * signs)))
    assert verdict.verdict == "healthy"
    shifted = with_logits(good, logits + 10 * verdict.smallest_visible["rms_of_logits"])
    assert fingerprint(model, shifted).verdict == "undecided"


def test_a_reference_record_takes_out_what_two_devices_have_in_common(model, good, recorded):
    """An offset in both records changes nothing; without the reference it drowns the fault, and no layer is blamed."""
    common = np.random.default_rng(0).standard_normal(good.logits().shape)
    shifted = [with_logits(record, record.logits() + common) for record in (recorded("bias:0.05@2"), good)]
    first = fingerprint(model, *shifted, families=["bias", "dead_zone"]).suspects[0]
    assert first.site.place == 2
    assert first.details["cosine"] > 0.99
    assert fingerprint(model, shifted[0], families=["bias", "dead_zone"]).verdict == "undecided"


def test_a_suspects_record_comes_from_a_folder(model, good, recorded):
    """Paths of records are as good as records."""
    verdict = fingerprint(model, recorded("bias:0.1@1").path, str(good.path), families=["bias"])
    assert verdict.suspects[0].site.place == 1


def test_records_that_do_not_belong_together_are_refused(model, good, recorded, tmp_path):
    """Another model, other prompts, a damaged file, and a model that gives no logits."""
    stranger = ns.wrap(tiny_model("llama", layers=LAYERS, seed=5))
    with pytest.raises(InvalidInput, match="a different model"):
        fingerprint(model, ns.record(stranger, output=tmp_path / "stranger", prompts=good.prompts))
    with pytest.raises(InvalidInput, match="different prompts"):
        fingerprint(model, good, recorded(prompts=good.prompts[:3]))
    cut = Path(shutil.copytree(good.path, tmp_path / "cut"))
    (cut / "0000.safetensors").write_bytes((cut / "0000.safetensors").read_bytes()[:200])
    with pytest.raises(InvalidInput, match="truncated or damaged"):
        fingerprint(model, cut)
    silent = dataclasses.replace(good, batches=(dataclasses.replace(good.batches[0], read=lambda name: None),))
    with pytest.raises(InvalidInput, match="holds no logits"):
        fingerprint(model, silent)


def test_prompts_whose_logits_are_not_finite_are_left_out(model, good, recorded):
    """One broken prompt is reported; where nothing else is wrong, or nothing fits, it is a fault without a place."""
    record = recorded("bias:0.1@2")
    logits = record.logits()
    logits[3] = np.nan
    verdict = fingerprint(model, with_logits(record, logits), families=["bias"])
    assert verdict.suspects[0].site.place == 2
    assert any("1 of 12 prompts" in note for note in verdict.notes)
    only_one = np.where(np.arange(12)[:, None] == 3, np.nan, good.logits())
    for broken in (np.full_like(logits, np.inf), only_one, only_one + np.arange(logits.shape[1]) % 7):
        verdict = fingerprint(model, with_logits(record, broken))
        assert (verdict.verdict, verdict.suspects) == ("faulty", ())
        assert any("not finite" in note for note in verdict.notes)


def test_prompts_of_several_lengths(model, recorded):
    """They can't share a forward, and are simulated all the same."""
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14, 15, 16]]
    verdict = fingerprint(model, recorded("bias:0.1@3", prompts), families=["bias"], sizes=[0.1])
    assert verdict.suspects[0].site.place == 3 and verdict.suspects[0].details["identical"]


def test_the_cost_counts_only_the_blocks_that_run(model, recorded):
    """Blocks before the fault are computed once: candidates cost the share of the blocks behind them."""
    verdict = fingerprint(model, recorded("bias:0.1@3"), families=["bias"], sizes=[0.1])
    assert verdict.checked == LAYERS
    assert verdict.forwards == pytest.approx(1 + 1 + sum(1 - layer / LAYERS for layer in range(LAYERS)))


def test_candidates_as_asked_for(model, good, recorded):
    """Layers, families and sizes narrow the search; other families than the notes' may take part."""
    families = ["gain", "dead_lane"]
    verdict = fingerprint(model, recorded("gain:0.1@3"), families=families, sizes={"gain": [0.1]}, layers=[2, 3])
    assert (verdict.suspects[0].site.place, verdict.suspects[0].fault_class) == (3, "gain")
    assert {s.site.place for s in verdict.suspects} == {2, 3}
    for arguments, reason in (
        ({"mode": "sighted"}, "unknown mode"),
        ({"families": ["exp_table"]}, "fault family at a block's output"),
        ({"layers": [7]}, "out of range"),
        ({"draws": 1}, "at least 2"),
    ):
        with pytest.raises(InvalidInput, match=reason):
            fingerprint(model, good, **arguments)


def test_cosines_of_prompts_that_change_and_that_do_not():
    """Same direction 1; changed by one side only 0; unchanged by both says nothing."""
    a = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [1e-9, 0.0]])
    b = np.array([[3.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1e-9]])
    assert cosines(a, b, 1e-6) == pytest.approx(0.5)
    assert cosines(a[:1], -b[:1], 1e-6) == pytest.approx(-1)
    assert cosines(a[2:], b[2:], 1e-6) == 0


def test_coherence_tells_one_direction_from_draws():
    """P where all prompts agree, about 1 where each goes its own way; prompts that did not change say nothing."""
    rows = np.random.default_rng(0).standard_normal((20, 500))
    assert coherence(np.outer(np.arange(1, 6), rows[0])) == pytest.approx(5)
    assert coherence(rows) == pytest.approx(1, abs=0.4)
    assert coherence(np.concatenate([rows, np.zeros((9, 500))])) == pytest.approx(coherence(rows))
    assert coherence(np.zeros((3, 4))) == 0


@given(st.integers(0, 1000))
def test_a_sketch_keeps_products(seed):
    """Of 5,000 numbers 1,024 sums are kept; products stay within a few percent of the lengths."""
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, 5000))
    b += a * rng.uniform(-2, 2)
    small_a, small_b = sketch(np.stack([a, b]))
    assert small_a.shape == (1024,)
    assert abs(small_a @ small_b - a @ b) < 0.2 * np.linalg.norm(a) * np.linalg.norm(b)
    assert sketch(2 * a) == pytest.approx(2 * small_a)
    assert np.array_equal(sketch(a[:100]), a[:100])


def test_nothing_is_left_behind(model, good, recorded):
    """Random state and modules are as they were."""
    record = recorded("bias:0.1@3")
    state, before = torch.get_rng_state(), {name: set(m.__dict__) for name, m in model.named_modules()}
    fingerprint(model, record)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before
    assert np.array_equal(recorded().logits(), good.logits())


def drawn_candidates(*spreads) -> list[Candidate]:
    """Candidates of relative noise, one a layer, whose draws scatter along the axes by these amounts."""
    (setting,) = settings("blind", ["relative_gaussian"], None, 0)
    draws = np.random.default_rng(0).standard_normal((16, 12, len(spreads[0])))
    return [Candidate(at, setting, 0.0, False, draws * np.array(spread)) for at, spread in enumerate(spreads)]


def test_blind_knows_relative_noise_and_is_undecided_where_layers_fit_alike():
    """The published fault is among the candidates; of two layers with one covariance neither is named."""
    assert "relative_gaussian" in {setting.family for setting in settings("blind", None, None, 0)}
    here, other = [1.0, 1.0, 0.1, 0.1] * 4, [0.1, 0.1, 1.0, 1.0] * 4
    observed = np.random.default_rng(1).standard_normal((12, 16)) * np.array(here)
    changed = np.ones(12, dtype=bool)
    apart = blind(observed, drawn_candidates(here, other, other), changed)
    assert apart.fitting and not apart.alike
    assert max(apart.fits, key=lambda layer: apart.fits[layer].score) == 0
    alike = blind(observed, drawn_candidates(here, here, other), changed)
    assert not alike.fitting and alike.alike == (0, 1)
    assert alike.note.startswith("layers 0, 1 fit equally well, so none of them is named")
