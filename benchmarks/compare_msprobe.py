"""msprobe beside `noisescope compare`: the same pair (transformers, vLLM), the same prompt, the same planted faults.

    PYTHONPATH=path/to/msprobe python benchmarks/compare_msprobe.py path/to/smollm2 --msprobe path/to/bin/msprobe

Runs in the virtual environment of `make engines`, with msprobe (`mindstudio-probe` 26.2.0 and what it imports) on the
path. msprobe dumps the modules of both sides (level L0), and its check of training against inference (`compare
--consistent_check --backend fsdp`) compares the dumps; the blocks of the transformers model are named as FSDP names
them, which that check expects. It gives a table with a result per tensor and no verdict, so two readings of it are
reported: the modules whose numbers it flags, and those of them that it does not flag in the healthy pair, which a user
would not have. Flags for other shapes or dtypes alone are not counted. Seconds are processor time.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import noisescope as ns
from noisescope.api.systems import roundoff_band
from noisescope.data.dataset import built_in, gather
from noisescope.engines.compare import compare_systems
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.engines.vllm_engine import VllmEngine

TOKENS = 48
# plant: part of the module's name that has to be given
PLANTS = {
    "healthy": "",
    "gate and up of layer 7 in float16": "layers.7.mlp.gate",
    "attention scale of layer 7 x 1.2": "layers.7.self_attn",
    "rotary positions of layer 7 halved": "layers.7.self_attn",
    "layer 12 has layer 3's down_proj": "layers.12.mlp.down_proj",
}


@contextmanager
def planted(name: str, a: TransformersEngine, b: VllmEngine) -> Iterator[None]:
    block = b.model.model.layers[7]
    linear, attention = block.mlp.gate_up_proj, block.self_attn.attn.impl
    kept, scale, rotary = linear.cpu_linear, attention.scale, block.self_attn.rotary_emb
    down = "model.layers.{}.mlp.down_proj.weight"
    weight = dict(b.tensors())[down.format(12)].clone()
    if name.startswith("gate"):
        linear.cpu_linear = lambda x, w, bias: kept(x.half().to(x.dtype), w, bias).half().to(x.dtype)
    elif name.startswith("attention"):
        attention.scale = 1.2 * scale
    elif name.startswith("rotary"):  # shared by all layers: only this layer's is replaced

        class Halved(nn.Module):
            def forward(self, positions: torch.Tensor, *qk: torch.Tensor) -> Any:
                return rotary(positions // 2, *qk)

        block.self_attn.rotary_emb = Halved()
    elif name.startswith("layer 12"):
        b.write(down.format(12), dict(a.tensors())[down.format(3)])
    try:
        yield
    finally:
        linear.cpu_linear, attention.scale, block.self_attn.rotary_emb = kept, scale, rotary
        if name.startswith("layer 12"):
            b.write(down.format(12), weight)


def by_noisescope(a: TransformersEngine, b: VllmEngine, ids: tuple[int, ...], out: Path) -> dict[str, Any]:
    start = time.process_time()
    found = compare_systems(a, b, ((ids,), (ids,)), band=roundoff_band(a, (ids,)))
    seconds = time.process_time() - start
    found.save(out)
    return {"verdict": found.verdict, "words": found.words, "seconds": seconds, "bytes": out.stat().st_size,
            "named": [where for cause in found.causes for where in (*cause.where, cause.words)]}  # fmt: skip


class Wrapped(nn.Module):
    """A module under the name that FSDP gives it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fsdp_wrapped_module(*args, **kwargs)


