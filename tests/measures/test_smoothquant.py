"""SmoothQuant: the same model in floating point, and better rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noisescope.diagnostic import ChannelOutlierDetector, apply_smoothquant_scaling
from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.measures.smoothquant import W8A8, find_folds, rounded_kl, rounding_error, smooth, smoothing_scales
from noisescope.model.anatomy import dissect
from noisescope.testing import tiny_model

IDS = torch.randint(3, 60, (6, 16), generator=torch.Generator().manual_seed(2))
BATCHES = list(IDS.split(2))
PLANTED = 60.0


def planted(name: str = "llama") -> Any:
    """A model with outlier channels in what its norms give: the same function, for the weights make up for it."""
    model = tiny_model(name, initializer_range=0.1)
    with torch.no_grad():
        for block in model.model.layers:  # type: ignore[union-attr]
            for norm, linears in (
                (block.input_layernorm, (block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)),
                (block.post_attention_layernorm, (block.mlp.gate_proj, block.mlp.up_proj)),
            ):
                norm.weight[[3, 17]] *= PLANTED
                for linear in linears:
                    linear.weight[:, [3, 17]] /= PLANTED
    return model


def test_folds_of_a_llama() -> None:
    """Norms into what reads them, values into o_proj (two query heads share a value head), up into down."""
    model = tiny_model("llama", layers=1)
    found = {fold.source.rpartition(".")[2]: fold for fold in find_folds(model, IDS, dissect(model))}
    short = {name: [target.rpartition(".")[2] for target in fold.targets] for name, fold in found.items()}
    assert short == {
        "input_layernorm": ["q_proj", "k_proj", "v_proj"],
        "post_attention_layernorm": ["gate_proj", "up_proj"],
        "v_proj": ["o_proj"],
        "up_proj": ["down_proj"],
    }
    assert found["v_proj"].repeats == 2 and found["v_proj"].head == 8


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "opt", "gpt2", "mixtral"])
@pytest.mark.parametrize("alpha", [0.3, 0.8])
def test_the_float_output_stays(name: str, alpha: float) -> None:
    """On every architecture with something to fold, to float32 round-off; and the model given is left alone."""
    model = tiny_model(name, initializer_range=0.1)
    before = model(IDS).logits
    smoothed = smooth(model, BATCHES, alpha=alpha)
    after = smoothed.model(IDS).logits
    assert smoothed.float_error < 1e-5
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-5 * float(before.detach().abs().max()) + 1e-6)
    assert torch.equal(model(IDS).logits, before)
    done = [fold for fold in smoothed.folds if fold.alpha is not None]
    changed = [
        key for key, value in smoothed.model.state_dict().items() if not torch.equal(value, model.state_dict()[key])
    ]
    assert done and len(changed) >= 2 * len(done)  # something was really moved


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_stay_16_bits(name: str, dtype: torch.dtype) -> None:
    """Folded in float32, given back in the model's own dtype, and moved by round-off alone."""
    model = tiny_model(name, initializer_range=0.1).to(dtype)
    smoothed = smooth(model, BATCHES, alpha=0.5)
    assert {p.dtype for p in smoothed.model.parameters()} == {dtype}
    assert 0 < smoothed.float_error < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folds_that_change_the_output_are_refused(dtype: torch.dtype) -> None:
    """Here the residual stream reads the norm, too; in 16 bits as in 32."""
    model = tiny_model("bloom", apply_residual_connection_post_layernorm=True).to(dtype)
    with pytest.raises(UnsupportedModel, match="in float32: this architecture can't be smoothed"):
        smooth(model, BATCHES, alpha=0.5)


@pytest.mark.parametrize(
    ("name", "norms"), [("llama", [0, 1, 0, 1]), ("gpt2", [0, 1, 0, 1]), ("gpt_neox", [0, 0, 0, 0])]
)
def test_norms_know_what_was_added_before(name: str, norms: list[int]) -> None:
    """The MLP's norm reads what attention added, but not where the two run side by side."""
    model = tiny_model(name)
    folds = find_folds(model, IDS, dissect(model))
    assert [fold.norm for fold in folds if fold.norm is not None] == norms


def test_outliers_cost_less_when_smoothed() -> None:
    """With planted outlier channels W8A8 KL falls at least twofold, with alpha fixed and searched."""
    model = planted()
    before = sum(rounded_kl(model, model, BATCHES))
    for alpha in (0.5, None):
        smoothed = smooth(model, BATCHES, alpha=alpha)
        after = sum(rounded_kl(smoothed.model, model, BATCHES))
        assert smoothed.float_error < 1e-5 and after < before / 2
    gains = [fold.gains["SmoothQuant"] for fold in smoothed.folds if "layernorm" in fold.fold.source]
    assert min(gains) > 4  # squared error of the linears that read the planted channels


def test_the_search_leaves_alone_what_is_best_so() -> None:
    """Its choice never has a larger error than no smoothing, and each fold has an alpha of its own."""
    smoothed = smooth(tiny_model("llama"), BATCHES)
    assert all(fold.gains["SmoothQuant"] >= 1 for fold in smoothed.folds)
    assert all((fold.alpha is None) == (fold.gains["SmoothQuant"] == 1) for fold in smoothed.folds)


def test_scales_by_hand() -> None:
    """max|X|^alpha over max|W|^(1 - alpha); a dead channel is left alone; a scale that halves the outlier helps."""
    scales = smoothing_scales(torch.tensor([16.0, 1.0, 0.0]), torch.tensor([4.0, 1.0, 2.0]), 0.5)
    assert scales.tolist() == pytest.approx([2.0, 1.0, 1.0])
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 100
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    scales = smoothing_scales(x.abs().amax(0), weight.abs().amax(0), 0.5)
    assert rounding_error(x, weight, W8A8, scales) < 0.5 * rounding_error(x, weight, W8A8, None)


def test_by_the_names_of_the_notes() -> None:
    """The function and the detector's method give a smoothed copy; without outliers there is nothing to do."""
    model = planted()
    assert apply_smoothquant_scaling(model, BATCHES, alpha=0.5).float_error < 1e-5
    detector = ChannelOutlierDetector(model, BATCHES, quantile_threshold=1e6)
    with pytest.raises(InvalidInput, match=r"collect_statistics\(\) first"):
        detector.apply_smoothquant_scaling()
    detector.collect_statistics()
    with pytest.raises(InvalidInput, match="nothing to smooth"):
        detector.apply_smoothquant_scaling()
    detector.quantile_threshold = 1.5
    detector.collect_statistics()
    assert detector.apply_smoothquant_scaling(alpha=0.75).float_error < 1e-5
    with pytest.raises(InvalidInput, match=r"from 0 .* to 1"):
        smooth(model, BATCHES, alpha=1.5)
