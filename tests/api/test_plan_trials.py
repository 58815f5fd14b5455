"""Plans carried out on tiny models: only on the model that the report is of, on samples that it has not seen."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.api.plan_trials import plan_smoothquant, verify_precision
from noisescope.api.plans import plan_precision
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.jsonform import from_json, to_json
from noisescope.measures.divergence import kl_divergence
from noisescope.measures.format_costs import plan_injection
from noisescope.model.loading import Subject
from noisescope.plans.precision import modules_of
from noisescope.plans.precision_exports import export_plan
from noisescope.plans.precision_results import PrecisionPlan
from noisescope.plans.smoothing import SmoothingPlan
from noisescope.testing import tiny_model


def batches(rows: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.randint(3, 64, (rows, 8), generator=torch.Generator().manual_seed(seed))}]


def diagnosed(subject: Subject, *levels: Any) -> Diagnosis:
    asked = {"samples": 4, "seeds": 1, "levels": levels, "window": 2, "step": 2, "calibration_samples": 2}
    return ns.diagnose(subject, batches(4), **asked).diagnosis


@pytest.fixture(scope="module")
def subject() -> Subject:
    return ns.load("tiny:llama")


@pytest.fixture(scope="module")
def report(subject: Subject) -> Diagnosis:
    return diagnosed(subject, "layer", "channel")


def verified(subject: Subject, report: Diagnosis, bits: float = 6, random: int = 0) -> PrecisionPlan:
    plan = plan_precision(report, average_bits=bits)
    return verify_precision(subject, report, plan, batches(4, seed=1), random=random, samples=4)


def test_average_bits_beyond_the_chosen_formats_are_refused(report):
    """With the range that these formats allow; its ends are allowed."""
    for bits in (9, 16):
        with pytest.raises(InvalidInput, match=r"averages from 4 \(int4\) to 8 bits \(int8\), got "):
            plan_precision(report, average_bits=bits, formats=("int4", "int8"))
    assert plan_precision(report, average_bits=8, formats=("int4", "int8")).average_bits == 8
    with pytest.raises(InvalidInput, match="average_bits must be from 3 to 16, got 99"):
        plan_precision(report, average_bits=99)


def test_a_report_of_another_width_is_refused(subject, report):
    """The same architecture and depth, other sizes: bits would be counted from weights that the model has not."""
    wider = ns.wrap(tiny_model("llama", hidden_size=64))
    with pytest.raises(InvalidInput, match=r"counts 2048 weights in model.layers.0.mlp.*has 4096.*diagnose MODEL"):
        verified(wider, report)
    without_scores = replace(report, format_scores=None)
    for given in (report, without_scores):
        with pytest.raises(InvalidInput, match="it is of another model"):
            plan_smoothquant(wider, given, batches(4))


def test_other_numbers_are_noted(subject, report):
    """A model of the same sizes may be measured; a note says that the report's numbers are not its own."""
    other = ns.wrap(copy.deepcopy(subject.model))
    with torch.no_grad():
        other.model.lm_head.weight *= 1.5
    assert not any("numbers are not those" in note for note in verified(subject, report).notes)
    assert any("numbers are not those" in note for note in verified(other, report).notes)
    assert plan_smoothquant(subject, report, batches(4)).notes == ()
    assert "numbers are not those" in plan_smoothquant(other, report, batches(4)).notes[0]


def test_what_is_not_planned_is_noted():
    """A mixture whose experts have no scores: the share is in the result, a note has the counts."""
    subject = ns.load("tiny:mixtral")
    report = diagnosed(subject, "layer")
    rows = tuple(row for row in report.format_scores.modules if "experts" not in row.module)
    section = replace(report.format_scores, modules=rows)
    report = replace(report, format_scores=section)
    blocks = sum(p.numel() for n, p in subject.model.named_parameters() if ".layers." in n and p.dim() > 1)
    planned = sum(row.parameters for row in section.modules)
    assert section.block_parameters == blocks > 2 * planned
    found = verified(subject, report)
    assert found.planned_share == pytest.approx(planned / blocks)
    (note,) = [note for note in found.notes if "stay at 16 bits" in note]
    assert f"covers {planned:,} of the {blocks:,} weights" in note


def test_all_of_a_dense_model_is_planned(subject, report):
    """Every weight of its blocks: nothing to say."""
    found = verified(subject, report)
    assert found.planned_share == 1.0 and not any("covers" in note for note in found.notes)


