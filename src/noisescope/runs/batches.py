"""Token sequences laid out as batches of tensors, and scores of their tokens gathered into one value per sample.

`Room` says how many samples fit: measures take as many at once as their memory allows, estimated from the model's
shapes. What an estimate misses is caught later: where memory runs out, the runner halves its batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noisescope.data.tokens import Encoded, Sequence
from noisescope.measures.divergence import clean_scores, compare
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import vocabulary_size
from noisescope.model.host_copy import HostCopy, begin_copy
from noisescope.model.streaming import StreamedForward
from noisescope.trials import Slice, content_id

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

CHOICE = 1 << 40  # the choices of one sample draw different noise: row id = sample + choice * CHOICE


@dataclass(frozen=True)
class Material:
    """Encoded samples of one data set, with their correct answers."""

    encoded: Encoded
    kind: str  # "text", "answer", "choice", "chat"
    labels: tuple[int, ...] = ()  # the right choice of each sample
    prompts: tuple[str, ...] = ()  # for generation
    answers: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Of the token sequences: the same text under another tokenizer is another material."""
        facts = [[[s.sample, s.ids, s.start, s.final, s.choice] for s in group] for group in self.encoded.sequences]
        return content_id([self.kind, self.labels, facts])

    def __len__(self) -> int:
        return len(self.encoded.sequences)

    def groups(self, part: Slice) -> tuple[tuple[Sequence, ...], ...]:
        """The sequences of each sample of a slice."""
        return self.encoded.sequences[part.start : part.stop]

    def samples(self, part: Slice) -> tuple[int, ...]:
        """The numbers of a slice's samples."""
        return tuple(group[0].sample for group in self.groups(part))


def whole_samples(material: Material) -> Material:
    """The same samples with every token scored, as for texts; of several choices, the correct one."""
    labels = material.labels or (0,) * len(material)
    groups = zip(material.encoded.sequences, labels, strict=True)
    chosen = [(replace(group[label], start=1, final=1, choice=0),) for group, label in groups]
    return Material(Encoded(tuple(chosen), 0, sum(len(one.ids) for (one,) in chosen)), "text")


@dataclass(frozen=True)
class Piece:
    """Some positions of a batch, whose logits are computed together, and which of them are scored."""

    kept: Tensor  # [K] positions whose logits are wanted
    scored: Tensor  # [N] indices into their logits, flattened [B * K]
    targets: Tensor  # [N] the token each predicts
    keys: Tensor  # [N] names of scored positions, for the screen's draws
    # on the host, where scores are gathered:
    owners: Integers  # [N] position of the sample in its slice
    final: NDArray[np.bool_]  # [N] whether the token decides accuracy
    sequences: Integers  # [N] row of the batch
    choices: Integers  # [N] which choice of its sample


@dataclass(frozen=True)
class Batch:
    """Right-padded tokens, and where the scored ones are.

    No attention mask: under causal attention no scored token attends to the padding behind it, and without a mask
    attention keeps its fast kernel.
    """

    ids: Tensor  # [B, T]
    rows: Tensor  # [B] names of the rows for the noise
    lengths: Tensor  # [B] tokens before the padding
    pieces: tuple[Piece, ...]  # in order of position

    @property
    def whole(self) -> Piece:
        assert len(self.pieces) == 1
        return self.pieces[0]


def lay_out(
    groups: Iterable[tuple[Sequence, ...]], first: int, device: torch.device | str, *, positions: int | None = None
) -> Batch:
    """One batch of the sequences of neighbouring samples; `first` is the number of the first sample in its slice.

    At most `positions` positions go into one piece, so that their logits fit.
    """
    rows = [(first + i, sequence) for i, group in enumerate(groups) for sequence in group]
    length = max(len(s.ids) for _, s in rows)
    begin = min(s.start for _, s in rows) - 1  # logits at t predict token t + 1
    end = max(length - 1, begin + 1)
    step = positions or end - begin
    ids = torch.zeros(len(rows), length, dtype=torch.int64)
    for row, (_, s) in enumerate(rows):
        ids[row, : len(s.ids)] = torch.tensor(s.ids)
    names = torch.tensor([s.sample + s.choice * CHOICE for _, s in rows])
    lengths = torch.tensor([len(s.ids) for _, s in rows])
    pieces = tuple(_piece(rows, at, min(at + step, end), device) for at in range(begin, end, step))
    return Batch(ids.to(device), names, lengths, pieces)


