"""Relations: healthy models break no law, nothing is left behind, and every call keeps its place."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import noisescope as ns
from noisescope import progress
from noisescope.cli.progress_display import ProgressDisplay
from noisescope.errors import InvalidInput
from noisescope.faults import Accumulation, Bias, DeadZone, Gain, Noise, NormGain, Saturation, StaleTile, faulty
from noisescope.injection import Injection
from noisescope.localization.laws.table import EXACT, Law
from noisescope.localization.relations import relations
from noisescope.localization.verdict import CLASSES
from noisescope.probe.inject import inject
from noisescope.testing import MODELS, tiny_inputs, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs_for(name: str, dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    made = tiny_inputs(name, length=16, seed=seed)
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_model("llama", layers=3)


@pytest.fixture(scope="module")
def tokens() -> dict[str, torch.Tensor]:
    return tiny_inputs("llama", length=24)


# Each architecture with each dtype and each attention kernel, each dtype with each kernel; the third factor alternates.
PAIRS = [
    pytest.param(name, dtype, (row + column) % 2, id=f"{name}-{dtype}", marks=[pytest.mark.slow] * (row % 3 != column))
    for row, name in enumerate(MODELS)
    for column, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "dtype", "eager"), PAIRS)
def test_healthy_models_keep_every_law(name, dtype, eager):
    """Every architecture in every dtype, with fused attention and without weights, or with both otherwise.

    No alarm, and what could not be tried is reported.
    """
    settings = {"attn_implementation": "eager"} if eager and name != "transformer_encoder" else {}
    model = tiny_model(name, seed=eager, **settings).to(dtype)
    verdict = relations(model, inputs_for(name, dtype, eager), weights=bool(eager))
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]
    assert verdict.checked > 80
    assert any("laws tried" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "name, words",
    [
        ("mixtral", "MoE routing may switch experts"),
        ("bert", "not a causal language model"),
        ("t5", "cross attention"),
        ("gpt2", "MLP identity: the MLP adds biases"),
        ("transformer_encoder", "nn.MultiheadAttention is checked as a whole"),
    ],
)
def test_laws_that_can_not_be_tried_are_told(name, words):
    """An architecture's guard shows in the notes."""
    verdict = relations(tiny_model(name), inputs_for(name, torch.float32))
    assert any(words in note for note in verdict.notes), verdict.notes


def test_nothing_is_left_behind(model, tokens):
    """Outputs, parameters, stand-ins, modes and random numbers are as before; so too where a forward raises."""
    model.train()
    model.model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    values = copy.deepcopy(model.state_dict())
    torch.manual_seed(7)
    state = torch.get_rng_state()
    relations(model, tokens, weights=True)
    with pytest.raises(ValueError, match="input_ids"):
        relations(model, {"position_ids": tokens["input_ids"]})
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    for name, module in model.named_modules():
        assert set(module.__dict__) == set(attributes[name])
        assert not module._forward_hooks and not module._forward_pre_hooks
    model.eval()


