"""The comparison of two systems as values: facts about each engine, the causes of divergence, and the verdict.

The divergence is KL(b || a) of the next-token distribution in nats per token: the mean log-ratio that samples of b
show, as in a rollout that a trainer scores. Causes are mended one after another (ORDER); what mending one removes is
its share, and what is left in the end is printed as the remainder. The first cause is the input: `input_difference`
compares the token ids that both produce for the same text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from noisescope.atomic_write import write_file
from noisescope.comparison.roundoff import RoundoffBand
from noisescope.estimate import Estimate
from noisescope.findings.pass_fail import FAIL, PASS, UNDECIDED
from noisescope.findings.pass_fail import Verdict as CheckVerdict
from noisescope.jsonform import to_json
from noisescope.tables import Sheet, Table, Tabular

SCHEMA_VERSION = 1
Setting = float | int | str | bool | None
Stage = Literal["semantics", "state", "operators"]
Verdict = Literal["identical", "round-off", "different", "undecided"]
ORDER = (
    "inputs (template, special tokens)", "missing values", "alignment", "other processing", "truncation", "temperature",
    "settings", "weights and buffers", "operators in the order they run", "round-off",
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How an engine makes its next-token distribution from logits, and which log-probabilities it reports.

    `processed`: those after temperature, top-k and top-p; else those of the model itself.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all tokens
    processed: bool = False


@dataclass(frozen=True)
class EngineFacts:
    """What is known about an engine before it runs; None if it does not apply or is unknown."""

    engine: str
    version: str
    model: str
    architecture: str
    dtype: str
    device: str
    attention: str = ""
    chunked_prefill: bool | None = None
    prefix_cache: bool | None = None
    sampling: Sampling = Sampling()
    fingerprint: str = ""


@dataclass(frozen=True)
class Cause:
    """Something that changes b's distribution; `nats` and `token_gap` are what correcting it removes.

    `token_gap` is of the mean |difference| of the tokens' log-probabilities. `nats.value` is None where a
    distribution has no finite divergence before or after, or was not given whole.
    """

    stage: Stage
    name: str
    words: str
    nats: Estimate
    token_gap: Estimate
    where: tuple[str, ...] = ()  # modules, tensors or settings
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerCost:
    """KL(changed || a) in nats per token, where `changed` is a with b's tensors in one layer alone.

    `layer` is None for the tensors outside the blocks.
    """

    layer: int | None
    tensors: int
    relative_l2: float  # of b's tensors from a's
    nats: Estimate


@dataclass(frozen=True)
class RoundOffSource:
    """Operators of one role whose outputs differ only by round-off, and what correcting them alone removes."""

    role: str
    sites: int
    relative_l2: float
    changed: float  # share of output elements that differ at all
    nats: Estimate


@dataclass(frozen=True)
class SystemComparison(Tabular):
    """The causes of b's divergence from a. The fields are the keys of its JSON form.

    `total` = the causes' nats + `round_off` + `remainder`, up to what is not finite. `round_off` is what operators
    make whose every output is within round-off of the reference's; `band` is the |difference| of log-probabilities
    that two healthy systems show, where it was measured, and `unexplained_gap` what is judged by it: the |difference|
    that is left when the causes are mended, at temperature 1. `remainder` belongs to no operator that was seen.
    `weight_costs` are given where b is quantised or another checkpoint, in the order of layers.
    """

    schema_version: int
    verdict: Verdict
    words: str
    a: EngineFacts
    b: EngineFacts
    prompts: int
    tokens: int
    total: Estimate
    token_gap: Estimate
    causes: tuple[Cause, ...]
    weight_costs: tuple[LayerCost, ...]
    round_off: Estimate
    round_off_gap: Estimate
    sources: tuple[RoundOffSource, ...]
    unexplained_gap: Estimate
    band: RoundoffBand | None
    remainder: Estimate
    order: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def outcome(self) -> CheckVerdict:
        if self.verdict == "undecided":
            return UNDECIDED
        return FAIL if self.verdict == "different" else PASS

    def sheet(self) -> Sheet:
        parts = Table.of(Cause, self.causes)
        tables = {
            "causes": parts,
            "weight_costs": Table.of(LayerCost, self.weight_costs),
            "round_off": Table.of(RoundOffSource, self.sources),
        }
        sides = (f"{name}: {side.model}, {side.engine} {side.version}, {side.dtype}, {side.device}"
                 for name, side in (("a", self.a), ("b", self.b)))  # fmt: skip
        sizes = (("In all", self.total), ("round-off", self.round_off), ("remainder", self.remainder))
        known = [f"{name} {size.value:.3g}" for name, size in sizes if size.value is not None]
        nats = [f"{', '.join(known)} nats per token."] if known else []
        heads = {"stage": "stage", "name": "cause", "nats": "nats per token", "words": ""}
        tone = {"identical": "low", "round-off": "low", "different": "critical", "undecided": "moderate"}[self.verdict]
        lines = (self.words, *sides, *nats, *self.notes)
        return Sheet(self.verdict, tables, heads, lines, tone=tone)

    def to_json(self) -> str:
        return json.dumps(to_json(self), indent=1, allow_nan=False) + "\n"

    def save(self, path: str | Path) -> Path:
        """Write as JSON; creates the folder if needed."""
        return write_file(Path(path), self.to_json())


Ids = Sequence[int]
_SHORT = 3  # tokens that a prefix or suffix of special tokens has at most
_LIKE = 0.5  # share of tokens in common, below which two tokenizers are at work


@dataclass(frozen=True)
class InputDifference:
    name: str  # "special tokens", "template", "truncation" or "tokenizer"
    words: str


def corresponding(a: Ids, b: Ids) -> list[tuple[int, int]]:
    """Positions of tokens that both sides predict: the same token, aligned, and not the first on either side."""
    if list(a) == list(b):
        return [(at, at) for at in range(1, len(a))]
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    pairs = ((block.a + at, block.b + at) for block in blocks for at in range(block.size))
    return [(i, j) for i, j in pairs if i and j]


def input_difference(a: Sequence[Ids], b: Sequence[Ids], *, chat: bool) -> InputDifference | None:
    """How the ids of all prompts differ, by the most common kind; None if none does."""
    kinds = [_kind(list(mine), list(its), chat) for mine, its in zip(a, b, strict=True) if list(mine) != list(its)]
    if not kinds:
        return None
    (name, detail), _ = Counter(kinds).most_common(1)[0]
    return InputDifference(name, f"{len(kinds)} of {len(a)} prompts have different token ids in b: {detail}")


def _kind(a: list[int], b: list[int], chat: bool) -> tuple[str, str]:
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    lacking, more = ("b", len(a) - len(b)) if longer is a else ("a", len(b) - len(a))
    if more and longer[more:] == shorter:
        if more <= _SHORT:
            return "special tokens", f"{lacking} lacks the {_ids(longer[:more])} at the beginning"
        return _beginning(lacking, more, chat)
    if more and longer[: len(shorter)] == shorter:
        if more <= _SHORT:
            return "special tokens", f"{lacking} lacks the {_ids(longer[-more:])} at the end"
        return "truncation", f"{lacking} lacks tokens at the end"
    for which, early, late in (("b", a, b), ("a", b, a)):  # both cut to one length
        for count in range(1, min(_SHORT, len(early) - _SHORT) + 1):
            if early[count:] == late[: len(early) - count]:
                return "special tokens", f"{which} lacks the {_ids(early[:count])} at the beginning"
    for which, early, late in (("b", a, b), ("a", b, a)):
        if (inside := _begins_inside(early, late)) and (chat or len(a) != len(b)):
            return _beginning(which, inside, chat)
        if inside:
            return "truncation", f"{which} keeps the end of long texts where the other side keeps the beginning"
    matcher = SequenceMatcher(None, a, b, autojunk=False)
    if matcher.ratio() < _LIKE:
        return "tokenizer", "fewer than half of the tokens match"
    first = next(code for code in matcher.get_opcodes() if code[0] != "equal")
    where = f"they first differ at token {first[1]}"
    if chat:
        return "template", f"{where}: different chat template"
    return "tokenizer", f"{where}: different tokenizer, template or normalisation"


def _beginning(lacking: str, count: int, chat: bool) -> tuple[str, str]:
    """What the other side has before the text: a prompt of its template, or what this side cut."""
    if chat:
        return "template", f"{lacking} lacks {count} tokens at the beginning: different chat template or system prompt"
    return "truncation", f"{lacking} lacks tokens at the beginning"


def _begins_inside(first: list[int], second: list[int]) -> int:
    """Where in `first` the text that `second` begins with begins, after special tokens of both; 0: nowhere."""
    same = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
    first, second = (ids[same if same <= _SHORT else 0 :] for ids in (first, second))
    places = range(1, int(len(first) * (1 - _LIKE)) + 1)
    return next((at for at in places if first[at:] == second[: len(first) - at]), 0)


def _ids(ids: list[int]) -> str:
    return f"token{'' if len(ids) == 1 else 's'} {', '.join(map(str, ids))}"
