"""On an NVIDIA GPU: the Triton engine, autograd's own threads, compiled graphs, no waiting (pytest -m gpu)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import noisescope as ns
from noisescope.probe import cuda_noise, unfused_attention
from noisescope.probe.draws import Draw, Rows
from noisescope.testing import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # the device machine's torch and Triton warn about themselves
]


def draw_of(key: int = 0x1234567, number: int = 1, **kwargs) -> Draw:
    return Draw(Rows(number), key, layout="plain", tensor="output", **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 64, 1536), (2, 300), (3, 7, 151936), (2, 4, 33, 57), (5, 100_000), (1, 1, 8)])
def test_the_kernel_reads_the_same_tape_as_the_plain_engine(dtype, shape):
    """y + s size z with the plain engine's z, once rounded, for relative and per-row sizes."""
    y = torch.randn(shape, device="cuda").to(dtype)
    z = draw_of()._window("normal", y.float()).double()
    z_tolerance = 0 if dtype == torch.float32 else 2.0**-10  # a float16 tape
    eps = torch.finfo(dtype).eps
    assert cuda_noise.usable(y, None)
    noisy = draw_of().add_noise(y, 0.05).double()
    exact = y.double() * (1 + 0.05 * z)
    slack = y.double().abs() * 0.05 * z.abs() * z_tolerance + y.double().abs() * 2 * eps + torch.finfo(dtype).tiny
    assert ((noisy - exact).abs() <= slack).all()
    size = y.float().square().mean(-1, keepdim=True).sqrt().to(dtype)
    noisy = draw_of().add_noise(y, 0.05, size).double()
    exact = y.double() + 0.05 * size.double() * z
    slack = size.double() * z.abs() * (0.05 * z_tolerance + eps) + y.double().abs() * 2 * eps + torch.finfo(dtype).tiny
    assert ((noisy - exact).abs() <= slack).all()


def test_statistics_of_the_kernel():
    """Size within 1 %, mean 0, no correlation at any lag between two sites or two forwards."""
    y = torch.ones(512, 1536, device="cuda")
    a, b, c = (ns.Gaussian(0.05)(y, draw_of(*of)) / 0.05 - 20 for of in ((11,), (13,), (11, 2)))
    n = y.numel()
    for z in (a, b, c):
        assert abs(z.mean()) < 5 / n**0.5 and abs(z.std() - 1) < 0.01
    for other in (b, c):
        x, w = a.double().flatten(), other.double().flatten()
        lags = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w).conj(), n=n) / n
        assert lags.abs().max() < 6 / n**0.5


def test_batch_split_and_decode_on_the_gpu():
    """Named rows draw the same noise in another batch, and token by token."""
    model = tiny_model("llama").cuda()
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)
    probe = ns.inject(model, ns.Injection(ns.Gaussian(0.05)))
    with torch.no_grad(), probe:
        probe.rows([7, 9])
        both = model(tokens).logits
        probe.rows([9])
        one = model(tokens[1:]).logits
        probe.rows([7, 9])
        out = model(tokens[:, :5], use_cache=True)
        last = model(tokens[:, 5:], past_key_values=out.past_key_values).logits
    assert torch.allclose(both[1:], one, atol=1e-5) and torch.allclose(both[:, 5:], last, atol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_backward_noise_stays_in_its_layer(layer):
    """Backward runs in autograd's own thread here; the layer is the one whose forward ran."""
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)
    model = tiny_model("llama").cuda()
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), layers={layer}, phases={"backward"})) as tally:
        model(tokens, labels=tokens).loss.backward()
    assert {p: (c.forward, c.backward) for p, c in tally.per_layer.items()} == {layer: (0, 14)}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_recomputes_the_same_noise(reentrant, dtype):
    """Recomputation in autograd's thread: the same gradients and tally as without checkpointing."""
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)
    runs = []
    for checkpointing in (False, True):
        model = tiny_model("llama").to("cuda", dtype).train()
        model.config.use_cache = False
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        with ns.inject(model, ns.Injection(ns.Gaussian(0.05))) as tally:
            for _ in range(2):
                model(tokens, labels=tokens).loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        runs.append((gradients, {p: (c.forward, c.backward) for p, c in tally.per_layer.items()}))
    (plain, plain_tally), (again, again_tally) = runs
    assert plain_tally == again_tally
    worst = max(float((plain[n] - again[n]).norm() / plain[n].norm()) for n in plain)
    assert worst <= (1e-6 if dtype == torch.float32 else 1e-2), worst  # embedding gradients add up by atomics


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models(mode):
    """Compiled before the scope, CUDA graphs included: fresh noise in each call, exact counts, clean afterwards."""
    model = tiny_model("llama").cuda()
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)
    compiled = torch.compile(model, mode=mode)
    with torch.no_grad():
        for _ in range(3):
            clean = compiled(tokens).logits.clone()
        with ns.inject(compiled, ns.Injection(ns.Gaussian(0.05), operators={"linear"})) as tally:
            first, second = compiled(tokens).logits.clone(), compiled(tokens).logits.clone()
        after = compiled(tokens).logits.clone()
    assert tally.forward == 30 and tally.forced_eager
    assert not torch.equal(first, second) and not torch.allclose(first, clean, atol=1e-4)
    assert torch.allclose(after, clean, atol=1e-5)


