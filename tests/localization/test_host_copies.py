"""Copies of modules: their own code and state, nothing that was put on them, and no weights until code asks."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.host_copies import (
    HostParameters,
    HostStates,
    copied_modules,
    own_state,
    real_tensors_in,
    set_state,
)
from noisescope.testing import tiny_model


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.table = nn.Linear(2, 2), 0, torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("empty", None)
        self.lock: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.mean += 1
        self.table = self.table + 1
        return self.linear(x)


def test_hooks_and_patched_forwards_are_left_behind():
    model = Counts()
    model.linear.register_forward_hook(lambda module, args, y: 2 * y)
    model.linear.register_forward_pre_hook(lambda module, args: args)
    model.linear.forward = lambda x: x  # type: ignore[method-assign]
    model.linear._old_forward = model.linear.forward  # accelerate's
    copied = copied_modules(model)
    assert list(copied) == ["", "linear"] and copied["linear"] is copied[""].linear is not model.linear
    twin = copied["linear"]
    assert not twin._forward_hooks and not twin._forward_pre_hooks and "forward" not in vars(twin)
    x = torch.ones(1, 2)
    assert torch.equal(twin(x), nn.Linear.forward(model.linear, x))
    assert model.linear._forward_hooks and torch.equal(model.linear.forward(x), x)  # as before


def test_buffers_are_copied_and_parameters_shared():
    model = Counts()
    twin = copied_modules(model)[""]
    twin(torch.ones(1, 2))
    assert (twin.calls, float(twin.mean[0]), model.calls, float(model.mean[0])) == (1, 1.0, 0, 0.0)
    assert twin.linear.weight is model.linear.weight  # on the host there is no need for another
    assert twin.empty is None


def test_parameters_that_code_reads_are_known():
    parameters = HostParameters({"weight": nn.Parameter(torch.ones(2)), "bias": None})
    assert [name for name, value in parameters.items() if value is None] == ["bias"]
    assert not parameters.was_read  # a list of all reads none
    assert parameters["bias"] is None and parameters.was_read


class Elsewhere(torch.Tensor):
    """A tensor that is not on the host."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("meta")


def test_parameters_of_a_device_show_their_shape_before_they_are_read():
    away = torch.ones(3, 4, dtype=torch.bfloat16).as_subclass(Elsewhere)
    parameters = HostParameters({"weight": away})
    (shown,) = parameters.values()
    assert (shown.shape, shown.dtype, shown.untyped_storage().nbytes()) == ((3, 4), torch.bfloat16, 2)


def test_what_can_not_be_copied_stands_for_itself_only():
    """A lock is replaced by something that nothing can be done with; the rest of its module is copied."""
    model = Counts()
    model.lock = [threading.Lock()]
    twin = copied_modules(model)[""]
    assert type(twin.lock) is object and type(model.lock) is list
    twin(torch.ones(1, 2))
    assert (twin.calls, model.calls) == (1, 0)


def test_modules_of_transformers_have_the_code_on_disk():
    model = tiny_model("llama", layers=1)
    copied = copied_modules(model)
    assert list(copied) == [name for name, _ in model.named_modules()]
    assert type(copied["model.layers.0"]).__module__.endswith("_as_on_disk")
    assert type(copied["model.layers.0.mlp.up_proj"]) is nn.Linear


def test_a_state_is_taken_and_given_back():
    model = Counts()
    before = own_state(model)
    model(torch.ones(1, 2))
    after = own_state(model)
    for state, calls in ((before, 0), (after, 1), (before, 0)):
        set_state(model, state)
        assert (model.calls, float(model.mean[0]), float(model.table[0])) == (calls, calls, calls)
        model(torch.ones(1, 2))  # must not write to the kept state
    assert model.linear.weight.requires_grad and model.empty is None


def test_recurrent_states_in_lists_are_adopted_and_keys_are_not():
    """Round-off of a state grows from step to step; keys and values must stay what was written."""

    class Layer:
        def __init__(self) -> None:
            self.recurrent_states, self.keys = [torch.ones(4)], torch.ones(4)
            self.by_name = {"conv": torch.ones(4), "key_cache": torch.ones(4)}

    theirs, states = Layer(), HostStates()
    mine = states.on_host({"cache": theirs})["cache"]
    for x in (theirs.recurrent_states[0], theirs.keys, *theirs.by_name.values()):
        x += 1e-6
    states.adopt(keys=False)
    assert torch.equal(mine.recurrent_states[0], theirs.recurrent_states[0])
    assert torch.equal(mine.by_name["conv"], theirs.by_name["conv"])
    assert torch.equal(mine.keys, torch.ones(4)) and torch.equal(mine.by_name["key_cache"], torch.ones(4))
    theirs.recurrent_states[0] += 1  # no round-off
    states.adopt(keys=False)
    assert float(mine.recurrent_states[0][0]) < 1.1


def test_conjugates_are_copied_and_compared_by_their_numbers():
    """A conjugate is a view of the same memory with other numbers, as an inverse Fourier transform takes one."""
    states, x = HostStates(), torch.complex(torch.ones(3), torch.arange(3.0))
    own, other = states.on_host((x, x.conj()))
    states.settle()
    assert torch.equal(own, x) and torch.equal(other, x.conj())
    pairs = dict(real_tensors_in({"x": x.conj()}))
    assert pairs["x"][:, 1].tolist() == [0, -1, -2]
