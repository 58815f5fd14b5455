"""The audit: healthy models of every architecture raise no alarm, and a fault is named by layer and operator."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.faults import FAMILIES, Lanes, faulty, make_fault
from noisescope.localization.audit import audit
from noisescope.testing import MODELS, tiny_inputs, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama", layers=3).bfloat16()


HEALTHY = list(zip(MODELS, itertools.cycle(DTYPES), strict=False))  # benchmarks/detection.py has all pairs


@pytest.mark.parametrize(("name", "dtype"), HEALTHY, ids=str)
def test_healthy_models_are_healthy(name, dtype):
    """All architectures: every operator is looked at, none alarms, nothing is left out."""
    model = tiny_model(name).to(dtype)
    verdict = audit(model, tiny_inputs(name) if name == "transformer_encoder" else None)
    assert verdict.verdict == "healthy", (verdict.suspects, verdict.notes)
    decode = [phase.steps for phase in verdict.coverage.phases if phase.kind == "decode"]
    assert bool(decode) == (name not in ("bert", "vit", "transformer_encoder"))
    prefill = [phase for phase in verdict.coverage.phases if phase.kind != "decode"]
    driven = dtype != torch.float32  # one forward more, in which 16-bit operators are driven
    assert verdict.forwards == sum(phase.steps for phase in prefill) + sum(decode) + driven
    assert verdict.coverage.smallest_share == 1.0 and not verdict.coverage.not_judged
    looked = set(verdict.smallest_visible)
    certain = {op for unit in ns.dissect(model).units if unit.certain for op in unit.operators}
    assert certain - {"residual"} <= looked  # sums are code between operators
    assert verdict.smallest_visible["between operators"]["sites"] >= 3
    assert not any("not examined" in note for note in verdict.notes)


@pytest.mark.parametrize("seed", range(3))
def test_other_prompts_are_healthy_too(model, seed):
    """Inputs differ with the seed, the verdict does not."""
    assert audit(model, seed=seed, quick=seed > 0).verdict == "healthy"


SITES = [
    ("embed", "embedding", "model.embed_tokens"),
    (0, "norm", "model.layers.0.input_layernorm"),
    (1, "linear", "model.layers.1.self_attn.k_proj"),
    (1, "softmax", "model.layers.1.self_attn"),
    (2, "matmul", "model.layers.2.self_attn"),
    (2, "silu", "model.layers.2.mlp.act_fn"),
    (0, "linear", "model.layers.0.mlp.down_proj"),
    (1, "residual", "model.layers.1"),
    ("final_norm", "norm", "model.norm"),
    ("lm_head", "linear", "lm_head"),
]


AT = [(*site, torch.bfloat16) for site in SITES] + [(*site, torch.float32) for site in SITES[2:8:2]]


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("name", ["gpt2", "opt", "bert"])
@pytest.mark.parametrize("size", [0.02, 0.5])
def test_biases_are_part_of_the_sums(name, size, tokens):
    """Kernels that start from a bias round at its size in every step, and leave its bits in what cancels."""
    ids = torch.randint(3, 60, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    found = ns.locate(tiny_model(name, biases=size), method="audit", inputs={"input_ids": ids}, quick=True)
    assert found.verdict == "healthy", found.suspects[:1]


@pytest.mark.parametrize("fault", ["gain", "stuck_bit", "dead_lane", "dead_k_lane", "bias"])
def test_faults_of_linears_with_biases_are_found(fault):
    """The floor is no larger than it must be."""
    model = tiny_model("gpt2", biases=0.1)
    with ns.faulty(model, fault, ns.Site("linear", 1, "transformer.h.1.mlp.c_fc")):
        found = ns.locate(model, method="audit", quick=True)
    assert found.suspects[0].site.module == "transformer.h.1.mlp.c_fc"


@pytest.mark.parametrize(("place", "operator", "module", "dtype"), AT, ids=str)
def test_a_gain_of_one_percent_is_named_everywhere(place, operator, module, dtype):
    """Layer, operator, module and class, at the first place of the list."""
    model = tiny_model("llama", layers=3).to(dtype)
    with faulty(model, make_fault("gain", magnitude=0.01), place, operator=operator, module=module):
        verdict = audit(model, quick=True)
    assert verdict.verdict == "faulty"
    site = verdict.suspects[0].site
    assert (site.place, site.operator, site.module) == (place, operator, module)
    assert verdict.suspects[0].fault_class == "gain"


SIZES = {"stuck_bit": {"bit": 4}, "accumulation": {"chunk": 4}}  # the tiny model's sums have 32 terms
AMBIGUOUS = {"bit_flip", "nan_to_zero", "input_truncation", "activation_cut_off", "flush_to_zero", "block_scale"}


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in AMBIGUOUS])
def test_every_family_is_found_and_named(family, model):
    """Default size as a rule, where the family makes sense first: the right site, and the class the family has."""
    fault = make_fault(family, **SIZES.get(family, {}))
    operator = next(op for op in ("linear", "softmax", "silu", "norm") if op in FAMILIES[family].operators)
    module = {"linear": "model.layers.1.mlp.gate_proj", "softmax": "model.layers.1.self_attn"}.get(operator)
    with faulty(model, fault, 1, operator=operator, module=module) as scope:
        verdict = audit(model, quick=True)
    assert scope.changed
    top = verdict.suspects[0]
    assert (top.site.place, top.site.operator) == (1, operator)
    assert top.fault_class == FAMILIES[family].fault_class


def test_channels_and_period_are_reported(model):
    """A lane of the unit shows as channels with a stride."""
    fault = make_fault("bias", magnitude=1.0, channels=Lanes(16, 5))
    with faulty(model, fault, 1, operator="linear", module="*gate_proj"):
        top = audit(model, quick=True).suspects[0]
    assert top.channels == tuple(range(5, 64, 16))
    assert top.period == 16


def test_errors_do_not_accumulate(model):
    """A gross fault in block 0 leaves every later operator unsuspected: each is judged on what it was given."""
    with faulty(model, make_fault("noise", magnitude=1.0), 0):
        verdict = audit(model, quick=True)
    assert [str(s.site) for s in verdict.suspects] == ["residual at block 0 (model.layers.0)"]


def test_two_faults_are_both_named_the_earlier_first(model):
    """Two broken operators are two suspects, in the order of computation."""
    gain = make_fault("gain", magnitude=0.05)
    with (
        faulty(model, gain, 2, operator="linear", module="*up_proj"),
        faulty(model, gain, 0, operator="norm", module="*input_layernorm"),
    ):
        verdict = audit(model, quick=True)
    assert [(s.site.place, s.site.operator) for s in verdict.suspects] == [(0, "norm"), (2, "linear")]


def test_a_fault_that_changes_nothing_is_healthy(model):
    """NaN-to-zero on a model without NaN is no fault of this run."""
    with faulty(model, make_fault("nan_to_zero"), 1) as scope:
        verdict = audit(model, quick=True)
    assert scope.changed == 0
    assert verdict.verdict == "healthy"


def test_noise_is_what_differs_from_run_to_run(model):
    """The same error is "noise" when it is drawn anew, and not when it repeats."""
    with faulty(model, make_fault("noise", magnitude=0.5), 1, operator="linear", module="*up_proj"):
        top = audit(model, quick=True).suspects[0]
    assert (top.fault_class, top.details["repeatable"]) == ("noise", False)
    noise = torch.randn(64, generator=torch.Generator().manual_seed(3)).bfloat16()
    frozen = ns.Injection(lambda y, draw: y + noise * 0.01, modules=("model.layers.1.mlp.up_proj",), phases={"forward"})
    with ns.inject(model, frozen):
        top = audit(model, quick=True).suspects[0]
    assert top.details["repeatable"]
    assert top.fault_class != "noise"


class BrokenKernel(torch.overrides.TorchFunctionMode):
    """A fused attention kernel that drops the last value channel; plain products are right."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        y = func(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention:
            y = y.clone()
            y[..., -1] = 0
        return y


