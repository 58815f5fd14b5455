"""Linears, embeddings and norms are judged by a formula only if their class's own code computes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding
from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding
from transformers.pytorch_utils import Conv1D

import noisescope as ns
from noisescope.localization import formula_recognition
from noisescope.localization.audit import audit
from noisescope.localization.embedding_recognition import looks_up_rows
from noisescope.localization.formula_recognition import LinearFormula, linear_formula, norm_formula
from noisescope.localization.host_operators import Unseen, recompute
from noisescope.localization.host_products import Rows
from noisescope.localization.relations import relations
from noisescope.testing import tiny_model


class Plain(nn.Linear):
    """Written out, but the same thing."""

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight.T
        return y if self.bias is None else y + self.bias


class LowRank(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.a, self.b = nn.Parameter(torch.randn(2, sizes[0])), nn.Parameter(torch.zeros(sizes[1], 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + x @ self.a.T @ self.b.T


class EightBits(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        unit = 127 / x.abs().amax(-1, keepdim=True).clamp_min(1e-9)
        return F.linear((x * unit).round() / unit, self.weight, self.bias)


class Rounding(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return (w * 16).round() / 16


class FakeQuantised(nn.Linear):
    """A child rounds the weight."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.rounding = Rounding()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounding(self.weight), self.bias)


class Activated(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


class Clipped(nn.Linear):
    """Linear for small numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-20, 20))


class Scaled(nn.Linear):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class OnlySixteenBits(nn.Linear):
    """Does something else in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.dtype == torch.float32 else y.clamp(-1, 1)


def scaled(scale: float) -> Scaled:
    made = Scaled(6, 9)
    made.scale = scale
    return made


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(6, 9), LinearFormula(transposed=False, bias=True)),
        (nn.Linear(6, 9, bias=False), LinearFormula(transposed=False, bias=False)),
        (Plain(6, 9), LinearFormula(transposed=False, bias=True)),
        (Conv1D(6, 6), LinearFormula(transposed=True, bias=True)),
        (parametrizations.weight_norm(nn.Linear(6, 9)), LinearFormula(transposed=False, bias=True)),
        (Plain(16, 400_000), LinearFormula(transposed=False, bias=True)),
        (scaled(1.0), LinearFormula(transposed=False, bias=True)),
        (scaled(2.0), None),
        (LowRank(6, 9), None),
        (EightBits(6, 9), None),
        (FakeQuantised(6, 9), None),
        (Activated(6, 9), None),
        (Clipped(6, 9), None),
        (OnlySixteenBits(6, 9).bfloat16(), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_formula_of_a_linear(module, expected):
    assert linear_formula(module) == expected


def test_what_is_not_class_code_is_left_out():
    """Hooks and a patched forward are not: there a fault may sit."""
    module = Plain(6, 9)
    module.register_forward_hook(lambda m, args, y: y * 2)
    module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module.forward = lambda x: torch.zeros(len(x), 9)  # type: ignore[method-assign]
    before = {name: p.clone() for name, p in module.named_parameters()}
    assert linear_formula(module) == LinearFormula(transposed=False, bias=True)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


def test_a_class_runs_once(monkeypatch):
    runs: list[Any] = []
    right = formula_recognition._find_linear
    monkeypatch.setattr(formula_recognition, "_find_linear", lambda m: (runs.append(m), right(m))[1])
    for _ in range(3):
        linear_formula(Plain(5, 7))
        linear_formula(nn.Linear(5, 7))
    assert len(runs) == 1


@pytest.mark.parametrize("cls", [LowRank, EightBits, FakeQuantised, Activated, Clipped])
def test_a_subclass_that_does_something_else_is_no_alarm(cls):
    """The audit judges it by its own code; relations have none for it, and their verdict is not healthy."""
    model = tiny_model("llama", seed=2)
    old = model.model.layers[1].mlp.up_proj
    new = model.model.layers[1].mlp.up_proj = cls(old.in_features, old.out_features)
    found = relations(model)
    assert (found.verdict, found.suspects) == ("undecided", ())
    assert any("computes something other than x W^T + b" in note for note in found.notes)
    found = audit(model, quick=True)
    assert (found.verdict, found.coverage.not_judged) == ("healthy", ())
    new.forward = lambda x: cls.forward(new, x) * 1.02
    first = audit(model, quick=True).suspects[0]
    assert (first.site.module, first.site.tensor) == ("model.layers.1.mlp.up_proj", "output")


def test_a_fault_in_a_plain_subclass_is_found():
    model = tiny_model("llama", seed=2)
    old = model.model.layers[1].mlp.up_proj
    new = Plain(old.in_features, old.out_features)
    model.model.layers[1].mlp.up_proj = new
    assert audit(model, quick=True).verdict == "healthy"
    new.forward = lambda x: Plain.forward(new, x) * 1.02  # type: ignore[method-assign]
    assert audit(model, quick=True).suspects[0].site.module == "model.layers.1.mlp.up_proj"


# -- embeddings


class Normalised(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return F.normalize(super().forward(ids), dim=-1)


class Shifted(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + 1


class Summed(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + super().forward(ids.flip(-1))


class Times(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 7.3


IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("make", "args"),
    [
        (nn.Embedding, (IDS,)),
        (Times, (IDS,)),
        (functools.partial(Gemma3TextScaledWordEmbedding, padding_idx=0, embed_scale=6.93), (IDS,)),
        (OPTLearnedPositionalEmbedding, (torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]), 0)),
    ],
    ids=["plain", "times", "gemma", "opt"],
)
def test_embeddings_are_judged_bit_by_bit(make: Callable[..., nn.Module], args: tuple[Any, ...], dtype):
    """By what the class does with its table: factors, their rounding, positions made inside."""
    module = make(12, 8).to(dtype)
    y = module(*args).detach()
    assert looks_up_rows(module, args, {})
    found = recompute("embedding", module, args, {}, y, Rows(64, 0))
    assert torch.equal(found.reference.values, found.y.double())
    off = y.clone()
    off[0, 1, 2] = torch.nextafter(off[0, 1, 2], off[0, 1, 2] + 1)
    found = recompute("embedding", module, args, {}, off, Rows(64, 0))
    assert int((found.reference.values != found.y.double()).sum()) == 1


@pytest.mark.parametrize("cls", [Normalised, Shifted, Summed])
def test_embeddings_of_another_kind_are_not_judged(cls):
    module = cls(12, 8)
    with pytest.raises(Unseen, match="computes something other than rows of its table"):
        recompute("embedding", module, (IDS,), {}, module(IDS).detach(), Rows(64, 0))


# -- norms under other names


class OwnNorm(nn.Module):
    def __init__(self, width: int, names: tuple[str, str], tiny: float) -> None:
        super().__init__()
        self.names, self.tiny = names, tiny
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(width)))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        normal = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.tiny)
        gain, shift = (self._parameters[name] for name in self.names)
        return normal * gain + shift


