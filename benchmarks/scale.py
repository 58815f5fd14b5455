"""Time and memory from 0.5B to 32B parameters on one GPU: random weights of Qwen2.5's shapes, bfloat16.

    python benchmarks/scale.py --parts diagnosis --shapes 1.5B,7B -o diagnosis.json
    python benchmarks/scale.py --parts screen,noise --shapes 32B -o large.json
    python benchmarks/scale.py --parts host --shapes 32B -o host.json         # 24 GiB of the GPU, weights on the host
    python benchmarks/scale.py --parts disk --shapes 7B -o disk.json          # the same, weights on disk
    python benchmarks/scale.py --plot diagnosis.json large.json -o growth.svg

| part | measures |
|---|---|
| diagnosis | a standard diagnosis: seconds, seconds of its own forwards at clean speed, peak memory by measure |
| screen | the same of a screen |
| noise | noise on all linears over a clean forward, in interleaved pairs with a clean/clean arm, eager |
| graph | the same by CUDA-graph replay |
| record | recording 16 x 512 tokens over plain forwards; seconds per parameter and forward |
| locate | `locate --quick`: seconds, seconds per parameter and forward |
| host, disk | a screen with --gib of GPU memory, weights streamed from the host or from a checkpoint |

The metric is agreement with the clean model, which random weights have, too. Not timed: making weights, loading, one
warm-up of two samples. The limit of memory is 1.25 x weights + 12 GiB.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from overhead import _sync, _SyncScoped, compare, device_seconds, replayed
from recording import Recorded, _seconds

import noisescope as ns
from noisescope import api
from noisescope.probe.prefix import first_noisy_block
from noisescope.runs.trial_runner import TrialRunner

GIB = 2**30
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "tie_word_embeddings": False},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64, "num_attention_heads": 40,
            "num_key_value_heads": 8, "tie_word_embeddings": False},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
             "num_key_value_heads": 2, "tie_word_embeddings": False, "vocab_size": 512},
}  # fmt: skip
VOCABULARY = 151936
GROWTH = "seconds_per_billion_parameters_and_forward"
NOISE = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, phases={"forward"})


def built(shape: str, device: str) -> Any:
    """A model with random weights, made on the device."""
    config = transformers.Qwen2Config(**{"vocab_size": VOCABULARY, "use_cache": False, **SHAPES[shape]})
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def data(model: Any, samples: int, tokens: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return list(torch.randint(0, model.config.vocab_size, (samples, tokens), generator=draw).split(10))


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


def reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


class ByMeasure:
    """Trials, seconds and peak memory of each measure. The host allocates when it begins a trial, and on a GPU it
    begins the next one before it has put away the last: a peak is read when the next trial starts."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self.errors: list[str] = []
        self.trials: list[Any] = []
        self._last = ""

    def row(self, measure: str) -> dict[str, float]:
        return self.found.setdefault(measure, {"trials": 0, "seconds": 0.0, "peak_gib": 0.0})

    def read_peak(self, measure: str = "") -> None:
        if self._last:
            row = self.row(self._last)
            row["peak_gib"] = round(max(row["peak_gib"], peak() / GIB), 2)
        self._last = measure
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def wave(self, trials: int) -> None:
        pass

    def start(self, trial: Any) -> None:
        self.read_peak(trial.measure)

    def step(self, trial: Any, result: Any, seconds: float) -> None:
        row = self.row(trial.measure)
        self.trials.append(trial)
        row["trials"] += 1
        row["seconds"] = round(row["seconds"] + seconds, 3)
        if result.error:
            self.errors.append(f"{trial.measure}: {result.error}")


def diagnosed(subject: ns.Subject, options: argparse.Namespace, effort: str) -> dict[str, Any]:
    """One diagnosis from the call to the report, against its own forwards at clean speed."""
    batches = data(subject.model, options.samples, options.tokens)
    settings: dict[str, Any] = {"samples": options.samples, "metric": "agreement", "effort": effort}
    api.diagnose(subject, [batches[0][:2]], **{**settings, "samples": 2})
    reset_peak()
    progress = ByMeasure()
    wait()
    started = time.perf_counter()
    report = api.diagnose(subject, batches, **settings, progress=progress)
    wait()
    seconds = time.perf_counter() - started
    progress.read_peak()
    forwards = report["run"]["cost"]["forwards"]
    own, clean = own_seconds(subject, batches, options, progress.trials)
    most = max(row["peak_gib"] for row in progress.found.values())
    weights = weight_bytes(subject.model) / GIB
    parameters = sum(p.numel() for p in subject.model.parameters())
    return {
        "seconds": seconds,
        "forwards": forwards,
        "clean_forward_seconds": clean,
        "own_forwards_seconds": own,
        "ratio": seconds / own,
        GROWTH: seconds / forwards / parameters * 1e9,
        "peak_gib": most,
        "weights_gib": weights,
        "limit_gib": 1.25 * weights + 12,
        "within_limit": most <= 1.25 * weights + 12,
        "by_measure": progress.found,
        "errors": sorted(set(progress.errors)),
        "notes": list(report["run"]["notes"]),
    }


