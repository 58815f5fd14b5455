"""What the benchmarks of the screen share: the text, the cells of a sweep, and predictions for them."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import noisescope as ns
from noisescope import stats
from noisescope.data.tokens import Encoded, Sequence
from noisescope.diagnosis import predicted_kl
from noisescope.diagnosis.context import Settings, StudyContext
from noisescope.diagnosis.predicted_kl import Screened
from noisescope.model.loading import Subject
from noisescope.runs.batches import Material
from noisescope.runs.trial_runner import TrialRunner, conditions
from noisescope.sites import Site
from noisescope.trials import Result, slices

Array = NDArray[np.float64]

SCALE = 0.05
OPERATORS = ("linear", "matmul", "softmax", "silu", "norm", "residual")
GROUPS = {  # linears that read the same input are fused when served, and quantised alike: ModelOpt's own four
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class Cell:
    """One row of the sweep: where noise falls."""

    level: str
    name: str
    injection: ns.Injection
    part: str = ""  # of its level


def read_material(tokenizer: Any, data: Path, items: int, length: int) -> Material:
    """The first items (question and answer, joined by a space) of at least `length` tokens, cut to that length."""
    rows: list[tuple[Sequence, ...]] = []
    with data.open(encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            ids = tokenizer(f"{item['question']} {item['answer']}")["input_ids"][:length]
            if len(ids) == length and len(rows) < items:
                rows.append((Sequence(len(rows), tuple(ids), 1, 1),))
    if len(rows) < items:
        raise SystemExit(f"{data} has {len(rows)} items of at least {length} tokens; {items} are wanted")
    return Material(Encoded(tuple(rows), 0, items * length), "text")


def frame_of(subject: Subject, material: Material, seeds: int, perturbation: Any = None) -> StudyContext:
    """All samples as one slice."""
    units = subject.anatomy.units
    return StudyContext(
        settings=Settings(perturbation or ns.Gaussian(SCALE), seeds=tuple(range(max(seeds, 1)))),
        conditions=conditions(subject),
        sites=tuple(unit.site(operator) for unit in units for operator in unit.operators if unit.certain),
        blocks=len(subject.anatomy.blocks),
        test=slices(material.fingerprint, len(material), len(material)),
    )


def run_screen(runner: TrialRunner, context: StudyContext, *, draws: int, seed: int) -> Screened:
    """A screen trial as a diagnosis runs it, with draws of another seed if wanted."""
    asked = dataclasses.replace(context, settings=dataclasses.replace(context.settings, draws=draws))
    results: dict[str, Result] = {}
    for trial in predicted_kl.propose(asked, {}):
        results[trial.id] = runner.run(dataclasses.replace(trial, settings={"draws": draws, "seed": seed}))
    screened = predicted_kl.conclude(asked, results)
    assert screened is not None
    if screened.error:
        raise SystemExit(f"the screen failed: {screened.error}")
    return screened


def cells_of(context: StudyContext, layers: int) -> list[Cell]:
    """Everything swept but channels."""
    cells = []
    for layer in range(min(layers, context.blocks)):
        for operator in ("linear", "gemm"):
            where = context.injection(operators={operator}, layers={layer})
            cells.append(Cell(f"layer: {operator}", str(layer), where))
        for operator in OPERATORS:
            where = context.injection(operators={operator}, layers={layer})
            cells.append(Cell("layer x operator", f"{layer} {operator}", where))
        for group, names in GROUPS.items():
            modules = tuple(f"model.layers.{layer}.{name}" for name in names)
            cells.append(Cell("group", f"{layer} {group}", context.injection(operators={"linear"}, modules=modules)))
    return cells


def channel_cells(context: StudyContext, screened: Screened, layers: int, count: int) -> list[Cell]:
    """Of all channels of the blocks' linears, half of `count` from the top 1 % by prediction (the very first of them
    among these), half at random from the rest."""
    known: list[tuple[float, Site, int]] = []
    for site in screened.sites:
        if site.operator == "linear" and isinstance(site.place, int) and site.place < layers:
            known += [(share, site, i) for i, share in enumerate(screened.by_channel(site).tolist())]
    known.sort(key=lambda row: -row[0])
    draw = random.Random(0)
    top = known[: len(known) // 100]
    head = top[: count // 8]
    rest = draw.sample(known[len(top) :], count // 2)
    more = draw.sample(top[len(head) :], count - len(rest) - len(head))
    return [channel_cell(context, site.module, i, "random") for _, site, i in rest] + [
        channel_cell(context, site.module, i, "top 1 %") for _, site, i in head + more
    ]


def channel_cell(context: StudyContext, module: str, channel: int, part: str) -> Cell:
    where = context.injection(operators={"linear"}, modules=(module,), channels=(channel,))
    return Cell("channel", f"{module} {channel}", where, part)


def predict(screened: Screened, cell: Cell) -> float:
    """Mean KL per token in nats."""
    where = cell.injection
    if where.channels is None:
        return float(screened.predicted_by(where).mean())
    sites = [site for site in screened.sites if where.selects(site)]
    return float(sum(screened.by_channel(site)[list(where.channels)].sum() for site in sites))


def split_half(sweep: Array) -> float:
    """Mean Spearman correlation of two halves of the seeds [seeds, n], over all ways to halve them."""
    seeds = len(sweep)
    found = []
    for half in itertools.combinations(range(seeds), seeds // 2):
        inside = np.isin(np.arange(seeds), half)
        one = stats.correlation(sweep[inside].mean(0), sweep[~inside].mean(0), permutations=9)  # its p is not used
        if one.value is None:
            raise ValueError("one half of the seeds ranks all cells alike")
        found.append(one.value)
    return float(np.mean(found))


def agreement(predicted: Array, measured: Array) -> dict[str, Any]:
    """Predictions [n] against a sweep [seeds, n]."""
    truth = measured.mean(0)
    ratio = predicted / truth
    rank = stats.correlation(predicted, truth, permutations=9)  # its p is not used
    return {
        "n": len(truth),
        "spearman": rank.value,
        "low": rank.low,
        "high": rank.high,
        "pearson_of_logs": stats.correlation(np.log(predicted), np.log(truth), method="pearson", permutations=9).value,
        "within_25_percent": float((np.abs(ratio - 1) <= 0.25).mean()),
        "median_ratio": float(np.median(ratio)),
        "ratio_5_to_95_percent": np.quantile(ratio, (0.05, 0.95)).tolist(),
        "split_half": split_half(measured) if len(measured) > 1 else None,
    }


def save(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1)
        numbers = re.compile(r"\[[-+.\de,\s]+\]")  # a list of numbers goes on one line
        path.write_text(numbers.sub(lambda found: " ".join(found[0].split()), text) + "\n")
