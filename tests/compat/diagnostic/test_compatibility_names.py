"""Every Python name of docs/compatibility.md is imported from where the page says, and used once."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from noisescope import diagnostic, findings, noisy_ops
from noisescope.compat.diagnostic.adapter import layer_of

Kit = Any  # of conftest.py

X = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
FEW: dict[str, Any] = {"seeds": 1, "samples": 4}
D, N = "noisescope.diagnostic", "noisescope.noisy_ops"
USES: dict[str, Callable[[Kit], Any]] = {
    "noisescope.findings.operator_advice": lambda k: findings.operator_advice("softmax"),
    f"{D}.IntegratedDiagnostic": lambda k: k.diagnosed,
    f"{D}.IntegratedDiagnostic.run_full_diagnosis": lambda k: k.diagnosed.full_report,
    f"{D}.IntegratedDiagnostic.generate_report": lambda k: k.diagnosed.generate_report(),
    f"{D}.IntegratedDiagnostic.save_report": lambda k: k.diagnosed.save_report(k.folder / "report"),
    f"{D}.IntegratedDiagnostic.model": lambda k: k.diagnosed.model,
    f"{D}.IntegratedDiagnostic.test_data": lambda k: k.diagnosed.test_data,
    f"{D}.IntegratedDiagnostic.calibration_data": lambda k: k.diagnosed.calibration_data,
    f"{D}.IntegratedDiagnostic.operator_results": lambda k: k.diagnosed.operator_results,
    f"{D}.IntegratedDiagnostic.layer_results": lambda k: k.diagnosed.layer_results,
    f"{D}.IntegratedDiagnostic.channel_results": lambda k: k.diagnosed.channel_results,
    f"{D}.ActivationCapture": lambda k: k.capture,
    f"{D}.ActivationCapture.register_hooks": lambda k: k.capture.statistics,
    f"{D}.ActivationCapture.remove_hooks": lambda k: k.capture.remove_hooks() or k.capture.statistics,
    f"{D}.ActivationCapture.detect_outliers": lambda k: k.capture.detect_outliers(threshold=0.5),
    f"{D}.ActivationCapture.activations": lambda k: k.capture.activations,
    f"{D}.ActivationCapture.model": lambda k: k.capture.model,
    f"{D}.ActivationCapture.layer_patterns": lambda k: diagnostic.ActivationCapture(k.model, ["mlp"]).layer_patterns,
    f"{D}.ChannelOutlierDetector": lambda k: k.detector,
    f"{D}.ChannelOutlierDetector.register_hooks": lambda k: watched(k),
    f"{D}.ChannelOutlierDetector.collect_statistics": lambda k: k.detector.get_report(),
    f"{D}.ChannelOutlierDetector.get_report": lambda k: k.detector.get_report(),
    f"{D}.ChannelOutlierDetector.apply_smoothquant_scaling": lambda k: k.detector.apply_smoothquant_scaling(0.5),
    f"{D}.ChannelOutlierDetector.model": lambda k: k.detector.model,
    f"{D}.ChannelOutlierDetector.calibration_data": lambda k: k.detector.calibration_data,
    f"{D}.ChannelOutlierDetector.quantile_threshold": lambda k: k.detector.quantile_threshold,
    f"{D}.ChannelOutlierDetector.activation_stats": lambda k: k.detector.activation_stats,
    f"{D}.ChannelOutlierDetector.outlier_channels": lambda k: k.detector.outlier_channels,
    f"{D}.MetricsDashboard": lambda k: k.dashboard,
    f"{D}.MetricsDashboard.compute_all_metrics": lambda k: k.dashboard.metrics,
    f"{D}.MetricsDashboard.print_dashboard": lambda k: written(k.dashboard.print_dashboard),
    f"{D}.MetricsDashboard.get_risk_assessment": lambda k: k.dashboard.get_risk_assessment(),
    f"{D}.MetricsDashboard.metrics": lambda k: k.dashboard.metrics,
    f"{D}.AdaptiveAQN": lambda k: k.adaptive,
    f"{D}.AdaptiveAQN.get_layer_noise_scale": lambda k: k.adaptive.get_layer_noise_scale(0),
    f"{D}.AdaptiveAQN.enable_adaptive_noise": lambda k: trained(k),
    f"{D}.AdaptiveAQN.model": lambda k: k.adaptive.model,
    f"{D}.AdaptiveAQN.sensitivity_profile": lambda k: k.adaptive.sensitivity_profile,
    f"{D}.AdaptiveAQN.base_noise_scale": lambda k: k.adaptive.base_noise_scale,
    f"{D}.RobustnessMonitor": lambda k: k.monitor,
    f"{D}.RobustnessMonitor.check_checkpoint": lambda k: k.monitor.history[0],
    f"{D}.RobustnessMonitor.plot_robustness_trend": lambda k: k.monitor.plot_robustness_trend(),
    f"{D}.RobustnessMonitor.baseline": lambda k: k.monitor.baseline,
    f"{D}.RobustnessMonitor.history": lambda k: k.monitor.history,
    f"{D}.FaultInjectionTestGenerator": lambda k: k.generator,
    f"{D}.FaultInjectionTestGenerator.generate_test_cases": lambda k: k.generator.generate_test_cases(),
    f"{D}.FaultInjectionTestGenerator.export_to_csv": lambda k: exported(k),
    f"{D}.FaultInjectionTestGenerator.report": lambda k: k.generator.report,
    f"{D}.operator_level_diagnosis": lambda k: diagnostic.operator_level_diagnosis(k.model, k.batches, 0.05, **FEW),
    f"{D}.operator_sensitivity_analysis": lambda k: diagnostic.operator_sensitivity_analysis(k.model, k.batches, **FEW),
    f"{D}.sliding_window_diagnosis": lambda k: diagnostic.sliding_window_diagnosis(k.model, k.batches, 3, 0.05, **FEW),
    f"{D}.identify_avalanche_points": lambda k: diagnostic.identify_avalanche_points(k.windows, threshold=0.15),
    f"{D}.find_critical_threshold": lambda k: diagnostic.find_critical_threshold(k.model, k.batches, 0.1, **FEW),
    f"{D}.detect_outliers": lambda k: diagnostic.detect_outliers(X, threshold=10.0),
    f"{D}.detect_outliers_quantile": lambda k: diagnostic.detect_outliers_quantile(X.pow(5), quantile=0.99),
    f"{D}.detect_outliers_fisher": lambda k: diagnostic.detect_outliers_fisher(k.model, k.batches, **FEW),
    f"{D}.capture_layer_output": lambda k: diagnostic.capture_layer_output(k.model, 0, k.tokens),
    f"{D}.apply_smoothquant_scaling": lambda k: diagnostic.apply_smoothquant_scaling(k.model, k.batches, alpha=0.5),
    f"{D}.correlate_layer_and_channel_sensitivity": lambda k: diagnostic.correlate_layer_and_channel_sensitivity(
        k.windows, k.results["channel_results"]
    ),
    f"{D}.validate_metric_correlations": lambda k: diagnostic.validate_metric_correlations(k.results),
    f"{D}.plan_hardware_migration": lambda k: k.migration,
    f"{D}.generate_mixed_precision_config": lambda k: diagnostic.generate_mixed_precision_config(
        {0: 0.2, 1: 0.01}, target_avg_bits=10
    ),
    f"{D}.assign_precision": lambda k: diagnostic.assign_precision({0: 0.2, 1: 0.01}, target_avg_bits=10),
    f"{D}.plot_sensitivity_heatmap": lambda k: diagnostic.plot_sensitivity_heatmap(k.windows, window_size=1),
    f"{D}.compute_snr": lambda k: diagnostic.compute_snr(X, noise_scale=0.05),
    f"{D}.compute_gradient_ratio": lambda k: diagnostic.compute_gradient_ratio(
        k.model, k.loss(k.model, k.tokens), k.loss(k.model, k.tokens)
    ),
    f"{D}.compute_sparsity": lambda k: diagnostic.compute_sparsity(X, threshold=1e-6),
    f"{D}.compute_layer_hessian_trace": lambda k: diagnostic.compute_layer_hessian_trace(
        k.model, k.loss, k.tokens, num_samples=2
    ),
    f"{D}.compute_mae": lambda k: diagnostic.compute_mae(X, 2 * X),
    f"{D}.compute_mape": lambda k: diagnostic.compute_mape(X, 2 * X),
    f"{D}.compute_correlation": lambda k: diagnostic.compute_correlation(X, 2 * X),
    f"{D}.compute_max_error": lambda k: diagnostic.compute_max_error(X, 2 * X),
    f"{D}.compute_kl_divergence": lambda k: diagnostic.compute_kl_divergence(X, 2 * X),
    f"{D}.estimate_fim_diagonal": lambda k: diagnostic.estimate_fim_diagonal(k.model, [k.tokens[:2]]),
    f"{D}.estimate_hessian_trace": lambda k: diagnostic.estimate_hessian_trace(
        k.model, k.loss, k.tokens, num_samples=2
    ),
    "noisescope.compat.diagnostic.adapter.layer_of": lambda k: layer_of("model.layers.9.mlp") == 9,
    f"{N}.enable_noisy_ops": lambda k: k.inside_noise(lambda: noisy_ops._NOISY_OPS_ENABLED),
    f"{N}.disable_noisy_ops": lambda k: k.inside_noise(lambda: True) and not noisy_ops._NOISY_OPS_ENABLED,
    f"{N}.set_noise_phases": lambda k: noisy_ops.set_noise_phases(forward=True, backward=True) or True,
    f"{N}.set_selective_layers": lambda k: noisy_ops.set_selective_layers(None) or True,
    f"{N}.set_selective_operators": lambda k: noisy_ops.set_selective_operators(None) or True,
    f"{N}.set_selective_ops": lambda k: noisy_ops.set_selective_ops(None) or True,
    f"{N}.set_operator_noise_scales": lambda k: noisy_ops.set_operator_noise_scales(None) or True,
    f"{N}.set_per_layer_scales": lambda k: noisy_ops.set_per_layer_scales(None) or True,
    f"{N}.register_layer_hooks": lambda k: noisy_ops.register_layer_hooks(k.model) == 6,
    f"{N}.should_inject_for_layer": lambda k: noisy_ops.should_inject_for_layer(),
    f"{N}.should_inject_for_operator": lambda k: noisy_ops.should_inject_for_operator("softmax"),
    f"{N}.get_injection_stats": lambda k: k.inside_noise(noisy_ops.get_injection_stats),
    f"{N}.get_layer_injection_stats": lambda k: k.inside_noise(noisy_ops.get_layer_injection_stats),
    f"{N}.get_operator_injection_stats": lambda k: k.inside_noise(noisy_ops.get_operator_injection_stats),
    f"{N}.reset_injection_stats": lambda k: noisy_ops.reset_injection_stats() or True,
    f"{N}.reset_layer_injection_stats": lambda k: noisy_ops.reset_layer_injection_stats() or True,
    f"{N}.reset_operator_injection_stats": lambda k: noisy_ops.reset_operator_injection_stats() or True,
    f"{N}.print_injection_summary": lambda k: written(noisy_ops.print_injection_summary),
    f"{N}.NoisyMatMul": lambda k: noisy_ops.NoisyMatMul.apply(X, X.transpose(1, 2)),
    f"{N}.NoisyBMM": lambda k: noisy_ops.NoisyBMM.apply(X, X.transpose(1, 2)),
    f"{N}.NoisyLinear": lambda k: noisy_ops.NoisyLinear.apply(X, torch.ones(3, 8)),
    f"{N}.NoisySoftmax": lambda k: noisy_ops.NoisySoftmax.apply(X),
    f"{N}.NoisySiLU": lambda k: noisy_ops.NoisySiLU.apply(X),
    f"{N}.NoisyGeLU": lambda k: noisy_ops.NoisyGeLU.apply(X),
    f"{N}.NoisyLayerNorm": lambda k: noisy_ops.NoisyLayerNorm.apply(X, (8,)),
    f"{N}._NOISY_OPS_ENABLED": lambda k: noisy_ops._NOISY_OPS_ENABLED is False,
    f"{N}._NOISY_OPS_FORWARD_ENABLED": lambda k: noisy_ops._NOISY_OPS_FORWARD_ENABLED,
    f"{N}._NOISY_OPS_BACKWARD_ENABLED": lambda k: noisy_ops._NOISY_OPS_BACKWARD_ENABLED,
    f"{N}._NOISY_OPS_FORWARD_SCALE": lambda k: noisy_ops._NOISY_OPS_FORWARD_SCALE,
    f"{N}._NOISY_OPS_BACKWARD_SCALE": lambda k: noisy_ops._NOISY_OPS_BACKWARD_SCALE,
    f"{N}._ERROR_SCALE": lambda k: noisy_ops._ERROR_SCALE,
    f"{N}._ERROR_TYPE": lambda k: noisy_ops._ERROR_TYPE,
    f"{N}._SELECTIVE_OPERATORS": lambda k: noisy_ops._SELECTIVE_OPERATORS is None,
    f"{N}._OPERATOR_NOISE_SCALES": lambda k: noisy_ops._OPERATOR_NOISE_SCALES == {},
    f"{N}._OPERATOR_INJECTION_STATS": lambda k: k.inside_noise(lambda: noisy_ops._OPERATOR_INJECTION_STATS),
}


def written(call: Callable[..., Any]) -> str:
    file = io.StringIO()
    call(file=file)
    return file.getvalue()


def watched(kit: Kit) -> Any:
    detector = diagnostic.ChannelOutlierDetector(kit.model, kit.batches)
    detector.register_hooks()
    kit.model(kit.tokens)
    detector.remove_hooks()
    return detector.get_report()


def trained(kit: Kit) -> Any:
    adaptive = kit.adaptive
    scales = adaptive.enable_adaptive_noise()
    kit.loss(kit.model, kit.tokens).backward()
    adaptive.disable_adaptive_noise()
    return scales


def exported(kit: Kit) -> str:
    kit.generator.export_to_csv(kit.generator.generate_test_cases(), kit.folder / "cases.csv")
    return (kit.folder / "cases.csv").read_text()


def test_every_python_name_is_used(page):
    """A row without a use fails, and so does a use without a row."""
    wanted = {row.here for row in page if row.here.startswith("noisescope.") and row.section != "Modules"}
    assert set(USES) == wanted


@pytest.mark.parametrize("name", sorted(USES))
def test_python_names(kit, name):
    """It is importable where the page says, and using it gives something."""
    parts = name.split(".")
    depth = 4 if parts[1] == "compat" else 2
    found = getattr(importlib.import_module(".".join(parts[:depth])), parts[depth])
    assert found is not None or name.endswith("_SELECTIVE_OPERATORS")
    result = USES[name](kit)
    assert result is not None and result is not False and not (isinstance(result, Mapping | list | str) and not result)
