"""What noisescope finds on a real model: massive activations, what breaks first in int4 and fp8, screen against sweep.

    python benchmarks/models.py SMOLLM2_FOLDER --data GSM8K.jsonl --items 8 --length 64 --seeds 1 -o smollm2.json
    python benchmarks/models.py GEMMA_FOLDER --device cuda --data GSM8K.jsonl --dither -o gemma.json
    python benchmarks/models.py --page results/models_*.json > ../docs/models.md

Float32. The screen predicts on the first items of the file, the sweep injects on the next ones. Swept: noise of 5 and
20 % in each operator of each layer; int4 weights linear by linear; int4 and fp8 in the whole model, by layer and by
kind of linear. Measured is KL(clean || perturbed) per token: of a typical sample with its 95 % interval, and the mean.

`--dither` is for weights that were in 4 bits before: rounded again to 4 bits they would hardly change. Before number
formats are asked about, each weight of the blocks' linears gets uniform noise of one step of 4 bits, (max - min) / 15
of its group of 32, between minus and plus half of it. The dithered model is then the reference.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from screen_setup import Array, Cell, agreement, frame_of, predict, read_material, run_screen, save

import noisescope as ns
from noisescope import stats
from noisescope.data.tokens import Encoded
from noisescope.diagnosis.context import Settings, StudyContext
from noisescope.model.forwards import evaluating
from noisescope.model.loading import Subject
from noisescope.probe.formats import format_on
from noisescope.runs.batches import Material
from noisescope.runs.trial_runner import TrialRunner

SCALES = (0.05, 0.2)
OPERATORS = ("linear", "matmul", "softmax", "silu", "gelu", "norm", "residual")
QUESTIONS = (
    ("int4", "weights"),
    ("fp8_e4m3", "weights"),
    ("int4", "activations"),
    ("fp8_e4m3", "activations"),
    ("fp8_e4m3", "kv-cache"),
)
GROUP = 32  # weights of a group in the 4-bit files
MASSIVE = (100.0, 1000.0)  # |x| above the first, and above the second times the median: Sun et al. 2024
SHOWN = 5


def halves(material: Material) -> tuple[Material, Material]:
    """Text to predict on, and text to measure on."""
    rows = material.encoded.sequences
    middle = len(rows) // 2
    later = tuple((replace(row[0], sample=at),) for at, row in enumerate(rows[middle:]))
    return tuple(
        Material(Encoded(half, 0, sum(len(r[0].ids) for r in half)), "text") for half in (rows[:middle], later)
    )  # type: ignore[return-value]


@torch.no_grad()
def massive_activations(subject: Subject, material: Material, device: str) -> dict[str, Any]:
    """Of the residual stream behind each block: its largest number, where that is, and what else is massive."""
    tokens = torch.tensor([row[0].ids for row in material.encoded.sequences], device=device)
    with evaluating(subject.model):
        states = subject.model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
    rows = []
    for block, state in enumerate(states[1:-1]):  # the last is behind the final norm
        size = state.abs().float()
        middle, top = float(size.median()), float(size.max())
        sample, position, channel = (int(at) for at in np.unravel_index(int(size.argmax()), tuple(size.shape)))
        massive = (size > MASSIVE[0]) & (size > MASSIVE[1] * middle)
        where = massive.nonzero()
        rows.append(
            {
                "block": block,
                "largest": _digits(top),
                "over_median": _digits(top / middle),
                "channel": channel,
                "position": position,
                "token": subject.tokenizer.decode([tokens[sample, position].item()]),
                "massive": len(where),
                "channels": sorted({int(at) for at in where[:, 2].tolist()})[:SHOWN],
                "at_first_token": _digits(float((where[:, 1] == 0).float().mean())) if len(where) else None,
            }
        )
    carrying = [row["block"] for row in rows if row["massive"]]
    return {"samples": len(tokens), "tokens": tokens.numel(), "carried_behind_blocks": carrying, "blocks": rows}


def dither(subject: Subject) -> None:
    """In place: uniform noise of one 4-bit step on every weight of the blocks' linears."""
    modules = dict(subject.model.named_modules())
    drawn = torch.Generator().manual_seed(0)
    for name in linears(subject):
        weight = modules[name].weight.data
        groups = weight.view(weight.shape[0], -1, GROUP)
        step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
        noise = torch.rand(groups.shape, generator=drawn).to(groups) - 0.5
        groups.add_(step * noise)


