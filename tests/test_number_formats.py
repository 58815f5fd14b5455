"""Number formats as questions: what is rounded, against models rounded by hand; what is refused; what reports say."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import noisescope as ns
from noisescope import api
from noisescope.api.gates import gate
from noisescope.api.run_question import tied_modules
from noisescope.diagnosis import layers, predicted_kl
from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.plans.migration import plan_migration
from noisescope.probe.formats import Format, format_on, quantise
from noisescope.reports.markdown import to_markdown
from noisescope.reports.report_document import document_of
from noisescope.testing import tiny_inputs, tiny_model

BATCHES = [torch.randint(3, 64, (1, 10), generator=torch.Generator().manual_seed(i)) for i in range(6)]
TOKENS = tiny_inputs("llama")["input_ids"]
QUICK: dict[str, Any] = {"metric": "next_token_accuracy", "samples": 6, "calibration_samples": 4, "window": 2}


def sharp(name: str = "llama", **more: Any) -> nn.Module:
    """A model whose logits are far apart, so that rounding is visible; its first layer's weights most."""
    model = tiny_model(name, layers=3, **more)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


@pytest.fixture(scope="module")
def reports() -> dict[str, ns.Report]:
    """One diagnosis of each kind."""
    subject = ns.wrap(sharp())
    asked = {"weights": "int4", "activations": "int8", "kv-cache": "int4"}
    return {on: api.diagnose(subject, BATCHES, perturbation=name, on=on, **QUICK) for on, name in asked.items()}


# -- what is rounded


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("fmt", [format_on("int4", "weights", asymmetric=True), format_on("fp8_e5m2", "weights")])
def test_weights_are_those_of_a_copy_rounded_by_hand(name: str, fmt: Format) -> None:
    """Linears of one block, bit by bit; GPT-2 keeps its weights as [in, out]."""
    model = tiny_model(name)
    by_hand, transposed = copy.deepcopy(model), name == "gpt2"
    for module_name, module in by_hand.named_modules():
        weight = getattr(module, "weight", None)
        if ".1." in module_name and weight is not None and weight.dim() == 2:
            turned = weight.data.T if transposed else weight.data
            rounded = quantise(turned, fmt, weight=True)
            weight.data = (rounded.T if transposed else rounded).contiguous()
    with torch.no_grad():
        wanted = by_hand(TOKENS).logits
        context = api.prepare_diagnosis(ns.wrap(model), BATCHES, perturbation=fmt, on="weights", **QUICK).context
        with ns.inject(model, layers.layer_injection(context, 1)):
            assert torch.equal(model(TOKENS).logits, wanted)


def test_activations_are_the_inputs_of_linears() -> None:
    fmt = format_on("int8", "activations")
    model = tiny_model("llama")
    by_hand = copy.deepcopy(model)
    for name, module in by_hand.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, args: (quantise(args[0], fmt),))
    context = api.prepare_diagnosis(ns.wrap(model), BATCHES, perturbation="int8", on="activations", **QUICK).context
    with torch.no_grad(), ns.inject(model, context.injection()):
        assert torch.equal(model(TOKENS).logits, by_hand(TOKENS).logits)


def test_a_tied_head_is_rounded_with_its_embedding_and_left_out_of_the_whole() -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    subject = ns.wrap(model)
    assert set(tied_modules(subject)) == {"model.embed_tokens", "lm_head"} and tied_modules(ns.wrap(sharp())) == ()
    context = api.prepare_diagnosis(subject, BATCHES, perturbation="int4", **QUICK).context
    assert layers.outer_places(context) == ["lm_head"]
    by_hand = copy.deepcopy(model)
    by_hand.lm_head.weight.data = quantise(by_hand.lm_head.weight.data, context.settings.perturbation, weight=True)
    by_hand.model.embed_tokens.weight = by_hand.lm_head.weight
    with torch.no_grad():
        with ns.inject(model, layers.place_injection(context, "lm_head")):
            assert torch.equal(model(TOKENS).logits, by_hand(TOKENS).logits)
        with ns.inject(model, context.injection()) as tally:
            model(TOKENS)
    assert set(tally.per_layer) == {0, 1}


def test_an_untied_head_has_a_row_of_its_own(reports: dict[str, ns.Report]) -> None:
    assert set(reports["weights"].diagnosis.layer_analysis.places) == {"embed", "lm_head"}
    assert set(reports["activations"].diagnosis.layer_analysis.places) == {"lm_head"}
    assert not reports["kv-cache"].diagnosis.layer_analysis.places


# -- what is refused