def test_exports_of_transposed_linears_are_refused():
    """GPT-2 from diagnosis to file: tools that skip its Conv1D are refused, AutoRound and json are not."""
    report = diagnosed(ns.load("tiny:gpt2"), "layer")
    assert {row.kind for row in report.format_scores.modules} == {"Conv1D"}
    plan, modules = plan_precision(report, average_bits=8), modules_of(report)
    for tool in ("llm-compressor", "torchao", "modelopt"):
        with pytest.raises(InvalidInput, match=rf"{tool} does not quantise .*Conv1D.*autoround, or export json"):
            export_plan(plan, tool, modules)
    assert all("class" not in note for note in export_plan(plan, "autoround", modules).notes)
    assert json.loads(export_plan(plan, "json", modules).text)["assignment"]


def scaled(report: Diagnosis, factor: float) -> Diagnosis:
    """The same with format scores so many times as large."""
    section = report.format_scores
    assert section is not None
    modules = tuple(
        replace(
            row,
            formats={
                name: replace(
                    score,
                    predicted_kl=score.predicted_kl * factor,
                    standard_error=None if score.standard_error is None else score.standard_error * factor,
                )
                for name, score in row.formats.items()
            },
        )
        for row in section.modules
    )
    return replace(report, format_scores=replace(section, modules=modules))


def test_a_prediction_far_off_is_noted(subject, report):
    """Scores a thousand times too small choose the same plan; a note says to use the measured KL."""
    far, near = verified(subject, scaled(report, 1e-3), bits=4), verified(subject, report, bits=4)
    assert far.typical_kl == near.typical_kl and far.prediction.value == pytest.approx(near.prediction.value / 1000)
    assert any("lies far above the predicted" in note for note in far.notes)
    assert not any("lies far" in note for note in near.notes)
    assert near.prediction.scored_tokens == 4 * 7


def test_plans_are_measured_in_pairs(subject, report):
    """Every other plan has its KL over the plan's own, sample by sample; medians carry the comparison."""
    found = verified(subject, report, bits=5)
    kinds = [row.kind for row in found.rows]
    assert kinds[0] == "plan" and set(kinds[1:]) <= {"uniform", "bit rule"}
    assert found.rows[0].over_plan is None and all(row.over_plan.n == 4 for row in found.rows[1:])
    assert found.verified and found.typical_kl == found.rows[0].kl.typical.value and found.data.samples == 4
    rough = next(row for row in found.rows if row.format == "int3")
    assert rough.kl.typical.value > found.typical_kl and rough.over_plan.value > 1
    assert from_json(PrecisionPlan, to_json(found)) == found


def test_a_gain_is_paired(subject, report):
    """Of the very samples: before over after, with an interval."""
    found = plan_smoothquant(subject, report, batches(16))
    assert found.gain.n == 8 and found.gain.low <= found.gain.value <= found.gain.high
    assert found.kl.before.typical.n == 8 and from_json(SmoothingPlan, to_json(found)) == found


