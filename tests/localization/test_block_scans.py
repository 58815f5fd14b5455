"""`scans`: a fault at a block's output is named at that block, and a healthy model is called healthy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import FAMILIES, Bias, Saturation, faulty
from noisescope.localization.block_scans import SCANS, scans, z_limit
from noisescope.localization.block_statistics import PROFILES, kurtosis, mean_shift, pile_up
from noisescope.testing import MODELS, tiny_inputs, tiny_model

FAULTS = ["dead_zone:0.01", "dead_zone:0.3", "saturation:0.01", "saturation:0.3", "bias:0.01", "bias:0.3"]
FAULTS += ["noise:0.01", "noise:0.3", "spike:0.3", "non_determinism:1.01"]
FAULTS += [f"non_determinism:5,mode={mode}" for mode in ("suppressed", "inconsistent", "biased", "correlated")]
LAYERS = 4


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=LAYERS)


@pytest.fixture(scope="module")
def deep():
    """Ten blocks, and one massive channel, as trained models have: all else is small beside it."""
    model = tiny_model("llama", layers=10)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0].mul_(30)
    return model


def prompts_of(name):
    return [tiny_inputs(name, batch=2, length=12)]


@pytest.mark.parametrize("layer", [0, 2, LAYERS - 1])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_a_blocks_output_is_named_there(model, fault, layer):
    """Every family of the notes, boundary blocks included, with its class; and no other block is accused."""
    with faulty(model, f"{fault},seed=3@{layer}") as scope:
        verdict = scans(model)
    assert scope.changed
    assert verdict.verdict == "faulty"
    assert [s.site.place for s in verdict.suspects] == [layer]
    suspect = verdict.suspects[0]
    assert suspect.fault_class == FAMILIES[fault.partition(":")[0]].fault_class
    assert (suspect.site.operator, suspect.site.module) == ("residual", f"model.layers.{layer}")


@pytest.mark.parametrize("fault", ["dead_zone:0.3", "bias:0.01", "noise:0.01", "spike:0.9"])
def test_sparse_faults_are_named_with_their_channels(model, fault):
    """On three channels of 32 the layer is found, and the channels accused are among those three."""
    with faulty(model, f"{fault},channels=3+17+30@2") as scope:
        verdict = scans(model)
    assert scope.changed
    assert verdict.suspects[0].site.place == 2
    assert set(verdict.suspects[0].channels) <= {3, 17, 30}
    assert verdict.suspects[0].channels


def test_a_fault_that_changes_nothing_leaves_the_model_healthy(model):
    """Saturation on channels that hold no large values is a no-op."""
    with torch.no_grad():
        hidden = model.model(torch.arange(3, 35)[None], output_hidden_states=True).hidden_states[2]
    quiet = tuple(int(channel) for channel in hidden.abs().amax((0, 1)).argsort()[:3])
    with faulty(model, Saturation(magnitude=0.01, channels=quiet), 1) as scope:
        verdict = scans(model)
    assert scope.changed == 0
    assert (verdict.verdict, verdict.suspects) == ("healthy", ())


@pytest.mark.parametrize("name", MODELS)
def test_healthy_models_of_every_architecture(name):
    """No alarm and no blind block: the form of the sum is found in pre-norm, post-norm, parallel and MoE blocks."""
    verdict = scans(tiny_model(name, layers=3), prompts=prompts_of(name))
    assert verdict.verdict == "healthy", verdict.notes
    assert verdict.smallest_visible["bookkeeping"]["blind"] == []
    assert verdict.suspects == ()


@pytest.mark.parametrize("name", MODELS)
def test_a_small_bias_is_found_in_every_architecture(name):
    """At block 1, whatever the block adds up."""
    model = tiny_model(name, layers=3)
    with faulty(model, "bias:0.01@1"):
        verdict = scans(model, prompts=prompts_of(name))
    assert (verdict.verdict, verdict.suspects[0].site.place) == ("faulty", 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype):
    """Sums are replayed in the model's own dtype: healthy is bit for bit there too."""
    model = tiny_model("llama", layers=LAYERS).to(dtype)
    assert scans(model).verdict == "healthy"
    with faulty(model, "bias:0.05@3"):
        assert scans(model).suspects[0].site.place == 3


