"""The screen predicts what noise costs, from gradients alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.injection import Injection
from noisescope.measures.divergence import kl_divergence
from noisescope.measures.fisher import Screen, fisher_factor
from noisescope.probe.formats import Format
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian, Uniform
from noisescope.sites import Site
from noisescope.testing import tiny_model

TOKENS = torch.randint(1, 60, (6, 12), generator=torch.Generator().manual_seed(3))


def screened(model: Any, perturbation: Any = None, *, draws: int = 1, seed: int = 0, tokens: Tensor = TOKENS) -> Screen:
    where = Injection(perturbation or Gaussian(1.0), phases={"forward"})
    with Screen(model, where) as screen, torch.enable_grad():
        screen.samples = torch.arange(len(tokens))
        logits = model(tokens, use_cache=False).logits.flatten(0, 1)
        rows = torch.arange(len(logits))
        screen.score(logits, rows, rows * 7919, draws=draws, seed=seed)
    return screen


def scale_of(injection: Injection, site: Site) -> float:
    """s^2 / 2 at a site: what a sum at noise of scale 1 is multiplied with. 1/2 where the error has no scale."""
    perturbation = injection.perturbation_at(site)
    return perturbation.scale**2 / 2 if isinstance(perturbation, (Gaussian, Uniform)) else 0.5


def predicted(screen: Screen, injection: Injection, draws: int) -> float:
    """Mean KL per token."""
    total = sum(
        sum(sums.samples.values()) * scale_of(injection, site)
        for site, sums in screen.sums.items()
        if injection.selects(site)
    )
    return total / draws / TOKENS.numel()


@torch.no_grad()
def injected(model: Any, injection: Injection, seeds: int) -> float:
    clean = model(TOKENS, use_cache=False).logits.flatten(0, 1)
    total = 0.0
    for seed in range(seeds):
        with inject(model, Injection(**{**injection.__dict__, "seed": seed})):
            total += float(kl_divergence(clean, model(TOKENS, use_cache=False).logits.flatten(0, 1)).mean())
    return total / seeds


@pytest.fixture(scope="module")
def sharp() -> Any:
    """A tiny Llama whose output depends on its input: a random one has almost flat distributions."""
    model = tiny_model("llama", layers=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    return model


@pytest.mark.parametrize(
    "target",
    [
        {"operators": {"linear"}, "layers": {1}},
        {"operators": {"softmax"}},
        {"operators": {"matmul"}},
        {"operators": {"norm"}},
        {"operators": {"silu"}, "layers": {0}},
        {"operators": {"residual"}, "layers": {2}},
        {"operators": {"embedding"}},
        {"places": {"lm_head"}},
        {"modules": ("*.2.mlp.down_proj",), "channels": (3, 4)},
    ],
    ids=str,
)
def test_the_prediction_is_what_injection_measures(sharp: Any, target: dict[str, Any]) -> None:
    """For every operator, place and for channels alone, within the error of the draws."""
    draws = 16
    injection = Injection(Gaussian(0.01), phases={"forward"}, **target)
    screen = screened(sharp, draws=draws)
    if injection.channels:
        site = next(s for s in screen.sums if injection.selects(s))
        channels = screen.sums[site].channels
        assert channels is not None
        guess = float(channels[list(injection.channels)].sum()) * scale_of(injection, site) / draws / TOKENS.numel()
    else:
        guess = predicted(screen, injection, draws)
    assert guess == pytest.approx(injected(sharp, injection, 24), rel=0.25)


@pytest.mark.parametrize("noise", [Gaussian(0.01, "rms"), Gaussian(0.002, "absolute"), Uniform(0.01)], ids=str)
def test_each_kind_of_noise_has_its_formula(sharp: Any, noise: Any) -> None:
    """Relative to the element, to the token's rms, absolute; uniform noise of the same variance costs the same."""
    screen = screened(sharp, type(noise)(1.0, noise.relative_to), draws=16)
    injection = Injection(noise, operators={"linear"}, layers={1}, phases={"forward"})
    assert predicted(screen, injection, 16) == pytest.approx(injected(sharp, injection, 24), rel=0.25)


def test_rounding_is_predicted_by_its_projection(sharp: Any) -> None:
    """A number format's error is the same every time: its product with the gradient counts, token by token."""
    screen = screened(sharp, Format("fp8_e4m3"), draws=16)
    injection = Injection(Format("fp8_e4m3"), operators={"linear"}, layers={2}, phases={"forward"})
    assert predicted(screen, injection, 16) == pytest.approx(injected(sharp, injection, 1), rel=0.6)