@pytest.mark.parametrize("names", [("gain", "shift"), ("g", "b"), ("gamma", "beta"), ("beta", "gamma"), ("bias", "w")])
@pytest.mark.parametrize("tiny", [1e-5, 2e-7, 1e-12])
def test_norms_whatever_their_parameters_are_called(names, tiny):
    """Which is the gain, which the bias, and how large eps is, come from what the code computes."""
    module = OwnNorm(16, names, tiny)
    formula = norm_formula(module, 16)
    assert formula is not None
    assert (formula.centred, formula.eps, formula.weight_name, formula.bias_name) == (True, tiny, *names)
    x = torch.randn(5, 16)
    found = recompute("norm", module, (x,), {}, module(x).detach(), Rows(64, 0))
    assert torch.allclose(found.reference.values.float(), found.y, atol=1e-5)


def test_a_gated_norm_is_not_judged_as_a_plain_one():
    """With a second tensor it is another function."""

    class Gated(nn.LayerNorm):
        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            y = super().forward(x)
            return y if gate is None else y * F.silu(gate)

    module, x = Gated(8), torch.randn(3, 8)
    assert norm_formula(module, 8) is not None
    with pytest.raises(Unseen, match="more than one tensor"):
        recompute("norm", module, (x, x), {}, module(x, x).detach(), Rows(64, 0))


def test_a_model_named_linear_has_norms():
    """KimiLinearRMSNorm is no packed linear."""

    class KimiLinearRMSNorm(nn.RMSNorm):
        pass

    model = tiny_model("llama")
    model.model.norm = KimiLinearRMSNorm(model.config.hidden_size)
    (unit,) = [unit for unit in ns.dissect(model).units if unit.module == "model.norm"]
    assert (unit.operators, unit.packed) == (("norm",), "")
