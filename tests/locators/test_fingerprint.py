"""`fingerprint`: a failure recorded elsewhere is matched with the layer whose simulated fault explains it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noisescope.errors import InvalidInput
from noisescope.faults import faulty
from noisescope.injection import Injection
from noisescope.locators.fingerprint import cosines, fingerprint
from noisescope.locators.fingerprint_bench import sketch
from noisescope.locators.outputs import OutputRecord, record_outputs
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.testing import tiny_model

LAYERS = 5
SMALL = {"count": 12, "length": 8}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=LAYERS, initializer_range=0.2)  # blocks that do something


@pytest.fixture(scope="module")
def good(model) -> OutputRecord:
    return record_outputs(model, **SMALL)


def failure(model, fault: str) -> OutputRecord:
    with faulty(model, fault):
        return record_outputs(model, **SMALL)


@pytest.mark.parametrize(
    ("fault", "layer"),
    [(f, layer) for f in ("dead_zone:0.3", "bias:0.05") for layer in (0, LAYERS - 1)] + [("saturation:0.1", 2)],
)
def test_blind_finds_faults_that_are_functions_of_the_data(model, fault, layer):
    """The first, a middle and the last block, with family and class, without being told either."""
    verdict = fingerprint(model, failure(model, f"{fault}@{layer}"))
    first = verdict.suspects[0]
    assert (verdict.verdict, first.site.place, first.details["family"]) == ("faulty", layer, fault.partition(":")[0])
    assert first.details["cosine"] > 0.999
    assert first.confidence > 0.9
    assert verdict.method == "fingerprint blind"


def test_a_size_between_the_candidates_is_sought(model):
    """A dead zone of 0.17 is not among the sizes tried at first."""
    first = fingerprint(model, failure(model, "dead_zone:0.17@2")).suspects[0]
    assert (first.site.place, first.fault_class) == (2, "dead zone")
    assert first.details["size"] == pytest.approx(0.17, rel=0.15)


@pytest.mark.parametrize("fault", ["noise:0.05", "non_determinism:5"])
def test_blind_places_noise_of_another_seed_nearby(model, fault):
    """Only the covariance of what arrives can tell: the layer or its neighbour, with a confidence that says so."""
    verdict = fingerprint(model, failure(model, f"{fault},seed=99@4"))
    assert verdict.suspects[0].fault_class == "noise"
    assert abs(verdict.suspects[0].site.place - 4) <= 1
    assert "covariance" in verdict.notes[0]
    assert sum(s.confidence for s in verdict.suspects) == pytest.approx(1)


@pytest.mark.parametrize("fault", ["noise:0.05", "spike:0.3"])
def test_the_same_seed_repeats_the_failure_bit_for_bit(model, fault):
    """The published method: similarity 1 at the right layer, and it is called an identity test."""
    verdict = fingerprint(model, failure(model, f"{fault},seed=7@3"), mode="same-seed", seed=7)
    first = verdict.suspects[0]
    assert (first.site.place, first.details["identical"]) == (3, True)
    assert first.score == pytest.approx(1)
    assert "identity test" in verdict.notes[0]


def test_the_published_fault_itself(model):
    """Relative noise of 0.2 on the products of one layer, candidates of the same scale and seed."""
    noise = Injection(Gaussian(0.2), operators={"gemm"}, layers={1}, phases={"forward"}, seed=7)
    with inject(model, noise):
        said = record_outputs(model, **SMALL)
    first = fingerprint(model, said, mode="same-seed", seed=7, families=["relative_gaussian"]).suspects[0]
    assert (first.site.place, first.details["identical"], first.details["size"]) == (1, True, 0.2)


def test_another_seed_is_no_identity(model):
    """With a seed that is not the failure's, no candidate repeats it, and that is said."""
    verdict = fingerprint(model, failure(model, "noise:0.05,seed=8@3"), mode="same-seed", seed=7, families=["noise"])
    assert not any(s.details["identical"] for s in verdict.suspects)
    assert any("no candidate repeats" in note for note in verdict.notes)


def test_outputs_within_rounding_are_healthy(model, good):
    """The same outputs, and outputs that differ by an eps; a fault ten times larger than the floor is not healthy."""
    assert fingerprint(model, good).verdict == "healthy"
    wobbled = good.logits * (
        1 + np.float32(2**-22) * np.sign(np.sin(np.arange(good.logits.size))).reshape(good.logits.shape)
    )
    verdict = fingerprint(model, dataclasses.replace(good, logits=wobbled.astype(np.float32)))
    assert verdict.verdict == "healthy"
    floor = verdict.smallest_visible["rms_of_logits"]
    shifted = dataclasses.replace(good, logits=good.logits + np.float32(10 * floor))
    assert fingerprint(model, shifted, families=["bias"]).verdict == "faulty"