def linears(subject: Subject) -> dict[str, int]:
    """Those of the blocks, each with its block."""
    units = [unit for unit in subject.anatomy.units if "linear" in unit.operators]
    return {unit.module: unit.place for unit in units if isinstance(unit.place, int)}


def sweep(runner: TrialRunner, context: StudyContext, cells: Sequence[Cell], seeds: int) -> Array:
    """KL per token [seeds, cells, samples]."""
    found = []
    for seed in range(seeds):
        for cell in cells:
            (trial,) = context.ask(cell.injection, seeds=[seed])
            result = runner.run(trial)
            if result.failed:
                raise SystemExit(f"{cell.level} {cell.name}: {result.error}")
            found.append(result.values["kl"])
    return np.array(found, dtype=np.float64).reshape(seeds, len(cells), -1)


def against(predicted: Array, measured: Array, cells: Sequence[Cell]) -> dict[str, Any]:
    """Predictions [cells] against KL [seeds, cells, samples]: all cells, and those of each part alone."""
    parts = {"all": list(range(len(cells)))}
    for at, cell in enumerate(cells):
        parts.setdefault(cell.part, []).append(at)
    means, found = measured.mean(2), {}
    for part, rows in parts.items():
        ratio = predicted[rows] / means[:, rows].mean(0)
        worst = int(np.abs(np.log(ratio)).argmax())
        middle = stats.median(ratio)
        row = agreement(predicted[rows], means[:, rows])
        found[part] = {
            "n": len(rows),
            **{name: _number(row[name]) for name in ("spearman", "low", "high", "within_25_percent", "split_half")},
            "median_ratio": [_number(end) for end in (middle.value, middle.low, middle.high)],
            "worst_ratio": [_digits(float(ratio[worst])), cells[rows[worst]].name],
        }
    return found


def largest(measured: Array, cells: Sequence[Cell], shown: int = SHOWN) -> list[dict[str, Any]]:
    """The cells that cost most, with the interval of their mean over samples."""
    by_sample = measured.mean(0)
    order = np.argsort(-by_sample.mean(1))[:shown]
    total = by_sample.mean(1).sum()
    return [
        {"where": cells[at].name, **_mean(by_sample[at]), "share": _digits(by_sample[at].mean() / total)}
        for at in order
    ]


