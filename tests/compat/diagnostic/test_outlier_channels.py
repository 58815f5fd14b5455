"""Captured activations and outlier channels by the notes' names."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from noisescope.diagnostic import (
    ActivationCapture,
    ChannelOutlierDetector,
    capture_layer_output,
    correlate_layer_and_channel_sensitivity,
    detect_outliers,
    detect_outliers_fisher,
    detect_outliers_quantile,
    validate_metric_correlations,
)
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.testing import tiny_model

DOWN = "model.layers.1.mlp.down_proj"


def test_a_planted_outlier_is_found(outlier, tokens, logits):
    """The notes' loop: register, run, detect; only the module with the massive channel is in the answer."""
    capture = ActivationCapture(outlier, layer_patterns=["self_attn.o_proj", "mlp.down_proj"])
    capture.register_hooks()
    logits(outlier, tokens)
    logits(outlier, tokens[:, :3])
    found = capture.detect_outliers(threshold=10.0)
    capture.remove_hooks()
    assert list(found) == [DOWN]
    row = found[DOWN]
    assert row["outlier_indices"] == [5] and row["num_outliers"] == 1 and row["layer"] == 1
    assert row["outlier_ratios"] == [row["max_ratio"]] and row["max_ratio"] > 50
    assert capture.detect_outliers(threshold=1e9) == {}
    assert capture.statistics[DOWN].count == 12 + 6


def test_activations_are_kept_call_by_call(subject, tokens):
    """What each linear gave, as a hook of torch itself sees it; on the CPU, detached, from the last registration on."""
    seen = []
    handle = subject.model.get_submodule(DOWN).register_forward_hook(lambda *call: seen.append(call[-1].detach()))
    capture = ActivationCapture(subject)
    assert capture.activations == {}
    for _ in range(2):
        seen.clear()
        capture.register_hooks()
        subject.model(tokens)
        subject.model(tokens[:, :3])
        capture.remove_hooks()
        assert list(capture.activations) == capture.modules
        found = capture.activations[DOWN]
        assert [tuple(x.shape) for x in found] == [(2, 6, 32), (2, 3, 32)]
        assert all(torch.equal(x, y) and not x.requires_grad for x, y in zip(found, seen, strict=True))
    handle.remove()
    with ActivationCapture(subject, keep_activations=False) as lean:
        subject.model(tokens)
    assert lean.statistics[DOWN].count == 12
    with pytest.raises(InvalidInput, match="keep_activations=False"):
        lean.activations  # noqa: B018


def test_every_outlier_is_listed(subject, tokens, logits):
    """A low threshold makes many channels outliers: all are listed, in order, as many as are counted."""
    with ActivationCapture(subject, ["mlp"]) as capture:
        logits(subject.model, tokens)
    row = capture.detect_outliers(threshold=0.5)["model.layers.0.mlp.gate_proj"]
    assert row["num_outliers"] == len(row["outlier_indices"]) == len(row["outlier_ratios"]) > 20
    assert row["outlier_indices"] == sorted(row["outlier_indices"])