def test_models_that_have_nothing_to_round_are_refused_by_name() -> None:
    class QuantLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.in_features, self.qweight = 32, nn.Parameter(torch.zeros(4, 4, dtype=torch.int32), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    packed = tiny_model("llama")
    packed.model.layers[1].self_attn.o_proj = QuantLinear()
    with pytest.raises(UnsupportedModel, match=r"layers.1.self_attn.o_proj is a QuantLinear whose weight is packed"):
        api.diagnose(ns.wrap(packed), BATCHES, perturbation="int4", **QUICK)
    adapted = tiny_model("llama")
    adapted.model.layers[0].self_attn.q_proj.lora_A = nn.ModuleDict()
    adapted.model.layers[0].self_attn.q_proj.base_layer = nn.Identity()
    with pytest.raises(UnsupportedModel, match=r"layers.0.self_attn.q_proj .* merge the adapters"):
        api.diagnose(ns.wrap(adapted), BATCHES, perturbation="int8", on="activations", **QUICK)
    latent = tiny_model("llama")
    latent.model.layers[1].self_attn.kv_lora_rank = 8
    with pytest.raises(UnsupportedModel, match=r"layers.1.self_attn .* caches a compressed latent"):
        api.diagnose(ns.wrap(latent), BATCHES, perturbation="int8", on="kv-cache", effort="screen", samples=2)
    with pytest.raises(InvalidInput, match="computes in bfloat16, so rounding to bf16 changes nothing"):
        api.diagnose(ns.wrap(tiny_model("llama").bfloat16()), BATCHES, perturbation="bf16", **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on": "weights"}, "on weights takes a number format"),
        ({"asymmetric": True}, "asymmetric belongs to a number format"),
        ({"operators": ("keys",)}, "keys and values take a number format"),
        ({"perturbation": "int4", "on": "outputs"}, "a number format falls on weights"),
        ({"perturbation": "int4", "noise_scale": 0.02}, "noise_scale is for Gaussian noise"),
        ({"perturbation": "int4", "operators": ("linear",)}, "operators is for noise on outputs"),
        ({"perturbation": "nvfp4", "group_size": 32}, "nvfp4 has blocks of 16"),
        ({"perturbation": "fp8_e4m3", "asymmetric": True}, "fp8_e4m3 has no zero point"),
        ({"perturbation": "int5"}, "int4"),
        ({"perturbation": Format("int4"), "group_size": 32}, "has its own"),
        ({"perturbation": abs}, "a value with a field scale, or a Format"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        DiagnoseOptions(**options)


def test_plans_that_need_noise_refuse_a_report_of_a_format(reports: dict[str, ns.Report]) -> None:
    found = reports["weights"]
    with pytest.raises(InvalidInput, match=r"is of int4 weights, groups of 64, and a migration plan ranks"):
        plan_migration(found.diagnosis)
    with pytest.raises(InvalidInput, match="of int4 weights, groups of 64, and a gate repeats noise"):
        gate(ns.wrap(sharp()), baseline=found, data=BATCHES)
    assert found.diagnosis.migration_plan is None


# -- what the report says


def test_nothing_is_divided_by_a_scale_there_is_none(reports: dict[str, ns.Report]) -> None:
    for report in reports.values():
        found, settings = report.diagnosis, report.diagnosis.run.settings
        assert settings.noise_scale is None and settings.seeds == (0,)
        rows = [*(found.operator_analysis or {}).values(), *found.layer_analysis.windows]
        assert all(row.sensitivity_score is None for row in rows) and all(row.kl is not None for row in rows)
        metrics = found.metrics
        assert metrics.primary.critical_threshold is None and not metrics.critical_thresholds
        assert metrics.secondary.nominal_snr_db is None and metrics.secondary.gradient_ratio is None
        assert found.gate is None and json.loads(json.dumps(report.data))["run"]["settings"]["noise_scale"] is None


def test_the_screen_predicts_the_order_of_what_is_injected(reports: dict[str, ns.Report]) -> None:
    """The layers, and the size within a factor of four: rounding is no small error."""
    for report in reports.values():
        rows = report.diagnosis.layer_analysis.windows + tuple(report.diagnosis.layer_analysis.places.values())
        both = [(row.kl.mean.value, row.predicted_kl.mean.value) for row in rows if row.kl and row.predicted_kl]
        assert len(both) == len(rows)
        assert all(1 / 4 < injected / predicted < 4 for injected, predicted in both), both


def test_reports_name_the_format_and_no_noise(reports: dict[str, ns.Report]) -> None:
    names = {
        "weights": ("int4 weights, groups of 64", "int4 weights here"),
        "activations": ("int8 activations, one scale per token", "int8 inputs of linears here"),
        "kv-cache": ("int4 KV cache, one scale per token and head", "keys and values in int4 here"),
    }
    found_any = 0
    for on, (name, subject) in names.items():
        found = reports[on].diagnosis
        text = to_markdown(document_of(found))
        assert f"**Number format**: {name}" in text and f"## Layers ({name})" in text
        assert not any(words in text for words in ("noise here", "noise costs", "noise injected"))
        assert "sensitivity score |" not in text and "% noise" not in text and "Gaussian" not in text
        statements = [finding.statement for finding in found.findings if finding.unit in ("share", "nats")]
        assert all(statement.startswith(subject) for statement in statements)
        assert not any("noise" in finding.statement for finding in found.findings)
        found_any += len(statements)
    assert found_any


def test_a_cache_is_split_into_keys_and_values(reports: dict[str, ns.Report]) -> None:
    found = reports["kv-cache"].diagnosis
    assert set(found.operator_analysis) == {"kv_cache", "keys", "values"}
    assert {(row.layer, row.operator) for row in found.layer_analysis.map} == {
        (layer, name) for layer in range(3) for name in ("keys", "values")
    }


def test_a_format_may_be_given_as_a_value() -> None:
    fmt = Format("int8", "group", 16, asymmetric=True)
    context = api.prepare_diagnosis(ns.wrap(sharp()), BATCHES, perturbation=fmt, on="kv-cache", **QUICK).context
    assert context.settings.perturbation == fmt
    assert context.settings.question.name == "int8 KV cache (asymmetric), groups of 16"


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_fused_experts_that_have_no_prediction_are_named(implementation: str) -> None:
    model = sharp("mixtral")
    model.config._experts_implementation = implementation
    report = api.diagnose(ns.wrap(model), BATCHES, perturbation="int4", levels=("operator", "layer"), **QUICK)
    named = any("3 sites of fused experts have no prediction" in limit for limit in report.diagnosis.could_not_see)
    assert named == (implementation == "batched_mm")
    assert report.diagnosis.operator_analysis["linear"].injected


def test_a_sample_that_is_not_finite_leaves_the_others_measured() -> None:
    """One token's embedding is infinite, as in a model that overflows in 16 bits."""
    model = sharp()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = torch.inf
    batches = [torch.where(batch == 7, 8, batch) for batch in BATCHES]
    whole = api.diagnose(ns.wrap(model), batches[1:], perturbation="int4", effort="screen", **QUICK)
    batches[0] = batches[0].index_fill(1, torch.tensor([4]), 7)
    for options in ({"perturbation": "int4", "effort": "screen"}, {"effort": "screen"}, {"perturbation": "int4"}, {}):
        report = api.diagnose(ns.wrap(model), batches, **QUICK, **options)
        report.to_json()
        found = report.diagnosis
        assert found.format_scores.n == 5
        assert found.format_scores.uniform["int4"].predicted_kl == pytest.approx(
            whole.diagnosis.format_scores.uniform["int4"].predicted_kl, rel=0.5
        )
        assert "locate" in found.executive_summary.next_step


def test_a_model_that_is_never_finite_is_reported() -> None:
    model = sharp()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    for options in ({"perturbation": "int4", "effort": "screen"}, {}):
        report = api.diagnose(ns.wrap(model), BATCHES, **QUICK, **options)
        report.to_json()
        assert "NaN or infinity on every sample" in report.diagnosis.could_not_see[0]
        assert "54 tokens are NaN or infinite" in report.diagnosis.executive_summary.next_step


def test_a_screen_alone_injects_nothing() -> None:
    prepared = api.prepare_diagnosis(ns.wrap(sharp()), BATCHES, perturbation="nvfp4", effort="screen", **QUICK)
    trials = predicted_kl.screen_trials(prepared.context)
    assert {trial.measure for trial in trials} == {"format_screen"}
    cost = str(prepared.cost(api.diagnosis.all_levels))
    assert "trials" in cost
    report = api.diagnose(ns.wrap(sharp()), BATCHES, perturbation="nvfp4", effort="screen", **QUICK)
    rows = report.diagnosis.layer_analysis.layers
    assert all(row.evidence == "predicted" and np.isfinite(row.nats) for row in rows)


def test_samples_of_a_mixture_have_predictions_of_their_own() -> None:
    """Rows of fused experts are sorted by expert; a standard error needs to know whose they are."""
    report = api.diagnose(ns.wrap(sharp("mixtral")), BATCHES, effort="screen", levels=("layer",), **QUICK)
    experts = [row for row in report.diagnosis.format_scores.modules if row.module.endswith("experts")]
    assert len(experts) == 3
    assert all(row.formats["int4"].standard_error > 0.05 * row.formats["int4"].predicted_kl for row in experts)