def noise_against_sweep(
    subject: Subject, known: Material, held_out: Material, seeds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    with TrialRunner(subject, [known, held_out]) as runner:
        screened = run_screen(runner, frame_of(subject, known, seeds), draws=2, seed=0)
        for scale in SCALES:
            context = frame_of(subject, held_out, seeds, ns.Gaussian(scale))
            cells = [
                Cell("noise", f"{layer} {name}", context.injection(operators={name}, layers={layer}), name)
                for layer in range(context.blocks)
                for name in OPERATORS
                if any(site.place == layer and site.operator == name for site in context.sites)
            ]
            at_scale = replace(screened, scale=scale)
            measured = sweep(runner, context, cells, seeds)
            predicted = np.array([predict(at_scale, cell) for cell in cells])
            yield f"{100 * scale:g} %", {"screen_and_sweep": against(predicted, measured, cells),
                                         "breaks_first": largest(measured, cells)}  # fmt: skip


def format_context(subject: Subject, material: Material, name: str, on: str) -> StudyContext:
    settings = Settings.of_format(format_on(name, on), on)
    return replace(frame_of(subject, material, 1), settings=settings)


def formats(subject: Subject, known: Material, held_out: Material) -> Iterator[tuple[str, dict[str, Any]]]:
    names = linears(subject)
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(name.rpartition(".")[2], []).append(name)
    with TrialRunner(subject, [known, held_out]) as runner:
        for name, on in QUESTIONS:
            context = format_context(subject, held_out, name, on)

            def cell(kind: str, name: str, part: str = "", context: StudyContext = context, **where: Any) -> Cell:
                return Cell(kind, name, context.injection(**where), part)

            layers = [cell("layer", f"block {layer}", layers={layer}) for layer in range(context.blocks)]
            found = {
                "whole": _mean(sweep(runner, context, [cell("whole", "all")], 1)[0, 0]),
                "layers": largest(sweep(runner, context, layers, 1), layers),
            }
            if on != "kv-cache":
                several = [cell("kind", kind, modules=tuple(modules)) for kind, modules in kinds.items()]
                found["kinds"] = largest(sweep(runner, context, several, 1), several, len(several))
            if (name, on) == ("int4", "weights"):
                screened = run_screen(runner, format_context(subject, known, name, on), draws=2, seed=0)
                each = [
                    cell("linear", module, module.rpartition(".")[2], modules=(module,), layers={layer})
                    for module, layer in names.items()
                ]
                measured = sweep(runner, context, each, 1)
                predicted = np.array([predict(screened, one) for one in each])
                found["linears"] = largest(measured, each)
                found["screen_and_sweep"] = against(predicted, measured, each)
            yield f"{name} {on}", found


def _mean(kl: Array) -> dict[str, Any]:
    """The mean, and what a typical sample shows with its interval: few samples leave a mean without an upper end."""
    found = stats.typical(kl)
    ends = {name: _number(getattr(found, name)) for name in ("low", "high")}
    return {"mean_kl": _digits(kl.mean()), "typical_kl": _number(found.value), **ends, "n": found.n}


def _number(value: float | None) -> float | None:
    return None if value is None else _digits(value)


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


INTRODUCTION = """# Real models

What noisescope finds on real models, in float32 on GSM8K problems as text. `benchmarks/models.py` measured everything
here and wrote this page. The weights were stored in about 4 bits and de-quantised, so before number formats were asked
about, each weight of the blocks' linears got uniform noise of one 4-bit step where it says "dithered", and the dithered
model is the reference. Otherwise int4 looks kinder than it is.

- **Massive** activations are larger than 100 and than 1000 times the median of the residual stream (Sun et al. 2024).
- **KL** is KL(clean || perturbed) in nats per token: of a typical sample with its 95 % interval, and the mean in
  parentheses. A few samples can decide a mean.
- **Screen and sweep**: the screen predicts on some problems, the sweep injects on others, in each operator of each
  layer (noise) or linear by linear (int4). Spearman's interval and that of the median ratio (predicted / injected) are
  over the n places; "worst" is the ratio furthest from 1, and where. Places are "layer operator" or linears.

What stands out:

- **Noise**: over all places the screen ranks with Spearman 0.98 to 0.99 at 5 % and 0.94 to 0.99 at 20 %; within one
  operator 0.90 to 1.00. The median ratio is 1.00 to 1.16, but single places are far off, many of them in the first
  layers: up to 3.4 times (SmolLM2) and 8 times (Gemma) at 5 %, 4.7 and 27 times at 20 %.
- **int4**: Spearman 0.88 and 0.91 overall, 0.73 to 0.97 within one kind of linear. The screen underrates v_proj (median
  ratio 0.46 and 0.39) and overrates k_proj (1.3 and 1.7), and misses four fifths of the cost of SmolLM2's down_proj of
  block 11, which writes the massive activations.
- **What breaks first**: int4 inputs of linears ruin both models (KL of about 6 nats), int4 weights cost 0.63 and 2.0
  nats, fp8_e4m3 weights, inputs and KV cache 0.01 to 0.08. Of SmolLM2's int4 weights, block 11 and the kind down_proj
  cost most. Of Gemma's, blocks 3, 0 and 11 and the kinds up_proj, down_proj and v_proj have overlapping intervals.
- **Massive activations** sit at the first token in SmolLM2, from block 11 on; in Gemma they begin with the first block,
  and 1 % of them are at the first token.
"""
NAMES = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma-3-270M"}


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """docs/models.md."""
    lines = [INTRODUCTION]
    for result in results:
        lines += [
            f"## {NAMES.get(result['model'], result['model'])}",
            "",
            _facts(result),
            "",
            _massive(result["massive"]),
            "",
        ]
        lines += ["| perturbation | KL of all | first layers | first kinds |", "|---|---|---|---|"]
        for name, found in result["formats"].items():
            kinds = _named(found.get("kinds", []))
            lines.append(f"| {name} | {_span(found['whole'])} | {_named(found['layers'])} | {kinds} |")
        for name, found in result["noise"].items():
            lines.append(f"| noise of {name} in one operator of one layer | | {_named(found['breaks_first'])} | |")
        lines += ["", "| screen and sweep | of | n | Spearman | median ratio | worst |", "|---|---|---|---|---|---|"]
        for name, found in {**result["noise"], **result["formats"]}.items():
            for part, row in found.get("screen_and_sweep", {}).items():
                middle, low, high = row["median_ratio"]
                ratio, where = row["worst_ratio"]
                rank = f"{row['spearman']:.3f} {_interval(row['low'], row['high'])}"
                cells = (
                    name,
                    part,
                    f"{row['n']:g}",
                    rank,
                    f"{middle:.2f} {_interval(low, high)}",
                    f"{ratio:.2f} ({_short(where)})",
                )
                lines.append(f"| {' | '.join(map(str, cells))} |")
        if not result["formats"]:
            lines += ["", "Number formats were not measured in this run."]
        lines.append("")
    return "\n".join(lines)


def _facts(result: Mapping[str, Any]) -> str:
    how = ""
    if result["formats"]:
        how = ", dithered for number formats" if result["dithered"] else ", not dithered"
    seeds = result["seeds"]
    return (
        f"{result['architecture']} on {result['machine']}, torch {result['torch']}, n = {result['samples']} problems "
        f"of {result['tokens']} tokens to predict on and as many to inject on, {seeds} noise "
        f"seed{'s' * (seeds > 1)}{how}; {result['seconds']['wall']:.0f} s."
    )


def _massive(found: Mapping[str, Any]) -> str:
    top = max(found["blocks"], key=lambda row: row["over_median"])
    most = (
        f"the largest number is {top['largest']:g}, {top['over_median']:g} times the median, behind block "
        f"{top['block']}, in channel {top['channel']} at position {top['position']}"
    )
    carrying = found["carried_behind_blocks"]
    if not carrying:
        return f"**Massive activations**: none; {most}."
    rows = [row for row in found["blocks"] if row["massive"]]
    channels = sorted({channel for row in rows for channel in row["channels"]})
    first = sum(row["massive"] * row["at_first_token"] for row in rows) / sum(row["massive"] for row in rows)
    return (
        f"**Massive activations** are behind {len(carrying)} of {len(found['blocks'])} blocks, first behind block "
        f"{carrying[0]} and last behind block {carrying[-1]}, in channels {', '.join(map(str, channels))}; "
        f"{100 * first:.0f} % of them at the first token. {most[0].upper()}{most[1:]}."
    )


def _interval(low: float | None, high: float | None) -> str:
    return f"[{'' if low is None else f'{low:.2f}'}, {'' if high is None else f'{high:.2f}'}]"


def _short(where: str) -> str:
    return where.removeprefix("model.layers.")


def _span(row: Mapping[str, Any]) -> str:
    ends = ", ".join("" if row[end] is None else f"{row[end]:.2g}" for end in ("low", "high"))
    return f"{row['typical_kl']:.2g} [{ends}] ({row['mean_kl']:.2g})"


def _named(rows: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(f"{_short(row['where'])} {_span(row)}" for row in rows[:3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", help="folder of a model; with --page results to write about")
    parser.add_argument("--data", type=Path, help="JSONL with question and answer")
    parser.add_argument("--page", action="store_true", help="print docs/models.md and stop")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--items", type=int, default=16, help="to predict on, and as many to measure on")
    parser.add_argument("--length", type=int, default=128, help="tokens of an item")
    parser.add_argument("--seeds", type=int, default=2, help="of the noise")
    parser.add_argument("--dither", action="store_true", help="for weights that were in 4 bits before")
    parser.add_argument("-o", "--output", type=Path, help="the results as JSON")
    options = parser.parse_args()
    if options.page:
        print(page([json.loads(Path(name).read_text()) for name in options.model]), end="")
        return
    (model,) = options.model

    torch.set_float32_matmul_precision("highest")
    started, processor = time.perf_counter(), time.process_time()
    subject = ns.load(model, dtype="float32", device=options.device)
    known, held_out = halves(read_material(subject.tokenizer, options.data, 2 * options.items, options.length))
    on_gpu = options.device.startswith("cuda")
    result: dict[str, Any] = {
        "model": Path(model).name,
        "architecture": subject.anatomy.architecture,
        "machine": torch.cuda.get_device_name()
        if on_gpu
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "samples": options.items,
        "tokens": options.length,
        "seeds": options.seeds,
        "dithered": options.dither,
        "massive": massive_activations(subject, held_out, options.device),
        "noise": {},
        "formats": {},
    }

    def fill(name: str, steps: Callable[[], Iterator[tuple[str, dict[str, Any]]]]) -> None:
        for key, found in steps():
            result[name][key] = found
            result["seconds"] = {"wall": round(time.perf_counter() - started, 1),
                                 "processor": round(time.process_time() - processor, 1)}  # fmt: skip
            save(options.output, result)
            print(f"{result['seconds']}: {key}", flush=True)

    fill("noise", lambda: noise_against_sweep(subject, known, held_out, options.seeds))
    if options.dither:
        dither(subject)
    fill("formats", lambda: formats(subject, known, held_out))


if __name__ == "__main__":
    main()