@pytest.mark.parametrize("seed", range(12))
def test_a_fault_that_comes_and_goes_is_found_in_whatever_call_it_acts(model, seed):
    """One call in five, three forwards and one more call of the block: found if it acted at all, else healthy."""
    with faulty(model, Bias(magnitude=0.1, rate=0.2, seed=seed), 1) as scope:
        verdict = scans(model)
    assert scope.calls == 4
    expected = ("faulty", [1]) if scope.acted else ("healthy", [])
    assert (verdict.verdict, [s.site.place for s in verdict.suspects]) == expected


def test_a_branch_that_differs_from_run_to_run_is_instability(model):
    """The sums are exact, but the same input gave another output."""
    with faulty(model, "noise:0.01@1/linear/*down_proj"):
        verdict = scans(model)
    assert [(s.site.place, s.fault_class, s.details["scan"]) for s in verdict.suspects] == [(1, "noise", "instability")]
    assert verdict.verdict == "faulty"


def test_runs_that_differ_by_rounding_are_no_alarm(model):
    """Devices that sum in no fixed order differ by an ulp: told, and not called a fault."""
    with faulty(model, "noise:1e-7@1/linear/*down_proj") as scope:
        verdict = scans(model)
    assert scope.changed
    assert verdict.verdict == "healthy"
    assert any("within rounding" in note for note in verdict.notes)


def test_a_wrong_summand_that_repeats_is_not_seen_here(model):
    """The stated blind spot: a gain inside a branch leaves the sums exact, and no block is accused for it."""
    with faulty(model, "gain:0.01@1/linear/*down_proj"):
        assert scans(model).suspects == ()


@pytest.mark.parametrize(
    ("scan", "fault", "kind"),
    [
        ("gain", "dead_zone:0.3", "dead zone"),
        ("mean_shift", "bias:3", "bias"),
        ("kurtosis", "spike:0.3", "spike"),
        ("pile_up", "saturation:0.7", "saturation"),
    ],
)
def test_profiles_alone_point_at_strong_faults_and_stay_undecided(deep, scan, fault, kind):
    """Each of the notes' scans, and the mean shift, ranks its own fault first; that alone is never called faulty."""
    model = tiny_model("llama", layers=10) if scan == "pile_up" else deep
    with faulty(model, f"{fault}@4"):
        verdict = scans(model, which=[scan])
    assert verdict.verdict == "undecided"
    first = verdict.suspects[0]
    assert (first.site.place, first.fault_class, first.details["scan"]) == (4, kind, scan)
    assert abs(first.details["z"]) > verdict.smallest_visible[scan]["z"]


def test_a_layer_that_stands_out_by_nature_is_a_note_where_its_books_balance():
    """A block that makes massive activations in one channel is unusual and healthy."""
    model = tiny_model("llama", layers=10)
    with torch.no_grad():
        model.model.layers[6].mlp.down_proj.weight[0].mul_(10_000)
    verdict = scans(model)
    assert verdict.verdict == "healthy"
    assert any("6 (kurtosis" in note and "sums are exact" in note for note in verdict.notes)


def test_the_cost_is_three_forwards_and_one_more_call_of_each_block(model):
    """Passive scans share forwards; without the gain, or without repeats, they are not made."""
    assert scans(model).forwards == 4
    assert scans(model, which=[s for s in SCANS if s != "gain"]).forwards == 3
    assert scans(model, which=["bookkeeping", "kurtosis"]).forwards == 1
    for count in (1, 3):
        assert scans(model, which=["bookkeeping"], prompts=[torch.tensor([[5, 6]])] * count).forwards == count


