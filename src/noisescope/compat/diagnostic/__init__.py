"""The classes and functions of the original method notes (docs/method.md), as a thin layer over noisescope.

    from noisescope.diagnostic import IntegratedDiagnostic

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

if TYPE_CHECKING:
    from noisescope.compat.diagnostic.checkpoint_monitor import *  # noqa: F403
    from noisescope.compat.diagnostic.levels import *  # noqa: F403
    from noisescope.compat.diagnostic.metrics import *  # noqa: F403
    from noisescope.compat.diagnostic.metrics_dashboard import *  # noqa: F403
    from noisescope.compat.diagnostic.outlier_channels import *  # noqa: F403
    from noisescope.compat.diagnostic.plans import *  # noqa: F403

_LAZY = {
    "outlier_channels": "ActivationCapture ChannelOutlierDetector capture_layer_output detect_outliers "
    "detect_outliers_fisher detect_outliers_quantile",
    "metrics_dashboard": "MetricsDashboard correlate_layer_and_channel_sensitivity validate_metric_correlations",
    "metrics": "compute_correlation compute_gradient_ratio compute_kl_divergence compute_layer_hessian_trace "
    "compute_mae compute_mape compute_max_error compute_snr compute_sparsity estimate_fim_diagonal "
    "estimate_hessian_trace",
    "levels": "IntegratedDiagnostic find_critical_threshold identify_avalanche_points operator_level_diagnosis "
    "operator_sensitivity_analysis plot_sensitivity_heatmap sliding_window_diagnosis",
    "checkpoint_monitor": "RobustnessMonitor",
    "plans": "AdaptiveAQN FaultInjectionTestGenerator apply_smoothquant_scaling assign_precision "
    "generate_mixed_precision_config plan_hardware_migration",
}
_HOMES = {name: f"noisescope.compat.diagnostic.{home}" for home, names in _LAZY.items() for name in names.split()}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'noisescope.compat.diagnostic' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