def test_biases_come_back(tokens):
    """Laws of biased modules are tried without their biases, which are the same objects with the same values after."""
    model = tiny_model("qwen2")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.5)
    before = [(id(p), p.clone()) for p in model.parameters()]
    verdict = relations(model, tokens)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]
    assert all(
        id(p) == was and torch.equal(p, value) for p, (was, value) in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize("place", [0, 2])
def test_a_shared_module_is_faulty_only_in_its_block(place, tokens):
    """The repeated calls of a module that two blocks share stay in the block that made them."""
    model = tiny_model("llama", layers=3)
    model.model.layers[2].mlp = model.model.layers[0].mlp
    module = "model.layers.0.mlp.down_proj" if place == 0 else "model.layers.2.mlp.down_proj"
    with faulty(model, DeadZone(0.1, relative_to="rms"), place, operator="linear", module=module):
        verdict = relations(model, tokens)
    assert [suspect.site.place for suspect in verdict.suspects] == [place]
    assert verdict.suspects[0].fault_class == "dead zone"


@pytest.mark.parametrize("occurrence, fault", [(0, Saturation(0.5)), (1, Bias(0.3))])
def test_a_call_made_again_has_the_number_of_the_first(model, tokens, occurrence, fault):
    """A fault at one product within attention acts on the repeated calls of that product, and not on the other one."""
    with faulty(model, fault, 1, operator="matmul", occurrence=occurrence) as scope:
        verdict = relations(model, tokens)
    assert scope.acted > 10
    first = verdict.suspects[0]
    assert (first.site.place, first.site.operator, first.site.occurrence) == (1, "matmul", occurrence)


def test_old_data_are_told_from_noise(model, tokens):
    """A tile that holds what the call before left repeats itself, noise does not."""
    for fault in (StaleTile(), Noise(0.1)):
        with faulty(model, fault, 1, operator="linear", module="*.q_proj"):
            first = relations(model, tokens).suspects[0]
        assert (first.site.module, first.fault_class) == ("model.layers.1.self_attn.q_proj", fault.fault_class)


def test_the_weakest_noise_in_one_module_is_found_and_that_of_the_stack_forgiven(tokens):
    """One ulp of noise in one linear is a fault; the same in all of them is a stack that not bit-for-bit repeatable."""
    model = tiny_model("llama", layers=3)

    def jitter(y, draw):
        return y * (1 + torch.finfo(y.dtype).eps * draw.normal(y).sign())

    with inject(model, Injection(jitter, modules=("model.layers.1.mlp.up_proj",), phases={"forward"})):
        one = relations(model, tokens)
    with inject(model, Injection(jitter, operators={"linear"}, phases={"forward"})):
        everywhere = relations(model, tokens)
    assert one.verdict == "faulty"
    assert (one.suspects[0].site.module, one.suspects[0].fault_class) == ("model.layers.1.mlp.up_proj", "noise")
    assert everywhere.verdict == "healthy", [suspect.evidence for suspect in everywhere.suspects]
    assert any("not bit-for-bit repeatable" in note for note in everywhere.notes)


def test_a_verdict_says_what_it_could_have_seen(model, tokens):
    """Gain is invisible without weights and visible with them; sizes are numbers."""
    blind, seeing = relations(model, tokens), relations(model, tokens, weights=True)
    assert blind.smallest_visible["linear"]["gain"]["size"] is None
    assert 0 < seeing.smallest_visible["linear"]["gain"]["size"] < 1e-4
    assert blind.smallest_visible["linear"]["noise"]["size"] == 0
    assert 0 < blind.smallest_visible["linear"]["accumulation"]["size"] < 1e-4
    assert 0 < blind.smallest_visible["linear"]["saturation"]["size"] < 1e-4
    assert 5 < blind.forwards < 15
    with faulty(model, Gain(3 * seeing.smallest_visible["linear"]["gain"]["size"]), 1, operator="linear"):
        assert relations(model, tokens, weights=True).verdict == "faulty"


@pytest.mark.parametrize("fault, site", [(Gain(0.01), "linear"), (NormGain(0.01), "norm")])
def test_linear_faults_need_weights(model, tokens, fault, site):
    """A gain keeps every law of what is linear; read weights show it."""
    with faulty(model, fault, 1, operator=site):
        assert relations(model, tokens).verdict == "healthy"
        first = relations(model, tokens, weights=True).suspects[0]
    assert (first.site.place, first.site.operator, first.fault_class) == (1, site, "gain")


def test_what_a_fault_leads_to_downstream_is_no_suspect(tokens):
    """Each module is judged on what it received: one faulty linear is one suspect, though all later numbers are off."""
    model = tiny_model("llama", layers=4)
    with faulty(model, Accumulation(chunk=8), 1, operator="linear", module="*.up_proj"):
        verdict = relations(model, tokens)
    assert [suspect.site.module for suspect in verdict.suspects] == ["model.layers.1.mlp.up_proj"]


def test_a_numbered_block_output_is_found_bit_by_bit(model, tokens):
    """A block whose output is no longer the sum of its parts, by one ulp in one channel."""

    def nudge(y, draw):
        return torch.nextafter(y, torch.full_like(y, torch.inf))

    with inject(model, Injection(nudge, operators={"residual"}, layers={1}, channels=(5,), phases={"forward"})):
        first = relations(model, tokens).suspects[0]
    assert (first.site.place, first.site.operator, first.channels) == (1, "residual", (5,))


def test_places_narrow_the_search(model, tokens):
    """Only the named blocks are looked at; a place that is not there is refused."""
    with faulty(model, DeadZone(0.3), 1, operator="linear", module="*.o_proj"):
        assert relations(model, tokens, places=[0]).verdict == "healthy"
        assert relations(model, tokens, places=1).verdict == "faulty"
    with pytest.raises(InvalidInput, match="unknown place 7"):
        relations(model, tokens, places=[7])


def test_every_call_is_a_step_of_a_plan(model, tokens):
    """Modules first, then functions, as many as planned: laws take minutes on a model of some size."""
    shown = ProgressDisplay()
    shares = []

    def stepped(name, work):
        ProgressDisplay.stepped(shown, name, work)
        shares.append((name, shown.share))

    shown.stepped = stepped
    with progress.shown_by(shown):
        relations(model, tokens)
    assert list(dict.fromkeys(name for name, _ in shares)) == ["laws of modules", "laws of functions"]
    assert 0.9 < shares[-1][1] <= 1.0  # some functions only may be called
    assert len({share for _, share in shares}) == len(shares)


def test_a_subject_needs_no_data():
    """Built-in text, or random tokens where there is no tokenizer."""
    assert relations(ns.load("tiny:llama")).verdict == "healthy"


def test_the_table_of_laws_is_whole():
    """Each law has a name, words and known classes; exact ones say so."""
    for law in Law:
        assert law.expected and law.blind and law.transform
        assert set(law.catches) <= set(CLASSES)
        assert law.access in ("H", "C", "W") and law.levels
    inner = {Law.ODDNESS, Law.ZERO, Law.SCALE_BY_TWO, Law.ONE_HOT_READBACK, Law.NAN_PASSES}
    assert {law for law in Law if law.floor == EXACT} == inner | {Law.SUM_OF_PARTS}


def test_a_model_that_does_not_repeat_itself_is_not_called_healthy():
    """A rare spike behind a block: laws at modules are kept, and two runs of the model differ."""
    model, calls = tiny_model("llama", layers=3), []

    def spike(_, args, output):
        calls.append(1)
        y = (output[0] if isinstance(output, tuple) else output).clone()
        if len(calls) % 3 == 0:
            y.view(-1)[7] += 50
        return (y, *output[1:]) if isinstance(output, tuple) else y

    model.model.layers[1].register_forward_hook(spike)
    verdict = relations(model)
    assert verdict.verdict != "healthy"
    assert not verdict.suspects or verdict.suspects[0].site.place in (1, 2)
