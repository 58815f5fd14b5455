"""One kernel that is wrong in every layer is one suspect; a fault of one layer stays apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import noisescope as ns
from noisescope.localization.audit import audit
from noisescope.localization.audit_verdict import in_all_layers
from noisescope.localization.verdict import Suspect
from noisescope.sites import Site
from noisescope.testing import tiny_model


class Intercepted(TorchFunctionMode):
    """Every call of one torch function gives something else."""

    def __init__(self, function: Any, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.change = function, change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return self.change(result) if func is self.function else result


def patched(module: torch.nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    right = module.forward
    module.forward = lambda *args, **kwargs: change(right(*args, **kwargs))


def lost_tail(y: Tensor) -> Tensor:
    return torch.cat([y[..., :-4], torch.zeros_like(y[..., -4:])], -1)


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny_model("llama", layers=4)


def test_every_linear_is_one_suspect(model):
    """A kernel that all linears share, the head included."""
    with Intercepted(F.linear, lost_tail):
        verdict = audit(model, quick=True)
    (only,) = verdict.suspects
    assert (only.site.place, only.site.operator, only.fault_class) == (0, "linear", "dead lane")
    assert len(only.also) == 4 * 7 and {site.place for site in only.also} == {0, 1, 2, 3, "lm_head"}
    assert "the same in 3 other layers, 28 other modules in all" in only.evidence
    assert only.to_dict()["also"] == [str(site) for site in only.also]


def test_a_function_in_a_loop_is_one_suspect(model):
    """A scan calls one product for each token, and all of them are wrong; attention has two products of its own."""
    sites = [Site("linear", 1, "model.layers.1.mixer", occurrence=at, tensor="input") for at in range(9)]
    pair = [Site("matmul", 2, "model.layers.2.self_attn", occurrence=at) for at in range(2)]
    suspects = [Suspect(site, "unknown", 0.9, "wrong", 1 / (2 + at)) for at, site in enumerate((*pair, *sites))]
    found = in_all_layers(suspects, (), ns.dissect(model))
    assert [suspect.site for suspect in found] == [*pair, sites[0]]
    assert found[-1].also == tuple(sites[1:])
    assert found[-1].evidence == "wrong; the same function in 8 other calls of this module"


def test_one_role_in_every_layer(model):
    """Every q_proj, and no other linear."""
    for layer in model.model.layers:
        patched(layer.self_attn.q_proj, lambda y: y * 1.05)
    (only,) = audit(model, quick=True).suspects
    assert (only.site.module, only.fault_class) == ("model.layers.0.self_attn.q_proj", "gain")
    assert [site.place for site in only.also] == [1, 2, 3] and only.evidence.endswith("the same in 3 other layers")


def test_a_fault_of_one_layer_stays_apart(model):
    """One layer's norm is off in another way than all q_proj; two layers of four are no kernel of all."""
    for layer in model.model.layers:
        patched(layer.self_attn.q_proj, lambda y: y * 1.05)
    patched(model.model.layers[2].input_layernorm, lambda y: y + 0.5)
    for number in (1, 2):
        patched(model.model.layers[number].mlp.up_proj, lambda y: y * 1.05)
    found = {suspect.site.module: len(suspect.also) for suspect in audit(model, quick=True).suspects}
    assert found == {
        "model.layers.0.self_attn.q_proj": 3,
        "model.layers.2.input_layernorm": 0,
        "model.layers.1.mlp.up_proj": 0,
        "model.layers.2.mlp.up_proj": 0,
    }


def test_a_healthy_model_has_no_suspects(model):
    with Intercepted(F.linear, lambda y: y):
        assert audit(model, quick=True).verdict == "healthy"


def test_rows_and_class_confidence_of_a_suspect(model):
    """A patched forward that spoils one tile: tokens, channels and how sure the class is, also as JSON."""

    def tile(y: Tensor) -> Tensor:
        y = y.clone()
        y[0, 4:8, 8:16] *= 2
        return y

    patched(model.model.layers[1].mlp.up_proj, tile)
    (only,) = audit(model, quick=True).suspects
    assert (only.site.place, only.fault_class, only.details["also"]) == (1, "tile", "gain")
    assert only.rows == ((0, 4), (0, 5), (0, 6), (0, 7)) and only.channels == tuple(range(8, 16))
    assert only.row_words.startswith("channels 8 to 15 of tokens 4 to 7 of sequence 0")
    assert 0.8 <= only.class_confidence < only.confidence
    assert only.to_dict()["rows"] == [[0, 4], [0, 5], [0, 6], [0, 7]]


def test_stale_rows_name_the_earlier_call_and_the_rows(model):
    """Some tokens keep what the call before left there."""
    kept: list[Tensor] = []

    def stale(y: Tensor) -> Tensor:
        before = kept[-1] if kept else y
        kept.append(y.clone())
        new = y.clone()
        new[:, 3:6] = before[:, 3:6]
        return new

    patched(model.model.layers[2].self_attn.o_proj, stale)
    (only,) = audit(model, quick=True).suspects
    assert (only.site.place, only.fault_class) == (2, "stale data")
    assert "another call's values" in only.evidence and {token for _, token in only.rows} == {3, 4, 5}