def test_a_fault_of_the_fused_kernel_stays_with_attention(model):
    """Taken apart, attention is right: so the kernel is to blame, not one of its operators."""
    with BrokenKernel():
        verdict = audit(model, quick=True)
    assert {s.site.operator for s in verdict.suspects} == {"attention"}
    assert verdict.suspects[0].site.place == 0
    assert verdict.suspects[0].fault_class == "dead lane"


def test_eager_attention_is_audited_directly():
    """Where softmax and products are visible anyway, they are judged in every forward."""
    model = tiny_model("llama", attn_implementation="eager").bfloat16()
    assert audit(model, quick=True).verdict == "healthy"
    with faulty(model, make_fault("normaliser_gain"), 1):
        assert audit(model, quick=True).suspects[0].site.operator == "softmax"


@pytest.mark.parametrize("rows", [4, 300])
def test_many_rows_are_sampled_and_checked_by_sums(model, rows):
    """The verdict says what was only summed up: with attention taken apart that is every row of a linear."""
    tokens = torch.randint(3, 60, (4, 60), generator=torch.Generator().manual_seed(0))
    verdict = audit(model, tokens, rows=rows, quick=True)
    assert verdict.verdict == "healthy"
    assert any("by checksum" in note for note in verdict.notes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_left_behind(dtype):
    """Weights, hooks, training mode, random state and outputs are as before, also after an error."""
    model = tiny_model("llama", layers=3).to(dtype)
    tokens = torch.arange(3, 19).reshape(2, 8)
    with torch.no_grad():
        before = model(tokens).logits
    weights = copy.deepcopy(model.state_dict())
    model.model.layers[1].train()
    state = torch.random.get_rng_state()
    audit(model, quick=True)
    with pytest.raises(RuntimeError):
        audit(model, {"input_ids": tokens, "position_ids": tokens[:, :3]})
    assert model.model.layers[1].training
    assert not model.model.layers[0].training
    model.eval()
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)


class StrangeNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))

    def forward(self, x):
        return self.weight * torch.tanh(x)


def test_a_norm_of_an_unknown_formula_is_judged_by_its_code():
    """A factor of 1.1, which its class does not have, is named there."""
    model = tiny_model("llama", layers=2)
    model.model.norm = StrangeNorm()
    verdict = audit(model, quick=True)
    assert verdict.verdict == "healthy" and not verdict.coverage.not_judged
    model.model.norm.forward = lambda x: 1.1 * StrangeNorm.forward(model.model.norm, x)
    (suspect,) = audit(model, quick=True).suspects
    assert (suspect.site.place, suspect.site.module, suspect.fault_class) == ("final_norm", "model.norm", "gain")


def test_the_power_of_a_healthy_verdict(model):
    """smallest_visible says per operator what would have been seen; a linear's gain of twice that is seen."""
    visible = audit(model, quick=True).smallest_visible
    assert visible["linear"]["element_ulp"] <= 2
    assert visible["linear"]["sites"] == 22
    with faulty(model, make_fault("gain", magnitude=3 * visible["linear"]["gain"]), 1, operator="linear"):
        assert audit(model, quick=True).verdict == "faulty"


def test_inputs_of_every_form(model):
    """Token ids, a batch, a list of batches; texts need a tokenizer, and nonsense is refused with a reason."""
    tokens = torch.arange(3, 19).reshape(2, 8)
    for inputs in (tokens, {"input_ids": tokens}, [tokens, {"input_ids": tokens.flip(0)}]):
        assert audit(model, inputs, quick=True).verdict == "healthy"
    with pytest.raises(InvalidInput, match="no tokenizer"):
        audit(model, ["some text"])
    with pytest.raises(InvalidInput, match="inputs must be a batch"):
        audit(model, 7)
    with pytest.raises(InvalidInput, match="rows must be at least 2"):
        audit(model, tokens, rows=0)
    with pytest.raises(InvalidInput, match="can't generate inputs"):
        audit(tiny_model("transformer_encoder"))


def test_a_subject_is_fed_built_in_text():
    """With a tokenizer the default input is text; the demo model, as it comes, is healthy."""
    subject = ns.load("demo")
    verdict = audit(subject, quick=True)
    assert verdict.verdict == "healthy"
    assert verdict.checked > 1_000_000