def test_channels_and_samples_add_up_to_the_same(sharp: Any) -> None:
    """Both are sums over the same squares."""
    for sums in screened(sharp).sums.values():
        assert sums.channels is not None
        assert float(sums.channels.sum()) == pytest.approx(sum(sums.samples.values()), rel=1e-4)


def test_a_draw_belongs_to_its_sample_and_position(sharp: Any) -> None:
    """The sums of a sample don't change when others leave the batch."""
    whole, alone = screened(sharp), screened(sharp, tokens=TOKENS[:1])
    for site, sums in alone.sums.items():
        assert sums.samples[0] == pytest.approx(whole.sums[site].samples[0], rel=2e-3)


def test_the_random_gradient_has_the_right_covariance() -> None:
    """E[v v^T] = diag(p) - p p^T for peaked and flat rows alike; rows that aren't scored get nothing."""
    p = torch.tensor([0.9, 0.05, 0.03, 0.019, 0.001])
    count = 20_000
    rows = torch.arange(0, 2 * count, 2)
    v = fisher_factor(p.log().expand(2 * count, 5), rows, torch.arange(count), seed=1)
    assert not v[1::2].any()
    covariance = v[::2].T @ v[::2] / count
    exact = p.diag() - p[:, None] * p
    assert torch.allclose(covariance, exact, atol=4e-3) and float(covariance[4, 4]) == pytest.approx(1e-3, rel=0.1)
    assert not torch.equal(v[::2], fisher_factor(p.log().expand(count, 5), torch.arange(count), torch.arange(count), 2))


def test_a_vocabulary_wider_than_a_window() -> None:
    """Two windows of the tape: signs of the second are no copy of the first."""
    width = 65_536 + 2_000
    v = fisher_factor(torch.zeros(3, width), torch.arange(3), torch.arange(3), seed=0).sign()
    agreement = (v[:, :2000] * v[:, 65_536:]).mean(1)
    assert float(agreement.abs().max()) < 0.1


def test_nothing_is_left_behind(sharp: Any) -> None:
    """No wrapper, no gradient, every requires_grad as it was, the same logits; also after an error."""
    flags = {name: p.requires_grad for name, p in sharp.named_parameters()}
    clean = sharp(TOKENS).logits
    screened(sharp)
    with pytest.raises(RuntimeError, match="stop"), Screen(sharp, Injection(Gaussian(1.0))):
        raise RuntimeError("stop")
    assert {name: p.requires_grad for name, p in sharp.named_parameters()} == flags
    assert all(p.grad is None for p in sharp.parameters())
    assert not [m for m in sharp.modules() if "forward" in m.__dict__]
    assert torch.equal(sharp(TOKENS).logits, clean)


def test_what_it_can_not_do_it_says(sharp: Any) -> None:
    """Noise on inputs or weights has no screen; a forward without an embedding has no beginning."""
    with pytest.raises(InvalidInput, match="not on 'weight'"):
        Screen(sharp, Injection(Gaussian(1.0), operators={"linear"}, tensor="weight"))
    with (
        pytest.raises(UnsupportedModel, match="no tensor to differentiate from"),
        Screen(sharp, Injection(Gaussian(1.0))) as screen,
    ):
        screen.score(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0]), draws=1, seed=0)


def test_a_value_changed_in_place_is_noticed() -> None:
    """Its square would be that of another number: that site has no prediction, the others have."""

    class Doubled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.weight = inner.weight  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).mul_(2.0)  # type: ignore[no-any-return]

    model = tiny_model("llama", layers=1)
    model.model.layers[0].mlp.up_proj = Doubled(model.model.layers[0].mlp.up_proj)  # type: ignore[union-attr,index]
    screen = screened(model)
    assert [site.module for site in screen.lost] == ["model.layers.0.mlp.up_proj.inner"]
    assert not screen.lost & set(screen.sums) and len(screen.sums) > 10


def test_mixture_of_experts_and_heads() -> None:
    """Rows that belong to no known sample are shared out; a channel inside attention is a head."""
    model = tiny_model("mixtral", layers=1)
    screen = screened(model)
    heads = [sums for site, sums in screen.sums.items() if site.operator == "softmax"]
    assert all(sums.channels is not None and len(sums.channels) == 4 for sums in heads)
    experts = [s for s in screen.sums if isinstance(s, Site) and "experts" in s.module]
    assert experts and all(len(screen.sums[s].samples) == len(TOKENS) for s in experts)