def _piece(rows: list[tuple[int, Sequence]], begin: int, end: int, device: torch.device | str) -> Piece:
    found = [
        (row * (end - begin) + t - 1 - begin, s.ids[t], owner, t >= s.final, row, s.choice,
         ((s.sample + s.choice * 1_000_003) << 20) + t)
        for row, (owner, s) in enumerate(rows)
        for t in range(max(s.start, begin + 1), min(len(s.ids), end + 1))
    ]  # fmt: skip
    table = torch.tensor(found, dtype=torch.int64).reshape(-1, 7).T.contiguous()
    scored, targets, keys = table[[0, 1, 6]].to(device)
    owners, final, sequences, choices = table[2:6].numpy()
    kept = torch.arange(begin, end, device=device)
    return Piece(kept, scored, targets, keys, owners, final.astype(bool), sequences, choices)


class SampleScores:
    """Token scores of a slice, gathered by sample.

    Each piece's are on their way to the host as soon as they are computed. Fetched at the end, they would come after
    all that the device was given meanwhile.
    """

    def __init__(self, material: Material, part: Slice) -> None:
        self.kind = material.kind
        self.samples = material.samples(part)
        self.labels = material.labels[part.start : part.stop]
        self.parts: list[tuple[Piece, HostCopy]] = []
        self.names: tuple[str, ...] = ()

    def add(self, piece: Piece, clean: Tensor, noisy: Tensor | None = None) -> None:
        """Score a piece by its clean logits [N, V] of scored rows, and by its noisy ones [B * K, V] if given."""
        targets = piece.targets.to(clean.device)
        if noisy is None:
            scores = clean_scores(clean, targets)
        else:
            scores = compare(clean, noisy, piece.scored.to(noisy.device), targets)
        self.names = tuple(scores)
        self.parts.append((piece, begin_copy(torch.stack([scores[name].double() for name in self.names]))))

    def by_sample(self) -> tuple[tuple[int, ...], dict[str, tuple[float | None, ...]]]:
        """Sample ids, and each metric's values; a sample with a token that is not finite has None."""
        count = len(self.samples)
        names = self.names
        sums = {name: np.zeros(count) for name in names}
        tokens, right = np.zeros(count), np.ones(count)
        likelihoods: dict[tuple[int, int], float] = {}  # (sample, row of its batch) -> log-likelihood
        for piece, copy in self.parts:
            table, owners, final = copy.wait().numpy(), piece.owners, piece.final
            counted = self._counted(piece, owners)
            np.add.at(tokens, owners[counted], 1.0)
            for name, row in zip(names, table, strict=True):
                np.add.at(sums[name], owners[counted], row[counted])
            np.minimum.at(right, owners[final], table[names.index("correct")][final])
            if self.kind == "choice":
                nll = table[names.index("nll")].tolist()
                for key, loss in zip(zip(owners.tolist(), piece.sequences.tolist(), strict=True), nll, strict=True):
                    likelihoods[key] = likelihoods.get(key, 0.0) - loss
        columns = _columns(sums, tokens)
        if "agreement" not in columns:  # the clean model agrees with itself
            columns["agreement"] = np.ones(count)
        if self.kind == "text":
            columns["accuracy"] = columns["next_token_accuracy"]
        else:
            columns["accuracy"] = self._choice_accuracy(likelihoods) if self.kind == "choice" else right
        return self.samples, {name: tuple(map(_finite, column)) for name, column in columns.items()}

    def _counted(self, piece: Piece, owners: Integers) -> NDArray[np.bool_]:
        """The tokens that averages include: of several choices, those of the correct one."""
        if self.kind != "choice":
            return np.ones(len(owners), dtype=bool)
        right: NDArray[np.bool_] = piece.choices == np.array(self.labels)[owners]
        return right

    def _choice_accuracy(self, likelihoods: dict[tuple[int, int], float]) -> Array:
        """1 where the right choice has the highest log-likelihood; a tie goes to the earlier one."""
        found: list[list[float]] = [[] for _ in self.samples]
        for owner, row in sorted(likelihoods):
            found[owner].append(likelihoods[owner, row])
        picked = [int(np.argmax(np.nan_to_num(row, nan=-np.inf))) for row in found]
        return np.array([float(p == label) for p, label in zip(picked, self.labels, strict=True)])


