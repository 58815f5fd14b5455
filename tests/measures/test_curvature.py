"""Traces against exact ones of matrices and of a small network's Hessian; Fisher against its closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from noisescope.errors import InvalidInput
from noisescope.measures.curvature import (
    TraceEstimate,
    gradient_norms,
    hessian_traces,
    hutch_plus_plus,
    parameter_fisher,
    xtrace,
)
from noisescope.testing import tiny_model

ESTIMATORS = [hutch_plus_plus, xtrace]
SIZE = 40


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def matrix(eigenvalues: list[float]) -> Tensor:
    size = len(eigenvalues)
    q, _ = torch.linalg.qr(torch.randn(size, size, generator=seeded(0), dtype=torch.float64))
    return q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ q.T


MATRICES = {
    "decaying": matrix([0.7**i for i in range(SIZE)]),
    "flat": matrix([1 + 0.1 * (i % 3) for i in range(SIZE)]),
    "indefinite": matrix([(-1) ** i / (i + 1) for i in range(SIZE)]),
    "rank one": matrix([5.0] + [0.0] * (SIZE - 1)),
    "zero": torch.zeros(SIZE, SIZE, dtype=torch.float64),
}


def many(estimator: Callable[..., TraceEstimate], a: Tensor, probes: int, seeds: int) -> list[TraceEstimate]:
    return [estimator(a.mv, a.shape[0], probes=probes, generator=seeded(s), dtype=torch.float64) for s in range(seeds)]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", MATRICES)
def test_unbiased_and_honest(estimator: Callable[..., TraceEstimate], name: str) -> None:
    """Over 150 seeds the mean is the trace within 4 standard errors, and the interval holds it as often as is said."""
    a = MATRICES[name]
    trace = float(a.trace())
    estimates = many(estimator, a, 12, 150)
    values = torch.tensor([e.trace for e in estimates], dtype=torch.float64)
    assert abs(float(values.mean()) - trace) <= 4 * float(values.std()) / math.sqrt(150) + 1e-12
    held = sum(e.low - 1e-12 <= trace <= e.high + 1e-12 for e in estimates) / 150
    assert held >= 0.78
    if name in ("flat", "indefinite") and estimator is not xtrace:
        assert 0.88 <= held <= 0.995  # no wider than need be either
    for e in estimates:
        assert e.parameters == SIZE and e.probes == 12 and e.per_parameter == e.trace / SIZE and e.low <= e.high


def test_sketches_win_where_the_spectrum_decays() -> None:
    """A decaying spectrum: Hutch++ is over three times nearer than Hutchinson, XTrace nearer still; rank one: exact."""
    a = MATRICES["decaying"]
    error = {}
    for estimator in ESTIMATORS:
        values = torch.tensor([e.trace for e in many(estimator, a, 24, 40)], dtype=torch.float64)
        error[estimator] = float((values - a.trace()).square().mean().sqrt())
    signs = torch.randint(0, 2, (40, 24, SIZE), generator=seeded(0), dtype=torch.float64) * 2 - 1
    plain = ((signs @ a) * signs).sum(-1).mean(-1)  # Hutchinson's estimator, 40 times
    assert error[hutch_plus_plus] < float((plain - a.trace()).square().mean().sqrt()) / 3
    assert error[xtrace] < error[hutch_plus_plus] / 1.5
    for estimator in (hutch_plus_plus, xtrace):
        for e in many(estimator, MATRICES["rank one"], 8, 5):
            assert e.trace == pytest.approx(5, abs=1e-9) and e.high - e.low < 1e-9


@pytest.mark.parametrize("estimator", [hutch_plus_plus, xtrace], ids=lambda f: f.__name__)
def test_small_matrices_are_exact(estimator: Callable[..., TraceEstimate]) -> None:
    """With as many probes as dimensions the diagonal is read off, and fewer products are spent."""
    for size in (1, 2, 7):
        a = MATRICES["indefinite"][:size, :size]
        e = estimator(a.mv, size, probes=8, generator=seeded(0), dtype=torch.float64)
        assert e.trace == e.low == e.high == pytest.approx(float(a.trace()), abs=1e-12) and e.probes == size


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=lambda f: f.__name__)
def test_no_more_products_than_asked(estimator: Callable[..., TraceEstimate]) -> None:
    """`probes` is what is paid."""
    a, calls = MATRICES["flat"], []

    def counted(v: Tensor) -> Tensor:
        assert v.is_contiguous()  # the backward of grouped products (MoE) takes nothing else
        calls.append(v.shape)
        return a.mv(v)

    for probes in (4, 7, 9):
        calls.clear()
        e = estimator(counted, SIZE, probes=probes, generator=seeded(0), dtype=torch.float64)
        assert len(calls) == e.probes <= probes and set(calls) == {(SIZE,)}


class Net(nn.Module):
    """Two layers with a curved loss, and an exact Hessian of 67 parameters by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        for number, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=seeded(number)) * 0.7

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


