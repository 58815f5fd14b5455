"""Predicted KL of weight formats: against the definition written out, and against what rounding really does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.diagnosis import format_costs as diagnosed
from noisescope.errors import InvalidInput, NothingInjected
from noisescope.measures.divergence import kl_divergence
from noisescope.measures.fisher import fisher_factor
from noisescope.measures.format_costs import (
    GROUP,
    UNTOUCHED,
    WEIGHT_FORMATS,
    FormatScreen,
    effective_bits,
    is_planned,
    plan_injection,
    weight_format,
)
from noisescope.model.anatomy import dissect, linear_weight
from noisescope.probe.formats import quantise
from noisescope.testing import tiny_model

TOKENS = torch.randint(3, 60, (8, 12), generator=torch.Generator().manual_seed(1))


def screened(model: Any, formats: tuple[str, ...], *, draws: int = 1, batch: int = 8) -> dict[str, torch.Tensor]:
    """Predicted KL per token [formats] of each module."""
    keys = torch.arange(TOKENS.numel()).view_as(TOKENS)
    screen = FormatScreen(model, {name: weight_format(name) for name in formats})
    with screen, torch.enable_grad():
        for at in range(0, len(TOKENS), batch):
            screen.samples = torch.arange(at, min(at + batch, len(TOKENS)))
            logits = model(TOKENS[at : at + batch], use_cache=False).logits.flatten(0, 1)
            rows = torch.arange(len(logits))
            screen.score(logits, rows, keys[at : at + batch].flatten(), draws=draws, seed=0)
    return {
        site.module: torch.stack(list(found.values())).sum(0) / (draws * TOKENS.numel())
        for site, found in screen.sums.items()
    }


def test_scores_are_what_the_formula_says() -> None:
    """For one linear: gradients and errors by hand, their products squared (as they are small) and added up."""
    model = tiny_model("llama")
    name = "model.layers.0.mlp.up_proj"
    module = dict(model.named_modules())[name]
    held: dict[str, torch.Tensor] = {}

    def hold(_: Any, args: Any, y: torch.Tensor) -> None:
        y.retain_grad()
        held.update(x=args[0].detach(), y=y)

    hook = module.register_forward_hook(hold)
    logits = model(TOKENS).logits.flatten(0, 1)
    v = fisher_factor(logits.detach(), torch.arange(len(logits)), torch.arange(len(logits)), 0)
    logits.backward(v)
    hook.remove()
    error = quantise(module.weight.detach(), WEIGHT_FORMATS["int4"], weight=True) - module.weight.detach()
    delta = torch.einsum("bti,oi->bto", held["x"], error)
    assert held["y"].grad is not None
    projected = (delta * held["y"].grad).sum(-1).double()
    wanted = ((1 + projected.square()).sqrt() - 1).sum() / TOKENS.numel()
    assert wanted.item() == pytest.approx(projected.square().sum().item() / (2 * TOKENS.numel()), rel=0.05)
    assert screened(model, ("int8", "int4"))[name][1].item() == pytest.approx(wanted.item(), rel=1e-3)


def test_one_module_rounded_costs_what_was_predicted() -> None:
    """Behind the last attention errors stay with their token, so the prediction is right in size, too."""
    model = tiny_model("llama", initializer_range=0.2)
    predicted = screened(model, ("int8", "int4"), draws=64)
    with torch.no_grad():
        clean = model(TOKENS).logits.flatten(0, 1)
        for name in ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.gate_proj", "model.layers.1.self_attn.o_proj"):
            for at, fmt in enumerate(("int8", "int4")):
                with ns.inject(model, plan_injection({name: fmt})):  # type: ignore[arg-type]
                    rounded = model(TOKENS).logits.flatten(0, 1)
                measured = kl_divergence(clean, rounded).mean().item()
                assert predicted[name][at].item() == pytest.approx(measured, rel=0.25), (name, fmt)


def test_batches_and_ranks_do_not_matter() -> None:
    """A sample's draws belong to its tokens: scored alone or with others, the numbers are the same."""
    model = tiny_model("llama")
    whole, apart = screened(model, ("int4",)), screened(model, ("int4",), batch=3)
    for name, value in whole.items():
        assert value.item() == pytest.approx(apart[name].item(), rel=1e-4)
    assert len(whole) == 14 and "lm_head" not in whole
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "opt"])
def test_other_architectures(name: str) -> None:
    """Conv1D is taken the right way round; routers and fused experts are left out; every planned linear has a score."""
    model = tiny_model(name)
    found = screened(model, ("int3", "int8"))
    assert found.keys() == {unit.module for unit in dissect(model).units if is_planned(unit)}
    assert not any("router" in module or module.endswith(".gate") for module in found)
    assert all(value[0] > value[1] > 0 for value in found.values())


