"""What is wrong in memory, by plain edits of loaded models; and what must be no alarm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import noisescope as ns
from noisescope.localization.state import check_state
from noisescope.testing import MODELS, tiny_model

LAYER = "model.layers.1"
Edit = Callable[[nn.Module], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 4 layers in several shards; its attention output projection is square."""
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", layers=4, initializer_range=0.2).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    return path


def weight(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(f"{LAYER}.{name}").data


def flip(model: nn.Module, bit: int = 20) -> None:
    weight(model, "mlp.up_proj.weight").view(torch.int32)[5, 7] ^= 1 << bit


def part(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def copy_layer(model: nn.Module) -> None:
    weight(model, "mlp.down_proj.weight").copy_(model.get_parameter("model.layers.3.mlp.down_proj.weight").data)


def swap_indices(model: nn.Module) -> None:
    for here, there in ((1, 2), (2, 1)):
        part(model, f"model.layers.{here}.self_attn").layer_idx = there


WEIGHTS: dict[str, tuple[Edit, str, str, str]] = {
    "bit": (flip, "mlp.up_proj", "stuck bit", "bit 20 of element [5, 7]"),
    "transposed": (
        lambda m: weight(m, "self_attn.o_proj.weight").copy_(weight(m, "self_attn.o_proj.weight").T.clone()),
        "self_attn.o_proj",
        "swapped channels",
        "transposed",
    ),
    "zero": (lambda m: weight(m, "mlp.gate_proj.weight").zero_(), "mlp.gate_proj", "dead lane", "all zero"),
    "rows": (lambda m: weight(m, "mlp.gate_proj.weight")[3:6].zero_(), "mlp.gate_proj", "dead lane", "3 rows of zeros"),
    "columns": (
        lambda m: weight(m, "mlp.gate_proj.weight")[:, 9].zero_(),
        "mlp.gate_proj",
        "dead input lane",
        "1 columns of zeros (9)",
    ),
    "another": (copy_layer, "mlp.down_proj", "stale data", "model.layers.3.mlp.down_proj.weight"),
    "rolled": (
        lambda m: weight(m, "self_attn.q_proj.weight").copy_(weight(m, "self_attn.q_proj.weight").roll(2, 0)),
        "self_attn.q_proj",
        "swapped channels",
        "rows shifted by 2",
    ),
    "swapped": (
        lambda m: weight(m, "self_attn.q_proj.weight").copy_(
            weight(m, "self_attn.q_proj.weight")[[0, 1, 2, 3, 6, 5, 4, *range(7, 32)]]
        ),
        "self_attn.q_proj",
        "swapped channels",
        "2 rows in another order (4, 6)",
    ),
    "scaled": (lambda m: weight(m, "mlp.up_proj.weight").mul_(1.25), "mlp.up_proj", "gain", "times 1.25"),
    "offset": (lambda m: weight(m, "input_layernorm.weight").add_(0.5), "input_layernorm", "", "checkpoint's"),
    "rounded": (
        lambda m: weight(m, "mlp.up_proj.weight").copy_(weight(m, "mlp.up_proj.weight").bfloat16()),
        "mlp.up_proj",
        "truncation",
        "rounded to bfloat16",
    ),
    "nan": (
        lambda m: weight(m, "mlp.up_proj.weight")[0, :3].fill_(torch.nan),
        "mlp.up_proj",
        "unknown",
        "3 NaN or infinities",
    ),
    "replaced": (
        lambda m: nn.init.normal_(weight(m, "mlp.up_proj.weight")),
        "mlp.up_proj",
        "unknown",
        "of 2048 elements by up to",
    ),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_damaged_weight_is_named(folder: Path, name: str, dtype: str) -> None:
    if dtype == "bfloat16" and name in ("bit", "rounded"):
        pytest.skip("a bit of float32")
    edit, module, kind, words = WEIGHTS[name]
    subject = ns.load(folder, dtype=dtype)
    edit(subject.model)
    report = check_state(subject)
    assert [s.site.module for s in report.suspects] == [f"{LAYER}.{module}"]
    suspect = report.suspects[0]
    assert suspect.site.place == 1 and suspect.site.tensor == "weight"
    assert suspect.site.operator == ("norm" if "norm" in module else "linear")
    assert suspect.fault_class == kind or not kind
    assert words in suspect.evidence
    assert "39 tensors with the checkpoint" in report.words


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bit", [0, 9, 14, 15])
def test_one_flipped_bit_of_16(folder: Path, dtype: torch.dtype, bit: int) -> None:
    subject = ns.load(folder, dtype=dtype)
    bits = weight(subject.model, "mlp.up_proj.weight").view(torch.int16)
    bits[3, 4] ^= -(1 << 15) if bit == 15 else 1 << bit
    (suspect,) = check_state(subject).suspects
    assert f"bit {bit} of element [3, 4]" in suspect.evidence


ATTRIBUTES: dict[str, tuple[Edit, str, str]] = {
    "eps": (lambda m: _times(part(m, f"{LAYER}.input_layernorm"), "variance_epsilon", 10), "variance_epsilon", "norm"),
    "scaling": (lambda m: _times(part(m, f"{LAYER}.self_attn"), "scaling", 1.1), "scaling", "attention"),
    "groups": (lambda m: setattr(part(m, f"{LAYER}.self_attn"), "num_key_value_groups", 1), "groups is 1", "attention"),
    "layer_idx": (swap_indices, "layer_idx is 2; the config gives 1", "attention"),
    "activation": (
        lambda m: setattr(part(m, f"{LAYER}.mlp"), "act_fn", nn.GELU()),
        "GELU; the config gives SiLU",
        "gelu",
    ),
}


def _times(module: Any, name: str, factor: float) -> None:
    setattr(module, name, getattr(module, name) * factor)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_that_the_config_does_not_give(folder: Path, name: str) -> None:
    edit, words, operator = ATTRIBUTES[name]
    model = tiny_model("llama", layers=4)
    edit(model)
    first = check_state(ns.wrap(model)).suspects[0]
    assert words in first.evidence and first.site.place == 1 and first.site.operator == operator


def test_rotary_frequencies(folder: Path) -> None:
    for edit, words in (
        (lambda x: x.bfloat16().float(), "rounded to bfloat16"),
        (lambda x: x**1.1, "differs from the one built from the config"),
    ):
        subject = ns.load(folder)
        rotary = part(subject.model, "model.rotary_emb")
        rotary.inv_freq = edit(rotary.inv_freq)
        (suspect,) = check_state(subject).suspects
        assert words in suspect.evidence and suspect.site.place == "rotary"


def test_suspicious_without_a_file() -> None:
    model = tiny_model("llama", layers=4)
    copy_layer(model)
    weight(model, "mlp.gate_proj.weight").zero_()
    weight(model, "self_attn.q_proj.weight")[2] = 0.5
    report = check_state(ns.wrap(model))
    assert not report.suspects
    found = "; ".join(s.evidence for s in report.doubtful)
    assert "all zero" in found and "same numbers as" in found and "1 of 32 rows" in found
    weight(model, "input_layernorm.weight")[0] = torch.nan
    assert "NaN" in check_state(ns.wrap(model)).suspects[0].evidence


def test_a_weight_of_a_wrapped_model_that_is_not_the_files(folder: Path) -> None:
    """Edited or damaged: that is open, so the model is not called healthy."""
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    weight(model, "input_layernorm.weight").add_(torch.linspace(0.1, 0.2, 32).square())
    report = check_state(ns.wrap(model))
    assert not report.suspects
    (suspect,) = report.possible
    assert "changed on purpose after loading, or damaged" in suspect.evidence
    verdict = ns.locate(ns.wrap(model))
    assert verdict.verdict == "undecided" and verdict.suspects == (suspect,)
    assert verdict.headline.startswith(f"undecided: possible, but not certain: {suspect.site}: weight differs from")


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64) for _ in range(4))


def test_odd_one_out_among_hand_written_blocks_is_doubtful() -> None:
    model = Own()
    assert not check_state(model).doubtful
    part(model, "layers.2.norm1").eps = 1e-3
    report = check_state(model)
    assert not report.suspects
    assert "eps is 0.001; in the other 3 blocks 1e-05" in report.doubtful[0].evidence
    assert "attributes between blocks" in report.words


# -- healthy


@pytest.mark.parametrize("name", MODELS)
def test_stored_and_loaded_is_no_alarm(name: str, tmp_path: Path) -> None:
    model: Any = tiny_model(name, biases=0.1)
    assert not check_state(ns.wrap(model)).suspects
    if name == "transformer_encoder":
        return
    model.save_pretrained(tmp_path)
    for loaded in (
        type(model).from_pretrained(tmp_path),
        type(model).from_pretrained(tmp_path, dtype="bfloat16"),
        type(model).from_pretrained(tmp_path).half(),
        type(model).from_pretrained(tmp_path).half().float(),
        type(model).from_pretrained(tmp_path).double(),
    ):
        report = check_state(ns.wrap(loaded))
        assert not report.suspects
        assert "tensors with the checkpoint" in report.words and "not compared" not in report.words


def train(model: Any) -> None:
    for p in model.parameters():
        p.data += 1e-3 * torch.randn_like(p)


def train_head(model: Any) -> None:
    model.lm_head.weight.data += 1e-3 * torch.randn_like(model.lm_head.weight)


def drop_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    model.config.num_hidden_layers = 2


def settings(model: Any) -> None:
    model.config.pad_token_id = 5
    model.config.use_cache = False
    model.train()


HEALTHY: dict[str, Edit] = {
    "trained": train,
    "trained head": train_head,
    "resized": lambda m: m.resize_token_embeddings(80),  # type: ignore[operator]
    "dropped layers": drop_layers,
    "settings": settings,
    "checkpointing": lambda m: m.gradient_checkpointing_enable(),  # type: ignore[operator]
    "eager": lambda m: m.set_attn_implementation("eager"),  # type: ignore[operator]
}


@pytest.mark.parametrize("name", HEALTHY)
def test_edits_that_are_no_damage(folder: Path, name: str) -> None:
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    HEALTHY[name](model)
    assert not check_state(ns.wrap(model)).suspects


def test_adapters_and_their_base(folder: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    report = check_state(ns.wrap(model))
    assert not report.suspects and "39 tensors with the checkpoint" in report.words
    model.merge_adapter()
    assert not check_state(ns.wrap(model)).suspects
    model.unmerge_adapter()
    base.get_parameter(f"{LAYER}.mlp.down_proj.weight").data.zero_()
    (suspect,) = check_state(ns.wrap(model)).suspects
    assert suspect.site.module == f"base_model.model.{LAYER}.mlp.down_proj" and suspect.site.place == 1


@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_a_factor_of_lora(folder: Path, rank_stabilised: bool) -> None:
    """That of one module is a fault; all of them scaled alike, as peft can do, are noted."""
    peft = pytest.importorskip("peft")
    import transformers

    base = transformers.LlamaForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], use_rslora=rank_stabilised)
    model = peft.get_peft_model(base, lora)
    assert not check_state(ns.wrap(model)).suspects
    layers = [module for module in model.modules() if isinstance(module, peft.tuners.lora.Linear)]
    for layer in layers:
        layer.scale_layer(0.5)
    report = check_state(ns.wrap(model))
    assert not report.suspects and any("the scaling of default" in note for note in report.notes)
    layers[0].scale_layer(0.5)
    suspects = check_state(ns.wrap(model)).suspects
    assert suspects and {one.fault_class for one in suspects} == {"gain"}
    for layer in layers[1:]:
        layer.unscale_layer()
    layers[0].unscale_layer()
    layers[0].scaling["default"] *= 2
    (suspect,) = check_state(ns.wrap(model)).suspects
    assert suspect.site.module.endswith("layers.0.self_attn.q_proj") and suspect.site.place == 0


