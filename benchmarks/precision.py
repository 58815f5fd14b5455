"""Precision plans and SmoothQuant on SmolLM2-135M, carried out by fake quantisation and measured.

    python benchmarks/precision.py --model SMOLLM2 --calibration GSM8K_TRAIN.jsonl --data GSM8K_TEST.jsonl \\
        --store STORE --json results/precision.json

Formats are scored on training text, plans measured on test text. Everything measured is kept in --store, so that a run
that was stopped goes on where it was. With nvidia-modelopt installed its `auto_quantize` plan (gradient method) is
measured beside ours: the same text, the same two formats, the same average bits over the blocks' linears, the same fake
quantisation. lm_head keeps 16 bits on all sides; ModelOpt counts it, so its target is converted.

This SmolLM2 was de-quantised from 4 bits (groups of 32), which makes 4-bit figures kinder than those of a model that
never was in 4 bits. Not timed: loading, tokenising.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from precision_modelopt import merged, modelopt_assignment, spread
from screen_setup import frame_of, read_material, save

import noisescope as ns
from noisescope import stats
from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.effects import task_loss
from noisescope.diagnosis.section_types import FormatScore
from noisescope.measures.format_costs import plan_injection
from noisescope.measures.smoothquant import rounded_kl, smooth
from noisescope.model.loading import Subject
from noisescope.plans.precision import (
    Budget,
    Module,
    Plan,
    optimal_plan,
    plan_of,
    random_plans,
    rule_plan,
    uniform_plan,
)
from noisescope.plans.precision_results import Verification
from noisescope.runs.batches import Material
from noisescope.runs.store import Store
from noisescope.runs.trial_runner import LocalExecutor, NoProgress, TrialRunner, run_waves
from noisescope.trials import Slice, Trial

FORMATS = ("int3", "int4", "int8")
# these weights were rounded to bfloat16 before they were widened to float32
SIXTEEN = {"bf16": FormatScore(16, 16, 0.0, None)}
LENGTH = 128
WINDOW = 3


def scored_modules(runner: TrialRunner, material: Material, store: Store) -> tuple[list[Module], float]:
    """Format scores as a diagnosis makes them, and their processor time."""
    settings = {"formats": FORMATS, "draws": 1, "seed": 0}
    conditions = frame_of(runner.subject, material, 1).conditions
    trial = Trial(conditions, "formats", Slice(material.fingerprint, 0, len(material)), None, settings)
    run_waves(lambda results: [trial], store, LocalExecutor(runner), NoProgress())
    found = store[trial.id]
    if found.failed:
        raise SystemExit(f"scoring failed: {found.error}")
    mean = found.arrays["predicted"].mean(2)
    modules = []
    for i, about in enumerate(found.facts["modules"]):
        choices = {
            name: FormatScore(bits, about["effective_bits"][name], float(mean[i, j]), None)
            for j, (name, bits) in enumerate(found.facts["formats"])
        }
        modules.append(Module(about["module"], about["place"], about["parameters"], choices))
    return modules, store.seconds[trial.id]


def offering(modules: Sequence[Module], names: Sequence[str]) -> list[Module]:
    """The same modules with other formats to choose from."""
    return [
        Module(m.name, m.place, m.parameters, {f: c for f, c in {**SIXTEEN, **m.choices}.items() if f in names})
        for m in modules
    ]


def layer_losses(runner: TrialRunner, context: StudyContext, store: Store) -> dict[int, float]:
    """What 5 % noise in windows of three layers, side by side, costs of the next-token accuracy."""
    starts = range(0, context.blocks, WINDOW)
    windows = {start: context.injection(layers=frozenset(range(start, start + WINDOW))) for start in starts}
    asked = [None, *windows.values()]
    run_waves(
        lambda results: [t for one in asked for t in context.ask(one, seeds=(0,))],
        store,
        LocalExecutor(runner),
        NoProgress(),
    )
    clean = context.answer(store, None)
    assert clean is not None
    losses = {}
    for start, injection in windows.items():
        noisy = context.answer(store, injection, seeds=(0,))
        assert noisy is not None
        loss = task_loss(context, clean, noisy, 1.0).degradation
        known = loss is not None and loss.value is not None
        losses |= dict.fromkeys(range(start, start + WINDOW), loss.value if known else 0.0)
    return losses


def measured(
    runner: TrialRunner, context: StudyContext, store: Store, plans: Mapping[str, Plan]
) -> dict[str, dict[str, Any]]:
    """Mean KL and next-token accuracy of each plan."""
    question = Verification({name: plan_injection(plan.assignment) for name, plan in plans.items()})
    run_waves(lambda results: question.propose(context, results), store, LocalExecutor(runner), NoProgress())
    rows = question.conclude(context, store).plans
    return {
        name: {
            "average_bits": plan.average_bits,
            "effective_bits": plan.effective_bits,
            "predicted_kl": plan.predicted_mean_kl,
            "kl": rows[name].divergence.mean.value,
            "accuracy": rows[name].score.value,
        }
        for name, plan in plans.items()
    }


def at_bits(
    runner: TrialRunner,
    context: StudyContext,
    store: Store,
    modules: list[Module],
    losses: dict[int, float],
    bits: float,
    count: int,
) -> dict[str, Any]:
    """A plan of so many bits beside the rule, uniform plans and random ones.

    Random plans of int4 and int8 alone are the harder rivals: the best plans hardly use int3.
    """
    plan = optimal_plan(modules, Budget(bits))
    rivals = {"rule": rule_plan(offering(modules, (*FORMATS, "bf16")), losses, bits)}
    rivals |= {f"uniform {name}": uniform_plan(modules, name) for name in ("int4", "int8")}
    drawn = {
        kind: random_plans(offering(modules, names), plan.average_bits, count, seed=0)
        for kind, names in (("random", FORMATS), ("random int4, int8", ("int4", "int8")))
    }
    named = {f"{kind} {i}": one for kind, plans in drawn.items() for i, one in enumerate(plans)}
    rows = measured(runner, context, store, {"plan": plan, **rivals, **named})
    found = {"bits": bits, "counts": plan.counts(), **{name: rows[name] for name in ("plan", *rivals)}}
    kl = rows["plan"]["kl"]
    print(f"{bits:g} bits: KL {kl:.4f} at {plan.average_bits:.3f} bits; rule {rows['rule']['kl']:.4f} at "
          f"{rows['rule']['average_bits']:.3f}; uniform int4 {rows['uniform int4']['kl']:.4f}")  # fmt: skip
    for kind, plans in drawn.items():
        predicted = [one.predicted_mean_kl for one in plans]
        truth = [rows[f"{kind} {i}"]["kl"] for i in range(count)]
        middle = statistics.median(truth)
        found[kind] = {"n": count, "median_kl": middle, "lowest_kl": min(truth), "plan_over_median": kl / middle,
                       "spearman": ranks(predicted, truth), "predicted_kl": predicted, "kl": truth}  # fmt: skip
        print(
            f"  {kind}: median {middle:.4f}, the plan's is {kl / middle:.3f} of it; {found[kind]['spearman']}",
            flush=True,
        )
    return found


def ranks(predicted: Sequence[float], truth: Sequence[float]) -> dict[str, Any]:
    found = stats.correlation(predicted, truth, permutations=9)  # its p is not used
    return {"value": found.value, "low": found.low, "high": found.high, "n": found.n}


def solving_time(modules: list[Module]) -> dict[str, Any]:
    """300 modules x 5 formats, made of the measured ones."""
    many = [
        Module(f"{m.name} {i}", m.place, m.parameters,
               {**m.choices, "a": FormatScore(5, 5, m.choices["int4"].predicted_kl / 4, None),
                "b": FormatScore(6, 6, m.choices["int4"].predicted_kl / 16, None)})
        for i, m in enumerate((modules * 2)[:300])
    ]  # fmt: skip
    started = time.perf_counter()
    plan = optimal_plan(many, Budget(4.7))
    return {"modules": len(many), "formats": 5, "seconds": time.perf_counter() - started, "note": plan.note}


def beside_modelopt(
    runner: TrialRunner,
    context: StudyContext,
    store: Store,
    modules: list[Module],
    folder: str,
    tokens: torch.Tensor,
    bits: float,
) -> dict[str, Any]:
    """ModelOpt's plan, and ours of the same bits: linear by linear, and with ModelOpt's groups kept together."""
    mine = offering(modules, ("bf16", "int8", "int4"))
    started = time.process_time()
    chosen, version = modelopt_assignment(folder, tokens, bits, sum(m.parameters for m in modules))
    seconds = time.process_time() - started
    theirs = plan_of(mine, chosen, "ModelOpt")
    budget = Budget(theirs.average_bits)
    together = optimal_plan(merged(mine), budget)
    plans = {
        "ModelOpt": theirs,
        "plan": optimal_plan(mine, budget),
        "plan by the same groups": plan_of(mine, spread(together.assignment, mine), "groups"),
    }
    rows = measured(runner, context, store, plans)
    for name, row in rows.items():
        print(f"beside ModelOpt, {name}: KL {row['kl']:.4f} at {row['average_bits']:.3f} bits", flush=True)
    return {"version": version, "asked_bits": bits, "seconds": seconds, "counts": theirs.counts(), **rows}


def smoothquant(subject: Subject, calibration: torch.Tensor, test: torch.Tensor) -> dict[str, Any]:
    """W8A8 before and after: the model as it is, and with outlier channels planted into what its norms give."""
    batches, held_out = list(calibration.split(4)), list(test.split(4))
    rows = {}
    for name in ("as it is", "planted"):
        if name == "planted":
            plant(subject.model)
        before = np.mean(rounded_kl(subject.model, subject.model, held_out, anatomy=subject.anatomy))
        smoothed = smooth(subject.model, batches, anatomy=subject.anatomy)
        after = np.mean(rounded_kl(smoothed.model, subject.model, held_out))
        done = sum(fold.alpha is not None for fold in smoothed.folds)
        rows[name] = {"kl_before": float(before), "kl_after": float(after), "gain": float(before / after),
                      "float_error": smoothed.float_error, "folds": len(smoothed.folds), "smoothed": done,
                      "tokens": test.numel() - len(test)}  # fmt: skip
        print(f"SmoothQuant, {name}: {rows[name]}", flush=True)
    return rows


def plant(model: Any, factor: float = 60.0, channels: tuple[int, ...] = (7, 100, 333)) -> None:
    """Outlier channels that change nothing in floating point: a norm's weight up, the columns that read it down."""
    with torch.no_grad():
        for block in model.model.layers:
            attention, mlp = block.self_attn, block.mlp
            for norm, linears in (
                (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                norm.weight[list(channels)] *= factor
                for linear in linears:
                    linear.weight[:, list(channels)] /= factor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M")
    parser.add_argument("--calibration", required=True, type=Path, help="GSM8K's training set as JSONL")
    parser.add_argument("--data", required=True, type=Path, help="GSM8K's test set as JSONL")
    parser.add_argument("--store", required=True, type=Path, help="folder for what is measured")
    parser.add_argument("--scored", type=int, default=16, help="items to score formats on")
    parser.add_argument("--items", type=int, default=8, help="items to measure plans on")
    parser.add_argument("--bits", nargs="*", type=float, default=[5.0, 4.5, 6.0])
    parser.add_argument("--random", type=int, default=32)
    parser.add_argument("--parts", nargs="*", default=["plans", "modelopt", "smoothquant"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    subject = ns.load(options.model, dtype="float32")
    scored, test = (
        read_material(subject.tokenizer, path, count, LENGTH)
        for path, count in ((options.calibration, options.scored), (options.data, options.items))
    )
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, one thread, other work beside",
        "torch": torch.__version__,
        "model": "SmolLM2-135M-Instruct, de-quantised from 4 bits, float32",
        "data": {
            "scored": f"GSM8K train, {options.scored} x {LENGTH}",
            "measured": f"test, {options.items} x {LENGTH}",
        },
        "bits_count": "nominal, over the 210 linears of the blocks; lm_head excluded",
        "plans": [],
    }
    context = frame_of(subject, test, 1)
    with TrialRunner(subject, [scored, test]) as runner, Store(options.store) as store:
        modules, result["scoring_seconds"] = scored_modules(runner, scored, store)
        result["solving"] = solving_time(modules)
        print(f"scored in {result['scoring_seconds']:.0f} s; {result['solving']}", flush=True)
        tokens = torch.tensor([group[0].ids for group in scored.encoded.sequences])
        if "plans" in options.parts:
            losses = layer_losses(runner, context, store)
            result["layer_losses"] = losses
            for bits in options.bits:
                row = at_bits(runner, context, store, modules, losses, bits, options.random)
                result["plans"].append(row)
                save(options.json, result)
            rows = [row["random"] for row in result["plans"]]
            result["spearman"] = ranks(
                [p for row in rows for p in row["predicted_kl"]], [k for row in rows for k in row["kl"]]
            )
            print("predicted against measured, all random plans:", result["spearman"], flush=True)
            save(options.json, result)
        if "modelopt" in options.parts:
            result["modelopt"] = beside_modelopt(runner, context, store, modules, options.model, tokens, 5.0)
            save(options.json, result)
    if "smoothquant" in options.parts:
        held_out = torch.tensor([group[0].ids for group in test.encoded.sequences])
        result["smoothquant"] = smoothquant(subject, tokens[:4], held_out[:4])
        save(options.json, result)


if __name__ == "__main__":
    main()
