"""Results of a shorter dtype than the code gives them, where nothing asks for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import noisescope as ns
from noisescope.localization.result_dtypes import as_coded, is_shorter
from noisescope.testing import tiny_inputs, tiny_model


def test_shorter_means_fewer_bits_of_mantissa() -> None:
    assert is_shorter(torch.bfloat16, torch.float32) and is_shorter(torch.bfloat16, torch.float16)
    assert not is_shorter(torch.float32, torch.bfloat16) and not is_shorter(torch.float16, torch.float16)
    assert not is_shorter(torch.int64, torch.float32)


def test_a_result_is_judged_in_the_dtype_of_its_code() -> None:
    """Of a module by its weights, of a function by its arguments; a cast that is asked for stays."""
    linear, x = nn.Linear(8, 8), torch.randn(2, 8)
    y = linear(x).detach()
    assert as_coded(linear, (x,), {}, y.bfloat16()).dtype == torch.float32
    assert as_coded(linear, (x,), {}, y) is y
    softmax = F.softmax(x, -1)
    assert as_coded(F.softmax, (x, -1), {}, softmax.half()).dtype == torch.float32
    asked = F.softmax(x, -1, dtype=torch.float16)
    assert as_coded(F.softmax, (x, -1), {"dtype": torch.float16}, asked) is asked


class Shorter(TorchFunctionMode):
    """A device that gives one function's results in bfloat16, on purpose of nobody."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y.bfloat16().to(y.dtype) if func is self.function and y.dtype == torch.float32 else y


@pytest.mark.parametrize("back", [False, True], ids=["and stays so", "and is cast back"])
def test_a_projection_that_comes_out_in_sixteen_bits(back: bool) -> None:
    model: Any = tiny_model("llama", layers=3)
    projection = model.model.layers[1].mlp.down_proj
    forward = projection.forward
    projection.forward = lambda x: forward(x).bfloat16().to(x.dtype if back else torch.bfloat16)
    suspect = ns.locate(model, quick=True).suspects[0]
    assert suspect.site.place == 1 and "mlp" in suspect.site.module, suspect
    assert suspect.fault_class == "truncation"


def test_softmax_in_sixteen_bits_that_the_class_computes_in_32() -> None:
    model: Any = tiny_model("llama", layers=2, attn_implementation="eager")
    with Shorter(F.softmax):
        suspect = ns.locate(model, quick=True).suspects[0]
    assert (suspect.site.operator, suspect.fault_class) == ("softmax", "truncation")


def test_autocast_shortens_results_on_purpose() -> None:
    """Of linears inside, and of calls that the model wraps in an autocast of its own."""

    class Inside(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x).float()

    model: Any = tiny_model("llama", layers=2)
    model.model.layers[1].mlp = Inside(model.model.layers[1].mlp)
    verdict = ns.locate(model, inputs=tiny_inputs("llama"))
    assert not verdict.suspects, verdict.suspects[0].evidence
    with torch.autocast("cpu", torch.bfloat16):
        verdict = ns.locate(tiny_model("llama", layers=2), inputs=tiny_inputs("llama"))
    assert not verdict.suspects, verdict.suspects[0].evidence