def test_a_reference_record_takes_out_what_two_devices_have_in_common(model, good):
    """An offset in both records changes nothing; without the reference it would drown the fault."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(good.logits.shape).astype(np.float32)
    said = failure(model, "bias:0.05@2")
    shifted = [dataclasses.replace(record, logits=record.logits + common) for record in (said, good)]
    first = fingerprint(model, *shifted, families=["bias", "dead_zone"]).suspects[0]
    assert first.site.place == 2
    assert first.details["cosine"] > 0.99
    alone = fingerprint(model, shifted[0], families=["bias", "dead_zone"]).suspects[0]
    assert alone.details["cosine"] < 0.9


def test_a_suspects_outputs_come_from_a_file(model, good, tmp_path):
    """Paths of saved records are as good as records."""
    failure(model, "bias:0.1@1").save(tmp_path / "suspect.npz")
    good.save(tmp_path / "good.npz")
    verdict = fingerprint(model, tmp_path / "suspect.npz", str(tmp_path / "good.npz"), families=["bias"])
    assert verdict.suspects[0].site.place == 1


def test_records_that_do_not_belong_together_are_refused(model, good, tmp_path):
    """Another model, other prompts, a damaged file, and what is no record."""
    stranger = record_outputs(tiny_model("llama", layers=LAYERS, seed=5), **SMALL)
    with pytest.raises(InvalidInput, match="another model"):
        fingerprint(model, stranger)
    with pytest.raises(InvalidInput, match="other prompts"):
        fingerprint(model, good, record_outputs(model, seed=1, **SMALL))
    good.save(tmp_path / "cut.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:200])
    with pytest.raises(InvalidInput, match="truncated or damaged"):
        fingerprint(model, tmp_path / "cut.npz")
    with pytest.raises(InvalidInput, match="a record or the path"):
        fingerprint(model, good.logits)


def test_prompts_whose_logits_are_not_finite_are_left_out(model, good):
    """One broken prompt is told; nothing but broken ones is a fault without a place."""
    said = failure(model, "bias:0.1@2")
    logits = said.logits.copy()
    logits[3] = np.nan
    verdict = fingerprint(model, dataclasses.replace(said, logits=logits), families=["bias"])
    assert verdict.suspects[0].site.place == 2
    assert any("1 of 12 prompts" in note for note in verdict.notes)
    for broken in (np.full_like(logits, np.inf), np.where(np.arange(12)[:, None] == 3, np.nan, good.logits)):
        verdict = fingerprint(model, dataclasses.replace(said, logits=broken))
        assert (verdict.verdict, verdict.suspects) == ("faulty", ())
        assert "not finite" in verdict.notes[0]


def test_prompts_of_several_lengths(model):
    """They can't share block outputs, and are simulated all the same."""
    prompts = [[3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13], [14, 15, 16]]
    with faulty(model, "bias:0.1@3"):
        said = record_outputs(model, prompts=prompts)
    verdict = fingerprint(model, said, families=["bias"], sizes=[0.1])
    assert verdict.suspects[0].site.place == 3


def test_the_cost_counts_only_the_blocks_that_run(model):
    """Blocks before the fault are computed once: candidates cost the share of the blocks behind them."""
    said = failure(model, "bias:0.1@3")
    verdict = fingerprint(model, said, families=["bias"], sizes=[0.1])
    assert verdict.checked == LAYERS
    assert verdict.forwards == pytest.approx(1 + 1 + sum(1 - layer / LAYERS for layer in range(LAYERS)))


def test_candidates_as_asked_for(model, good):
    """Layers, families and sizes narrow the search; other families than the notes' may take part."""
    said = failure(model, "gain:0.1@3")
    verdict = fingerprint(model, said, families=["gain", "dead_lane"], sizes={"gain": [0.1]}, layers=[2, 3])
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


def test_nothing_is_left_behind(model, good):
    """Random state and modules are as they were."""
    said = failure(model, "bias:0.1@3")
    state, before = torch.get_rng_state(), {name: set(m.__dict__) for name, m in model.named_modules()}
    fingerprint(model, said)
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before
    assert np.array_equal(record_outputs(model, **SMALL).logits, good.logits)
