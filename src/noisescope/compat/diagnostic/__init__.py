"""The classes and functions of the original method notes by their own names, thin over noisescope's own code.

    from noisescope.compat.diagnostic import IntegratedDiagnostic

    diagnostic = IntegratedDiagnostic(model, test_data, calibration_data)
    diagnostic.run_full_diagnosis(noise_scale=0.05, window_size=3, outlier_threshold=10.0)
    report = diagnostic.generate_report()

`model` is a Subject (`noisescope.load`, `noisescope.wrap`) or a bare torch model. Data is tokenised batches (tensors
[B, T], or dicts with input_ids), or, where there is a tokenizer, the path of a data file. Further keywords are those of
`noisescope.diagnose`: samples, seeds, metric and so on.

Words differ in two places: "matmul" here means every matrix product (noisescope's group `gemm`), and "layernorm" is
noisescope's `norm`, RMSNorm included. A number that could not be measured is None, never 0: on a model that answers no
better than chance nothing can be lost. docs/compatibility.md has the whole table.

Names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "FaultInjectionTestGenerator": "plans",
    "AdaptiveAQN": "plans",
    "IntegratedDiagnostic": "levels",
    "MetricsDashboard": "dashboard",
    "RobustnessMonitor": "monitor",
    "ActivationCapture": "channels",
    "ChannelOutlierDetector": "channels",
    "capture_layer_output": "channels",
    "detect_outliers": "channels",
    "detect_outliers_fisher": "channels",
    "detect_outliers_quantile": "channels",
    "find_critical_threshold": "levels",
    "identify_avalanche_points": "levels",
    "operator_level_diagnosis": "levels",
    "operator_sensitivity_analysis": "levels",
    "sliding_window_diagnosis": "levels",
    "compute_correlation": "formulas",
    "compute_gradient_ratio": "formulas",
    "compute_kl_divergence": "formulas",
    "compute_layer_hessian_trace": "formulas",
    "compute_mae": "formulas",
    "compute_mape": "formulas",
    "compute_max_error": "formulas",
    "compute_snr": "formulas",
    "compute_sparsity": "formulas",
    "estimate_fim_diagonal": "formulas",
    "estimate_hessian_trace": "formulas",
    "correlate_layer_and_channel_sensitivity": "dashboard",
    "validate_metric_correlations": "dashboard",
    "plan_hardware_migration": "plans",
    "apply_smoothquant_scaling": "plans",
    "assign_precision": "plans",
    "generate_mixed_precision_config": "plans",
    "plot_sensitivity_heatmap": "levels",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from noisescope.compat.diagnostic.channels import ActivationCapture as ActivationCapture
    from noisescope.compat.diagnostic.channels import ChannelOutlierDetector as ChannelOutlierDetector
    from noisescope.compat.diagnostic.channels import capture_layer_output as capture_layer_output
    from noisescope.compat.diagnostic.channels import detect_outliers as detect_outliers
    from noisescope.compat.diagnostic.channels import detect_outliers_fisher as detect_outliers_fisher
    from noisescope.compat.diagnostic.channels import detect_outliers_quantile as detect_outliers_quantile
    from noisescope.compat.diagnostic.dashboard import MetricsDashboard as MetricsDashboard
    from noisescope.compat.diagnostic.dashboard import (
        correlate_layer_and_channel_sensitivity as correlate_layer_and_channel_sensitivity,
    )
    from noisescope.compat.diagnostic.dashboard import validate_metric_correlations as validate_metric_correlations
    from noisescope.compat.diagnostic.formulas import compute_correlation as compute_correlation
    from noisescope.compat.diagnostic.formulas import compute_gradient_ratio as compute_gradient_ratio
    from noisescope.compat.diagnostic.formulas import compute_kl_divergence as compute_kl_divergence
    from noisescope.compat.diagnostic.formulas import compute_layer_hessian_trace as compute_layer_hessian_trace
    from noisescope.compat.diagnostic.formulas import compute_mae as compute_mae
    from noisescope.compat.diagnostic.formulas import compute_mape as compute_mape
    from noisescope.compat.diagnostic.formulas import compute_max_error as compute_max_error
    from noisescope.compat.diagnostic.formulas import compute_snr as compute_snr
    from noisescope.compat.diagnostic.formulas import compute_sparsity as compute_sparsity
    from noisescope.compat.diagnostic.formulas import estimate_fim_diagonal as estimate_fim_diagonal
    from noisescope.compat.diagnostic.formulas import estimate_hessian_trace as estimate_hessian_trace
    from noisescope.compat.diagnostic.levels import IntegratedDiagnostic as IntegratedDiagnostic
    from noisescope.compat.diagnostic.levels import find_critical_threshold as find_critical_threshold
    from noisescope.compat.diagnostic.levels import identify_avalanche_points as identify_avalanche_points
    from noisescope.compat.diagnostic.levels import operator_level_diagnosis as operator_level_diagnosis
    from noisescope.compat.diagnostic.levels import operator_sensitivity_analysis as operator_sensitivity_analysis
    from noisescope.compat.diagnostic.levels import plot_sensitivity_heatmap as plot_sensitivity_heatmap
    from noisescope.compat.diagnostic.levels import sliding_window_diagnosis as sliding_window_diagnosis
    from noisescope.compat.diagnostic.monitor import RobustnessMonitor as RobustnessMonitor
    from noisescope.compat.diagnostic.plans import AdaptiveAQN as AdaptiveAQN
    from noisescope.compat.diagnostic.plans import FaultInjectionTestGenerator as FaultInjectionTestGenerator
    from noisescope.compat.diagnostic.plans import apply_smoothquant_scaling as apply_smoothquant_scaling
    from noisescope.compat.diagnostic.plans import assign_precision as assign_precision
    from noisescope.compat.diagnostic.plans import generate_mixed_precision_config as generate_mixed_precision_config
    from noisescope.compat.diagnostic.plans import plan_hardware_migration as plan_hardware_migration


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.compat.diagnostic' has no attribute {name!r}")
    return getattr(importlib.import_module(f"noisescope.compat.diagnostic.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