INPUTS, LABELS = torch.randn(20, 4, generator=seeded(9)), torch.randint(0, 3, (20,), generator=seeded(8))


def loss_of(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(INPUTS), LABELS)


def layers_of(net: Net) -> dict[str, list[nn.Parameter]]:
    return {"first": list(net.first.parameters()), "second": list(net.second.parameters())}


def exact_trace(net: nn.Module, names: list[str], loss: Callable[[nn.Module], Tensor] = loss_of) -> float:
    """From torch's own full Hessian of the functional model, in float64."""
    net = net.double()
    chosen = {n: p.detach() for n, p in net.named_parameters() if n in names}

    class Bound(nn.Module):
        def __init__(self, values: dict[str, Tensor]) -> None:
            super().__init__()
            self.values = values

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(net, self.values, args, kwargs)

    def of(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in chosen.values()])
        return loss(Bound({n: part.reshape(chosen[n].shape) for n, part in zip(chosen, parts, strict=True)}))

    flat = torch.cat([p.reshape(-1) for p in chosen.values()])
    return float(torch.autograd.functional.hessian(of, flat).trace())


def double_loss(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(INPUTS.double()), LABELS)


@pytest.fixture(scope="module")
def exact_traces() -> dict[str, float]:
    return {name: exact_trace(Net(), [f"{name}.weight", f"{name}.bias"], double_loss) for name in ("first", "second")}


@pytest.mark.parametrize("method", ["hutchinson", "hutch++", "xtrace"])
def test_traces_of_a_network(method: str, exact_traces: dict[str, float]) -> None:
    """The exact block traces lie in (a little more than) the intervals, which are narrow enough to say something."""
    net = Net()
    probes = 200 if method == "hutchinson" else 24
    for name, e in hessian_traces(net, loss_of, layers_of(net), probes=probes, method=method, seed=3).items():
        exact, half = exact_traces[name], (e.high - e.low) / 2
        assert abs(e.trace - exact) < 2 * half < 0.4 * sum(exact_traces.values())
        assert e.parameters == {"first": 40, "second": 27}[name] and e.per_parameter == e.trace / e.parameters


def test_groups_may_overlap_and_share_probes(exact_traces: dict[str, float]) -> None:
    """One run serves parts and their union alike, a parameter named twice counts once, and the blocks add up."""
    net = Net()
    first, second = layers_of(net).values()
    groups = {"all": [*first, *second], "first": first, "twice": [*first, *first], "bias": [net.first.bias]}
    e = hessian_traces(net, loss_of, groups, probes=200)
    assert e["twice"] == e["first"] and e["all"].parameters == 67
    assert e["all"].low < sum(exact_traces.values()) < e["all"].high
    bias = exact_trace(Net(), ["first.bias"], double_loss)
    assert e["bias"].low < bias < e["bias"].high and e["bias"].parameters == 8


