"""Precision plans beside fair rivals, on weights that never were in 4 bits; every difference paired by sequence.

    python benchmarks/precision.py MODEL --device cuda --data GSM8K_TRAIN.jsonl -o results/precision.json

All methods see the same calibration samples and choose from the same formats; scores go to the same solver
(precision_rivals.py has the rivals). Rules and random plans take the 4-bit format that costs least where all linears
have it. Bits are nominal, over the linears of the blocks; lm_head keeps 16. Plans are measured by fake quantisation on
sequences that nothing was chosen on. "Best of random" is the one with the lowest KL on the calibration samples.

Models that are around as 4-bit files round to 4 bits for free. So each weight is dithered first: uniform noise of one
step, the step being a 15th of the range of its group of 32 (that of a 4-bit file), which is what rounding to 4 bits
took away. The dithered model is the reference of all KLs. `--no-dither` leaves that out.

The difference of two plans is the mean over sequences of (KL of the rival - KL of the plan), with a 95 % interval. "The
best rival" is picked by the sequences it is measured on, which favours the rival.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from precision_rivals import filled, first_and_last, gradient_scores, llama_cpp, with_scores
from screen_setup import frame_of, read_material, save

import noisescope as ns
from noisescope import stats
from noisescope.diagnosis.context import StudyContext
from noisescope.diagnosis.section_types import FormatScore
from noisescope.measures.format_costs import is_planned, plan_injection
from noisescope.model.anatomy import linear_weight
from noisescope.model.loading import Subject
from noisescope.plans.precision import Budget, Module, Plan, optimal_plan, random_plans, uniform_plan
from noisescope.plans.precision_results import Verification
from noisescope.plans.refinement import Refinement
from noisescope.runs.calibrated_plans import input_squares
from noisescope.runs.store import Store
from noisescope.runs.trial_runner import LocalExecutor, NoProgress, TrialRunner, run_waves
from noisescope.trials import Slice, Trial

FORMATS = ("int4_asymmetric", "int4_clipped", "int8")
FOUR_BITS = FORMATS[:2]
OURS = ("screen", "refined")


class Bench:
    """A model with its trials: what is asked twice is measured once."""

    def __init__(self, runner: TrialRunner, store: Store, calibration: StudyContext, test: StudyContext) -> None:
        self.runner, self.store, self.calibration, self.test = runner, store, calibration, test

    def settle(self, question: Any, frame: StudyContext) -> Any:
        run_waves(
            lambda results: question.propose(frame, results), self.store, LocalExecutor(self.runner), NoProgress()
        )
        return question.conclude(frame, self.store)

    def kl(
        self, plans: Mapping[str, Mapping[str, str]], frame: StudyContext, *, to_inputs: bool = True
    ) -> dict[str, np.ndarray]:
        """KL of each sequence under each assignment. Clipped ranges fit the inputs of linears, or weights alone."""
        samples = self.calibration.test[0] if to_inputs else None
        question = Verification({name: plan_injection(chosen, samples) for name, chosen in plans.items()})
        return {name: found.kl for name, found in self.settle(question, frame).plans.items()}

    def one_at_a_time(self, modules: list[Module]) -> dict[str, dict[str, float]]:
        """Mean KL with one linear in each 4-bit format; 8 bits count as free."""
        alone = {f"{m.name} {fmt}": {m.name: fmt} for m in modules for fmt in FOUR_BITS}
        kl = self.kl(alone, self.calibration)
        return {
            m.name: {f: float(kl[f"{m.name} {f}"].mean()) if f in FOUR_BITS else 0.0 for f in FORMATS} for m in modules
        }

    def clipped(self, names: Sequence[str]) -> dict[str, Any]:
        """Every linear in int4_clipped on held-out sequences: ranges that fit inputs beside those that fit weights."""
        plan = {"uniform": dict.fromkeys(names, "int4_clipped")}
        inputs, weights = (self.kl(plan, self.test, to_inputs=to_inputs)["uniform"] for to_inputs in (True, False))
        less = stats.mean(weights - inputs, countable=False)
        return {
            "kl": {"inputs": float(inputs.mean()), "weights": float(weights.mean())},
            "less": {"value": less.value, "low": less.low, "high": less.high, "n": less.n},
        }

    def scored(self) -> list[Module]:
        """Format scores as a diagnosis makes them."""
        part = self.calibration.test[0]
        trial = Trial(self.calibration.conditions, "formats", part, None, {"formats": FORMATS, "draws": 1, "seed": 0})
        run_waves(lambda results: [trial], self.store, LocalExecutor(self.runner), NoProgress())
        found = self.store[trial.id]
        if found.failed:
            raise SystemExit(f"scoring failed: {found.error}")
        mean = found.arrays["predicted"].mean(2)
        modules = []
        for row, about in zip(mean, found.facts["modules"], strict=True):
            named = zip(found.facts["formats"], row, strict=True)
            choices = {n: FormatScore(bits, about["effective_bits"][n], float(kl), None) for (n, bits), kl in named}
            modules.append(Module(about["module"], about["place"], about["parameters"], choices))
        return modules


def dither(subject: Subject, seed: int = 0) -> None:
    """Uniform noise of one 4-bit step on every planned weight."""
    modules = dict(subject.model.named_modules())
    for unit in filter(is_planned, subject.anatomy.units):
        weight = linear_weight(modules[unit.module])
        draw = torch.Generator().manual_seed(seed + hash_of(unit.module))
        groups = weight.data.reshape(-1, 32)
        step = (groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)) / 15
        noise = torch.rand(groups.shape, generator=draw).sub_(0.5).to(groups.device, groups.dtype)
        weight.data.copy_((groups + noise * step).reshape(weight.shape))


def hash_of(name: str) -> int:
    return int.from_bytes(name.encode(), "little") % (2**31)


def plans_at(bench: Bench, modules: list[Module], rivals: dict[str, list[Module]], bits: float, low: str,
             options: argparse.Namespace) -> tuple[dict[str, Plan], dict[str, Any]]:  # fmt: skip
    """Plans of so many bits by name, and how ours were refined."""
    budget = Budget(bits)
    screen = optimal_plan(modules, budget)
    started = time.perf_counter()
    samples = bench.calibration.test[0]
    carried_out = functools.partial(plan_injection, samples=samples)
    refined = bench.settle(Refinement(modules, budget, screen, options.rounds, samples, carried_out), bench.calibration)
    found = {"screen": screen, "refined": refined.plan}
    facts = {"calibration_kl": refined.measured, "seconds": time.perf_counter() - started}
    for name, scored in rivals.items():
        found[name] = replace(optimal_plan(scored, budget), method=name)
    found["llama.cpp's rule"] = filled(modules, llama_cpp(modules), bits, low, "int8", "llama.cpp's rule")
    found["first and last"] = filled(modules, first_and_last(modules), bits, low, "int8", "first and last")
    two = [replace(m, choices={f: m.choices[f] for f in (low, "int8")}) for m in modules]
    drawn = random_plans(two, bits, options.random, seed=0)
    kl = bench.kl({str(i): plan.assignment for i, plan in enumerate(drawn)}, bench.calibration)
    found[f"best of {len(drawn)} random"] = drawn[min(range(len(drawn)), key=lambda i: float(kl[str(i)].mean()))]
    return found, facts


def compared(kl: Mapping[str, np.ndarray], plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Each plan's KL, and how far rivals are above the refined plan; which rival is best."""
    rows = {}
    for name, values in kl.items():
        beyond = stats.mean(values - kl["refined"], countable=False)
        rows[name] = {
            "bits": plans[name].average_bits,
            "effective_bits": plans[name].effective_bits,
            "formats": plans[name].counts(),
            "kl": float(values.mean()),
            "above_refined": {"value": beyond.value, "low": beyond.low, "high": beyond.high, "n": beyond.n},
            "ratio": float(values.mean() / kl["refined"].mean()),
            "by_sequence": [round(float(one), 6) for one in values],
        }
    best = min((name for name in rows if name not in OURS), key=lambda name: rows[name]["kl"])
    return {"plans": rows, "best_rival": best}


