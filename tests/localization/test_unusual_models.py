"""Healthy models of unusual structure, or with unusual numbers, raise no alarm and are judged."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import noisescope as ns
from noisescope.model.forwards import sliding_window
from noisescope.testing import tiny_inputs, tiny_model

WIDTH, VOCABULARY = 16, 40


class Own(nn.Module):
    """No blocks and no config: an embedding, whatever a subclass does, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.between(self.table(input_ids)))


class ChannelsFirst(Own):
    """Batch normalisation of [batch, channels, tokens], as beside a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class ScalarFirst(Own):
    """Its first parameter is a number."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.table, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def between(self, x: Tensor) -> Tensor:
        return x / self.temperature


class Ensemble(Own):
    """Products and a module inside torch.vmap, whose tensors have no storage, and a choice."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)
        self.norm = nn.LayerNorm(WIDTH)

    def between(self, x: Tensor) -> Tensor:
        def member(weight: Tensor) -> Tensor:
            y = self.norm(x @ weight)
            return y - y.topk(4, -1).values[..., -1:]

        return torch.vmap(member)(self.weights).mean(0)


class Recurrent(Own):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def between(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class Expanded(Own):
    """Positions expanded over the batch go through a dropout, which gives them back as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.dropout = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Dropout(0.1)

    def between(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.positions.expand(x.shape))


def made(kind: type[Own]) -> Own:
    torch.manual_seed(1)
    return kind().eval()


def located(model: nn.Module, **kwargs: Any) -> Any:
    draw = torch.Generator().manual_seed(2)
    ids = [torch.randint(VOCABULARY, (2, 24), generator=draw) for _ in range(2)]
    return ns.locate(ns.wrap(model), inputs=[{"input_ids": each} for each in ids], **kwargs)


@pytest.mark.parametrize("kind", [ChannelsFirst, ScalarFirst, Ensemble, Recurrent, Expanded])
def test_a_model_without_blocks(kind: type[Own]) -> None:
    verdict = located(made(kind))
    assert verdict.verdict == "healthy", verdict.headline
    assert verdict.coverage.smallest_share == 1


def test_a_fault_in_a_model_without_blocks() -> None:
    model = made(Recurrent)
    model.lstm.register_forward_hook(lambda module, args, output: (output[0] * 1.05, output[1]))
    suspect = located(model, quick=True).suspects[0]
    assert "head" in (suspect.site.module, *suspect.evidence.split()) or "lstm" in suspect.site.module


