"""A plan carried out: every weight rounded to its own format where it is used, and nothing left behind."""

from __future__ import annotations

import copy

import pytest
import torch

import noisescope as ns
from noisescope.errors import NothingInjected
from noisescope.measures.format_costs import PerModule, plan_injection, weight_format
from noisescope.probe.formats import quantise
from noisescope.testing import tiny_inputs, tiny_model
from noisescope.trials import content_id

TOKENS = tiny_inputs("llama")["input_ids"]


def linears(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    return {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}


def test_a_plan_is_what_rounding_by_hand_gives() -> None:
    """Module by module its own format; those of 16 bits, and lm_head, are not touched; afterwards all is as before."""
    model = tiny_model("llama")
    formats = ("int3", "int4", "int8", "fp8_e4m3", "mxfp4", "nvfp4", "bf16")
    plan = {name: formats[i % len(formats)] for i, name in enumerate(linears(model))}
    by_hand = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in linears(by_hand).items():
            if plan[name] != "bf16":
                module.weight.copy_(quantise(module.weight, weight_format(plan[name]), weight=True))
        clean, wanted = model(TOKENS).logits, by_hand(TOKENS).logits
        injection = plan_injection(plan)
        assert injection is not None
        with ns.inject(model, injection) as tally:
            assert torch.equal(model(TOKENS).logits, wanted)
        assert torch.equal(model(TOKENS).logits, clean) and not torch.equal(clean, wanted)
    assert tally.forward == sum(fmt != "bf16" for fmt in plan.values())


def test_plans_are_values() -> None:
    """The same plan is the same trial, whatever the order it was written in; another plan is another."""
    one, other = plan_injection({"a": "int4", "b": "int8"}), plan_injection({"b": "int8", "a": "int4"})
    assert one == other and hash(one) == hash(other) and content_id(one) == content_id(other)
    assert content_id(one) != content_id(plan_injection({"a": "int8", "b": "int4"}))
    assert plan_injection({"a": "bf16"}) is None


def test_names_that_are_not_there_are_refused() -> None:
    """A plan of another model, and a PerModule used as if it were one perturbation."""
    with pytest.raises(NothingInjected, match="nonsense"):
        ns.inject(tiny_model("llama"), plan_injection({"nonsense": "int4"}))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"call \.at"):
        PerModule(())(torch.zeros(1), None)
