"""Layers of a KV cache that keep 16 bits: the choice, the list for vLLM, and the plan carried out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import noisescope as ns
from noisescope import api
from noisescope.cli import app
from noisescope.diagnosis.format_question import Question
from noisescope.errors import InvalidInput
from noisescope.options.plans import KvCacheOptions
from noisescope.plans.kv_cache import export_vllm, kv_cache_plan, rivals, vllm_command, vllm_dtype
from noisescope.testing import tiny_model

BATCHES = [torch.randint(3, 64, (1, 10), generator=torch.Generator().manual_seed(i)) for i in range(6)]


@pytest.fixture(scope="module")
def subject() -> ns.Subject:
    """Four layers; the third has values far apart, so rounding it costs most."""
    model = tiny_model("llama", layers=4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
        model.model.layers[2].self_attn.v_proj.weight[:, :8] *= 30
    return ns.wrap(model)


@pytest.fixture(scope="module")
def report(subject: ns.Subject) -> ns.Report:
    asked = {"perturbation": "int4", "on": "kv-cache", "levels": ("operator", "layer"), "effort": "full"}
    return api.diagnose(subject, BATCHES, metric="next_token_accuracy", samples=6, window=1, **asked)


def test_the_costliest_layers_are_kept_until_the_rest_fits(report: ns.Report) -> None:
    found = report.diagnosis
    nats = {row.layer: row.nats for row in found.layer_analysis.layers}
    order = sorted(nats, key=lambda layer: -nats[layer])
    plan = kv_cache_plan(found, max_kl=nats[order[2]] + nats[order[3]])
    assert plan.kept == tuple(sorted(order[:2])) and plan.rounded == tuple(sorted(order[2:]))
    assert plan.nats_left == pytest.approx(nats[order[2]] + nats[order[3]]) and plan.nats_all == pytest.approx(
        sum(nats.values())
    )
    assert kv_cache_plan(found, keep_layers=1).kept == (order[0],) and not kv_cache_plan(found, max_kl=1e9).kept
    by_default = kv_cache_plan(found)
    assert by_default.nats_left <= 0.1 * by_default.nats_all
    with pytest.raises(InvalidInput, match="has 4 layers, and 5"):
        kv_cache_plan(found, keep_layers=5)
    with pytest.raises(InvalidInput, match="give one of them"):
        KvCacheOptions(report=Path(), keep_layers=1, max_kl=0.1)


def test_a_report_of_something_else_is_refused(report: ns.Report) -> None:
    settings = replace(report.diagnosis.run.settings, question=None)
    other = replace(report.diagnosis, run=replace(report.diagnosis.run, settings=settings))
    with pytest.raises(InvalidInput, match="is of noise: make one of the cache with noisescope diagnose"):
        kv_cache_plan(other)
    section = report.diagnosis.layer_analysis
    lost = replace(section.layers[1], kl=None, predicted_kl=None, evidence="failed", error="nothing fired")
    hybrid = replace(section, layers=(section.layers[0], lost, *section.layers[2:]))
    with pytest.raises(InvalidInput, match=r"no divergence of layers 1 \(nothing fired\): a plan is for"):
        kv_cache_plan(replace(report.diagnosis, layer_analysis=hybrid))


def test_vllm_gets_its_own_names(report: ns.Report) -> None:
    plan = kv_cache_plan(report.diagnosis, keep_layers=2)
    written = json.loads(export_vllm(plan).text)
    kept = [str(layer) for layer in plan.kept]
    assert written == {"kv_cache_dtype": "int4_per_token_head", "kv_cache_dtype_skip_layers": kept}
    assert vllm_command(plan, "org/model") == (
        f"vllm serve org/model --kv-cache-dtype int4_per_token_head --kv-cache-dtype-skip-layers {' '.join(kept)}"
    )
    assert vllm_dtype(Question("fp8_e4m3", "kv-cache", None, None, False)) == "fp8_e4m3"
    for question in (
        Question("mxfp4", "kv-cache", "group", 32, False),
        Question("int8", "kv-cache", "group", 32, False),
        Question("int8", "kv-cache", "token", None, True),
    ):
        with pytest.raises(InvalidInput, match="vLLM has no cache dtype for"):
            vllm_dtype(question)


def test_the_plan_carried_out_is_an_injection_into_the_other_layers(subject: ns.Subject, report: ns.Report) -> None:
    plan = kv_cache_plan(report.diagnosis, keep_layers=1)
    assert set(rivals(plan)) >= {"plan", "every layer rounded"}
    done = api.verify_kv_cache(subject, report, plan, BATCHES, samples=6)
    rows = {row.name: row for row in done.rows}
    assert rows["plan"].kl.mean.value < rows["every layer rounded"].kl.mean.value
    assert rows["every layer rounded"].over_plan.value > 1 and rows["plan"].over_plan is None
    measured = report.diagnosis.operator_analysis["kv_cache"].kl.mean.value
    assert rows["every layer rounded"].kl.mean.value == pytest.approx(measured, rel=1e-5)


def test_the_command_writes_the_list(report: ns.Report, tmp_path: Path) -> None:
    report.save(tmp_path, formats=("json",))
    file = tmp_path / "kv.json"
    ran = CliRunner().invoke(
        app, ["plan", "kv-cache", str(tmp_path), "--keep-layers", "1", "--export", "vllm", "-o", str(file)]
    )
    assert ran.exit_code == 0, ran.output
    assert "int4 KV cache, one scale per token and head: 1 of 4 layers keep 16 bits" in ran.output
    assert json.loads(file.read_text())["kv_cache_dtype"] == "int4_per_token_head"