# Passes over the model for each sample beside those of `score`; a backward counts as one, and so does a block that
# backward computes again.
PASSES = {
    "screen": lambda settings: 1 + 2 * settings["draws"],
    "formats": lambda settings: 1 + 2 * settings["draws"],
    "gradients": lambda settings: 3,
    "curvature": lambda settings: 6 * settings["probes"],
    "capture": lambda settings: 1,
}


@torch.no_grad()
def own_seconds(
    subject: ns.Subject, batches: list[torch.Tensor], options: argparse.Namespace, trials: list[Any]
) -> tuple[float, float]:
    """Seconds of the forwards that trials ran, each from its first noisy block on, at clean speed; and of a whole one.

    Clean forwards of a slice from several blocks on are timed (median of three), laid out as in scoring; those between
    are interpolated. What runs once for all blocks, such as the product with 152,000 tokens, is in each of them.
    """
    prepared = api.prepare_diagnosis(subject, batches, samples=options.samples, metric="agreement", effort="screen")
    last = len(subject.anatomy.blocks) - 1
    starts = sorted({round(share * last) for share in (0, 0.25, 0.5, 0.75, 1)})
    with TrialRunner(subject, prepared.materials) as runner:
        part = prepared.context.test[0]
        size = part.stop - part.start
        medians = []
        for start in starts:
            times = []
            for _ in range(4):
                laid_out = runner.clean(part).batches
                wait()
                began = time.perf_counter()
                for number, batch in enumerate(laid_out):
                    for _ in runner._pieces(batch, start, number):
                        pass
                wait()
                times.append(time.perf_counter() - began)
            medians.append(statistics.median(times[1:]) / size)
    own = 0.0
    for trial in trials:
        samples = trial.slice.stop - trial.slice.start
        if trial.measure == "score":
            start = 0 if trial.injection is None else first_noisy_block(trial.injection, subject.anatomy)
            own += samples * float(np.interp(start, starts, medians))
        else:
            own += samples * medians[0] * PASSES[trial.measure](trial.settings)
    return own, medians[0] * options.samples