def test_the_seed_decides() -> None:
    """Same seed, same numbers; another seed, others; the caller's random state is neither read nor moved."""
    net = Net()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = hessian_traces(net, loss_of, layers_of(net), seed=5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert hessian_traces(net, loss_of, layers_of(net), seed=5) == one
    assert hessian_traces(net, loss_of, layers_of(net), seed=6) != one


def test_constant_and_unused_parameters_have_no_curvature() -> None:
    """A loss linear in a parameter, or without it, has trace 0 there."""
    net = Net()
    linear = {"bias": [net.second.bias], "unused": [net.first.weight]}
    for method in ("hutchinson", "hutch++", "xtrace"):
        for e in hessian_traces(net, lambda m: m.second(torch.ones(8)).sum(), linear, method=method).values():
            assert e.trace == e.low == e.high == 0


MEASURES: dict[str, Callable[[nn.Module, dict[str, list[nn.Parameter]]], Any]] = {
    "hessian": lambda net, groups: hessian_traces(net, loss_of, groups, probes=4),
    "hutch++": lambda net, groups: hessian_traces(net, loss_of, groups, probes=4, method="hutch++"),
    "fisher": lambda net, groups: parameter_fisher(net, [INPUTS], groups=groups),
    "norms": lambda net, groups: gradient_norms(net, loss_of, groups),
}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("fails", [False, True])
def test_no_trace_is_left(measure: str, fails: bool) -> None:
    """requires_grad and .grad are as before, also after an error, also under no_grad and inference_mode."""
    net = Net()
    net.first.weight.requires_grad_(False)
    net.second.bias.grad = torch.full((3,), 7.0)
    groups = layers_of(net)
    if fails:
        net.second.forward = None  # type: ignore[method-assign,assignment]
        with pytest.raises(TypeError):
            MEASURES[measure](net, groups)
    else:
        results = [MEASURES[measure](net, groups)]
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                results.append(MEASURES[measure](net, groups))
        assert str(results[0]) == str(results[1]) == str(results[2])
    assert [p.requires_grad for p in net.parameters()] == [False, True, True, True]
    assert [p.grad is None for p in net.parameters()] == [True, True, True, False]
    assert torch.equal(net.second.bias.grad, torch.full((3,), 7.0))


@pytest.fixture(scope="module")
def language_model() -> Iterator[Any]:
    yield tiny_model("llama", layers=2)


def test_attention_of_transformers_can_be_differentiated_twice(language_model: Any) -> None:
    """sdpa attention, whose fused kernel has no second derivative: the trace of one block's norm, against the exact."""
    tokens = torch.arange(1, 13).reshape(2, 6)

    def loss(model: Any) -> Tensor:
        return functional.cross_entropy(
            model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    assert language_model.config._attn_implementation == "sdpa"
    norm = language_model.model.layers[0].input_layernorm.weight
    attention = list(language_model.model.layers[1].self_attn.parameters())
    e = hessian_traces(language_model, loss, {"norm": [norm], "attention": attention}, probes=32, method="xtrace")
    eager = tiny_model("llama", layers=2, attn_implementation="eager")
    assert e["norm"].trace == pytest.approx(
        exact_trace(eager, ["model.layers.0.input_layernorm.weight"], loss), rel=1e-3
    )
    shared = hessian_traces(language_model, loss, {"norm": [norm], "attention": attention}, probes=8)
    assert all(math.isfinite(x.trace) and x.high > x.low for x in shared.values())
    assert shared["attention"].parameters == 32 * 32 * 3


def regression() -> nn.Linear:
    linear = nn.Linear(4, 3)
    linear.weight.data = torch.randn(3, 4, generator=seeded(0))
    linear.bias.data = torch.randn(3, generator=seeded(1))
    return linear


def test_fisher_of_softmax_regression_is_its_closed_form() -> None:
    """F of weight kj is the mean of p_k (1 - p_k) x_j^2: samples one by one, not the square of a batch's mean."""
    model = regression()
    x = INPUTS[:6]
    p = model(x).softmax(-1).detach()
    spread = p * (1 - p)
    fisher = parameter_fisher(model, [x[:4], x[4:]], draws=400, seed=1)
    assert set(fisher) == {"weight", "bias"} and fisher["weight"].dtype == torch.float32
    assert torch.allclose(fisher["weight"], torch.einsum("nk,nj->kj", spread, x.square()) / 6, rtol=0.2, atol=0.005)
    assert torch.allclose(fisher["bias"], spread.mean(0), rtol=0.15)


def test_fisher_of_a_language_model_is_that_of_all_labels(language_model: Any) -> None:
    """Against brute force: every label of every position weighted with its probability, gradients by backward()."""
    tokens = torch.arange(3, 15).reshape(3, 4)
    name = "model.layers.1.mlp.down_proj.weight"
    weight = dict(language_model.named_parameters())[name]
    brute = torch.zeros_like(weight)
    for row in tokens:
        log_p = language_model(row[None]).logits[0].log_softmax(-1)
        for position in range(4):
            for label in range(64):
                (g,) = torch.autograd.grad(log_p[position, label], weight, retain_graph=True)
                brute += log_p[position, label].detach().exp() * g.square() / 3
    fisher = parameter_fisher(language_model, [tokens], draws=150, seed=2, groups={"down": [weight]})
    assert list(fisher) == [name]
    assert float(fisher[name].sum() / brute.sum()) == pytest.approx(1, abs=0.1)
    assert float(torch.corrcoef(torch.stack([fisher[name].flatten(), brute.flatten()]))[0, 1]) > 0.9


def test_fisher_draws_from_the_model_not_from_the_data(language_model: Any) -> None:
    """Labels in the batch are ignored, the seed decides, and padding takes no part."""
    tokens = torch.arange(3, 15).reshape(2, 6)
    weight = language_model.model.layers[1].mlp.down_proj.weight
    groups = {"down": [weight]}
    (plain,) = parameter_fisher(language_model, [tokens], groups=groups).values()
    (labelled,) = parameter_fisher(language_model, [{"input_ids": tokens, "labels": tokens}], groups=groups).values()
    (other,) = parameter_fisher(language_model, [tokens], groups=groups, seed=1).values()
    assert torch.equal(plain, labelled) and not torch.equal(plain, other)
    mask = torch.ones_like(tokens)
    mask[:, 1:] = 0
    masked = {"input_ids": tokens, "attention_mask": mask}
    (first,) = parameter_fisher(language_model, [tokens[:, :1]], groups=groups, draws=400).values()
    (padded,) = parameter_fisher(language_model, [masked], groups=groups, draws=400).values()
    assert float(padded.sum() / first.sum()) == pytest.approx(1, abs=0.15)


def test_gradient_norms() -> None:
    """As torch's own after backward()."""
    net = Net()
    norms = gradient_norms(net, loss_of, layers_of(net))
    loss_of(net).backward()
    for name, group in layers_of(net).items():
        together = torch.cat([p.grad.flatten() for p in group if p.grad is not None])
        assert norms[name] == pytest.approx(float(together.norm()), rel=1e-6)


def test_refusals() -> None:
    """What can't be used is named: method, probes, groups, loss, draws, batches."""
    net = Net()
    groups = layers_of(net)
    with pytest.raises(InvalidInput, match=r"unknown method 'hutch\+'.*Did you mean 'hutch\+\+'"):
        hessian_traces(net, loss_of, groups, method="hutch+")
    with pytest.raises(InvalidInput, match=r"at least 2 .* got 1"):
        hessian_traces(net, loss_of, groups, probes=1)
    with pytest.raises(InvalidInput, match=r"at least 4 .* got 3"):
        xtrace(MATRICES["flat"].mv, SIZE, probes=3, generator=seeded(0))
    with pytest.raises(InvalidInput, match="groups is empty"):
        hessian_traces(net, loss_of, {})
    for bad in ([], [torch.zeros(2, dtype=torch.int8)]):
        with pytest.raises(InvalidInput, match="group 'bad' must be a list of floating-point parameters"):
            gradient_norms(net, loss_of, {"bad": bad})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput, match=r"must be a scalar .* got shape \(20, 3\)"):
        gradient_norms(net, lambda m: m(INPUTS), groups)
    with pytest.raises(InvalidInput, match="requires_grad=False"):
        gradient_norms(net, lambda m: loss_of(m).detach(), groups)
    with pytest.raises(InvalidInput, match="draws must be at least 1"):
        parameter_fisher(net, [INPUTS], draws=0)
    with pytest.raises(InvalidInput, match="batches is empty"):
        parameter_fisher(net, [])
    with pytest.raises(InvalidInput, match="parameters of this model"):
        parameter_fisher(net, [INPUTS], groups={"foreign": [nn.Parameter(torch.zeros(2))]})
