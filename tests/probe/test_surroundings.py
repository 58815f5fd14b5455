"""The probe in the company it meets: generate, compile, autocast, PEFT, accelerate, hooks of others."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noisescope as ns
from noisescope.errors import ModelHeld
from noisescope.probe.formats import quantise
from noisescope.testing import tiny_inputs, tiny_model

PER_FORWARD = 31  # tiny llama of 2 blocks: 2 x 14, embedding, final norm, head


def test_generate_with_a_cache(tokens):
    """Inside generate every decoding step is counted, and noise can change the tokens."""
    model = tiny_model("llama")
    with ns.inject(model, ns.Injection(ns.Gaussian(0.5))) as tally:
        noisy = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    clean = model.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert tally.forward == 8 * PER_FORWARD and noisy.shape == clean.shape and not torch.equal(noisy, clean)


def test_generate_names_its_rows_by_itself(tokens):
    """rows(samples) is enough for generation: positions come from generate, and batches may be split."""
    model = tiny_model("llama")
    probe = ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"linear"}))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with probe:
        probe.rows([0, 1])
        both = model.generate(tokens, **settings)
        probe.rows([1])
        one = model.generate(tokens[1:], **settings)
    assert torch.equal(both[1:], one)


@pytest.mark.parametrize("when", ["before", "inside", "in place", "blocks"])
def test_torch_compile_is_never_silently_clean(tokens, when):
    """Compiled before or inside the scope: eager noise, fresh each call, exact counts, and the tally says so."""
    model = tiny_model("llama")
    injection = ns.Injection(ns.Gaussian(0.05), operators={"linear"})
    with torch.no_grad():
        clean = model(tokens).logits
        if when == "in place":
            model.compile(backend="eager")
        elif when == "blocks":
            for block in model.model.layers:
                block.compile(backend="eager")
        call = torch.compile(model, backend="eager") if when == "before" else model
        call(tokens)
        with ns.inject(call, injection) as tally:
            if when == "inside":
                call = torch.compile(model, backend="eager")
            first, second = call(tokens).logits, call(tokens).logits
        plain = tiny_model("llama")
        with ns.inject(plain, injection):
            expected = plain(tokens).logits
        after = call(tokens).logits
    assert tally.forward == 30 and not torch.equal(first, second)
    assert torch.allclose(first, expected, atol=1e-5) and torch.allclose(after, clean, atol=1e-5)
    assert tally.forced_eager


def test_autocast(tokens, logits):
    """Under autocast noise falls on what autocast made, in its dtype."""
    model = tiny_model("llama")
    seen = []

    def keep(y, draw):
        seen.append(y.dtype)
        return ns.Gaussian(0.05)(y, draw)

    with torch.autocast("cpu", torch.bfloat16), ns.inject(model, ns.Injection(keep, operators={"linear"})):
        logits(model, tokens)
    assert set(seen) == {torch.bfloat16}


def test_peft_lora(tokens):
    """A LoRA model's base and adapter linears are all linears; only adapters get gradients; merging is clean."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )
    model.eval()
    with torch.no_grad():
        clean = model(tokens).logits
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"linear"})) as tally:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert {p: c.forward for p, c in tally.per_layer.items()} == {0: 11, 1: 11, "lm_head": 1}
    assert tally.backward > 0
    with torch.no_grad():
        assert torch.equal(clean, model(tokens).logits)


def test_accelerate_device_map(tokens, logits):
    """A model dispatched by accelerate (offloaded weights, its own forwards) gets noise and is put back."""
    accelerate = pytest.importorskip("accelerate")
    plain = tiny_model("llama")
    model = accelerate.cpu_offload(tiny_model("llama"), execution_device="cpu")
    before = {n: m.__dict__.get("forward") for n, m in model.named_modules()}
    clean = logits(model, tokens)
    for tensor in ("output", "weight"):
        injection = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, tensor=tensor)
        with ns.inject(model, injection) as tally:
            noisy = logits(model, tokens)
        with ns.inject(plain, injection):
            assert torch.allclose(noisy, logits(plain, tokens), atol=1e-6)
        assert tally.forward == 15
    assert torch.equal(clean, logits(model, tokens))
    assert before == {n: m.__dict__.get("forward") for n, m in model.named_modules()}


def test_the_signature_stays_readable(llama):
    """generate() and Trainer read the forward's signature: it is the model's own inside a scope."""
    import inspect

    outside = inspect.signature(llama.forward)
    with pytest.raises(ns.NothingInjected), ns.inject(llama, ns.Injection(ns.Gaussian(0.05))):
        assert inspect.signature(llama.forward) == outside


def test_replicas_are_refused(llama, tokens):
    """nn.DataParallel-style replicas share our stand-ins: calling one from another thread raises."""
    import threading

    caught = []
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05))):
        llama(tokens)
        replica = llama._replicate_for_data_parallel()

        def run() -> None:
            try:
                replica(tokens)
            except ModelHeld as error:
                caught.append(str(error))

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert "DataParallel" in caught[0]


def test_submodules_called_on_their_own(llama, tokens):
    """Calling the body instead of the model is injected into as well, with fresh noise each time."""
    with torch.no_grad(), ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layers={1})) as tally:
        a = llama.model(tokens).last_hidden_state
        b = llama.model(tokens).last_hidden_state
    assert tally.forward == 14 and not torch.equal(a, b)


