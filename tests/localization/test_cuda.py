"""On a GPU: a healthy device raises no alarm against the host, a simulated fault is named, a passport is taken."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import noisescope as ns
from noisescope.localization.host_products import Rows, attention
from noisescope.localization.judge import judge
from noisescope.passports.diff import diff
from noisescope.passports.measure import take_passport
from noisescope.testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # the device machine's torch and Triton warn about themselves
]
DTYPES = ["float32", "bfloat16", "float16"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["audit", "relations"])
def test_a_healthy_device_is_healthy(dtype, method):
    """Every operator of the bundled model, in three number formats, against the host or against itself."""
    verdict = ns.locate(ns.load("demo", device="cuda", dtype=dtype), method=method)
    assert verdict.verdict == "healthy", verdict.suspects[:2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", ["gain:0.01", "bias:0.05", "stuck_bit:bit=5", "dead_lane"])
def test_a_fault_is_named(fault, dtype):
    """Layer and operator of a fault in one linear."""
    subject = ns.load("demo", device="cuda", dtype=dtype)
    with ns.faulty(subject.model, f"{fault}@5/linear/model.layers.5.mlp.down_proj", anatomy=subject.anatomy):
        verdict = ns.locate(subject, method="audit")
    assert verdict.verdict == "faulty"
    assert (verdict.suspects[0].site.place, verdict.suspects[0].site.operator) == (5, "linear")


def test_float32_attention_of_few_rows_is_healthy():
    """Tensor cores truncate its sums: means over few rows lean, and are no alarm. A factor of 1.0002 is one."""
    torch.manual_seed(0)
    rows = Rows(64, 0, "cuda")
    found = []
    for number in range(300):
        keys, width = (2, 3, 5, 17, 62, 200)[number % 6], (8, 16, 64, 128)[number % 4]
        q = torch.randn(1, 4, 1 + number % 2, width, device="cuda") * (1.0, 4.0)[number % 5 == 0]
        k, v = (torch.randn(1, 4, keys, width, device="cuda") + 0.1 for _ in range(2))
        y = F.scaled_dot_product_attention(q, k, v)
        for factor in (1.0, 1.0002):
            one = attention(q, k, v, None, y * factor, rows, is_causal=False, scale=None)
            found.append((factor, judge(one.y, one.reference).strength))
    assert max(strength for factor, strength in found if factor == 1) < 1
    assert sum(strength > 1 for factor, strength in found if factor > 1) > 270


def test_tf32_that_is_allowed_is_no_alarm():
    """The settings allow products of 10 bits: the floor is wider, and the verdict says so."""
    model = tiny_model("llama", layers=3).to("cuda").eval()
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        verdict = ns.locate(model, method="audit")
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert verdict.verdict == "healthy"
    assert any("TF32" in note for note in verdict.notes)


def test_passports_of_gpu_and_cpu_differ():
    """Both are taken and compared; they are not the same arithmetic."""
    assert diff(take_passport("cpu", quick=True), take_passport("cuda", quick=True))
