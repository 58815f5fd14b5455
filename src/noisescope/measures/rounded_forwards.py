"""What round-off alone does to a model: the same forwards clean and with other round-off.

In 16 bits the others run under `Rounding`, with several seeds: the same kernels on the same batches, so nothing but the
rounding differs. In float32 a sum is rounded at every step, and how much that matters depends on what is summed: scores
of attention may be 1e4 and their differences decide. That error is not drawn but measured, as the difference to the
same forward in float64. Two systems have one such error each, of similar size and independent of each other, so they
differ by sqrt 2 times as much.

Of a greedy text the forward reads all tokens at once: up to the first step at which the likeliest token differs, both
systems have the same text, so that step is where their greedy texts diverge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from noisescope import progress
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.measures.float64_mode import Float64Mode
from noisescope.model.anatomy import Anatomy
from noisescope.model.forwards import dtype_of, evaluating, input_device, without_cache
from noisescope.probe.inject import Probe
from noisescope.probe.noise import Rounding
from noisescope.probe.recorded_call import RecordedCall
from noisescope.probe.watch import watch

Array = NDArray[np.float64]
_ROWS = 256  # positions whose log-probabilities are computed at once: bounds the wider copies of the logits
Method = Literal["rounding", "float64"]

# Products carry nearly all sums, and what rounds differently there goes through every other operator's rounding.
OPERATORS = frozenset({"linear"})

# Where float64 is not at hand: sums are rounded as often as results, and a clean run shares those errors with its
# rounded copy, but not with another kernel. Measured / expected without this factor is 1.05 to 2.1
# (benchmarks/roundoff_band.py, 10 pairs).
_SUMMATION = {"float32": 1.4, "float64": 1.4}


@dataclass(frozen=True)
class ScoredTokens:
    """Token ids of one sequence, of which those from `start` on are scored; `sample` names its draws."""

    sample: int
    ids: tuple[int, ...]
    start: int


@dataclass
class RoundoffRuns:
    """Per sequence: log-probabilities [T], expected differences between two systems [S, T], flips of the likeliest
    token [S, T]; S is the number of seeds, or 1 for float64.

    Relative errors are per token and seed: of the logits (about their mean), and of each block's output.
    """

    method: Method = "rounding"
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
    reported: bool = True,
) -> RoundoffRuns:
    """Run every sequence clean, and under each seed of `Rounding` or, in float32, in float64.

    `blocks` False skips the blocks' outputs. `reported`: one of the two systems computes log-probabilities from its
    logits in float32, as engines do; False: both do it in float64.
    """
    if not sequences or not seeds or any(not 1 <= one.start < len(one.ids) for one in sequences):
        raise InvalidInput("measuring round-off needs sequences with at least one scored token, and at least one seed")
    with evaluating(model), torch.no_grad():
        probe = Probe(model, Injection(Rounding(), operators=OPERATORS, phases=frozenset({"forward"})), anatomy=anatomy)
        exact = dtype_of(model) == "float32" and _runs_in_float64(model, sequences[0].ids[:2])
        runs = RoundoffRuns("float64" if exact else "rounding")
        for at in progress.track("round-off", range(0, len(sequences), batch)):
            _run_batch(
                model,
                sequences[at : at + batch],
                probe,
                [None] if exact else seeds,
                runs,
                blocks=blocks,
                reported=reported,
            )
    return runs


def _run_batch(
    model: torch.nn.Module,
    sequences: Sequence[ScoredTokens],
    probe: Probe,
    seeds: Sequence[int | None],
    runs: RoundoffRuns,
    *,
    blocks: bool,
    reported: bool,
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
    factor = math.sqrt(2) if runs.method == "float64" else _SUMMATION.get(dtype_of(model), 1.0)
    for seed in seeds:
        errors: dict[int, Tensor] = {}
        with _other_round_off(probe, seed, samples):
            rounded = _forward(model, ids, probe, kept=kept, errors=errors if blocks else None)
        for row, part in enumerate(scored):
            logprob, best = _scores(rounded[row, part], targets[row])
            differs = factor * (logprob - before[row][0])
            if reported:
                differs = differs + _report_error(clean[row, part], targets[row])
            error = _centred_error(clean[row, part], rounded[row, part])
            found[row].append((differs.double().cpu().numpy(), (best != before[row][1]).cpu().numpy(), error))
            for block, error_of_tokens in errors.items():
                runs.block_errors.setdefault(block, []).append(error_of_tokens[row, part].double().cpu().numpy())
    for row in range(len(sequences)):
        runs.logprobs.append(before[row][0].double().cpu().numpy())
        runs.differences.append(np.stack([one[0] for one in found[row]]))
        runs.flipped.append(np.stack([one[1] for one in found[row]]))
        runs.logit_errors.extend(one[2] for one in found[row])


@contextmanager
def _other_round_off(probe: Probe, seed: int | None, samples: Sequence[int]) -> Iterator[None]:
    """Forwards inside have the round-off of this seed; none where it is None."""
    if seed is None:
        with Float64Mode():
            yield
        return
    probe.reseed(seed)
    with probe:
        probe.rows(samples)
        yield


def _runs_in_float64(model: torch.nn.Module, ids: Sequence[int]) -> bool:
    """Whether the model's code and device can: kernels of one's own and Apple's devices can't."""
    try:
        with Float64Mode():
            logits = model(input_ids=torch.tensor([ids], device=input_device(model)), **without_cache(model)).logits
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool(logits.dtype == torch.float64)


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
        wide = _wide(logits[at : at + _ROWS])
        chosen = wide.gather(1, targets[at : at + _ROWS, None].to(wide.device))[:, 0]
        logprobs.append(chosen - wide.logsumexp(-1))
        best.append(wide.argmax(-1))
    return torch.cat(logprobs), torch.cat(best)


def _report_error(logits: Tensor, targets: Tensor) -> Tensor:
    """What a float32 log-softmax adds to the log-probabilities of float32 logits.

    A long sum loses the terms that are small beside it: torch's on a CPU makes every token of Qwen2.5 (a vocabulary of
    151,936) likelier by 3e-5 nats.
    """
    if logits.dtype != torch.float32:
        return torch.zeros((), device=logits.device)  # far below the round-off of 16 bits
    following = targets[:, None].to(logits.device)
    parts = [slice(at, at + _ROWS) for at in range(0, len(targets), _ROWS)]
    own = torch.cat([logits[part].log_softmax(-1).gather(1, following[part])[:, 0] for part in parts])
    return own.double() - _scores(logits, targets)[0]


def _wide(logits: Tensor) -> Tensor:
    return logits.double() if logits.dtype.itemsize >= 4 else logits.float()


def _centred_error(clean: Tensor, rounded: Tensor) -> Array:
    """Per token: rms error of the logits over their own spread; what is common to all logits changes nothing."""
    errors = []
    for at in range(0, len(clean), _ROWS):
        first, second = _wide(clean[at : at + _ROWS]), _wide(rounded[at : at + _ROWS])
        errors.append((second - first).std(-1) / first.std(-1))
    found: Array = torch.cat(errors).double().cpu().numpy()
    return found