def show(bits: float, found: Mapping[str, Any]) -> None:
    print(f"\n{bits:g} bits; best rival: {found['best_rival']}")
    for name, row in sorted(found["plans"].items(), key=lambda entry: entry[1]["kl"]):
        beyond = row["above_refined"]
        known = name != "refined" and beyond["low"] is not None
        interval = f"{beyond['value']:+.5f} [{beyond['low']:+.5f}, {beyond['high']:+.5f}]" if known else ""
        print(f"  {name:<20} {row['bits']:.3f} bits  KL {row['kl']:.5f}  x {row['ratio']:.3f}  {interval}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--data", required=True, type=Path, help="JSONL with question and answer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calibration", type=int, default=32, help="sequences to choose on")
    parser.add_argument("--sequences", type=int, default=64, help="held-out sequences to measure on")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--bits", nargs="*", type=float, default=[4.5, 5.0], help="none: clipped ranges alone")
    parser.add_argument("--random", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20, help="of refinement")
    parser.add_argument("--no-dither", dest="dithered", action="store_false")
    parser.add_argument("--without", nargs="*", default=[], help="rivals to leave out, such as 'one at a time'")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    transformers.utils.logging.disable_progress_bar()
    started = time.perf_counter()
    subject = ns.load(options.model, dtype="float32", device=options.device)
    if options.dithered:
        dither(subject)
    count, held_out = options.calibration, options.sequences
    material = read_material(subject.tokenizer, options.data, count + held_out, options.length)
    whole = frame_of(subject, material, 1)
    calibration = replace(whole, test=(Slice(material.fingerprint, 0, count),))
    test = replace(whole, test=(Slice(material.fingerprint, count, count + held_out),))
    result: dict[str, Any] = {
        "model": Path(options.model).name,
        "machine": torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "dithered": options.dithered,
        "formats": FORMATS,
        "calibration": f"{count} x {options.length} tokens",
        "held_out": f"{held_out} x {options.length} tokens",
        "seconds": {"loading": time.perf_counter() - started},
        "at": {},
    }

    def timed(name: str, since: float) -> None:
        result["seconds"][name] = time.perf_counter() - since
        print(f"{name}: {result['seconds'][name]:.1f} s", flush=True)

    with (
        tempfile.TemporaryDirectory() as folder,
        TrialRunner(subject, [material]) as runner,
        Store(Path(folder)) as store,
    ):
        bench = Bench(runner, store, calibration, test)
        result["int4_clipped"] = bench.clipped([unit.module for unit in subject.anatomy.units if is_planned(unit)])
        print(f"int4_clipped, ranges that fit inputs or weights: {result['int4_clipped']}", flush=True)
        save(options.output, result)
        if not options.bits:
            return
        since = time.perf_counter()
        modules = bench.scored()
        timed("screen", since)
        names = [module.name for module in modules]
        since = time.perf_counter()
        tokens = [torch.tensor([group[0].ids], device=runner.device) for group in material.encoded.sequences[:count]]
        squares = input_squares(runner, calibration.test[0])
        scores = gradient_scores(subject.model, names, FORMATS, tokens, squares)
        timed("gradient scores", since)
        since = time.perf_counter()
        if "one at a time" not in options.without:
            scores["one at a time"] = bench.one_at_a_time(modules)
            timed("one at a time", since)
        rivals = {name: with_scores(modules, found) for name, found in scores.items()}
        uniform = {name: uniform_plan(modules, name) for name in FORMATS}
        kl = bench.kl({name: plan.assignment for name, plan in uniform.items()}, calibration)
        low = min(FOUR_BITS, key=lambda name: float(kl[name].mean()))
        result["uniform_calibration_kl"] = {name: float(values.mean()) for name, values in kl.items()}
        print(f"uniform: {result['uniform_calibration_kl']}; rules use {low}", flush=True)
        for bits in options.bits:
            since = time.perf_counter()
            plans, facts = plans_at(bench, modules, rivals, bits, low, options)
            plans[f"uniform {low}"] = uniform[low]
            kl = bench.kl({name: plan.assignment for name, plan in plans.items()}, test)
            found = {**compared(kl, plans), "refinement": facts}
            timed(f"{bits:g} bits", since)
            result["at"][f"{bits:g}"] = found
            show(bits, found)
            save(options.output, result)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
