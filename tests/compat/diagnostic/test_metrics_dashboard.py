"""Formulas and the dashboard by the notes' names."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from noisescope.diagnostic import (
    MetricsDashboard,
    compute_correlation,
    compute_gradient_ratio,
    compute_kl_divergence,
    compute_layer_hessian_trace,
    compute_mae,
    compute_mape,
    compute_max_error,
    compute_snr,
    compute_sparsity,
    estimate_fim_diagonal,
    estimate_hessian_trace,
)
from noisescope.errors import InvalidInput


def quadratic(model: nn.Module, scale: float) -> torch.Tensor:
    """scale * |w|^2: the Hessian is 2 * scale on its diagonal."""
    return scale * sum(p.square().sum() for p in model.parameters())


@pytest.fixture
def line() -> nn.Module:
    return nn.Linear(3, 4)


def test_snr_is_nominal_or_measured():
    """A scale gives the notes' 26 dB at 5 % whatever the tensor; a second tensor gives what is there."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert compute_snr(x, 0.05) == compute_snr(100 * x, 0.05) == pytest.approx(20 * math.log10(1 / 0.05))
    assert compute_snr(x, torch.tensor(0.05)) == pytest.approx(26.02, abs=0.01)
    assert compute_snr(x, 1.1 * x) == pytest.approx(20, abs=1e-3)
    assert compute_snr(x, x) is None


def test_sparsity_by_both_thresholds():
    """1e-6 by default; a share of the rms where asked for."""
    x = torch.tensor([0.0, 1e-3, 1.0, -1.0])
    assert compute_sparsity(x) == 0.25 and compute_sparsity(x, relative=0.01) == 0.5
    assert compute_sparsity(x, threshold=0.5) == 0.5


def test_divergence_between_devices():
    """Each against its formula on four numbers."""
    gpu, npu = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 5.0])
    assert compute_mae(gpu, npu) == 0.25 and compute_max_error(gpu, npu) == 1.0
    assert compute_mape(gpu, npu) == pytest.approx(0.0625)
    assert compute_correlation(gpu, npu) == pytest.approx(float(torch.corrcoef(torch.stack([gpu, npu]))[0, 1]))
    assert compute_correlation(gpu, torch.ones(4)) is None


def test_kl_of_logits_in_float32():
    """Two coins by hand; float32 whatever came in, and close to the exact divergence, which needs no eps."""
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert compute_kl_divergence(p, q) == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-4)
    assert compute_kl_divergence(p + 7, p) == pytest.approx(0, abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(3, 5, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = float((p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1).mean())
    assert compute_kl_divergence(p, q) == pytest.approx(exact, rel=1e-3)
    low, high = p.bfloat16(), (p + 0.1 * q).bfloat16()  # in bfloat16 itself 1 + 1e-6 is 1, and sums keep 3 digits
    exact = float(
        (low.double().softmax(-1) * (low.double().log_softmax(-1) - high.double().log_softmax(-1))).sum(-1).mean()
    )
    assert compute_kl_divergence(low, high) == pytest.approx(exact, rel=1e-3)
    sure = torch.tensor([[200.0, 0.0]])
    assert compute_kl_divergence(sure, -sure) == pytest.approx(math.log(1e6), rel=0.01)  # eps keeps it finite


@pytest.mark.parametrize(
    ("p", "q", "eps", "words"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), 1e-6, r"p_logits have the shape \(2, 3\), q_logits \(3, 2\)"),
        (torch.ones(2, 3), torch.ones(2, 3), 0.0, "eps must be above 0"),
        (torch.ones(2, 3), torch.ones(2, 3) * math.nan, 1e-6, "hold NaN or infinity"),
    ],
)
def test_kl_of_what_is_no_pair_of_logits(p, q, eps, words):
    """Refused with what is wrong."""
    with pytest.raises(InvalidInput, match=words):
        compute_kl_divergence(p, q, eps=eps)


def test_gradient_ratio_of_losses_and_of_functions(line):
    """A loss three times as steep has a ratio of 3, as a tensor with its graph and as a function."""
    assert compute_gradient_ratio(line, quadratic(line, 1.0), quadratic(line, 3.0)) == pytest.approx(3.0)
    assert compute_gradient_ratio(line, lambda m: quadratic(m, 1.0), lambda m: quadratic(m, 0.5)) == pytest.approx(0.5)
    assert compute_gradient_ratio(line, quadratic(line, 0.0), quadratic(line, 1.0)) is None
    assert all(p.grad is None and p.requires_grad for p in line.parameters())
    with pytest.raises(InvalidInput, match="requires a gradient"):
        compute_gradient_ratio(line.requires_grad_(False), quadratic(line, 1.0), quadratic(line, 1.0))


