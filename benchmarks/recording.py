"""What recording costs, and how well its sketches tell the difference of two devices.

    python benchmarks/recording.py                      # CPU: SmolLM2-135M's shape, float32
    python benchmarks/recording.py --device cuda        # Qwen2.5-1.5B's shape, bfloat16

Time: four forwards under `record` (sketches, folded, copied and written to disk) over four plain ones, in interleaved
pairs with a plain/plain arm; the median with a bootstrap interval. Outputs of a block are read together, as `record`
does from its second batch on. Not timed: opening a scope, the model's fingerprint, record.json. Weights are random:
only time is measured there. Accuracy: the bundled model against itself with small noise on every linear, full detail on
both sides: each site's relative L2 from sketches against the one from whole tensors, and the size of the sketches
against that of the tensors.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from overhead import compare, host_seconds, llama, show

import noisescope as ns
from noisescope.comparison.measures import from_sketches
from noisescope.comparison.records import Record
from noisescope.comparison.site_divergence import sketches_of
from noisescope.runs.device_record_writer import Detail, Reading, Recording

TARGET = 1.3
SHAPES = {"cpu": [(4, 128)], "cuda": [(16, 512), (32, 1024)]}  # prompts x tokens
BATCHES = 4  # one after the other: one is written while the next one runs


def qwen(device: str) -> Any:
    config = transformers.Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return transformers.Qwen2ForCausalLM(config).to(torch.bfloat16).eval()


class Recorded:
    """Forwards of several batches under recordings, written as `record` does; scopes are opened around the clock."""

    def __init__(self, model: Any, ids: torch.Tensor, folder: Path) -> None:
        self.model, self.ids, self.folder = model, ids, folder
        self.anatomy = ns.dissect(model)

    def __call__(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        """Each batch waits until the one before it is written, the clock runs until all are."""
        with ThreadPoolExecutor(1) as disk:
            writing: list[Future[Any]] = []
            seconds = sum(self._one(number, writing, disk) for number in range(BATCHES))
            return seconds + host_seconds(writing[-1].result)

    def _one(self, number: int, writing: list[Future[Any]], disk: ThreadPoolExecutor) -> float:
        recording = Recording(self.ids.shape, 0, Detail(), self.folder / str(number), Reading.TOGETHER)

        def run() -> None:
            tensors = recording.finish(self.model(self.ids).logits[:, -1])
            if writing:
                writing[-1].result()
            writing.append(disk.submit(recording.write, tensors))

        with recording.watch(self.model, self.anatomy):
            return _seconds(run, self.ids.device)


def _seconds(run: Any, device: torch.device) -> float:
    if device.type != "cuda":
        return host_seconds(run)
    torch.cuda.synchronize()

    def through() -> None:
        run()
        torch.cuda.synchronize()

    return host_seconds(through)


def cost(device: str, shape: tuple[int, int], pairs: int) -> dict[str, Any]:
    if device == "cuda":
        model, title = qwen(device), f"1.5B, bfloat16, {shape[0]} x {shape[1]}"
    else:
        model, title = llama(30, 576, 1536, 9, 3, 49152), f"135M, {shape[0]} x {shape[1]}"
    ids = torch.randint(0, model.config.vocab_size, shape, device=device)

    def plain() -> None:
        for _ in range(BATCHES):
            model(ids).logits[:, -1].to("cpu")

    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        recorded = Recorded(model, ids, Path(folder))
        plain()
        before = _peak(device)
        recorded()
        more = _peak(device) - before
        rows = compare(
            {"recording": recorded},
            plain,
            pairs,
            lambda run: run.seconds() if isinstance(run, Recorded) else _seconds(run, ids.device),
        )
    show(
        f"{title}: a recorded forward over a plain one; peak memory + {more / 2**20:.0f} MiB",
        rows,
        {"recording": TARGET},
    )
    return {"case": title, "rows": rows, "more_bytes": more}


def _peak(device: str) -> int:
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def accuracy(device: str, samples: int) -> list[dict[str, Any]]:
    """Sketches against whole tensors, in both dtypes."""
    tables = []
    for dtype, scale in (("float32", 1e-5), ("bfloat16", 0.02)):
        subject = ns.load("demo", device=device, dtype=dtype)
        with tempfile.TemporaryDirectory() as folder:
            a = ns.record(subject, None, f"{folder}/a", detail="full", inputs=False, samples=samples)
            with ns.inject(subject.model, ns.Injection(ns.Gaussian(scale), operators={"linear"}, seed=1)):
                b = ns.record(subject, None, f"{folder}/b", detail="full", inputs=False, samples=samples)
            tables.append({"dtype": dtype, "samples": samples, **_told(a, b), **_sizes(Path(folder) / "a")})
    for table in tables:
        print(
            f"\ndemo, {table['dtype']}, {samples} prompts, {table['sites']} sites: relative L2 from sketches is off by "
            f"{100 * table['rms_error']:.1f} % (rms), {100 * table['worst_error']:.1f} % at worst; "
            f"size {100 * table['share']:.2f} % of the tensors ({table['kilobytes_a_layer']:.1f} KB a layer)"
        )
    return tables


def _told(a: Record, b: Record) -> dict[str, Any]:
    exact = {row.site: row.relative_l2 for row in ns.compare(a, b).sites}
    left, right = sketches_of(a), sketches_of(b)
    assert left is not None and right is not None
    errors = []
    for number, site in enumerate(a.sites):
        estimate = from_sketches(left[number], right[number], a.numbers()).relative_l2
        if exact[site] > 0:
            errors.append(estimate / exact[site] - 1)
    return {
        "sites": len(errors),
        "rms_error": statistics.mean(e * e for e in errors) ** 0.5,
        "worst_error": max(map(abs, errors)),
        "within_10_percent": sum(abs(e) <= 0.1 for e in errors) / len(errors),
    }


def _sizes(folder: Path) -> dict[str, float]:
    """Bytes of the sketches' files (headers, per-token figures and logits included) over those of the tensors."""
    sketches = sum(file.stat().st_size for file in folder.glob("????.safetensors"))
    whole = sum(file.stat().st_size for file in folder.glob("????-*.safetensors"))
    layers = json.loads((folder / "record.json").read_text())["model"]["blocks"]
    return {"share": sketches / whole, "kilobytes_a_layer": sketches / layers / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = torch.cuda.get_device_name() if options.device == "cuda" else f"{torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {machine}")
    result = {
        "machine": machine,
        "torch": torch.__version__,
        "cost": [cost(options.device, shape, options.pairs) for shape in SHAPES[options.device]],
        "accuracy": accuracy(options.device, options.samples),
    }
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