class Packed(nn.Module):
    """A linear with 8-bit weights, which are buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.codes.to(x.dtype) * self.scale)


def test_attention_between_packed_weights_is_judged() -> None:
    model: Any = tiny_model("llama").bfloat16()
    for layer in model.model.layers:
        for name, linear in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, Packed(linear))
    verdict = ns.locate(ns.wrap(model), quick=True)
    assert verdict.verdict == "healthy", verdict.headline
    kinds = {(unit.module, unit.kind) for unit in ns.dissect(model).units}
    assert ("model.layers.0.self_attn", "attention") in kinds


def zero_gain(model: Any) -> None:
    model.model.layers[0].input_layernorm.weight.zero_()


def tiny_embeddings(model: Any) -> None:
    model.model.embed_tokens.weight.mul_(1e-20)


def tiny_weights(model: Any) -> None:
    for parameter in model.parameters():
        parameter.mul_(1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("edit", [zero_gain, tiny_embeddings, tiny_weights])
def test_extreme_numbers_are_no_fault(edit: Callable[[Any], None], dtype: str) -> None:
    """Products of tiny numbers are subnormal: nothing can be said of them, but they are no fault."""
    model: Any = tiny_model("llama").to(getattr(torch, dtype))
    with torch.no_grad():
        edit(model)
    verdict = ns.locate(ns.wrap(model), inputs=tiny_inputs("llama", length=16))
    assert not verdict.suspects, verdict.headline
    assert verdict.verdict == ("healthy" if edit is zero_gain else "undecided")


@pytest.mark.parametrize("wrap", [lambda model: model, nn.DataParallel], ids=["itself", "in a wrapper"])
def test_token_ids_are_made_without_a_config(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """From the smallest table of tokens; the shapes of the design follow."""
    verdict = ns.locate(ns.wrap(wrap(made(Recurrent))))
    assert verdict.verdict == "healthy", verdict.headline
    assert len(verdict.coverage.phases) > 4


def test_ids_fit_the_text_part_of_a_config() -> None:
    sizes = {"vocab_size": 24, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 32}
    encoder, decoder = (transformers.BertConfig(**sizes, is_decoder=on, add_cross_attention=on) for on in (False, True))
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    verdict = ns.locate(ns.wrap(transformers.EncoderDecoderModel(config).eval()), quick=True)
    assert verdict.verdict == "healthy", verdict.headline


def test_layers_with_windows_of_their_own() -> None:
    """Such a config refuses to be asked for one window."""

    class Config:
        per_layer_config = {0: SimpleNamespace(sliding_window=8), 1: SimpleNamespace(sliding_window=None)}

        @property
        def sliding_window(self) -> int:
            raise RuntimeError("may vary across layers")

    model = made(Recurrent)
    model.config = Config()  # type: ignore[assignment]
    assert sliding_window(model) == 8
    assert sliding_window(tiny_model("mistral")) == tiny_model("mistral").config.sliding_window  # type: ignore[union-attr]


def test_norms_and_tables_that_no_forward_calls_are_called_alone() -> None:
    model = made(Recurrent)
    model.image_norm, model.image_table = nn.LayerNorm(WIDTH), nn.Embedding(4, WIDTH)  # type: ignore[assignment]
    verdict = located(model)
    assert verdict.verdict == "healthy" and verdict.coverage.smallest_share == 1, verdict.headline
    model.image_norm.register_forward_hook(lambda module, args, y: y * 1.01)  # type: ignore[union-attr]
    verdict = located(model)
    assert verdict.verdict == "faulty" and verdict.suspects[0].site.module == "image_norm"


def test_a_token_repeated_is_one_row_of_evidence() -> None:
    """Its rows differ by round-off alone, and so do their errors."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 160, "hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=96)
    model = transformers.LlamaForCausalLM(config).eval()
    inputs = [{"input_ids": torch.full((2, 64), token)} for token in (7, 10)]
    verdict = ns.locate(ns.wrap(model), inputs=inputs, quick=True)
    assert not verdict.suspects, verdict.suspects[0].evidence