def test_hessian_traces_of_a_quadratic(line):
    """Signs as random vectors make the trace of a diagonal Hessian exact: 2 * 1.5 for each parameter."""
    assert estimate_hessian_trace(line, quadratic, 1.5) == pytest.approx(3.0 * 16)
    assert compute_layer_hessian_trace(line, quadratic, 1.5) == {"weight": pytest.approx(3.0 * 12)}
    assert compute_layer_hessian_trace(line, quadratic, 1.5, 4, per_parameter=True) == {"weight": pytest.approx(3.0)}


def test_hessian_trace_of_a_language_model(subject, tokens):
    """Fused attention has no second derivative and is opened for it; every weight has its trace."""
    found = compute_layer_hessian_trace(subject, lambda m, ids: m(ids, labels=ids).loss, tokens, num_samples=2)
    assert set(found) == {name for name, _ in subject.model.named_parameters()}
    assert all(math.isfinite(trace) for trace in found.values())


def test_fisher_does_not_shrink_with_the_batch(subject, tokens):
    """Single samples are squared, so two batches of one and one batch of two agree."""
    together = estimate_fim_diagonal(subject, [tokens])
    apart = estimate_fim_diagonal(subject.model, [{"input_ids": tokens[:1]}, {"input_ids": tokens[1:]}])
    assert set(together) == {name for name, _ in subject.model.named_parameters()}
    for name, values in together.items():
        assert torch.allclose(values, apart[name], rtol=1e-3, atol=1e-7) and bool((values >= 0).all())


def test_the_dashboard_measures_and_prints(subject, answered, capsys):
    """All of the notes' keys, numbers that fit each other, and every one of them on the screen."""
    gpu = torch.linspace(1, 2, 50)
    dashboard = MetricsDashboard()
    metrics = dashboard.compute_all_metrics(subject, answered, gpu, 1.2 * gpu, noise_scale=0.3, seeds=1)
    primary, secondary, hardware = metrics["primary"], metrics["secondary"], metrics["hardware"]
    assert primary["relative_degradation"] > 0.2
    assert primary["noise_tolerance_index"] == pytest.approx(1 / primary["relative_degradation"])
    assert 0 < primary["critical_threshold"] < 0.2
    assert 0 < secondary["snr_db"] < 40 and secondary["gradient_ratio"] > 0
    assert secondary["activation_sparsity"] == compute_sparsity(gpu)
    assert hardware["mape"] == pytest.approx(0.2) and hardware["max_error"] == pytest.approx(0.4)
    assert dashboard.get_risk_assessment().startswith("HIGH RISK - ")  # 50 points and 30
    dashboard.print_dashboard()
    printed = capsys.readouterr().out
    for text in (f"{100 * primary['relative_degradation']:.2f} %", "20.00 %", f"{secondary['snr_db']:.4g} dB", "HIGH"):
        assert text in printed
    assert metrics["full"]["primary"]["relative_degradation"]["n"] == 20


def test_the_dashboard_knows_what_it_does_not_know(subject, random_batches, capsys):
    """At chance nothing is measurable, and the risk is not LOW; sparsity comes from the linears themselves."""
    dashboard = MetricsDashboard()
    for call in (dashboard.print_dashboard, dashboard.get_risk_assessment):
        with pytest.raises(InvalidInput, match="compute_all_metrics"):
            call()
    metrics = dashboard.compute_all_metrics(subject, random_batches, seeds=1)
    assert metrics["primary"] == dict.fromkeys(metrics["primary"]) and "hardware" not in metrics
    assert 0 < metrics["secondary"]["relative_sparsity"] < 0.1
    assert dashboard.get_risk_assessment().startswith("NOT MEASURABLE")
    dashboard.print_dashboard()
    said, risk = capsys.readouterr().out.split("Risk: ")
    assert said.count("not measurable") == 3 and risk.startswith("NOT MEASURABLE - degradation: not measurable")
    with pytest.raises(InvalidInput, match="gpu_activations"):
        dashboard.compute_all_metrics(subject, random_batches, None, torch.ones(3))


@pytest.mark.parametrize(
    ("loss", "index", "threshold", "words"),
    [(0.0, None, math.inf, ["unbounded", "> 0.20", "LOW RISK"]), (0.12, 8.3, 0.03, ["8.3", "3.00 %", "LOW RISK"])],
)
def test_the_dashboard_at_its_edges(loss, index, threshold, words, capsys):
    """No loss is an unbounded index, a threshold out of reach is "> 0.20"; 30 points are still LOW."""
    dashboard = MetricsDashboard()
    dashboard.metrics = {
        "primary": {"relative_degradation": loss, "noise_tolerance_index": index, "critical_threshold": threshold},
        "secondary": dict.fromkeys(("snr_db", "gradient_ratio", "activation_sparsity", "relative_sparsity"), 1.0),
        "full": {"primary": {"critical_threshold": {"label": "> 0.20"}}},
    }
    dashboard.print_dashboard()
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)