def _columns(sums: dict[str, Array], tokens: Array) -> dict[str, Array]:
    """Means over tokens; `nonfinite` is a count, and signal over error is a ratio."""
    columns = {"next_token_accuracy": sums["correct"] / tokens, "nonfinite": sums["nonfinite"]}
    for name in ("kl", "agreement", "nll", "margin"):
        if name in sums:
            columns[name] = sums[name] / tokens
    if "error" in sums:
        with np.errstate(divide="ignore", invalid="ignore"):
            columns["snr_db"] = 10 * np.log10(sums["signal"] / sums["error"])
    return columns


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


GIB = 1 << 30
MARGIN = 0.1  # of what is free: fragments, and what kernels need for themselves
GRADIENTS = 6 * GIB  # for gradients of a batch: more at once are hardly quicker
_STREAMED_BLOCKS = 3  # whose weights are on the device at once


@dataclass(frozen=True)
class Footprint:
    """Bytes that tokens of a model take, by its shapes: generous, since implementations differ."""

    logits: int  # of a token
    hidden: int  # one block's output for a token
    widths: int  # numbers that the linears of a block give and take for a token
    heads: int
    blocks: int
    element: int
    streamed: int = 0  # bytes of streamed weights that are on the device; 0: all are

    def kept(self, tokens: int) -> int:
        """The clean logits and block outputs of a slice."""
        return tokens * (self.logits + self.blocks * self.hidden)

    def forward(self, length: int) -> int:
        """One sample in a forward, its logits apart."""
        return length * (2 * self.widths * self.element + 2 * self.hidden) + self._pairs(length, 2)

    def gradients(self, length: int) -> int:
        """One sample in a backward that computes its blocks again."""
        block = length * self.widths * (3 * self.element + 8) + self._pairs(length, 3)
        return block + length * (2 * self.logits + self.blocks * self.hidden)

    def _pairs(self, length: int, copies: int) -> int:
        """Attention's scores, opened, with float32 copies."""
        return self.heads * length * length * copies * (self.element + 4)


def footprint(model: nn.Module, anatomy: Anatomy) -> Footprint:
    blocks = [model.get_submodule(name) for name in anatomy.blocks]
    matrices = [[p for p in block.parameters() if p.dim() > 1] for block in blocks]
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    element = next((p.element_size() for p in model.parameters() if p.is_floating_point()), 4)
    sizes = [sum(p.numel() * p.element_size() for p in block.parameters()) for block in blocks]
    streamed = any(isinstance(vars(block).get("forward"), StreamedForward) for block in blocks)
    return Footprint(
        logits=(vocabulary_size(model) or 0) * element,
        hidden=max((min(p.shape[-2:]) for ps in matrices for p in ps), default=0) * element,
        widths=max((sum(max(p.shape[-2:]) for p in ps) for ps in matrices), default=0),
        heads=int(getattr(config, "num_attention_heads", None) or 0),
        blocks=len(blocks),
        element=element,
        streamed=_STREAMED_BLOCKS * max(sizes, default=0) if streamed else 0,
    )


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, what torch holds and does not use included; None where that is not known."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable")))
    except (OSError, StopIteration, ValueError):
        return None


@dataclass(frozen=True)
class Room:
    """Memory beside the weights, and what fits into it."""

    bytes: int | None  # None: not known, so everything fits
    needs: Footprint

    @classmethod
    def on(cls, model: nn.Module, anatomy: Anatomy, device: torch.device, gib: float | None) -> Room:
        """As given, or what is free less a margin."""
        free = free_memory(device)
        found = int(gib * GIB) if gib is not None else None if free is None else int(free * (1 - MARGIN))
        return cls(found, footprint(model, anatomy))

    def keeps_blocks(self, tokens: int) -> bool:
        """Whether the block outputs of a slice may be stored: they leave a fifth of the memory."""
        return self.bytes is None or self.needs.kept(tokens) + self.needs.streamed <= 0.8 * self.bytes

    def forwards(self, length: int, kept: int) -> int | None:
        """Samples of a length in one forward beside `kept` bytes; None: any number."""
        return self._fits(self.needs.forward(length), kept, None)

    def gradients(self, length: int, kept: int) -> int | None:
        """Samples of a length in one backward. Streamed weights are worth all the memory: each batch copies them."""
        return self._fits(self.needs.gradients(length), kept, None if self.needs.streamed else GRADIENTS)

    def _fits(self, each: int, kept: int, most: int | None) -> int | None:
        if self.bytes is None:
            return None
        left = self.bytes - kept - self.needs.streamed
        return max(1, (left if most is None else min(left, most)) // max(each, 1))