def test_trained_model_is_noted(folder: Path) -> None:
    subject = ns.load(folder)
    train(subject.model)
    report = check_state(subject)
    assert not report.suspects and any("trained" in note for note in report.notes)


# -- in a verdict


def test_exchanged_blocks_are_no_training(folder: Path) -> None:
    """Many matrices differ, but each holds another block's numbers; a wrapped model may have been rearranged."""
    subject = ns.load(folder)
    layers = subject.model.model.layers
    layers[1], layers[2] = layers[2], layers[1]
    for index in (1, 2):
        layers[index].self_attn.layer_idx = index
    report = check_state(subject)
    assert {s.fault_class for s in report.suspects} == {"stale data"}
    assert "holds the numbers of model.layers.2." in report.suspects[0].evidence


def test_an_exponent_that_a_bit_flip_made_huge_is_doubtful() -> None:
    """Without a file nobody knows, but one weight of 1e30 among small ones is named; a large column is none."""
    model = tiny_model("llama", layers=2)
    up = weight(model, "mlp.up_proj.weight")
    up[3, 5] = 1e30
    report = check_state(ns.wrap(model))
    assert not report.suspects
    assert ["has 1 element of up to 1e+30, over 1e+06 times the others" in s.evidence for s in report.doubtful] == [
        True
    ]
    up[:, 5] = 1e30
    assert not check_state(ns.wrap(model)).doubtful


def test_rows_of_nan_that_no_text_reads_are_doubtful() -> None:
    """Nothing ever set the rows of ids beside the vocabulary: they are no fault, and no made-up text reads them."""
    model = tiny_model("llama", layers=2)
    table = model.model.embed_tokens.weight.data
    table[-9:] = torch.nan
    verdict = ns.locate(ns.wrap(model), quick=True)
    assert verdict.verdict == "healthy" and "rows of NaN" in verdict.coverage.doubtful[0]
    table[5, 3] = torch.nan
    assert [s.fault_class for s in check_state(ns.wrap(model)).suspects] == ["unknown"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_made_in_the_models_dtype_are_its_own(dtype: torch.dtype) -> None:
    """GPT-J divides integers by an integer, so its angles have the dtype that is torch's default meanwhile."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "vocab_size": 40}
    config = transformers.GPTJConfig(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    assert not check_state(ns.wrap(model)).suspects
    model.transformer.h[0].attn.embed_positions[3] *= 1.1
    assert len(check_state(ns.wrap(model)).suspects) == 1
