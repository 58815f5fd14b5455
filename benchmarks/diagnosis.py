"""What a whole diagnosis costs: seconds, forwards, memory; and against the plain loop of the original method notes.

    python benchmarks/diagnosis.py                     # CPU: the demo model against the plain loop
    python benchmarks/diagnosis.py --capture           # CPU: peak memory of channel capture, 100 and 10,000 samples
    python benchmarks/diagnosis.py --device cuda       # Qwen2.5-1.5B's shape, bfloat16: time and memory

On the GPU weights are random and the metric is agreement with the clean model, which is measurable for any weights, so
that every part of a diagnosis runs, the critical threshold too: only time and memory are measured there. Timed: from
the call to the report, after loading; not timed: loading, and one warm-up diagnosis of two samples (compiling kernels).
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import noisescope as ns
from noisescope import api
from noisescope.diagnosis import operators as level_one
from noisescope.diagnosis import predicted_kl as screening
from noisescope.diagnosis.layers import window_injection
from noisescope.jsonform import to_json
from noisescope.runs.measures import score, screen
from noisescope.runs.trial_runner import TrialRunner
from noisescope.trials import Slice, Trial

QWEN = {
    "vocab_size": 151936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def qwen(device: str, **smaller: int) -> ns.Subject:
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**QWEN, **smaller})).to(torch.bfloat16)
    return ns.wrap(model.eval())


def batches(samples: int, tokens: int, vocabulary: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return list(torch.randint(0, vocabulary, (samples, tokens), generator=draw).split(10))


def timed(subject: ns.Subject, data: Any, **settings: Any) -> dict[str, Any]:
    """One diagnosis from the call to the report."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    report = api.diagnose(subject, data, **settings)
    seconds = time.perf_counter() - started
    failed = [name for name, row in report["operator_analysis"].items() if row["evidence"] == "failed"]
    cost = report["run"]["cost"]
    by_measure = cost.get("by_measure", {})
    return {"seconds": seconds, "trials": cost["trials"], "forwards": cost["forwards"], "failed": failed, **by_measure}


def memory(subject: ns.Subject, data: Any, slice_samples: int) -> dict[str, float]:
    """Peak GPU memory of a clean forward, of injection trials, of the screen; the same slice each time."""
    prepared = api.prepare_diagnosis(
        subject,
        data,
        calibration=None,
        samples=slice_samples,
        calibration_samples=0,
        metric="agreement",
        generate=False,
        max_tokens=256,
        max_new_tokens=8,
        slice=slice_samples,
    )
    context, peaks = prepared.context, {}
    part: Slice = context.test[0]
    with TrialRunner(subject, prepared.materials) as runner:
        batch = runner.batches(part)[0]
        with torch.no_grad():
            peaks["clean"] = _peak(lambda: runner.forward(batch))
        trials = [context.ask(window_injection(context, w))[0] for w in (context.windows[0], context.windows[-1])]
        trials += [context.ask(level_one.injection(context, name))[0] for name in ("linear", "softmax")]
        peaks["sweep"] = _peak(lambda: [score(runner, trial)() for trial in trials])
        runner.forget_slice()
        where = screening.screen_injection(context)
        trial = Trial(context.conditions, "screen", part, where, {"draws": 2, "seed": 0})
        peaks["screen"] = _peak(lambda: screen(runner, trial))
    gib = {name: value / 2**30 for name, value in peaks.items()}
    return {**gib, "sweep / clean": gib["sweep"] / gib["clean"], "screen / clean": gib["screen"] / gib["clean"]}


def _peak(run: Any) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    subject = qwen("cuda", num_hidden_layers=options.layers)
    data = batches(options.samples, options.tokens, QWEN["vocab_size"])
    settings = {"samples": options.samples, "metric": "agreement", "slice": options.slice}
    timed(subject, [data[0][:2]], **{**settings, "samples": 2})
    found: dict[str, Any] = {"memory_gib": memory(subject, data, options.slice)}
    for effort in options.efforts:
        found[effort] = timed(subject, data, effort=effort, **settings)
        print(effort, found[effort], flush=True)
    return found