def test_patterns_are_parts_of_the_names_of_linears(subject):
    """Containers' names select what is inside; other architectures have a default of their own; nonsense is refused."""
    assert len(ActivationCapture(subject, ["self_attn", "mlp"]).modules) == 2 * 7
    assert ActivationCapture(subject).modules == [
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    assert len(ActivationCapture(tiny_model("gpt2")).modules) == 2 * 4
    assert set(ActivationCapture(tiny_model("mixtral")).modules) == {
        f"model.layers.{i}.{name}" for i in range(2) for name in ("self_attn.o_proj", "mlp.experts")
    }
    with pytest.raises(InvalidInput, match=r"layer_patterns \['nowhere'\].*such as model.layers.0"):
        ActivationCapture(subject, "nowhere")


def test_both_products_of_experts_are_seen(tokens, logits):
    """An experts module makes two products; neither hides the other."""
    model = tiny_model("mixtral")
    with ActivationCapture(model, ["experts"]) as capture:
        logits(model, tokens)
    assert {len(statistics.maximum) for statistics in capture.statistics.values()} == {32, 128}
    assert len(capture.rows(10.0)) == 4


def test_a_capture_says_when_it_has_seen_nothing(subject, tokens, logits):
    """No outliers and nothing looked at are two things; registering again starts anew."""
    capture = ActivationCapture(subject)
    with pytest.raises(InvalidInput, match="nothing has been captured"):
        capture.detect_outliers()
    with pytest.raises(InvalidInput, match="register_hooks"):
        capture.tokens(torch.ones(2, 6))
    for rows in (2, 1):
        with capture:
            with pytest.raises(InvalidInput, match="already"):
                capture.register_hooks()
            logits(subject.model, tokens[:rows])
        assert {statistics.count for statistics in capture.statistics.values()} == {6 * rows}
    capture.remove_hooks()  # a second time does no harm


def test_padding_can_be_left_out(subject, tokens, logits):
    """Tokens that a mask hides are not in the statistics."""
    mask = torch.ones_like(tokens)
    mask[0, 3:] = 0
    with ActivationCapture(subject) as capture:
        capture.tokens(mask)
        logits(subject.model, tokens)
    assert {statistics.count for statistics in capture.statistics.values()} == {9}


def test_the_detector_finds_the_planted_channel(outlier, tokens):
    """collect_statistics and one's own forwards between the hooks give the same row, and padding does not count."""
    padded = {"input_ids": tokens.clone(), "attention_mask": torch.ones_like(tokens)}
    padded["attention_mask"][0, 4:] = 0
    detector = ChannelOutlierDetector(outlier, [padded])
    assert detector.outlier_channels == {}
    with pytest.raises(InvalidInput, match="collect_statistics"):
        detector.get_report()
    detector.collect_statistics()
    report = detector.get_report()
    row = report["per_layer"][DOWN]
    assert row["outlier_indices"] == [5] and row["total_channels"] == 32 and row["outlier_percentage"] == 100 / 32
    assert report["summary"]["layers_with_outliers"] == len(report["per_layer"]) == len(detector.outlier_channels)
    assert report["summary"]["total_outlier_channels"] == sum(r["num_outliers"] for r in report["per_layer"].values())

    by_hand = ChannelOutlierDetector(outlier, None)
    by_hand.register_hooks()
    with torch.no_grad():
        outlier(tokens[:1, :4])
        outlier(tokens[1:])
    by_hand.remove_hooks()
    assert by_hand.outlier_channels[DOWN]["max_ratio"] == pytest.approx(row["max_ratio"], rel=1e-5)
    strict = ChannelOutlierDetector(outlier, [padded], quantile_threshold=1e9)
    strict.collect_statistics()
    assert strict.outlier_channels == {}


def test_statistics_of_the_detector(outlier, tokens):
    """Of |x| by channel: those of the activations themselves, collected and watched alike."""
    with torch.no_grad():
        size = capture_layer_output(outlier, DOWN, tokens).abs().flatten(0, -2)
    collected, watched = (ChannelOutlierDetector(outlier, [tokens]) for _ in range(2))
    collected.collect_statistics()
    watched.register_hooks()
    outlier(tokens)
    watched.remove_hooks()
    for detector in (collected, watched):
        stats = detector.activation_stats[DOWN]
        assert set(stats) == {"max", "mean", "std", "q99"} and all(len(column) == 1 for column in stats.values())
        assert torch.allclose(stats["max"][0].float(), size.amax(0))
        assert torch.allclose(stats["mean"][0].float(), size.mean(0), rtol=1e-4)
        assert torch.allclose(stats["std"][0].float(), size.std(0, correction=0), rtol=1e-3, atol=1e-5)
        q99 = stats["q99"][0] / size.quantile(0.99, 0)  # from a histogram of few tokens
        assert bool(((q99 > 0.8) & (q99 < 1.3)).all())
        assert detector.model is outlier


@given(st.integers(0, 15), st.floats(30, 1e4), st.integers(1, 3))
def test_a_planted_channel_of_a_tensor(channel, size, dims):
    """Of activations with any leading dimensions, the one massive channel is the outlier."""
    x = 1 + torch.rand(*([3] * dims), 16, generator=torch.Generator().manual_seed(0))
    x[..., channel] *= -size
    assert detect_outliers(x).nonzero().flatten().tolist() == [channel]
    assert not detect_outliers(x, threshold=1e6).any()


def test_tensors_that_can_not_be_judged():
    """One dimension has no channels, and NaN would compare as "no outlier": both are refused."""
    with pytest.raises(InvalidInput, match="channels"):
        detect_outliers(torch.ones(4))
    with pytest.raises(InvalidInput, match="1 channels contain NaN"):
        detect_outliers(torch.tensor([[1.0, float("nan"), 2.0]]))
    with pytest.raises(InvalidInput, match="between 0 and 1"):
        detect_outliers_quantile(torch.ones(2, 2), quantile=99)


def test_the_quantile_rule():
    """Two percent of large values are outliers of the whole tensor, half a percent is below the 99th percentile."""
    x = torch.ones(1000)
    x[:20] = 6.0
    assert detect_outliers_quantile(x) and not detect_outliers_quantile(x, quantile=0.9)
    x[:15] = 1.0
    assert not detect_outliers_quantile(x)
    assert not detect_outliers_quantile(torch.zeros(10))


def test_the_fisher_rule(subject, answered):
    """Masks of about a twentieth of each linear's channels; a channel that reaches nothing carries no information."""
    found = detect_outliers_fisher(subject, answered)
    assert len(found) == 15 and found["lm_head"].shape == (64,)
    assert all(mask.dtype == torch.bool and 0 < mask.sum() <= len(mask) // 10 for mask in found.values())
    deaf = tiny_model("llama")
    with torch.no_grad():
        deaf.model.layers[0].mlp.down_proj.weight[:, 2:] = 0  # up_proj's channels 2 to 63 reach nothing
    mask = detect_outliers_fisher(deaf, answered)["model.layers.0.mlp.up_proj"]
    assert set(mask.nonzero().flatten().tolist()) <= {0, 1} and mask.any()


def test_a_failed_capture_raises(subject, answered, monkeypatch):
    """What failed while measuring is an error, never "no outliers"."""
    model = tiny_model("llama")
    monkeypatch.setattr(model.model.layers[0].mlp.act_fn, "forward", lambda x: 1 / 0 if x is None else x[..., :3])
    with pytest.raises(NoisescopeError, match="capture failed"):
        ChannelOutlierDetector(model, answered).collect_statistics()


def test_the_output_of_a_block_or_a_module(subject, tokens):
    """A block by index is its hidden state, a linear by name is what it computes; others are refused."""
    with torch.no_grad():
        hidden = subject.model(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(capture_layer_output(subject, 0, tokens), hidden[1])
    assert torch.equal(capture_layer_output(subject.model, 0, {"input_ids": tokens}), hidden[1])
    name = "model.layers.1.mlp.gate_proj"
    assert capture_layer_output(subject, name, tokens).shape == (2, 6, 64)
    with pytest.raises(InvalidInput, match="layer 2 is out of range: the model has 2 blocks"):
        capture_layer_output(subject, 2, tokens)
    with pytest.raises(InvalidInput, match=r"'model\.layers\.1\.self_attn' is not a module with one output"):
        capture_layer_output(subject, "model.layers.1.self_attn", tokens)


def results(losses, counts, size=1):
    """Windows of `size` layers with these losses, and a module with outliers in each layer."""
    windows = {
        f"L{i}-{i + size - 1}": {
            "start_layer": i,
            "end_layer": i + size - 1,
            "degradation": loss,
            "sensitivity_score": None if loss is None else loss / 0.05,
        }
        for i, loss in enumerate(losses)
    }
    per_layer = {f"model.layers.{i}.mlp": {"layer": i, "num_outliers": n} for i, n in enumerate(counts)}
    return windows, {"per_layer": {**per_layer, "lm_head": {"layer": "lm_head", "num_outliers": 99}}}


def test_outliers_beside_sensitivity():
    """Layer 1 is not layer 11, overlapping windows are thinned out, unmeasured ones don't count."""
    losses = [0.1 * (i % 4) for i in range(12)]
    rows, r = correlate_layer_and_channel_sensitivity(*results(losses, [i % 4 for i in range(12)]))
    assert r == pytest.approx(1.0) and [row["total_outliers"] for row in rows] == [i % 4 for i in range(12)]
    assert rows[3] == {
        "layer_range": "L3-3",
        "sensitivity_score": losses[3] / 0.05,
        "total_outliers": 3,
        "degradation": losses[3],
    }
    assert correlate_layer_and_channel_sensitivity(*results([0.1, None, 0.2], [1, 2, 3]))[1] is None
    windows, report = results(losses[:10], [1] * 12, size=3)
    found = validate_metric_correlations({"layer_results": windows, "channel_results": report})
    assert found["outliers_sensitivity"]["n"] == 4 and found["outliers_sensitivity"]["r"] is None  # all alike
    with pytest.raises(InvalidInput, match="no `layer`"):
        correlate_layer_and_channel_sensitivity(windows, {"per_layer": {"x": {"num_outliers": 1}}})


def test_expected_correlations():
    """Curvature and outliers should rise with the loss, sparsity fall; `held` says whether they did."""
    losses = [0.1, 0.2, 0.3, 0.4, 0.5]
    windows, report = results(losses, [5, 4, 3, 2, 1])
    traces = {label: 10 * row["degradation"] for label, row in windows.items()}
    sparsity = {label: 1 - row["degradation"] for label, row in windows.items()}
    found = validate_metric_correlations(
        {"layer_results": windows, "channel_results": report, "hessian_traces": traces, "sparsity": sparsity}
    )
    assert {name: (round(row["r"], 6), row["held"]) for name, row in found.items()} == {
        "hessian_sensitivity": (1.0, True),
        "outliers_sensitivity": (-1.0, False),
        "sparsity_degradation": (-1.0, True),
    }
    assert all(0 < row["p"] < 0.1 and row["n"] == 5 for row in found.values())
    assert "r > 0.7" in found["hessian_sensitivity"]["interpretation"]


def in_the_shape_of_the_notes():
    """Four windows by label with a score alone, and modules whose layer stands in their names alone."""
    scores = {"L0-2": 1.0, "L3-5": 4.0, "L6-8": 2.0, "L9-11": 3.0}
    outliers = {0: 1, 4: 2, 5: 2, 7: 2, 11: 3}
    per_layer = {f"model.layers.{n}.self_attn.o_proj": {"num_outliers": count} for n, count in outliers.items()}
    return {
        "layer_results": {label: {"sensitivity_score": score} for label, score in scores.items()},
        "channel_results": {"per_layer": per_layer},
        "hessian_traces": {"L0-2": 0.1, "L3-5": 0.4, "L6-8": 0.2, "L9-11": 0.3},
        "sparsity": {"L0-2": 0.9, "L3-5": 0.6, "L6-8": 0.8, "L9-11": 0.7},
    }


def test_correlations_of_what_the_notes_hold():
    """Window labels, scores and module names are enough; layer 1 is not layer 11."""
    given_results = in_the_shape_of_the_notes()
    found = validate_metric_correlations(given_results)
    assert {name: (round(row["r"], 6), row["n"], row["held"]) for name, row in found.items()} == {
        "hessian_sensitivity": (1.0, 4, True),
        "outliers_sensitivity": (1.0, 4, True),  # 1, 4, 2 and 3 channels
        "sparsity_degradation": (-1.0, 4, True),
    }
    rows, r = correlate_layer_and_channel_sensitivity(given_results["layer_results"], given_results["channel_results"])
    assert [row["total_outliers"] for row in rows] == [1, 4, 2, 3] and r == pytest.approx(1.0)
    assert rows[1]["sensitivity_score"] == 4.0 and rows[1]["degradation"] is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_results": {"early": {"sensitivity_score": 1.0}}}, "'early', which is not a range of layers"),
        ({"channel_results": {"per_layer": {"lm_head": {"num_outliers": 1}}}}, "lm_head has no `layer`"),
        ({"hessian_traces": {"L0-2": 0.1}}, "hessian_traces has no value for L3-5, L6-8, L9-11"),
    ],
)
def test_results_that_can_not_be_read(change, words):
    """What is missing, by name."""
    with pytest.raises(InvalidInput, match=words):
        validate_metric_correlations({**in_the_shape_of_the_notes(), **change})


def test_results_without_a_level():
    """A report of something else says what is missing."""
    with pytest.raises(InvalidInput, match=r"'layer_results' is missing.*got operator_analysis"):
        validate_metric_correlations({"operator_analysis": {}})
