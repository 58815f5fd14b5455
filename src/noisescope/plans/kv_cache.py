"""KV-cache precision by layer: which layers keep 16 bits while the others are rounded, and vLLM's list of them.

A diagnosis with `--on kv-cache` gives each layer's own divergence, injected, or predicted on the same scale. The layers
that cost most keep 16 bits, until what is left of the sum fits the budget. The sum takes layers as independent: whether
that holds is measured by carrying the plan out.

vLLM (0.27 to 0.32, `vllm/config/cache.py`) takes `kv_cache_dtype` for the whole model and
`kv_cache_dtype_skip_layers`, layer indices as text, for the layers left in the model's own dtype; on its command line
the indices follow `--kv-cache-dtype-skip-layers`, separated by spaces.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from noisescope.diagnosis.format_question import Question
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.rows import Divergence
from noisescope.errors import InvalidInput
from noisescope.findings.finding import Evidence
from noisescope.plans.precision_exports import Export
from noisescope.plans.precision_results import PlanData
from noisescope.sites import place_ranges
from noisescope.stats import Estimate
from noisescope.tables import Sheet, Table, Tabular

SHARE = 0.1  # of the divergence of a wholly rounded cache may be left, where no budget is given
# The cache dtypes of vLLM that round as ours do: fp8 with its scale of 1, integers with a scale per token and head.
VLLM_DTYPES = {
    ("fp8_e4m3", None): "fp8_e4m3",
    ("fp8_e5m2", None): "fp8_e5m2",
    ("int8", "token"): "int8_per_token_head",
    ("int4", "token"): "int4_per_token_head",
    ("nvfp4", "token"): "nvfp4",
}


@dataclass(frozen=True)
class CacheLayer:
    """What rounding one layer's keys and values does by itself, nats per token."""

    layer: int
    nats: float
    evidence: Evidence
    keeps_16_bits: bool


@dataclass(frozen=True)
class CarriedOut:
    """A choice of layers carried out on held-out samples. `over_plan` is its KL over the plan's; None for the plan."""

    name: str
    kept: tuple[int, ...]
    kl: Divergence
    accuracy: Estimate
    clean_accuracy: float
    over_plan: Estimate | None


@dataclass(frozen=True)
class KvCachePlan(Tabular):
    """Layers by the cost of rounding them, the most expensive first, and those that keep 16 bits."""

    question: Question
    kept: tuple[int, ...]
    rounded: tuple[int, ...]
    layers: tuple[CacheLayer, ...]
    nats_all: float  # the sum over all layers
    nats_left: float  # the sum over those that are rounded
    rows: tuple[CarriedOut, ...] = ()
    data: PlanData | None = None
    notes: tuple[str, ...] = ()

    def sheet(self) -> Sheet:
        title = f"{self.question.name}: {len(self.kept)} of {len(self.layers)} layers keep 16 bits"
        tables = {"layers": Table.of(CacheLayer, self.layers), "measured": Table.of(CarriedOut, self.rows)}
        heads = {"layer": "layer", "nats": "nats per token", "evidence": "evidence", "keeps_16_bits": "keeps 16 bits"}
        return Sheet(title, tables, heads, self.notes)


def kv_cache_plan(found: Diagnosis, *, keep_layers: int | None = None, max_kl: float | None = None) -> KvCachePlan:
    """The costliest layers kept: so many, or as few as leave at most `max_kl`; by default a tenth of the whole."""
    question, section = found.run.settings.question, found.layer_analysis
    if question is None or question.on != "kv-cache":
        asked = "noise" if question is None else question.name
        raise InvalidInput(
            f"this report is of {asked}: make one of the cache with noisescope diagnose MODEL --perturbation fp8_e4m3 "
            "--on kv-cache -o kv"
        )
    rows = [] if section is None else [row for row in section.layers if row.divergence is not None]
    if section is None:
        raise InvalidInput("this report knows no divergence of some layer: make it with --level operator,layer")
    unknown = [row for row in section.layers if row.divergence is None]
    if unknown:
        raise InvalidInput(
            f"this report knows no divergence of layers {place_ranges([row.layer for row in unknown])} "
            f"({unknown[0].error or unknown[0].evidence}): a plan is for models in which every block has a cache"
        )
    ranked = sorted(rows, key=lambda row: (-row.nats, row.layer))
    total = sum(row.nats for row in ranked)
    if keep_layers is None:
        limit = SHARE * total if max_kl is None else max_kl
        keep_layers = next(
            count for count in range(len(ranked) + 1) if sum(row.nats for row in ranked[count:]) <= limit
        )
    elif keep_layers > len(ranked):
        raise InvalidInput(f"the model has {len(ranked)} layers, and {keep_layers} were to be kept")
    kept = {row.layer for row in ranked[:keep_layers]}
    predicted = sum(not row.injected for row in ranked)
    note = f"{predicted} of {len(ranked)} layers are predicted, not injected: --effort full injects all"
    return KvCachePlan(
        question=question,
        kept=tuple(sorted(kept)),
        rounded=tuple(sorted(row.layer for row in ranked if row.layer not in kept)),
        layers=tuple(CacheLayer(row.layer, row.nats, row.evidence, row.layer in kept) for row in ranked),
        nats_all=total,
        nats_left=sum(row.nats for row in ranked[keep_layers:]),
        notes=(note,) if predicted else (),
    )


def rivals(plan: KvCachePlan) -> dict[str, tuple[int, ...]]:
    """The plan and what it is compared with, by name: the layers that keep 16 bits in each."""
    count, layers = len(plan.kept), sorted(row.layer for row in plan.layers)
    first = layers[: (count + 1) // 2] + layers[len(layers) - count // 2 :]
    chosen = {"plan": plan.kept, "every layer rounded": (), "first and last kept": tuple(first)}
    return {name: kept for name, kept in chosen.items() if name == "plan" or kept != plan.kept}


def vllm_dtype(question: Question) -> str:
    """vLLM's name of the cache dtype that rounds so."""
    key = (question.format, question.granularity)
    if question.asymmetric or key not in VLLM_DTYPES:
        offered = ", ".join(dict.fromkeys(name for name, _ in VLLM_DTYPES))
        raise InvalidInput(
            f"vLLM has no cache dtype for {question.name}: it has {offered}, without --group-size and --asymmetric"
        )
    return VLLM_DTYPES[key]


def vllm_command(plan: KvCachePlan, model: str) -> str:
    """What to type."""
    skipped = ["--kv-cache-dtype-skip-layers", *map(str, plan.kept)] if plan.kept else []
    return shlex.join(["vllm", "serve", model, "--kv-cache-dtype", vllm_dtype(plan.question), *skipped])


def export_vllm(plan: KvCachePlan) -> Export:
    """JSON of keyword arguments for vllm.LLM."""
    arguments: dict[str, str | Sequence[str]] = {"kv_cache_dtype": vllm_dtype(plan.question)}
    if plan.kept:
        arguments["kv_cache_dtype_skip_layers"] = [str(layer) for layer in plan.kept]
    notes: tuple[str, ...] = ()
    if plan.question.format.startswith("int"):
        notes = (f"vLLM's {arguments['kv_cache_dtype']} was not run: that it rounds as measured here is assumed",)
    return Export(json.dumps(arguments, indent=1) + "\n", notes)