def test_a_padded_batch_of_an_eager_float64_model() -> None:
    """Its mask is -inf in float32, in which softmax computes, so rows that see nothing are NaN: judged in part."""
    model = tiny_model("llama", layers=2).double()
    model.config._attn_implementation = "eager"
    verdict = ns.locate(model, method="audit")
    assert verdict.verdict == "undecided" and not verdict.suspects
    assert verdict.coverage.multiply_adds.share < 0.95 and verdict.coverage.modules.share == 1
    assert [each.partition(":")[0] for each in verdict.coverage.in_part] == [
        "prefill 8 x 15 tokens, left padding",
        "decode 8 x 2 tokens after 15, left padding",
    ]
    assert "of the output is NaN or infinite, on the host as well, in 18 modules" in verdict.coverage.in_part[0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
def test_a_scripted_activation_is_not_judged() -> None:
    """Its class has no Python forward that the host could run."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(1.702 * x)

    model = tiny_model("llama", layers=2)
    model.model.layers[1].mlp.act_fn = torch.jit.script(Gate())
    verdict = ns.locate(model, quick=True)
    assert not verdict.suspects
    assert [each.modules for each in verdict.coverage.not_judged] == [("model.layers.1.mlp.act_fn",)]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min and quant_max")
def test_fake_quantisation_by_hooks_of_torch() -> None:
    """Quantisation-aware training rounds outputs in torch's own hooks, and updates observers meanwhile."""
    quantisation = pytest.importorskip("torch.ao.quantization")
    model = tiny_model("opt", layers=2)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.qconfig = quantisation.get_default_qat_qconfig("fbgemm")
    quantisation.prepare_qat(model.train(), inplace=True)
    model(**tiny_inputs("opt"))
    assert ns.locate(model.eval()).verdict == "healthy"
    model.model.decoder.layers[1].fc1.register_forward_hook(lambda module, args, y: 1.01 * y)
    assert ns.locate(model).suspects[0].site.module.startswith("model.decoder.layers.1.")


class Refuses(Own):
    """A model that wants what nobody can make for it, or raises at shapes that it does not know."""

    def __init__(self, refuses: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.refuses = refuses

    def between(self, x: Tensor) -> Tensor:
        if self.refuses(x):
            raise ValueError("no kernel for this shape")
        return x


def test_a_model_that_can_not_run_on_what_is_made_for_it() -> None:
    """That is wrong usage, with the remedy; with inputs of the caller's its own error comes through."""
    torch.manual_seed(1)
    model = Refuses(lambda x: x.shape[1] > 20).eval()
    words = r"Refuses can't run on the inputs made for it \(ValueError: no kernel for this shape\): pass inputs="
    with pytest.raises(ns.NoisescopeError, match=words):
        ns.locate(ns.wrap(model))
    with pytest.raises(ValueError, match="no kernel"):
        located(model)


def test_token_ids_are_passed_by_the_name_that_the_forward_has() -> None:
    class Named(Recurrent):
        def forward(self, idx: Tensor) -> Tensor:
            return super().forward(idx)

    verdict = ns.locate(ns.wrap(made(Named)))
    assert verdict.verdict == "healthy" and len(verdict.coverage.phases) > 4, verdict.headline


def test_code_that_draws_random_numbers_is_not_judged() -> None:
    """The host draws others, so nothing can be said of the result."""

    class Noisy(Own):
        def between(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn(WIDTH, device=x.device)

    verdict = located(made(Noisy))
    assert "its code draws random numbers, and the host draws others" in {
        each.reason.rpartition(": ")[2] for each in verdict.coverage.not_judged
    }
    assert verdict.verdict == "undecided" or any(s.fault_class == "intermittent" for s in verdict.suspects)


def test_a_model_that_fails_in_every_decode_is_not_healthy() -> None:
    """Prefill alone is not what it is used for; a model without a cache is another matter."""
    model: Any = tiny_model("llama", layers=2)
    forward = model.forward

    def without_decode(input_ids: Any = None, **kwargs: Any) -> Any:
        if input_ids.shape[1] == 1:
            raise RuntimeError("no kernel for one query")
        return forward(input_ids=input_ids, **kwargs)

    model.forward = without_decode
    verdict = ns.locate(model)
    assert verdict.verdict == "undecided" and not verdict.suspects
    assert "the model can't decode" in verdict.headline and "no kernel for one query" in verdict.headline


class MaskAdded(Own):
    """Attention whose scores are a product with a mask added in one call."""

    def between(self, x: Tensor) -> Tensor:
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return torch.bmm(torch.baddbmm(mask, x, x.mT).softmax(-1), x)


def test_minus_infinity_of_an_added_mask_is_no_overflow() -> None:
    verdict = ns.locate(ns.wrap(made(MaskAdded)))
    assert verdict.verdict == "healthy", verdict.headline
    assert not any("overflow" in note for note in verdict.notes)


def test_where_nan_begins_is_explained_in_merged_calls_too() -> None:
    """Without eps, the norm of a row of zeros is NaN."""
    model = tiny_model("llama", layers=2, rms_norm_eps=0.0)
    model.model.embed_tokens.weight.data[0] = 0.0
    notes = ns.locate(ns.wrap(model)).notes
    assert any("NaN or infinity first" in note and "host's result from the same inputs" in note for note in notes)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_model_is_refused() -> None:
    model = torch.jit.trace(made(MaskAdded), torch.zeros(2, 8, dtype=torch.long), check_trace=False)
    with pytest.raises(ns.NoisescopeError, match="give the module that it was made from"):
        ns.locate(ns.wrap(model))
