"""Token sequences laid out as batches of tensors, with the map from scored tokens back to samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from noisescope.tasks import Encoded, Sequence
from noisescope.trials import content_id

_CHOICE = 1 << 40  # the choices of one sample draw different noise: row id = sample + choice * _CHOICE


@dataclass(frozen=True)
class Material:
    """Encoded samples of one data set, and what tells right from wrong."""

    encoded: Encoded
    kind: str  # "text", "answer", "choice", "chat"
    labels: tuple[int, ...] = ()  # the right choice of each sample
    prompts: tuple[str, ...] = ()  # for generation
    answers: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """Of the token sequences: the same text under another tokenizer is another material."""
        return content_id(
            [self.kind, self.labels, [[list(_facts(s)) for s in group] for group in self.encoded.sequences]]
        )

    def __len__(self) -> int:
        return len(self.encoded.sequences)


def _facts(sequence: Sequence) -> tuple[object, ...]:
    return (sequence.sample, sequence.ids, sequence.start, sequence.final, sequence.choice)


def whole_samples(material: Material) -> Material:
    """The same samples with every token scored, as texts are; of several choices, the right one."""
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
    owners: Tensor  # [N] position of the sample in its slice
    final: Tensor  # [N] whether the token decides accuracy
    sequences: Tensor  # [N] row of the batch
    choices: Tensor  # [N] which choice of its sample
    keys: Tensor  # [N] names of scored positions, for the screen's draws


@dataclass(frozen=True)
class Batch:
    """Right-padded tokens, and where the scored ones are.

    No attention mask: under causal attention nothing scored ever looks at the padding behind it, and without a mask
    attention keeps its fast kernel.
    """

    ids: Tensor  # [B, T]
    rows: Tensor  # [B] names of the rows for the noise
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
    names = torch.tensor([s.sample + s.choice * _CHOICE for _, s in rows])
    pieces = tuple(_piece(rows, at, min(at + step, end), device) for at in range(begin, end, step))
    return Batch(ids.to(device), names, pieces)


def _piece(rows: list[tuple[int, Sequence]], begin: int, end: int, device: torch.device | str) -> Piece:
    scored, targets, owners, final, sequences, choices, keys = ([] for _ in range(7))
    for row, (owner, s) in enumerate(rows):
        for t in range(max(s.start, begin + 1), min(len(s.ids), end + 1)):
            scored.append(row * (end - begin) + t - 1 - begin)
            targets.append(s.ids[t])
            owners.append(owner)
            final.append(t >= s.final)
            sequences.append(row)
            choices.append(s.choice)
            keys.append(((s.sample + s.choice * 1_000_003) << 20) + t)

    def there(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64).to(device)

    return Piece(
        kept=torch.arange(begin, end, device=device),
        scored=there(scored),
        targets=there(targets),
        owners=there(owners),
        final=there(final).bool(),
        sequences=there(sequences),
        choices=there(choices),
        keys=there(keys),
    )
