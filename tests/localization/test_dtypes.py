"""Numbers of another kind than the model's name says: float64 models, and float32 models under autocast."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import torch
import transformers

import noisescope as ns
from noisescope.faults import DeadZone, Saturation, faulty
from noisescope.localization.relations import relations
from noisescope.testing import tiny_inputs, tiny_model

METHODS = ("audit", "relations", "auto")


def locate(model, method, name):
    return ns.locate(model, method=method, inputs=tiny_inputs(name, length=16), quick=method != "relations")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_healthy_float64_model_is_no_alarm(name, method):
    """Norms that run in float32 whatever the dtype, and a host that has nothing wider."""
    verdict = ns.locate(
        tiny_model(name).double(), method=method, inputs=tiny_inputs(name, length=16), quick=method != "relations"
    )
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


def test_float64_is_told_of():
    """What is finer than float32 was not looked at, and the verdict says so."""
    model, inputs = tiny_model("llama"), tiny_inputs("llama", length=16)
    assert any("float32 precision" in note for note in relations(model.double(), inputs).notes)
    assert not any("float32 precision" in note for note in relations(model.float(), inputs).notes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "name, module, fault", [("llama", "*.up_proj", DeadZone(0.1)), ("gpt2", "*.c_fc", Saturation(0.5))]
)
def test_a_fault_in_a_float64_model_is_found(name, module, fault, method):
    """Where it is and of what kind."""
    model = tiny_model(name).double()
    with faulty(model, fault, 1, operator="linear", module=module):
        first = ns.locate(
            model, method=method, inputs=tiny_inputs(name, length=16), quick=method != "relations"
        ).suspects[0]
    assert (first.site.place, first.site.operator, first.fault_class) == (1, "linear", fault.fault_class)


@pytest.mark.parametrize(
    "name, method, dtype",
    [
        *itertools.product(["llama", "gpt2", "transformer_encoder"], METHODS, [torch.bfloat16]),
        ("qwen3", "audit", torch.bfloat16),
        ("qwen3", "relations", torch.bfloat16),
        ("llama", "relations", torch.float16),
    ],
)
def test_a_healthy_model_under_autocast_is_no_alarm(name, method, dtype):
    """Operands rounded on their way in, norms that mix two dtypes: each operator is judged by what it really did."""
    model = tiny_model(name)
    with torch.autocast("cpu", dtype=dtype):
        verdict = locate(model, method, name)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


SMALL = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2}
MAMBA = transformers.Mamba2Config(**SMALL, num_heads=8, head_dim=16, state_size=16, n_groups=2)
JAMBA = transformers.JambaConfig(
    **SMALL, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, attn_layer_period=2,
    attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
)  # fmt: skip


@pytest.mark.parametrize("config", [MAMBA, JAMBA], ids=lambda config: config.model_type)
def test_what_autocast_does_to_code_between_operators(config):
    """A convolution without a formula runs in 16 bits on the host, too; float32 inputs that drive attention stay."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        verdict = ns.locate(ns.wrap(model))
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


class InAutocast(torch.nn.Module):
    """Turns autocast on by itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(input_ids)


def test_autocast_that_a_module_turns_on_reaches_the_code_inside():
    """A state-space scan multiplies matrices without a module of their own."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(**SMALL, state_size=8)
    verdict = ns.locate(ns.wrap(InAutocast(transformers.AutoModelForCausalLM.from_config(config)).eval()), quick=True)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


def test_weights_are_read_as_autocast_rounds_them():
    """Checksums on operands and weights in bfloat16; eager attention calls softmax and both products by themselves."""
    model = tiny_model("llama", attn_implementation="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        verdict = relations(model, tiny_inputs("llama", length=16), weights=True)
    assert verdict.verdict == "healthy", [suspect.evidence for suspect in verdict.suspects]


@pytest.mark.parametrize("scope", [contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)])
def test_a_fault_under_autocast_is_found(scope):
    """With and without it, by the same laws."""
    model = tiny_model("llama")
    with scope, faulty(model, DeadZone(0.1), 1, operator="linear", module="*.up_proj"):
        first = relations(model, tiny_inputs("llama", length=16), weights=True).suspects[0]
    assert (first.site.module, first.fault_class) == ("model.layers.1.mlp.up_proj", "dead zone")
