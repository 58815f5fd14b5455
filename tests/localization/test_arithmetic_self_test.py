"""The self-test of the device's elementwise arithmetic: silent on a healthy one, and it names what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from noisescope.localization.arithmetic_self_test import OPERATIONS, self_test, self_test_of, with_self_test
from noisescope.localization.relations import relations
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.sites import DEVICE, ELEMENTWISE, Site, place_order
from noisescope.testing import tiny_model

PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)


class Broken(TorchFunctionMode):
    """A device on which some functions give something else for tensors of some dimensions."""

    def __init__(self, functions: tuple[Any, ...], change: Callable[[Tensor], Tensor], dims: int = 3) -> None:
        super().__init__()
        self.functions, self.change, self.dims = functions, change, dims

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func in self.functions and isinstance(y, Tensor) and y.dim() == self.dims and y.is_floating_point():
            return self.change(y)
        return y


def enlarged(y: Tensor) -> Tensor:
    return torch.add(y, y, alpha=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_healthy_host_passes(dtype):
    assert self_test("cpu", dtype, width=96, heads=6, seed=3) == []


def test_a_product_that_is_too_large():
    """By what share, for which shapes and dtypes, as a class of fault."""
    with Broken(PRODUCTS, enlarged):
        (fault,) = self_test("cpu", torch.bfloat16, width=64, heads=4)
    assert str(fault) == (
        "the device's multiply of [B, T, C] bfloat16 and float32 tensors is wrong: results 2 % too large"
    )
    assert fault.pattern.fault_class == "gain"


@pytest.mark.parametrize(
    ("functions", "change", "operation"),
    [
        ((Tensor.__add__, torch.add), lambda y: torch.where(torch.arange(y.shape[-1]) == 5, 0.0, y), "add"),
        ((torch.cat,), lambda y: y.roll(1, -1), "cat"),
        ((torch.gather,), lambda y: torch.where(torch.arange(y.shape[-1]) % 8 == 3, 0.0, y), "gather"),
        ((Tensor.bfloat16, Tensor.to), lambda y: y if y.dtype != torch.bfloat16 else y.mul(1.008), "cast to bfloat16"),
        ((Tensor.contiguous,), lambda y: torch.where(y.abs() < 0.05, 0.0, y), "transposed copy"),
    ],
)
def test_what_is_wrong_is_named(functions, change, operation):
    with Broken(functions, change):
        found = [fault.operation for fault in self_test("cpu", torch.float32, width=64, heads=4)]
    assert operation in found


def test_broken_copies_are_the_only_fault_named():
    """What every other operation was given is then unknown."""
    with Broken((Tensor.to,), enlarged, dims=2):
        (fault,) = self_test("cpu", torch.float32, width=64, heads=4)
    assert fault.operation == "copy to the device and back"
    assert fault.shapes == ("[T, C]",)


def test_quotients_may_be_off_by_one_unit():
    with Broken((Tensor.__truediv__, torch.div), lambda y: torch.nextafter(y, y * 2)):
        assert self_test("cpu", torch.float32, width=64, heads=4) == []
    with Broken((Tensor.__truediv__, torch.div), enlarged):
        assert [f.operation for f in self_test("cpu", torch.float32, width=64, heads=4)] == ["divide"]


def test_an_operation_that_the_device_lacks_is_left_out():
    def missing(y: Tensor) -> Tensor:
        raise NotImplementedError

    with Broken((torch.gather,), missing):
        assert self_test("cpu", torch.float32, width=64, heads=4) == []


def test_relations_name_the_device_first_and_no_healthy_linear():
    """Probes are made on the host, so a broken multiply breaks no law of a linear."""
    model = tiny_model("llama", seed=1)
    assert relations(model).verdict == "healthy"
    with Broken(PRODUCTS, enlarged):
        verdict = relations(model)
    assert verdict.verdict == "faulty"
    first, *others = verdict.suspects
    assert (first.site.place, first.site.operator, first.site.module) == (DEVICE, ELEMENTWISE, "multiply")
    assert "2 % too large" in first.evidence
    assert all(other.site.operator != "linear" for other in others)
    assert all(other.details["consequence_of"] == "multiply" for other in others)


def test_consequences_come_after_the_device():
    norm = Suspect(Site("norm", 0, "a"), "gain", 0.99, "off", 5.0)
    linear = Suspect(Site("linear", 0, "b"), "gain", 0.99, "off", 4.0)
    found = Verdict("undecided", "audit", (norm, linear))
    assert with_self_test(found, []) is found
    with Broken(PRODUCTS, enlarged):
        faults = self_test_of(tiny_model("gpt2"))
    device, first, second = with_self_test(found, faults).suspects
    assert device.site.place == DEVICE
    assert "probably caused by the device's multiply" in first.evidence
    assert second == linear


def test_the_device_is_a_place_before_all_others():
    assert place_order(DEVICE) < place_order("embed") < place_order(0)
    assert str(Site(ELEMENTWISE, DEVICE, "multiply")) == "multiply on the device"


def test_every_operation_gives_a_tensor():
    a, b, at = torch.rand(3, 4, 6), torch.rand(3, 4, 6), torch.arange(4)
    assert all(isinstance(form(a, b, at), Tensor) for forms in OPERATIONS.values() for form in forms)