def test_numbers_of_all_scans_are_with_the_suspect(model):
    """What each scan read at the accused block, and what each could have seen."""
    with faulty(model, "bias:0.3@2"):
        verdict = scans(model)
    assert {*PROFILES, *(f"{name}_z" for name in PROFILES), "instability"} <= set(verdict.suspects[0].details)
    assert set(verdict.smallest_visible) == set(SCANS)
    verdict.to_dict()


def test_formulas():
    """Kurtosis of normal and two-valued numbers, a pile-up where a limit cuts, the median of what was added."""
    z = torch.randn(200, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert kurtosis(z) == pytest.approx(3, abs=0.1)
    assert kurtosis(z.sign()) == pytest.approx(1, abs=0.01)
    assert kurtosis(torch.ones(3, 3)) == 1
    assert pile_up(z) < 3
    assert pile_up(z.clamp(-1.5, 1.5)) > 20
    assert pile_up(torch.ones(3, 3)) == 0
    assert mean_shift(z, z + 0.5 + 0.1 * z) == pytest.approx(5, rel=0.05)
    assert mean_shift(z, z) == 0


@pytest.mark.parametrize("layers", [8, 30])
def test_the_limit_has_its_stated_rate_for_layers_that_are_alike(layers):
    """Of fresh sets of normal layers about 5 % pass a limit meant for 5 %."""
    limit = z_limit(layers, 2, 0.05)
    drawn = np.random.default_rng(7).standard_normal((4000, layers))
    middle = np.median(drawn, 1, keepdims=True)
    z = (drawn - middle) / (1.4826 * np.median(np.abs(drawn - middle), 1, keepdims=True))
    rate = float((np.abs(z).max(1) > limit).mean())
    assert 0.03 < rate < 0.07
    assert z_limit(0, 2, 0.05) == z_limit(8, 0, 0.05) == math.inf


def test_nothing_is_left_behind(model):
    """Random state, modes and modules are as they were, also after an exception in the model."""
    model.train()
    state, before = torch.get_rng_state(), {name: set(m.__dict__) for name, m in model.named_modules()}
    scans(model)
    tokens = torch.arange(3, 19).reshape(2, 8)
    with pytest.raises(RuntimeError):
        scans(model, prompts=[{"input_ids": tokens, "position_ids": tokens[:, :3]}])
    assert torch.equal(torch.get_rng_state(), state)
    assert {name: set(m.__dict__) for name, m in model.named_modules()} == before
    assert all(module.training for module in model.modules())
    model.eval()


def test_the_demo_needs_no_data():
    """Built-in text, a trained model: healthy, and found when broken."""
    demo = ns.load("demo")
    assert scans(demo).verdict == "healthy"
    with faulty(demo.model, "saturation:0.05@9"):
        assert scans(demo).suspects[0].site.place == 9


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"which": ["kurtossis"]}, "Did you mean 'kurtosis'"),
        ({"which": []}, "which is empty"),
        ({"runs": 1}, "at least 2"),
        ({"false_alarms": 0}, "between 0 and 1"),
    ],
)
def test_what_can_not_be_asked(model, arguments, reason):
    """Scans that are not there, none, one run, no false alarms at all."""
    with pytest.raises(InvalidInput, match=reason):
        scans(model, **arguments)


def test_a_hook_on_a_block_changes_its_output(model):
    """It runs after the block's code, so only the next block's input shows it."""
    handle = model.model.layers[1].register_forward_hook(lambda block, given, y: y * (y.abs() > 0.3 * y.std()))
    try:
        (suspect,) = scans(model).suspects
        assert (suspect.site.place, suspect.fault_class) in ((1, "dead zone"), (1, "flush to zero"))
        assert ns.locate(model, method="relations").suspects[0].site.place == 1
    finally:
        handle.remove()


def test_nan_is_not_healthy(model):
    """Sums with NaN are right sums; an overflow in 16 bits looks like this too, so nothing is decided."""
    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda module, given, y: y * math.nan)
    try:
        verdict = scans(model)
    finally:
        handle.remove()
    assert verdict.verdict == "undecided"
    assert "block 1" in verdict.headline and "NaN" in verdict.headline
