"""What follows from a diagnosis, under the names of the original method notes: noise, migration, tests, bits."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from noisescope import noisy_ops
from noisescope.api.fault_tests import run_fault_tests
from noisescope.api.plan_trials import smooth_outliers
from noisescope.atomic_write import write_file
from noisescope.compat.diagnostic.adapter import (
    Row,
    batches_of,
    diagnosis_in,
    ends_of,
    full_report,
    layer_of,
    model_of,
    our_name,
    subject_of,
)
from noisescope.compat.diagnostic.levels import IntegratedDiagnostic
from noisescope.errors import InvalidInput
from noisescope.findings import percent
from noisescope.jsonform import to_json
from noisescope.measures.smoothquant import Smoothed
from noisescope.model.loading import Subject
from noisescope.plans.fault_tests import (
    MOST_CHANNEL_TESTS,
    FaultTest,
    channel_test,
    from_columns,
    operator_test,
    propose_tests,
    refuse_none,
    to_csv,
    window_test,
)
from noisescope.plans.migration import plan_migration
from noisescope.plans.precision import bits_by_rule, missed_target
from noisescope.training.schedules import ruled

UNKNOWN = 0.10  # sensitivity of a layer that the profile lacks: it gets the base scale


class AdaptiveAQN:
    """Noise that spares sensitive layers: half the base scale above 0.15, twice below 0.05 (rule "methodology").

    sensitivity_profile maps a layer to its degradation, the share of the accuracy that noise there takes (not divided
    by the noise scale, or every layer would count as brittle). Noise is that of `noisescope.noisy_ops`, whose counts,
    phases and selections therefore apply: on all products, forward and backward, wherever gradients are recorded.
    """

    def __init__(
        self,
        model: Subject | nn.Module,
        sensitivity_profile: Mapping[int, float],
        *,
        base_noise_scale: float = 0.05,
        rule: str = "methodology",
    ) -> None:
        self.model = model
        self.sensitivity_profile = dict(sensitivity_profile)
        self.base_noise_scale = base_noise_scale
        self.rule = rule
        self._on = False

    def get_layer_noise_scale(self, layer_id: int) -> float:
        """The absolute noise scale of a layer."""
        factor = ruled({layer_id: self.sensitivity_profile.get(layer_id, UNKNOWN)}, self.rule)[layer_id]
        return self.base_noise_scale * factor

    def enable_adaptive_noise(self, seed: int = 0) -> dict[int, float]:
        """Turn noise on until disable_adaptive_noise(); returns the scale of each layer."""
        if self._on and noisy_ops.is_enabled():
            raise InvalidInput("adaptive noise is already enabled: call disable_adaptive_noise() first")
        blocks = noisy_ops.register_layer_hooks(model_of(self.model))
        scales = {layer: self.get_layer_noise_scale(layer) for layer in range(blocks)}
        noisy_ops.set_per_layer_scales(scales)
        noisy_ops.set_training_only(True)
        noisy_ops.enable_noisy_ops(error_scale=self.base_noise_scale, seed=seed)
        self._on = True
        return scales

    def disable_adaptive_noise(self) -> None:
        """Turn noise off and reset the scales; raises NothingInjected if no noise was injected."""
        if not self._on:
            return
        self._on = False
        try:
            noisy_ops.disable_noisy_ops()
        finally:
            noisy_ops.set_per_layer_scales(None)
            noisy_ops.set_training_only(False)


def plan_hardware_migration(
    model: Subject | nn.Module, test_data: Any = None, calibration_data: Any = None, **more: Any
) -> Row:
    """Layers in three priorities, ranked by the evidence of a diagnosis made here: {priority_1_layers, ...}.

    `recommendations` has precision, validation and fallback in words; `full` is noisescope's own plan, with the
    evidence for each layer and the commands to run next. `more` is any keyword of `noisescope.diagnose`.
    """
    diagnostic = IntegratedDiagnostic(model, test_data, calibration_data)
    diagnostic.run_full_diagnosis(**more)
    assert diagnostic.full_report is not None
    plan = plan_migration(diagnostic.full_report.diagnosis)
    first, second, third = plan.priorities
    precision = {**first.precision, **second.precision}
    return {
        **{f"priority_{entry.priority}_layers": list(entry.layers) for entry in plan.priorities},
        "recommendations": {
            "precision": ", ".join(f"{place}: {bits}" for place, bits in precision.items())
            or f"all layers: {next(iter(third.precision.values()))}",
            "validation": f"priority 1: {first.validation}; priority 2: {second.validation}",
            "fallback": plan.fallback,
        },
        "full": to_json(plan),
    }


class FaultInjectionTestGenerator:
    """Fault tests for a hardware team from a diagnostic report: operators, avalanche points, outlier channels.

    Takes the report of `IntegratedDiagnostic`, noisescope's own, the path of one, or a dictionary with what the notes'
    report holds and no more. Ids are unique and cells of the CSV are JSON.
    """

    def __init__(self, diagnostic_report: Mapping[str, Any] | str | Path) -> None:
        self.report = full_report(diagnostic_report)
        own = "schema_version" in self.report
        self.tests = propose_tests(diagnosis_in(self.report)) if own else _from_notes(self.report)

    def generate_test_cases(self) -> list[Row]:
        """[{test_id, component, test_type, parameters, acceptance_criteria}]."""
        return [test.to_dict() for test in refuse_none(self.tests)]

    def export_to_csv(self, test_cases: Iterable[Mapping[str, Any]], output_path: str | Path) -> None:
        """Write the cases as CSV; creates the folder if needed."""
        write_file(Path(output_path), to_csv(map(from_columns, test_cases)))

    def run_test_cases(
        self, model: Subject | nn.Module, test_data: Any, test_cases: Iterable[Mapping[str, Any]], **more: Any
    ) -> list[Row]:
        """Run the cases with the fault simulator, each with its verdict; `more`: samples, max_tokens."""
        tests = list(map(from_columns, test_cases))
        results = run_fault_tests(subject_of(model), tests, batches_of(test_data), **more)
        return [to_json(result) for result in results]


def _from_notes(report: Mapping[str, Any]) -> list[FaultTest]:
    """Tests for what the notes' report warns about, with noisescope's names and places."""
    summary, channels = report.get("executive_summary"), report.get("channel_analysis") or {}
    if not isinstance(summary, Mapping):
        raise InvalidInput("fault tests need a diagnosis report, but this one has no executive_summary")
    tests = [operator_test(our_name(name), "critical in the report") for name in summary.get("critical_operators", ())]
    for point in summary.get("avalanche_points", ()):
        start, end = ends_of(str(point.get("layer_range")))
        tests.append(window_test(start, end, f"avalanche point, {percent(point['degradation'])} lost"))
    outliers = []
    for name, row in channels.get("per_layer", {}).items():
        layer = layer_of(name)
        if layer is None:
            raise InvalidInput(
                f"the report names {name!r}, which is not a module of a layer such as model.layers.9.mlp.down_proj"
            )
        if row["outlier_indices"]:
            where = f"{layer}/linear/{name}"
            outliers.append((name, where, tuple(row["outlier_indices"]), float(row["max_ratio"])))
    worst = sorted(outliers, key=lambda row: -row[3])[:MOST_CHANNEL_TESTS]
    return [*tests, *(channel_test(*row) for row in worst)]


def generate_mixed_precision_config(
    sensitivity_profile: Mapping[Any, Any], target_avg_bits: float = 6
) -> dict[Any, int]:
    """16, 8 or 4 bits for each layer by its degradation; warns where the target is missed.

    The profile has the degradation of each layer, or a row of a report that holds one under 'degradation'.
    `noisescope plan precision` finds better plans: this rule knows layers alone, and three widths.
    """
    bits = bits_by_rule({layer: _loss(given) for layer, given in sensitivity_profile.items()}, target_avg_bits)
    if missed := missed_target(bits, target_avg_bits):
        warnings.warn(f"the bit rule {missed}", stacklevel=2)
    return bits


def _loss(given: Any) -> Any:
    """A degradation as it is, or out of a row, where it may have an interval; the rule refuses what is no number."""
    loss = given["degradation"] if isinstance(given, Mapping) and "degradation" in given else given
    loss = loss["value"] if isinstance(loss, Mapping) and "value" in loss else loss
    return float(loss) if isinstance(loss, np.floating) else loss


assign_precision = generate_mixed_precision_config


def apply_smoothquant_scaling(
    model: Subject | nn.Module, calibration_data: Any, alpha: float = 0.5, *, samples: int = 16, max_tokens: int = 256
) -> Smoothed:
    """A copy of the model whose outlier channels are folded into the weights; the model itself is left alone.

    smoothed = apply_smoothquant_scaling(model, batches, alpha=0.5)
    smoothed.model, smoothed.float_error
    """
    data = batches_of(calibration_data)
    return smooth_outliers(subject_of(model), data, alpha=alpha, samples=samples, max_tokens=max_tokens)