def test_encoder_decoder_generation():
    """T5's generate calls the encoder alone first: its blocks fire, in their own places."""
    model = tiny_model("t5")
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"linear"})) as tally:
        model.generate(tiny_inputs("t5")["input_ids"], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert {p: c.forward for p, c in tally.per_layer.items() if p != "lm_head"} == {0: 6, 1: 6, 2: 30 - 4, 3: 30 - 4}


def test_inference_mode(llama, tokens):
    """torch.inference_mode is a no-grad run like any other."""
    with torch.inference_mode():
        clean = llama(tokens).logits
        with ns.inject(llama, ns.Injection(ns.Gaussian(0.05))) as tally:
            assert not torch.equal(clean, llama(tokens).logits)
    assert tally.forward == 45


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # torch's own fast path, in the clean run
def test_eager_moe_and_plain_encoder(logits):
    """MoE experts run one by one are linear calls too; a plain TransformerEncoder leaves its fused fast path."""
    moe = tiny_model("mixtral", experts_implementation="eager")
    with ns.inject(moe, ns.Injection(ns.Gaussian(0.05), modules=["*.experts"], operators={"linear"})) as tally:
        logits(moe, **tiny_inputs("mixtral"))
    assert tally.forward > 4
    encoder = tiny_model("transformer_encoder")
    inputs = tiny_inputs("transformer_encoder")
    padding = torch.zeros(inputs["src"].shape[:2], dtype=torch.bool)
    padding[0, -2:] = True
    with torch.no_grad():
        clean = encoder(**inputs, src_key_padding_mask=padding)
        with ns.inject(encoder, ns.Injection(ns.Gaussian(0.0), operators={"softmax", "linear"})) as tally:
            control = encoder(**inputs, src_key_padding_mask=padding)
    assert tally.per_operator["softmax"].forward == 2
    assert torch.allclose(clean[1], control[1], atol=1e-5)


def test_the_fallback_of_grouped_products_is_seen(logits, monkeypatch):
    """On older cards transformers multiplies experts by an operator of its own: it is `linear` too."""
    from transformers.integrations import moe

    monkeypatch.setattr(moe, "_can_use_grouped_mm", lambda *args: False)
    model = tiny_model("mixtral")
    with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layers={0})) as tally:
        logits(model, **tiny_inputs("mixtral"))
    assert tally.per_module["model.layers.0.mlp.experts"].forward == 2


def test_an_operator_hidden_in_an_unknown_kernel_raises(llama, tokens, logits):
    """A module that must compute softmax but never shows it is an error, even when others fired."""
    attention = llama.model.layers[1].self_attn
    attention.forward = lambda hidden_states, **kwargs: (hidden_states * 1.0, None)
    with (
        pytest.raises(ns.NothingInjected, match=r"layers.1.self_attn ran, but its (softmax|matmul) was never observed"),
        ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"attention"})),
    ):
        logits(llama, tokens)


def test_peft_generate_calls_an_inner_model(tokens):
    """rows() and keys hold where generate bypasses the outermost module."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    probe = ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"linear"}))
    with probe:
        probe.rows([0, 1])
        both = model.generate(input_ids=tokens, **settings)
        probe.rows([1])
        one = model.generate(input_ids=tokens[1:], **settings)
    assert torch.equal(both[1:], one) and probe.forwards == 8


class HandMade(nn.Module):
    """Attention and norm written by hand, in a class whose name says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 24) / 8**0.5)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (F.layer_norm(x, (8,)) @ self.w).chunk(3, -1)
        x = x + torch.einsum("bts,bsd->btd", torch.softmax(q @ k.transpose(1, 2), -1), v)
        return x + self.down(F.gelu(self.up(torch.einsum("btd->btd", x))))


def test_hand_written_blocks():
    """Raw parameters are linears, a permuting einsum is no product, loose calls belong to attention or the MLP."""
    model = nn.Sequential(HandMade(), HandMade())
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        for operators, expected in (
            (None, {"linear": 6, "matmul": 4, "softmax": 2, "gelu": 2, "norm": 2, "residual": 2}),
            ({"attention"}, {"matmul": 4, "softmax": 2}),
            ({"mlp"}, {"linear": 6, "gelu": 2}),
        ):
            with ns.inject(model, ns.Injection(ns.Gaussian(0.05), operators=operators)) as tally:
                model(x)
            assert {o: c.forward for o, c in tally.per_operator.items()} == expected


def test_weight_formats_run_along_the_inputs():
    """GPT-2 stores [in, out]: per-channel rounding is per output all the same."""
    model = tiny_model("gpt2")
    layer = model.transformer.h[0].mlp.c_fc
    x = torch.randn(1, 3, 32)
    want = F.linear(x, quantise(layer.weight.T, ns.Format("int8", "channel"), weight=True), layer.bias)
    with (
        torch.no_grad(),
        ns.inject(
            model, ns.Injection(ns.Format("int8", "channel"), modules=["transformer.h.0.mlp.c_fc"], tensor="weight")
        ),
    ):
        assert torch.allclose(layer(x), want, atol=1e-6)
