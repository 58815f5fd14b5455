"""From scores of tokens to one number per sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisescope.metrics.scores import clean_scores, compare
from noisescope.runs.batches import Material, Piece
from noisescope.trials import Slice

Array = NDArray[np.float64]


def tokens_compared(piece: Piece, clean: Tensor, noisy: Tensor | None) -> dict[str, Tensor]:
    """Scores of every scored token [N]; `noisy` [B * K, V], or None for the clean model's own."""
    targets = piece.targets.to(clean.device)
    if noisy is None:
        return clean_scores(clean, targets)
    return compare(clean, noisy, piece.scored.to(noisy.device), targets)


class Gathered:
    """Token scores of a slice; they are fetched from the device once, at the end."""

    def __init__(self, material: Material, part: Slice) -> None:
        self.kind = material.kind
        self.groups = material.encoded.sequences[part.start : part.stop]
        self.labels = material.labels[part.start : part.stop]
        self.parts: list[tuple[Piece, dict[str, Tensor]]] = []

    def add(self, piece: Piece, scores: dict[str, Tensor]) -> None:
        self.parts.append((piece, scores))

    def settle(self) -> tuple[tuple[int, ...], dict[str, tuple[float | None, ...]]]:
        """Sample ids, and each metric's values; a sample with a token that is not finite has None."""
        count = len(self.groups)
        names = list(self.parts[0][1])
        sums = {name: np.zeros(count) for name in names}
        tokens, right = np.zeros(count), np.ones(count)
        likelihoods: dict[tuple[int, int], float] = {}  # (sample, row of its batch) -> log-likelihood
        for piece, scores in self.parts:
            table = torch.stack([scores[name].double() for name in names]).cpu().numpy()
            owners, final = piece.owners.cpu().numpy(), piece.final.cpu().numpy()
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
            columns["accuracy"] = self._choices(likelihoods) if self.kind == "choice" else right
        samples = tuple(group[0].sample for group in self.groups)
        return samples, {name: tuple(map(_finite, column)) for name, column in columns.items()}

    def _counted(self, piece: Piece, owners: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Tokens that averages are taken over: of several choices, those of the right one."""
        if self.kind != "choice":
            return np.ones(len(owners), dtype=bool)
        right: NDArray[np.bool_] = piece.choices.cpu().numpy() == np.array(self.labels)[owners]
        return right

    def _choices(self, likelihoods: dict[tuple[int, int], float]) -> Array:
        """1 where the right choice has the highest log-likelihood; a tie goes to the earlier one."""
        found: list[list[float]] = [[] for _ in self.groups]
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
