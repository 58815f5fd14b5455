"""Levels 1 and 2 by the names of the original method notes: operators, sliding windows, the critical threshold."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from noisescope.diagnosis import layers, operators, threshold
from noisescope.diagnosis.frame import Frame
from noisescope.diagnostic.asking import Question, Row, ask, operator_rows, our_name, subject_of, window_rows
from noisescope.errors import NoisescopeError, NothingInjected
from noisescope.findings import LIMITS, Window, avalanche_points
from noisescope.jsonform import to_json
from noisescope.model import Subject
from noisescope.trials import Results, Trial

NOTES_OPERATORS = ("matmul", "softmax", "silu", "gelu", "layernorm")


def operator_level_diagnosis(
    model: Subject | nn.Module,
    test_data: Any,
    noise_scale: float = 0.05,
    *,
    operators: Iterable[str] | None = None,
    **more: Any,
) -> dict[str, Row]:
    """What noise on one kind of operation alone costs: {operator: {degradation, sensitivity_score, ...}}.

    "matmul" means every matrix product, linears included (noisescope's `gemm`), and "layernorm" every norm. Without
    `operators` they are matmul, softmax, silu, gelu and layernorm, as far as the model has them. A row also has its
    interval (`degradation_interval`), n and the KL divergence; one that failed says why in `error`.
    """
    present = subject_of(model).anatomy.operators()
    if operators is None:
        wanted = [our_name(name) for name in NOTES_OPERATORS if name == "matmul" or our_name(name) in present]
    else:
        wanted = [our_name(name) for name in operators]
    found = operator_rows(ask(model, test_data, _OPERATORS, noise_scale=noise_scale, operators=wanted, **more))
    for name in wanted:
        if not any(row["operator"] == name for row in found.values()):
            raise NothingInjected(f"the model computes no {name}: it has {', '.join(sorted(present))}")
    return found


def operator_sensitivity_analysis(
    model: Subject | nn.Module, data: Any, noise_scale: float = 0.05, **more: Any
) -> list[tuple[str, float]]:
    """(operator, accuracy under its noise), the most sensitive operator first.

    One scale for all, unlike the notes' 1e-5 for products and 1e-6 for softmax: with a tenth of the noise softmax would
    look ten times as robust, and in 16 bits neither survives rounding.
    """
    rows = operator_level_diagnosis(model, data, noise_scale, **more)
    for name, row in rows.items():
        if row["noisy_acc"] is None:
            raise NoisescopeError(f"{name} could not be measured: {row.get('error', 'no sample has a finite score')}")
    return sorted(((name, row["noisy_acc"]) for name, row in rows.items()), key=lambda pair: pair[1])


def sliding_window_diagnosis(
    model: Subject | nn.Module,
    test_data: Any,
    window_size: int = 3,
    noise_scale: float = 0.05,
    step_size: int = 1,
    **more: Any,
) -> dict[str, Row]:
    """What noise on the products of neighbouring layers costs: {"L0-2": {start_layer, end_layer, degradation, ...}}.

    A model with fewer blocks than `window_size` has one window.
    """
    rows = ask(model, test_data, _WINDOWS, noise_scale=noise_scale, window=window_size, step=step_size, **more)
    return window_rows(rows)


def identify_avalanche_points(sensitivity_map: Mapping[str, Mapping[str, Any]], threshold: float = 0.15) -> list[Row]:
    """Windows that lose more than `threshold` and more than 1.5 times what the windows beside them lose.

    Beside means without a common layer. The notes compare with the next window, which overlaps: one hot layer lifts
    them alike, and nothing would ever be found. Overlapping hits are one point, named by the worst.
    """
    labels = {(row["start_layer"], row["end_layer"]): label for label, row in sensitivity_map.items()}
    windows = [Window(*ends, loss_of(sensitivity_map[label])) for ends, label in labels.items()]
    points = avalanche_points(windows, threshold=threshold)
    return [{"layer_range": labels[point.start, point.end], **to_json(point)} for point in points]


def find_critical_threshold(
    model: Subject | nn.Module,
    test_data: Any,
    target_degradation: float = LIMITS["critical_threshold_degradation"],
    *,
    highest: float = 0.20,
    **more: Any,
) -> float | None:
    """The smallest noise on all products that costs `target_degradation` of the accuracy, by bisection.

    Infinity where `highest` does not reach it (the notes would return `highest`); None where nothing can be measured,
    as for a model at chance.
    """
    settings = {"target_degradation": target_degradation, "highest_scale": highest}
    return threshold_value(ask(model, test_data, _THRESHOLD, settings=settings, levels=("operator",), **more))


def threshold_value(row: Mapping[str, Any] | None) -> float | None:
    """A critical threshold as one number: inf where it was not reached, None where it can't be known."""
    if row is None or not row["n"]:
        return None
    return math.inf if row["value"] is None else float(row["value"])


def loss_of(row: Mapping[str, Any]) -> float | None:
    """The degradation of a row, whether it stands there as a number or with its interval."""
    loss = row["degradation"]
    value: float | None = loss["value"] if isinstance(loss, Mapping) else loss
    return value


def _propose_operators(frame: Frame, results: Results) -> list[Trial]:
    return frame.ask(None) + operators.propose(frame, results)


def _propose_windows(frame: Frame, results: Results) -> list[Trial]:
    noisy = [trial for window in frame.windows for trial in frame.ask(layers.window_injection(frame, window))]
    return frame.ask(None) + noisy


def _propose_threshold(frame: Frame, results: Results) -> list[Trial]:
    return frame.ask(None) + threshold.propose(frame, results)


_OPERATORS = Question(_propose_operators, lambda frame, results: to_json(operators.conclude(frame, results, None)))
_WINDOWS = Question(_propose_windows, lambda frame, results: to_json(layers.conclude(frame, results, None).windows))
_THRESHOLD = Question(_propose_threshold, lambda frame, results: to_json(threshold.conclude(frame, results)))