def size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def dump_all(a: TransformersEngine, b: VllmEngine, ids: tuple[int, ...], folder: Path, task: str) -> dict[str, float]:
    """Step k of the dump is plant k of vLLM, the last step transformers; the processor seconds of each."""
    from msprobe.pytorch import PrecisionDebugger

    config = {"task": task, "dump_path": str(folder), "rank": [], "step": [], "level": "L0",
              task: {"scope": [], "list": [], "data_mode": ["forward"]}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    debugger = PrecisionDebugger(config_path=str(folder / "config.json"))
    seconds = {}
    for name in PLANTS:
        with planted(name, a, b):
            start = time.process_time()
            debugger.start(model=b.model)
            b._run(ids)
            debugger.stop()
            debugger.step()
            seconds[name] = time.process_time() - start
    for number, layer in enumerate(a.model.model.layers):
        a.model.model.layers[number] = Wrapped(layer)
    whole = Wrapped(a.model)
    start = time.process_time()
    debugger.start(model=whole)
    with torch.no_grad():
        whole(input_ids=torch.tensor([ids]), use_cache=False)
    debugger.stop()
    debugger.step()
    seconds["transformers"] = time.process_time() - start
    return seconds


def compared(program: str, target: Path, golden: Path, out: Path) -> tuple[list[dict[str, str]], float, str]:
    """The rows of msprobe's table, its processor seconds and its last words."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [program, "compare", "-tp", str(target), "-gp", str(golden), "-o", str(out), "--consistent_check",
               "--backend", "fsdp"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    words = (done.stdout + done.stderr)[-2000:]
    tables = sorted(out.rglob("*.csv"))
    if not tables:
        return [], seconds, words
    with tables[-1].open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file)), seconds, words


def flagged(table: list[dict[str, str]]) -> list[str]:
    """vLLM's modules whose outputs the table calls wrong by their numbers."""
    return [row["Bench Name"] for row in table if row["Result"] == "error" and "Ratio" in row["Err_message"]]


def read(name: str, table: list[dict[str, str]], healthy: list[dict[str, str]]) -> dict[str, Any]:
    wrong, usual = flagged(table), set(flagged(healthy))
    new = [module for module in wrong if module not in usual]
    both = sum("N/A" not in (row["NPU Name"], row["Bench Name"]) for row in table)
    return {"rows": len(table), "matched": both, "errors": sum(row["Result"] == "error" for row in table),
            "flagged": len(wrong), "first": wrong[0] if wrong else None, "new": len(new), "new_flags": new[:4],
            "named_by_first": bool(wrong) and bool(PLANTS[name]) and PLANTS[name] in wrong[0],
            "named_by_new": bool(new) and bool(PLANTS[name]) and PLANTS[name] in new[0]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--msprobe", required=True)
    parser.add_argument("--task", default="tensor", choices=("tensor", "statistics"))
    parser.add_argument("--keep", type=Path, help="keep dumps and tables in this folder")
    parser.add_argument("-o", type=Path)
    options = parser.parse_args()
    b = VllmEngine(options.model, dtype="float32", max_model_len=256)
    a = TransformersEngine(ns.load(options.model, dtype="float32"))
    ids = a.encode(gather(built_in().items[:1], "built-in text"), TOKENS)[0]
    folder = options.keep or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name, module in PLANTS.items():
        with planted(name, a, b):
            mine = by_noisescope(a, b, ids, folder / "noisescope.json")
        mine["named_module"] = any(module in words for words in mine["named"]) if module else not mine["named"]
        rows.append({"plant": name, "module": module, "tokens": len(ids), "noisescope": mine})
        print(json.dumps(rows[-1]), flush=True)
    dumps = folder / "dumps"
    dumps.mkdir(exist_ok=True)
    seconds = dump_all(a, b, ids, dumps, options.task)
    steps = sorted((step for step in dumps.glob("step*")), key=lambda step: int(step.name[4:]))
    print([(step.name, size(step), [p.name for p in step.iterdir()]) for step in steps], seconds, flush=True)
    healthy: list[dict[str, str]] = []
    for row, step in zip(rows, steps, strict=False):
        table, took, words = compared(options.msprobe, steps[-1], step, folder / f"table-{step.name}")
        healthy = healthy or table
        row["msprobe"] = {"task": options.task, **read(row["plant"], table, healthy),
                          "bytes": size(step) + size(steps[-1]),
                          "seconds": seconds[row["plant"]] + seconds["transformers"] + took,
                          "words": "" if table else words}  # fmt: skip
        print(json.dumps(row["msprobe"]), flush=True)
    if options.o:
        options.o.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
