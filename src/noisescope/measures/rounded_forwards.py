"""What round-off alone does to a model: the same forwards clean and under `Rounding`, with several seeds.

Clean and rounded forwards run the same kernels on the same batches, so nothing but the rounding differs. Of a greedy
text the forward reads all tokens at once: up to the first step at which the likeliest token differs, both systems have
the same text, so that step is where their greedy texts diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisescope import progress
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import evaluating, input_device, without_cache
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Rounding
from noisescope.probe.recorded_call import RecordedCall
from noisescope.probe.watch import watch

Array = NDArray[np.float64]
_ROWS = 512  # positions whose log-probabilities are computed at once: bounds the float32 copies of the logits

# Products carry nearly all sums, and what rounds differently there goes through every other operator's rounding.
OPERATORS = frozenset({"linear"})


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids of one sequence, of which those from `start` on are scored; `sample` names its draws."""

    sample: int
    ids: tuple[int, ...]
    start: int


@dataclass
class RoundoffRuns:
    """Per sequence: log-probabilities [T], differences [S, T], flips of the likeliest token [S, T].

    Relative errors are per token and seed: of the logits (about their mean), and of each block's output.
    """

    logprobs: list[Array] = field(default_factory=list)
    differences: list[Array] = field(default_factory=list)
    flipped: list[NDArray[np.bool_]] = field(default_factory=list)
    logit_errors: list[Array] = field(default_factory=list)
    block_errors: dict[int, list[Array]] = field(default_factory=dict)


def run_rounded(
    model: torch.nn.Module,
    sequences: Sequence[ScoredTokens],
    *,
    seeds: Sequence[int],
    batch: int = 8,
    anatomy: Anatomy | None = None,
    blocks: bool = True,
) -> RoundoffRuns:
    """Run every sequence clean and under each seed of `Rounding`; `blocks` False skips the blocks' outputs."""
    if not sequences or not seeds or any(not 1 <= one.start < len(one.ids) for one in sequences):
        raise InvalidInput("measuring round-off needs sequences with at least one scored token, and at least one seed")
    runs = RoundoffRuns()
    with evaluating(model), torch.no_grad():
        probe = Probe(model, Injection(Rounding(), operators=OPERATORS, phases=frozenset({"forward"})), anatomy=anatomy)
        for at in progress.track("round-off", range(0, len(sequences), batch)):
            _run_batch(model, sequences[at : at + batch], probe, seeds, runs, blocks=blocks)
    return runs


def _run_batch(
    model: torch.nn.Module,
    sequences: Sequence[ScoredTokens],
    probe: Probe,
    seeds: Sequence[int],
    runs: RoundoffRuns,
    *,
    blocks: bool,
) -> None:
    length = max(len(one.ids) for one in sequences)
    ids = torch.zeros(len(sequences), length, dtype=torch.int64)
    for row, one in enumerate(sequences):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
    ids = ids.to(input_device(model))
    scored = [slice(one.start - 1, len(one.ids) - 1) for one in sequences]  # logits at t predict token t + 1
    kept: dict[int, Tensor] = {}
    clean = _forward(model, ids, probe, kept=kept if blocks else None)
    targets = [ids[row, one.start : len(one.ids)] for row, one in enumerate(sequences)]
    before = [_scores(clean[row, part], targets[row]) for row, part in enumerate(scored)]
    found: list[list[tuple[Array, NDArray[np.bool_], Array]]] = [[] for _ in sequences]
    samples = [one.sample for one in sequences]
    for seed in seeds:
        errors: dict[int, Tensor] = {}
        probe.reseed(seed)
        with probe:
            probe.rows(samples)
            rounded = _forward(model, ids, probe, kept=kept, errors=errors if blocks else None)
        for row, part in enumerate(scored):
            logprob, best = _scores(rounded[row, part], targets[row])
            differs = (logprob - before[row][0]).double().cpu().numpy()
            error = _centred_error(clean[row, part], rounded[row, part])
            found[row].append((differs, (best != before[row][1]).cpu().numpy(), error))
            for block, error_of_tokens in errors.items():
                runs.block_errors.setdefault(block, []).append(error_of_tokens[row, part].double().cpu().numpy())
    for row in range(len(sequences)):
        runs.logprobs.append(before[row][0].double().cpu().numpy())
        runs.differences.append(np.stack([one[0] for one in found[row]]))
        runs.flipped.append(np.stack([one[1] for one in found[row]]))
        runs.logit_errors.extend(one[2] for one in found[row])


def _forward(
    model: torch.nn.Module,
    ids: Tensor,
    probe: Probe,
    *,
    kept: dict[int, Tensor] | None,
    errors: dict[int, Tensor] | None = None,
) -> Tensor:
    """Logits [B, T, V]; blocks' outputs go into `kept`, or with `errors` are compared with those kept there."""

    def on_call(call: RecordedCall) -> None:
        block, y = call.site.place, call.output_tensor
        assert isinstance(block, int) and kept is not None and y is not None
        if errors is None:
            kept[block] = y.clone()
        else:
            clean = kept[block].float()
            errors[block] = (y.float() - clean).norm(dim=-1) / clean.norm(dim=-1)

    if kept is None or (errors is None and kept):
        logits = model(input_ids=ids, **without_cache(model)).logits
    else:
        with watch(model, on_call, operators={"residual"}, anatomy=probe.anatomy):
            logits = model(input_ids=ids, **without_cache(model)).logits
    found: Tensor = logits
    return found


def _scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and the likeliest token, of logits [T, V]."""
    logprobs, best = [], []
    for at in range(0, len(targets), _ROWS):
        wide = logits[at : at + _ROWS].float()
        chosen = wide.gather(1, targets[at : at + _ROWS, None].to(wide.device))[:, 0]
        logprobs.append(chosen - wide.logsumexp(-1))
        best.append(wide.argmax(-1))
    return torch.cat(logprobs), torch.cat(best)


def _centred_error(clean: Tensor, rounded: Tensor) -> Array:
    """Per token: rms error of the logits over their own spread; what is common to all logits changes nothing."""
    errors = []
    for at in range(0, len(clean), _ROWS):
        first, second = clean[at : at + _ROWS].float(), rounded[at : at + _ROWS].float()
        errors.append((second - first).std(-1) / first.std(-1))
    found: Array = torch.cat(errors).double().cpu().numpy()
    return found
