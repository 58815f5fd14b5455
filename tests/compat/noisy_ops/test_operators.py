"""NoisyMatMul and the other operators, called by name on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope import noisy_ops as no
from noisescope.compat.noisy_ops.state import state
from noisescope.errors import NoiseRoundsAway, NothingInjected


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


A, B, X = normal(8, 16, 32), normal(8, 32, 24, seed=1), normal(8, 16, 32, seed=2)
W, BIAS = normal(24, 32, seed=3), normal(24, seed=4)
CASES = {
    "NoisyMatMul": ((A, B), A @ B, "matmul"),
    "NoisyBMM": ((A, B), torch.bmm(A, B), "bmm"),
    "NoisyLinear": ((X, W, BIAS), F.linear(X, W, BIAS), "linear"),
    "NoisySoftmax": ((X, -1), X.softmax(-1), "softmax"),
    "NoisySiLU": ((X,), F.silu(X), "silu"),
    "NoisyGeLU": ((X,), F.gelu(X), "gelu"),
    "NoisyLayerNorm": ((X, (32,), torch.ones(32), torch.zeros(32), 1e-5), F.layer_norm(X, (32,)), "norm"),
}


@pytest.mark.parametrize("name", CASES)
def test_each_operator(name):
    """Clean while noise is off; 5 % off and counted while it is on, by both spellings, another draw each time."""
    arguments, clean, operator = CASES[name]
    noisy = getattr(no, name)
    assert torch.equal(noisy(*arguments), clean)
    no.enable_noisy_ops(error_scale=0.05, all_ops_mode=True, seed=1)
    found = [noisy(*arguments), noisy.apply(*arguments)]
    assert no.get_operator_injection_stats()[operator] == {"forward": 2, "backward": 0}
    assert no.disable_noisy_ops() == {"total_forward": 2, "total_backward": 0}
    assert all(0.04 < float((y - clean).norm() / clean.norm()) < 0.06 for y in found)
    assert not torch.equal(*found)
    no.enable_noisy_ops(error_scale=0.05, all_ops_mode=True, seed=1)
    assert torch.equal(noisy(*arguments), found[0])
    no.disable_noisy_ops()
    assert torch.equal(noisy(*arguments), clean)


def gradients(function: Any) -> list[Tensor]:
    leaves = [A.clone().requires_grad_(), B.clone().requires_grad_()]
    function(*leaves).square().sum().backward()
    return [leaf.grad for leaf in leaves]


def test_gradients_of_both_factors():
    """Backward noise is 5 % of each gradient and leaves the result clean; forward noise passes straight through."""
    clean = gradients(torch.matmul)
    no.set_noise_phases(forward=False, backward=True)
    no.enable_noisy_ops(error_scale=0.05, seed=1)
    assert torch.equal(no.NoisyMatMul(A, B), A @ B)
    noisy = gradients(no.NoisyMatMul)
    assert no.disable_noisy_ops() == {"total_forward": 0, "total_backward": 1}
    for a, b in zip(clean, noisy, strict=True):
        assert 0.04 < float((a - b).norm() / a.norm()) < 0.06
    no.set_noise_phases(forward=True, backward=False)
    no.enable_noisy_ops(error_scale=0.05, seed=1)
    leaf = A.clone().requires_grad_()
    no.NoisyMatMul(leaf, B).sum().backward()
    assert no.disable_noisy_ops() == {"total_forward": 1, "total_backward": 0}
    assert torch.allclose(leaf.grad, B.sum(-1)[:, None].expand_as(A), rtol=1e-4, atol=1e-5)


def test_selections_hold(model):
    """Operators, layers, the empty list and all_ops_mode decide as they do for modules."""
    no.enable_noisy_ops(seed=1)
    assert torch.equal(no.NoisySoftmax(X), X.softmax(-1))  # only products without all_ops_mode
    no.set_selective_operators(["softmax"])
    assert torch.equal(no.NoisyMatMul(A, B), A @ B) and not torch.equal(no.NoisySoftmax(X), X.softmax(-1))
    no.set_selective_operators(None)
    no.register_layer_hooks(model)
    no.set_selective_layers([0])
    assert torch.equal(no.NoisyMatMul(A, B), A @ B)  # in no layer
    no.set_selective_layers([])
    assert torch.equal(no.NoisyMatMul(A, B), A @ B)
    no.set_selective_layers(None)
    no.set_operator_noise_scales({"matmul": 3.0})
    assert 0.12 < float((no.NoisyMatMul(A, B) - A @ B).norm() / (A @ B).norm()) < 0.18
    no.disable_noisy_ops()


def test_zero_is_an_error():
    """A selected operator that was not called, and noise that rounds away."""
    no.set_selective_operators(["softmax", "gelu"])
    no.enable_noisy_ops()
    no.NoisySoftmax(X)
    with pytest.raises(NothingInjected, match="gelu never fired"):
        no.disable_noisy_ops()
    no.set_selective_operators(None)
    no.enable_noisy_ops(1e-4)
    no.NoisyMatMul(A.bfloat16(), B.bfloat16())
    with pytest.raises(
        NoiseRoundsAway,
        match=r"NoisyMatMul, forward: noise of scale 0\.0001 is lost to rounding in "
        r"bfloat16",
    ):
        no.disable_noisy_ops()


SQUARE = normal(32, 32, seed=5) / 6


class Block(nn.Module):
    """A block of two linears, and a third that it writes by hand: no module, so nobody noises it but its name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
        self.selected: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.selected.append(no.should_inject_for_layer())
        return x + self.second(no.NoisyLinear(self.first(x), SQUARE))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_inside_a_model_a_call_has_its_layer():
    """Counts and selections by layer; each block can ask for its own."""
    model = Stack()
    no.register_layer_hooks(model)
    no.set_selective_layers([1])
    no.enable_noisy_ops(seed=1)
    model(X)
    assert no.get_layer_injection_stats() == {1: {"forward": 3, "backward": 0}}
    assert [layer.selected for layer in model.layers] == [[False], [True], [False]]
    no.set_selective_layers(None)
    no.set_per_layer_scales({2: 0.5})
    no.reset_injection_stats()
    model(X)
    assert no.get_layer_injection_stats() == {n: {"forward": 3, "backward": 0} for n in range(3)}
    scales = {target.unit.place: target.forward.scale for target in state.direct._targets.values()}
    assert scales == pytest.approx({0: 0.05, 1: 0.05, 2: 0.5})
    no.disable_noisy_ops()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_block_repeats_the_noise(reentrant):
    """The gradients under checkpointing are those without it."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return x

    found = []
    for kind in (Stack, Checkpointed):
        model, x = kind(), X.clone().requires_grad_()
        no.enable_noisy_ops(seed=1)
        model(x).square().sum().backward()
        found.append((x.grad, no.disable_noisy_ops()))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]


def test_noise_falls_once_where_the_model_is_watched():
    """In an attention module, whose own products are noised, the name changes nothing."""

    class TinyAttention(nn.Module):
        def __init__(self, product: Any, softmax: Any) -> None:
            super().__init__()
            self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.v_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.product, self.softmax = product, softmax

        def forward(self, x: Tensor) -> Tensor:
            scores = self.softmax(self.product(self.q_proj(x), self.k_proj(x).transpose(-1, -2)), dim=-1)
            return self.o_proj(self.product(scores, self.v_proj(x)))

    found = []
    for product, softmax in ((torch.matmul, torch.softmax), (no.NoisyMatMul, no.NoisySoftmax)):
        torch.manual_seed(0)
        model = TinyAttention(product, softmax)
        no.enable_noisy_ops(all_ops_mode=True, seed=1)
        with torch.no_grad():
            found.append(model(X))
        assert no.disable_noisy_ops()["total_forward"] == 7
    assert torch.equal(*found)


def test_training_only_leaves_evaluation_clean():
    """Without gradients the operators are torch's."""
    no.set_training_only()
    no.enable_noisy_ops()
    with torch.no_grad():
        assert torch.equal(no.NoisyMatMul(A, B), A @ B)
    assert not torch.equal(no.NoisyMatMul(A, B), A @ B)
    no.disable_noisy_ops()