def test_held_out_samples_are_taken(subject, report, tmp_path: Path):
    """Behind those that this report's formats were scored on, not behind the most that they may be."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"{i} and {i + 1} and {i + 2}"}) + "\n" for i in range(10, 20)))
    plan = plan_precision(report, average_bits=6)
    assert report.format_scores.n == 4
    demo = ns.load("demo")
    by_text = Subject(subject.model, demo.tokenizer, subject.anatomy, subject.source)
    found = verify_precision(by_text, report, plan, file, random=0, samples=64)
    assert found.data.samples == 6 and not any("it was made from" in note for note in found.notes)
    file.write_text("".join(json.dumps({"text": f"{i} and {i + 1} and {i + 2}"}) + "\n" for i in range(10, 14)))
    again = verify_precision(by_text, report, plan, file, random=0, samples=64)
    assert any("holds 4 samples, no more than the 4 used to choose formats" in note for note in again.notes)


def test_a_plan_that_rounds_nothing(subject, report):
    """16 bits everywhere: a KL of exactly 0."""
    found = verified(subject, report, bits=16, random=2)
    assert found.typical_kl == 0.0 and (found.random.n, found.random.median_typical_kl) == (2, 0.0)
    (row,) = [row for row in found.rows if row.kind == "plan"]
    assert row.kl.typical.value == row.kl.mean.value == 0.0 and row.kl.typical.n == 4


def test_a_plan_is_refined_on_the_samples_that_scored(subject, report):
    """A plan from scores that were mixed up gets better within the same budget, and a note tells by how much."""
    model = tiny_model("llama", num_hidden_layers=4)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.mul_(8 if "proj" in name else 1)  # errors that matter
    large, tokens = ns.wrap(model), batches(16)
    scored = ns.diagnose(large, tokens, samples=16, level="layer", effort="screen").diagnosis
    rows = scored.format_scores.modules
    mixed = tuple(replace(row, formats=other.formats) for row, other in zip(rows, reversed(rows), strict=True))
    wrong = replace(scored, format_scores=replace(scored.format_scores, modules=mixed))
    options = {"average_bits": 5, "formats": "int3,int4,int8", "data": tokens}
    before = ns.plan.precision(wrong, **options)
    after = ns.plan.precision(wrong, refine=6, subject=large, **options)
    assert after.average_bits <= 5 and after.method == "optimal by module, refined"
    ids = tokens[0]["input_ids"]
    kl = []
    for plan in (before, after):
        with torch.no_grad():
            clean = model(ids).logits[:, :-1].flatten(0, 1)
            with ns.inject(model, plan_injection(plan.assignment)):
                kl.append(float(kl_divergence(clean, model(ids).logits[:, :-1].flatten(0, 1)).mean()))
    [note] = [note for note in after.notes if note.startswith("refined in ")]
    assert kl[1] < 0.8 * kl[0] and f"mean KL {kl[0]:.3g} to {kl[1]:.3g} on 16 samples" in note
    [note] = ns.plan.precision(scored, refine=1, subject=large, **options | {"average_bits": 8}).notes
    assert note.startswith("refinement tried 0 changes and kept none: mean KL ")
    with pytest.raises(InvalidInput, match="refine needs the model"):
        ns.plan.precision(report, refine=1, **options)
    with pytest.raises(InvalidInput, match="granularity"):
        ns.plan.precision(report, refine=1, granularity="layer", subject=subject, **options)


def test_fused_experts_are_planned(tmp_path):
    """From scores to a measured plan and llama.cpp's three tensors; tools that name experts one by one are refused."""
    mixture = ns.load("tiny:mixtral")
    scored = ns.diagnose(mixture, batches(8), samples=8, level="layer", effort="screen")
    options = {"average_bits": 4.5, "formats": "int4,int8", "subject": mixture, "data": batches(8, seed=1)}
    plan = ns.plan.precision(scored, verify=True, refine=2, random=0, samples=4, **options)
    experts = "model.layers.1.mlp.experts"
    assert plan.planned_share > 0.95 and experts in plan.assignment
    [row] = [row for row in scored.diagnosis.format_scores.modules if row.module == experts]
    assert (row.kind, row.parameters, row.inputs) == ("MixtralExperts", 4 * (128 * 32 + 32 * 64), 32)
    file = tmp_path / "types.txt"
    ns.plan.precision(scored, average_bits=4.5, formats="int4,int8", export="llama.cpp", output=file)
    assert r"blk\.1\.ffn_gate_exps\.weight=q" in file.read_text()
    with pytest.raises(InvalidInput, match="holds the experts of a block in one tensor"):
        ns.plan.precision(scored, average_bits=4.5, formats="int4,int8", export="torchao", output=file)


def test_a_screen_scores_formats():
    """So a plan can be made of it."""
    screened = ns.diagnose(ns.load("tiny:llama"), batches(4), samples=4, level="layer", effort="screen")
    plan = ns.plan.precision(screened, average_bits=5)
    assert plan.average_bits <= 5 and screened.diagnosis.format_scores.n == 4


def test_a_plan_for_a_tool_has_formats_of_the_tool(report, tmp_path):
    """Unless others were chosen."""
    options = {"average_bits": 4.5, "output": tmp_path / "plan.json", "export": "torchao"}
    assert set(ns.plan.precision(report, **options).assignment.values()).isdisjoint({"int4_clipped", "nvfp4", "mxfp4"})
    with pytest.raises(InvalidInput, match="torchao has no weight-only int4_clipped"):
        ns.plan.precision(report, formats="int4_clipped,bf16", **options)