def plain_loop(subject: ns.Subject, items: list[Any], window: int) -> tuple[float, list[float]]:
    """Operators and windows as the notes run them: one sample at a time, by generation, three seeds, nothing kept."""
    started = time.perf_counter()
    losses = []
    blocks = len(subject.anatomy.blocks)
    aims: list[dict[str, Any]] = [{"operators": {name}} for name in ("gemm", "softmax", "silu", "norm")]
    aims += [{"operators": {"gemm"}, "layers": set(range(at, at + window))} for at in range(blocks - window + 1)]
    for aim in aims:
        right = 0
        for seed in range(3):
            injection = ns.Injection(ns.Gaussian(0.05), phases={"forward"}, seed=seed, **aim)
            with ns.inject(subject.model, injection, anatomy=subject.anatomy):
                right += sum(_answers(subject, item) for item in items)
        losses.append(1 - right / (3 * len(items)))
    return time.perf_counter() - started, losses


@torch.no_grad()
def _answers(subject: ns.Subject, item: Any) -> bool:
    ids = subject.tokenizer(item.prompt, return_tensors="pt")["input_ids"]
    out = subject.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    return bool(subject.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip() == item.answer)


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    from noisescope import demo, stats
    from noisescope.data.dataset import read_data

    subject = ns.load("demo", dtype="float32")
    items = list(read_data(demo.test_file(), limit=options.samples).items)
    slow, losses = plain_loop(subject, items, 3)
    found: dict[str, Any] = {"plain loop": {"seconds": slow, "samples": len(items)}}
    for effort in ("screen", "standard"):
        started = time.perf_counter()
        report = api.diagnose(subject, samples=options.samples, effort=effort, level=("operator", "layer"))
        seconds = time.perf_counter() - started
        rows = [report["operator_analysis"][name] for name in ("gemm", "softmax", "silu", "norm")]
        rows += report["layer_analysis"]["windows"]
        ours = [(row["kl"] or row["predicted_kl"])["typical"]["value"] for row in rows]
        agreement = to_json(stats.correlation(ours, losses))
        found[effort] = {"seconds": seconds, "times quicker": slow / seconds, "rank agreement": agreement}
    return found


def captured(samples: int) -> float:
    """Peak resident memory in MiB of a process that captures channels of the demo model on so many samples."""
    from noisescope import demo
    from noisescope.data.dataset import gather, read_data
    from noisescope.diagnosis.channels import capture_trial

    items = read_data(demo.test_file()).items
    data = gather((items[i % len(items)] for i in range(samples)), "demo, repeated")
    prepared = api.prepare_diagnosis(ns.load("demo"), data, samples=8, calibration=data, calibration_samples=samples)
    trial = capture_trial(prepared.context)
    assert trial is not None
    with TrialRunner(prepared.subject, prepared.materials) as runner:
        assert not runner.run(trial).error
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def capture_memory() -> dict[str, Any]:
    """Each in a process of its own; what the tokens themselves take is in it."""
    found = {}
    for samples in (100, 1_000, 10_000):
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.insert(0, {here!r}); import diagnosis; print(diagnosis.captured({samples}))"
        out = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
        found[f"{samples} samples, MiB"] = float(out.stdout.split()[-1])
    return {"capture": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--slice", type=int, default=50)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--efforts", nargs="*", default=["standard", "full"])
    parser.add_argument("--capture", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = capture_memory() if options.capture else on_gpu(options) if options.device == "cuda" else on_cpu(options)
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    facts = {"machine": machine, "torch": torch.__version__, "transformers": transformers.__version__}
    result = {"workload": {k: v for k, v in vars(options).items() if k != "json"}, **facts, **found}
    print(json.dumps(result, indent=1, default=str), platform.machine())
    if options.json:
        options.json.write_text(json.dumps(result, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
