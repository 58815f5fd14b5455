"""Residual adds are found by their terms, replayed bit for bit; a wrong one is no unknown one."""

from __future__ import annotations

import torch

from noisescope.localization.block_wiring import OUT, Recorder, Residuals
from noisescope.model.anatomy import Unit

HIDDEN = 24


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(seed)).bfloat16()


def block(index: int, *, form: str = "pre-norm", wrong: bool = False):
    """What a recorder takes down of one block, with the adds of a form."""
    unit = Unit(f"layers.{index}", "module", index, "", ("residual",))
    recorder = Recorder()
    x, attention, mlp = (drawn(100 * index + at) for at in range(3))
    name = f"layers.{index}"
    recorder.got(f"{name}.norm1", x)
    recorder.gave(f"{name}.norm1", drawn(100 * index + 7))
    recorder.gave(f"{name}.attn.o_proj", attention)
    if form == "pre-norm":
        middle = x + attention
        recorder.got(f"{name}.norm2", middle)
        recorder.gave(f"{name}.norm2", drawn(100 * index + 8))
        recorder.gave(f"{name}.mlp.down", mlp)
        y = middle + mlp
    elif form == "parallel":
        recorder.gave(f"{name}.mlp.down", mlp)
        y = (mlp + attention) + x
    else:
        recorder.gave(f"{name}.mlp.down", mlp)
        y = x + 0.5 * attention + mlp
    if wrong:
        y = y.clone()
        y[1, 2, 3] += 1
    return recorder.block(unit, index, x, y)


def test_the_form_of_healthy_blocks_is_found():
    """Pre-norm adds twice: the input of the second norm, and the output."""
    seen = Residuals()
    for index in range(3):
        seen.see(block(index))
    assert not list(seen.failures())
    assert seen.forms["norm2.in"] == {("in", "attn.o_proj"): {0, 1, 2}}
    assert seen.forms[OUT] == {("norm2.in", "mlp.down"): {0, 1, 2}}
    assert not seen.unknown()


def test_a_sum_of_three_in_its_own_order():
    """Parallel blocks add three tensors, and the order of adding shows in bfloat16."""
    seen = Residuals()
    for index in range(3):
        seen.see(block(index, form="parallel"))
    assert not list(seen.failures())
    assert seen.forms[OUT] == {("attn.o_proj", "mlp.down", "in"): {0, 1, 2}}


def test_one_wrong_element_in_one_block_is_a_failure():
    """Also where the wrong block comes first, before the form is known."""
    for at in (0, 1, 3):
        seen = Residuals()
        for index in range(4):
            seen.see(block(index, wrong=index == at))
        found = list(seen.failures())
        assert [(b.unit.place, target) for b, target, _, _ in found] == [(at, OUT)]
        recomputed = found[0][3]
        assert int((recomputed.y.double() != recomputed.reference.values).sum()) == 1


def test_a_form_that_is_not_a_sum_is_no_failure():
    """A block that scales what it adds is unknown, in every layer, and never called wrong."""
    seen = Residuals()
    for index in range(3):
        seen.see(block(index, form="scaled"))
    assert not list(seen.failures())
    assert [b.unit.place for b in seen.unknown()] == [0, 1, 2]


def test_most_blocks_decide():
    """A sum that fits one block of four does not make the other three wrong."""
    seen = Residuals()
    seen.see(block(0))
    for index in range(1, 4):
        seen.see(block(index, wrong=True))
    assert not list(seen.failures())
    assert len(seen.unknown()) == 3


def test_adding_in_place_does_not_hide_the_terms():
    """What a module gave is remembered as it was, though the block writes over it."""
    unit = Unit("layers.0", "module", 0, "", ("residual",))
    recorder = Recorder()
    x, attention, mlp = (drawn(at) for at in range(3))
    recorder.gave("layers.0.attn", attention)
    recorder.gave("layers.0.mlp", mlp)
    mlp += attention
    seen = Residuals()
    seen.see(recorder.block(unit, 0, x, mlp + x))
    assert list(seen.forms[OUT]) == [("attn", "mlp", "in")]


def test_a_block_that_waits_keeps_its_own_numbers():
    """The first block's tensors may be written over before its form is known."""
    seen = Residuals()
    first = block(0, wrong=True)
    seen.see(first)
    first.targets[OUT].zero_()
    for index in (1, 2):
        seen.see(block(index))
    (failure,) = seen.failures()
    assert int((failure[3].y.double() != failure[3].reference.values).sum()) == 1
