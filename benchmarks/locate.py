"""What `locate` costs, and what it says of a healthy device: this one, in three number formats.

    python benchmarks/locate.py --device cuda --passport results/passport_cpu.json --json results/locate_h200.json
    python benchmarks/locate.py --device cuda --shapes 1.5B,7B --seeds 0      # the cost alone

Healthy runs differ in model, dtype and prompts; each must come out "healthy". Costs are of `auto` in bfloat16, the
first call in this process and the next one, and of `--quick`; on a GPU on Qwen2.5's shapes (random weights: what is
timed and checked is arithmetic), on the model of --model otherwise. Passports are taken here and, with --passport,
compared with another device's.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

import noisescope as ns
from diagnosis import qwen
from noisescope.passports.diff import diff, read_passport, say, write_passport
from noisescope.passports.measure import take_passport
from noisescope.testing import tiny_model

DTYPES = ("float32", "bfloat16", "float16")
SEVEN = {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
TINY = ("llama", "gpt2", "mixtral", "gemma2", "gpt_neox", "opt")


def subjects(device: str) -> dict[str, Any]:
    """Healthy models by name: the bundled one, and small ones of other architectures, biases not 0."""
    found: dict[str, Any] = {f"demo {dtype}": ns.load("demo", device=device, dtype=dtype) for dtype in DTYPES}
    for kind in TINY:
        for dtype in DTYPES:
            model = tiny_model(kind, layers=4, biases=0.1).to(device, getattr(torch, dtype)).eval()
            found[f"{kind} {dtype}"] = ns.wrap(model)
    return found


def healthy_runs(device: str, method: str, seeds: range) -> dict[str, Any]:
    """Verdicts of healthy models; every alarm with its reason."""
    verdicts: Counter[str] = Counter()
    alarms: list[dict[str, Any]] = []
    for name, subject in subjects(device).items():
        for seed in seeds:
            verdict = ns.locate(subject, method=method, seed=seed)
            verdicts[verdict.verdict] += 1
            if verdict.verdict != "healthy":
                alarms.append({"model": name, "seed": seed, "verdict": verdict.verdict, "why": _why(verdict)})
    return {"method": method, "n": sum(verdicts.values()), **verdicts, "alarms": alarms}


def _why(verdict: Any) -> str:
    first = verdict.suspects[0] if verdict.suspects else None
    return " ".join(verdict.notes) if first is None else f"{first.site}: {first.fault_class}: {first.evidence}"


def cost(subject: ns.Subject, name: str, runs: str) -> list[dict[str, Any]]:
    """Seconds and forwards of `auto`: its first call, the next one, and the quick one."""
    found = []
    for run in runs.split(","):
        start, used = time.perf_counter(), time.process_time()
        verdict = ns.locate(subject, quick=run == "quick")
        row = {
            "model": name,
            "run": run,
            "seconds": round(time.perf_counter() - start, 2),
            "processor_seconds": round(time.process_time() - used, 2),
            "forwards": verdict.forwards,
            "headline": verdict.headline,
            "why": "" if verdict.verdict == "healthy" else _why(verdict),
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


def costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.device == "cpu":
        return cost(ns.load(options.model, dtype="bfloat16"), Path(options.model).name, options.runs)
    shapes = {"1.5B": {}, "7B": SEVEN}
    return [
        row
        for shape in filter(None, options.shapes.split(","))
        for row in cost(qwen(options.device, **shapes[shape]), f"Qwen2.5-{shape}'s shape", options.runs)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="demo", help="whose cost is measured on a CPU")
    parser.add_argument("--shapes", default="1.5B", help="1.5B, 7B: whose cost is measured on a GPU; '' for none")
    parser.add_argument("--runs", default="first,warm,quick", help="calls whose cost is measured, with commas")
    parser.add_argument("--seeds", type=int, default=10, help="prompts of each healthy model")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--methods", default="auto", help="with commas")
    parser.add_argument("--passport", type=Path, help="another device's passport, to compare with")
    parser.add_argument("--save-passport", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor() or "CPU"
    results: dict[str, Any] = {
        "machine": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "costs": costs(options),
    }
    methods = options.methods.split(",") if seeds else []
    results["healthy"] = [healthy_runs(options.device, method, seeds) for method in methods]
    print(json.dumps(results["healthy"], indent=1), flush=True)
    passport = take_passport(options.device) if options.passport or options.save_passport else None
    if options.save_passport:
        write_passport(passport, options.save_passport)
    if options.passport:
        results["passport_difference"] = say(diff(read_passport(options.passport), passport)).splitlines()
        print("\n".join(results["passport_difference"]))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