def test_nothing_to_score_is_an_error() -> None:
    """A scope in which nothing ran says so."""
    uncalled = FormatScreen(tiny_model("llama"), WEIGHT_FORMATS).__enter__()
    with pytest.raises(NothingInjected, match="nothing to plan"):
        uncalled.__exit__(None, None, None)


def test_bits_with_and_without_scales() -> None:
    """Groups of 64 add 16 / 64, output channels 16 / inputs, MXFP4 and NVFP4 their 8-bit scales."""
    wanted = {"bf16": 16, "int8": 8.25, "fp8_e4m3": 8.125, "int4": 4.25, "nvfp4": 4.5, "mxfp4": 4.25, "int3": 3.25}
    wanted |= {"int4_asymmetric": 4 + 20 / 64, "int4_clipped": 4 + 20 / 64}  # and a zero point
    assert {name: effective_bits(name, 128) for name in WEIGHT_FORMATS} == wanted
    assert [WEIGHT_FORMATS[name].element_bits for name in wanted] == [16, 8, 8, 4, 4, 4, 3, 4, 4]
    with pytest.raises(InvalidInput, match="'int5'"):
        weight_format("int5")


def test_a_short_last_group_has_a_scale() -> None:
    """96 inputs are two groups of 64 (4.33 bits, not 4.25), 40 are two blocks of 32."""
    assert effective_bits("int4", 96) == pytest.approx(4 + 2 * 16 / 96)
    assert effective_bits("mxfp4", 40) == pytest.approx(4 + 2 * 8 / 40)
    assert effective_bits("bf16", 96) == 16


def test_interpreting_knows_the_same_formats() -> None:
    """The torch-free side lists names and group by itself; the two lists are one."""
    assert tuple(WEIGHT_FORMATS) == diagnosed.FORMATS
    assert (UNTOUCHED, GROUP) == (diagnosed.UNTOUCHED, diagnosed.GROUP)


def test_weights_are_out_by_in() -> None:
    """Also those of GPT-2, which are stored the other way round; a view, so that changes reach the parameter."""
    modules = dict(tiny_model("gpt2").named_modules())
    weight = linear_weight(modules["transformer.h.0.mlp.c_fc"])
    assert weight.shape == (64, 32) and weight.data_ptr() == modules["transformer.h.0.mlp.c_fc"].weight.data_ptr()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_fused_experts_are_scored_as_their_products(implementation: str) -> None:
    """Predicted KL of a block's experts at int3, against the KL with their weights rounded."""
    model = tiny_model("mixtral")
    model.config._experts_implementation = implementation
    name = "model.layers.1.mlp.experts"
    predicted = float(screened(model, ("int3",), draws=64)[name])
    clean = model(TOKENS).logits.flatten(0, 1)
    experts = dict(model.named_modules())[name]
    with torch.no_grad():
        for weight in (experts.gate_up_proj, experts.down_proj):
            weight.copy_(quantise(weight, weight_format("int3"), weight=True))
        measured = float(kl_divergence(clean, model(TOKENS).logits.flatten(0, 1)).mean())
    assert predicted == pytest.approx(measured, rel=0.5)


@pytest.mark.gpu
def test_16_bit_products_of_an_accelerator_give_the_same_scores() -> None:
    """Of one linear's bfloat16 weight, input and gradient: the device multiplies in bfloat16, the host in float32."""
    draw = torch.Generator().manual_seed(0)
    weight = (torch.randn(256, 512, generator=draw) / 16).bfloat16()
    x = torch.randn(4, 64, 512, generator=draw).bfloat16()
    g = (torch.randn(4, 64, 256, generator=draw) / 10).bfloat16()
    model = tiny_model("llama")
    screen, unit = FormatScreen(model, WEIGHT_FORMATS), next(unit for unit in dissect(model).units if is_planned(unit))
    screen.samples = torch.arange(4)

    def product(x: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
        assert x.dtype == (torch.bfloat16 if x.is_cuda else torch.float32)
        return x @ error.T

    host = screen._predicted(weight, x, g, product, unit)
    device = screen._predicted(weight.cuda(), x.cuda(), g.cuda(), product, unit)
    torch.testing.assert_close(device.cpu(), host, rtol=0.02, atol=1e-9)
