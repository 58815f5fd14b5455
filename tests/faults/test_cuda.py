"""On a GPU: the same faults, on the device, without waiting for it."""

from __future__ import annotations

import warnings

import pytest
import torch

from noisescope.faults import FAMILIES, Noise, bit_patterns, faulty
from noisescope.faults.fault_state import Memory, Stream, faulty_output
from noisescope.model.anatomy import MODULE, Unit
from noisescope.probe.draws import Rows
from noisescope.probe.operator_target import Context
from noisescope.probe.recorded_call import RecordedCall
from noisescope.testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # the device machine's torch and Triton warn about themselves
]
CHANCE = {"noise", "spike", "non_determinism", "bit_flip"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", [f for f in FAMILIES if FAMILIES[f].at_block_output and f not in CHANCE])
def test_what_is_not_chance_is_the_same_on_both(family, dtype):
    """Two calls on the CPU and on the GPU: equal, but for sizes summed in another order."""
    fault = FAMILIES[family].make(channels=0.3)
    call = RecordedCall(Unit("", MODULE, 0, "", ()), "residual", torch.nn.Identity(), (), {}, None, 0, Context(Rows(1)))
    results = []
    for device in ("cpu", "cuda"):
        memory = Memory(Stream(fault))
        for seed in (0, 1):
            y = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
            new = faulty_output(fault, y, call, memory)
        results.append(new.cpu())
    if family in ("bias", "stuck_lane"):
        torch.testing.assert_close(*results)
    else:
        assert not bit_patterns.differ(*results).any()


def waits(model, tokens) -> int:
    """How often the host waits for the device in one forward."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said, torch.no_grad():
            warnings.simplefilter("always")
            model(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in said)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_waits_for_the_device(family, dtype):
    """Once its masks are made a fault makes the host wait no more often, and the caller's generator stays put."""
    model = tiny_model("llama", layers=2).to("cuda", dtype)
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)
    fault = FAMILIES[family].make(seed=2)
    healthy = waits(model, tokens)
    for operator in {"linear", "softmax", "silu", "norm", "residual"} & set(fault.operators):
        state = torch.cuda.get_rng_state()
        with faulty(model, fault, 1, operator=operator) as scope:
            waits(model, tokens)
            assert waits(model, tokens) <= healthy
        assert scope.acted == scope.calls > 0 and scope.changed >= 0
        assert torch.equal(state, torch.cuda.get_rng_state())


def test_noise_is_replayed_on_the_device():
    """The same seed gives the same sequence."""
    model = tiny_model("llama", layers=2).to("cuda")
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)
    runs = []
    for _ in range(2):
        with faulty(model, Noise(0.3, seed=5), 1), torch.no_grad():
            runs.append([model(tokens).logits for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)) and not torch.equal(*runs[0])