class Body(torch.nn.Module):
    """The blocks of a model without what transformers does around them (its masks wait for the device)."""

    def __init__(self, model) -> None:
        super().__init__()
        self.layers = model.model.layers

    def forward(self, states, rotation):
        for layer in self.layers:
            states = layer(states, position_embeddings=rotation, attention_mask=None)
        return states


def test_no_synchronisation_on_the_hot_path():
    """Noise on every operator, forward and backward, never waits for the device."""
    model = tiny_model("llama").to("cuda", torch.bfloat16)
    body = Body(model)
    states = torch.randn(2, 6, 32, device="cuda", dtype=torch.bfloat16)
    rotation = model.model.rotary_emb(states, torch.arange(6, device="cuda")[None])
    probe = ns.inject(body, ns.Injection(ns.Gaussian(0.05)))
    with probe:
        probe.rows(torch.tensor([1, 2], device="cuda"))
        for checked in (False, True):
            torch.cuda.set_sync_debug_mode("error" if checked else "default")
            try:
                body(states, rotation).sum().backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decomposed_attention_is_as_exact_as_the_kernel(dtype):
    """Error against float64 at most 1.2 x the fused kernel's, gradients too."""
    errors = {"fused": [], "decomposed": []}
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(2, 8, 256, 64, device="cuda").to(dtype) for _ in range(3))

        def run(function, *tensors):
            leaves = [t.detach().requires_grad_() for t in tensors]
            out = function(*leaves, is_causal=True)
            out.backward(torch.cos(torch.arange(out.numel(), device="cuda") % 97).to(out.dtype).reshape(out.shape))
            return [out.detach(), *(leaf.grad for leaf in leaves)]

        exact = run(F.scaled_dot_product_attention, *(t.double() for t in (q, k, v)))
        for name, function in (
            ("fused", F.scaled_dot_product_attention),
            ("decomposed", unfused_attention.scaled_dot_product),
        ):
            results = run(function, q, k, v)
            errors[name].append(
                [float((a.double() - b).norm() / b.norm()) for a, b in zip(results, exact, strict=True)]
            )
    fused, decomposed = (torch.tensor(errors[name]).square().mean(0).sqrt() for name in ("fused", "decomposed"))
    print(dtype, "fused", fused.tolist(), "decomposed", decomposed.tolist())
    assert (decomposed <= 1.2 * fused).all(), decomposed / fused


def test_number_formats_agree_with_the_cpu():
    """Formats are deterministic: bit-equal on both devices."""
    y = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    for name in ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "mxfp4", "nvfp4"):
        fmt = ns.Format(name)
        assert torch.equal(fmt(y, draw_of()), fmt(y.cuda(), draw_of()).cpu()), name


def test_a_thousand_scopes_leave_memory_flat():
    """Scopes and captures give back all they took on the device."""
    model = tiny_model("llama").cuda()
    tokens = torch.arange(1, 13, device="cuda").reshape(2, 6)

    def cycle(times: int) -> None:
        for _ in range(times):
            with torch.no_grad(), ns.inject(model, ns.Injection(ns.Gaussian(0.05))):
                model(tokens)
            with torch.no_grad(), ns.capture(model, operators={"linear"}, keep="both"):
                model(tokens)

    cycle(5)
    before = torch.cuda.memory_allocated()
    cycle(200)
    assert torch.cuda.memory_allocated() == before