def part_diagnosis(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    return diagnosed(ns.wrap(built(shape, options.device)), options, "standard")


def part_screen(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    return diagnosed(ns.wrap(built(shape, options.device)), options, "screen")


@torch.no_grad()
def part_noise(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    model = built(shape, options.device)
    ids = data(model, 16, options.tokens)
    ids = torch.cat(ids)[:16].to(options.device)

    def forward() -> Any:
        return model(ids, use_cache=False).logits

    def seconds(run: Any) -> float:
        return run.seconds() if isinstance(run, _SyncScoped) else _sync(run)

    rows = compare({"all linears": _SyncScoped(model, NOISE, forward)}, forward, options.pairs, seconds)
    return {"tokens": list(ids.shape), "rows": rows}


@torch.no_grad()
def part_graph(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    model = built(shape, options.device).model
    states = torch.randn(16, options.tokens, model.config.hidden_size, dtype=torch.bfloat16, device=options.device)

    def forward() -> Any:
        return model(inputs_embeds=states, use_cache=False).last_hidden_state

    clean = replayed(forward)
    with ns.inject(model, NOISE):
        noisy = replayed(forward)
    rows = compare({"all linears": noisy}, clean, options.pairs, device_seconds)
    return {"tokens": list(states.shape[:2]), "rows": rows}


@torch.no_grad()
def part_record(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    model = built(shape, options.device)
    ids = torch.cat(data(model, 16, 512)).to(options.device)

    def plain() -> None:
        for _ in range(4):  # as many as Recorded runs
            model(ids).logits[:, -1].to("cpu")

    def seconds(run: Any) -> float:
        return run.seconds() if isinstance(run, Recorded) else _seconds(run, ids.device)

    with tempfile.TemporaryDirectory() as folder:
        recorded = Recorded(model, ids, Path(folder))
        rows = compare({"recording": recorded}, plain, max(3, options.pairs // 4), seconds)
        spent = statistics.median(recorded.seconds() for _ in range(3)) / 4
    parameters = sum(p.numel() for p in model.parameters())
    return {"rows": rows, GROWTH: spent / parameters * 1e9}


def part_locate(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    subject = ns.wrap(built(shape, options.device))
    parameters = sum(p.numel() for p in subject.model.parameters())
    reset_peak()
    started = time.perf_counter()
    verdict = ns.locate(subject, quick=True)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "forwards": verdict.forwards,
        "verdict": verdict.verdict,
        GROWTH: seconds / verdict.forwards / parameters * 1e9,
        "peak_gib": peak() / GIB,
    }


def part_host(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    from noisescope.model.streaming import stream_blocks

    model = built(shape, options.device).to("cpu")  # made on the device: a host draws slowly
    return streamed(ns.wrap(stream_blocks(model, torch.device(options.device), pin=True)), options)


def part_disk(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        built(shape, options.device).save_pretrained(folder)
        gc.collect()
        for file in Path(folder).iterdir():  # out of the page cache, so that it is read from disk
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return streamed(ns.load(folder, device=options.device, stream="disk"), options)


def streamed(subject: ns.Subject, options: argparse.Namespace) -> dict[str, Any]:
    """A screen within so much of the GPU's memory."""
    reset_peak()
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.gib * GIB / total))
    try:
        batches = data(subject.model, options.samples, options.tokens)
        progress = ByMeasure()
        started = time.perf_counter()
        resident = torch.cuda.memory_allocated() / GIB if torch.cuda.is_available() else 0.0
        report = api.diagnose(
            subject,
            batches,
            samples=options.samples,
            metric="agreement",
            effort="screen",
            progress=progress,
            memory=0.85 * (options.gib - resident),  # the limit of this process is not what the device has free
        )
        wait()
        progress.read_peak()
        return {
            "seconds": time.perf_counter() - started,
            "forwards": report["run"]["cost"]["forwards"],
            "weights_gib": weight_bytes(subject.model) / GIB,
            "allowed_gib": options.gib,
            "reserved_gib": torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0,
            "by_measure": progress.found,
            "errors": progress.errors,
            "notes": list(report["run"]["notes"]),
        }
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)


def plot(files: list[Path], target: Path) -> None:
    """Time per parameter and forward over parameters, a line for each part that has it."""
    from matplotlib.figure import Figure

    found: dict[str, dict[float, float]] = {}
    for file in files:
        for name, row in json.loads(file.read_text(encoding="utf-8")).items():
            part, _, shape = name.partition(" ")
            if isinstance(row, dict) and GROWTH in row and shape in SHAPES:
                found.setdefault(part, {})[float(shape.removesuffix("B"))] = row[GROWTH]
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for part, line in sorted(found.items()):
        sizes = sorted(line)
        axes.loglog(sizes, [line[size] for size in sizes], "o-", label=part)
    axes.set_xticks(sizes := sorted({size for line in found.values() for size in line}), [f"{s:g}B" for s in sizes])
    axes.set_xticks([], minor=True)
    for which in ("major", "minor"):
        axes.yaxis.set_tick_params(which=which, labelsize="small")
        getattr(axes.yaxis, f"set_{which}_formatter")("{x:g}")
    axes.set_xlabel("parameters")
    axes.set_ylabel("seconds per billion parameters and forward")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(target)


PARTS = {name.removeprefix("part_"): function for name, function in list(globals().items()) if name[:5] == "part_"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="diagnosis", help=f"with commas: {', '.join(PARTS)}")
    parser.add_argument("--shapes", default="1.5B", help=f"with commas: {', '.join(SHAPES)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--gib", type=float, default=24.0, help="GPU memory for host and disk")
    parser.add_argument("--folder", help="where the checkpoint for disk is written")
    parser.add_argument("--plot", type=Path, nargs="+", help="draw growth from these results, and measure nothing")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if options.plot:
        plot(options.plot, options.output or Path("growth.svg"))
        return
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    found: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "workload": {"samples": options.samples, "tokens": options.tokens, "pairs": options.pairs},
    }
    for part in options.parts.split(","):
        for shape in options.shapes.split(","):
            reset_peak()
            started = time.perf_counter()
            try:
                row = PARTS[part](shape, options)
            except Exception as error:  # the other parts are worth having
                row = {"failed": f"{type(error).__name__}: {error}"[:2000]}
            row["seconds_of_this_part"] = time.perf_counter() - started
            found[f"{part} {shape}"] = row
            print(part, shape, json.dumps(row, indent=1, default=str), flush=True)
            if options.output:
                options.output.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
