"""Loading: what comes back, what is refused, and in which words. No network, and no pickle is run."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import noisescope as ns
from noisescope.errors import InvalidInput, MissingExtra
from noisescope.model.loading import outline
from noisescope.testing import MODELS, tiny_inputs, tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama folder with a tokenizer. Read only: tests copy it before they break it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("llama")
    tiny_model("llama").save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "noise": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def broken(llama: Path, tmp_path: Path) -> Path:
    """A copy of that folder to break."""
    return Path(shutil.copytree(llama, tmp_path / "broken"))


@pytest.mark.parametrize("name", [name for name in MODELS if name != "transformer_encoder"])
def test_a_folder_loads_as_what_it_was_saved_from(name: str, tmp_path: Path) -> None:
    """Class, weights and anatomy come back, for language models and for BERT, ViT and T5."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    subject = ns.load(tmp_path)
    assert type(subject.model) is type(model) and not subject.model.training
    with torch.no_grad():
        assert torch.equal(subject.model(**tiny_inputs(name))[0], model(**tiny_inputs(name))[0])
    assert subject.anatomy == ns.dissect(model)
    assert subject.tokenizer is None and subject.source == str(tmp_path)


def test_an_outline_is_the_same_model_without_weights(llama: Path, broken: Path) -> None:
    """The anatomy comes from the config alone: garbage in the weight file goes unnoticed."""
    (broken / "model.safetensors").write_bytes(b"no weights here")
    subject = outline(broken)
    assert subject.anatomy == ns.load(llama).anatomy
    assert {parameter.device.type for parameter in subject.model.parameters()} == {"meta"}


def test_the_tokenizer_comes_along(llama: Path) -> None:
    """A folder that holds a tokenizer gives a subject that has it."""
    assert ns.load(llama).tokenizer("noise")["input_ids"] == [1]


@pytest.mark.parametrize(
    ("given", "loaded"),
    [
        (None, torch.bfloat16),  # as stored
        ("auto", torch.bfloat16),
        ("float32", torch.float32),
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("float16", torch.float16),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes(given: str | torch.dtype | None, loaded: torch.dtype, tmp_path: Path) -> None:
    """Each name of a dtype is understood; none at all means as stored."""
    tiny_model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert ns.load(tmp_path, dtype=given).model.dtype == loaded
    assert outline(tmp_path, dtype=given).model.dtype == loaded


def test_the_attention_implementation_is_passed_on(llama: Path) -> None:
    """`attn_implementation` reaches the model, also where no weights are read."""
    assert ns.load(llama, attn_implementation="eager").model.config._attn_implementation == "eager"
    assert outline(llama, attn_implementation="eager").model.config._attn_implementation == "eager"
    with pytest.raises(InvalidInput, match="transformers can't load"):
        ns.load(llama, attn_implementation="no_such_attention")


def test_device_map_places_the_model(llama: Path) -> None:
    """accelerate's device_map is passed on."""
    model = ns.load(llama, device_map="cpu").model
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtype": "bfloat61"}, "unknown dtype 'bfloat61'. Allowed: .*Did you mean 'bfloat16'?"),
        ({"dtype": torch.int8}, "unknown dtype 'torch.int8'"),
        ({"device": "gpu"}, "device 'gpu' can't be used here"),
        ({"device": "cuda:99"}, "device 'cuda:99' can't be used here"),
        ({"revision": "main"}, "revision='main' selects a version of a hub id, but .* is a path: omit it"),
    ],
)
def test_bad_settings(settings: dict[str, Any], words: str, llama: Path) -> None:
    """A wrong setting is refused before anything is read."""
    with pytest.raises(InvalidInput, match=words):
        ns.load(llama, **settings)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "model.pkl", "no/such/model.ckpt"])
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    """A pickle is not opened; the error says how to convert it."""
    with pytest.raises(InvalidInput, match=r"is a pickle. Opening one runs code.* Convert it to safetensors"):
        ns.load(tmp_path / name)


def test_a_folder_of_pickles_is_refused(broken: Path) -> None:
    """pytorch_model.bin beside a config is not opened either."""
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(
        InvalidInput,
        match=r"has no \*\.safetensors files \(noisescope does not open pickles such as "
        r"pytorch_model\.bin",
    ):
        ns.load(broken)


def test_a_safetensors_file_is_not_a_model(llama: Path) -> None:
    """The error names the folder to pass."""
    with pytest.raises(InvalidInput, match=f"pass its folder, {llama}"):
        ns.load(llama / "model.safetensors")


def test_a_folder_without_config(tmp_path: Path) -> None:
    """The error says what is missing, and points to a GGUF file where there is one."""
    with pytest.raises(InvalidInput, match=r"has no config\.json\. A model is a Hugging Face folder"):
        ns.load(tmp_path)
    (tmp_path / "tiny.gguf").touch()
    with pytest.raises(InvalidInput, match=r"has no config\.json\. Pass the file: .*tiny\.gguf"):
        ns.load(tmp_path)


def test_an_adapter_is_not_a_model(broken: Path) -> None:
    """A PEFT adapter's folder is refused with what to do."""
    (broken / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match=r"is a PEFT adapter, not a model: merge it"):
        ns.load(broken)


def test_missing_weights_are_an_error(broken: Path) -> None:
    """transformers would fill them with random numbers."""
    weights = load_file(broken / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"lacks 1 weights of LlamaForCausalLM \(such as model.layers.1.mlp.up_proj"):
        ns.load(broken)


def test_unused_weights_are_noted(broken: Path) -> None:
    """Tensors that the class has no use for are no error, but not silent either."""
    weights = load_file(broken / "model.safetensors")
    weights["model.extra.weight"] = torch.zeros(2)
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    assert ns.load(broken).anatomy.notes == ("1 tensors of the checkpoint are not used by LlamaForCausalLM",)


@pytest.mark.parametrize(
    ("file", "content"), [("model.safetensors", b"garbage"), ("config.json", b"{not json"), ("tokenizer.json", b"{")]
)
def test_broken_files_give_one_line(file: str, content: bytes, broken: Path) -> None:
    """What transformers says about a broken file arrives as one line that names the source."""
    (broken / file).write_bytes(content)
    with pytest.raises(
        InvalidInput, match=r"transformers can't load .*broken: |config.json is not a valid model config: Expecting"
    ) as caught:
        ns.load(broken)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_that_names_no_class_is_a_causal_language_model(broken: Path) -> None:
    """Without `architectures` in its config, a folder loads as a causal language model."""
    config = json.loads((broken / "config.json").read_text())
    del config["architectures"]
    (broken / "config.json").write_text(json.dumps(config))
    assert type(ns.load(broken).model).__name__ == "LlamaForCausalLM"
    assert type(outline(broken).model).__name__ == "LlamaForCausalLM"


def test_code_of_a_checkpoint_is_not_run_unasked(broken: Path) -> None:
    """A checkpoint that brings its own classes is refused without trust_remote_code, and the error names the option."""
    config = json.loads((broken / "config.json").read_text())
    config |= {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyModel"},
    }
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "mine.py").write_text("raise SystemExit('this code ran')")
    with pytest.raises(InvalidInput, match=r"contains custom code.*trust_remote_code=True"):
        ns.load(broken)


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "no/such/deep/folder", "nowhere.gguf"])
def test_a_missing_path(source: str) -> None:
    """The error says what a model can be."""
    with pytest.raises(InvalidInput, match=r"there is no file or folder .* A model is .*tiny:llama"):
        ns.load(source)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_an_id_that_is_not_cached(cache: Path) -> None:
    """Nothing is downloaded; the error gives the command that would fetch it."""
    with pytest.raises(InvalidInput, match=r"noisescope downloads nothing.* hf download some/model$"):
        ns.load("some/model")
    with pytest.raises(InvalidInput, match=r"hf download some/model --revision v2$"):
        ns.load("some/model", revision="v2")
    with pytest.raises(InvalidInput, match="is not a file, a folder or a hub id"):
        ns.load("a model?")


def test_an_id_from_the_cache(cache: Path, llama: Path) -> None:
    """An id is looked up in the hub library's own cache, at its revision."""
    home, commit = cache / "models--some--model", "0" * 40
    shutil.copytree(llama, home / "snapshots" / commit)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    subject = ns.load("some/model")
    assert subject.source == "some/model" and type(subject.model).__name__ == "LlamaForCausalLM"


def test_demo_is_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    """`demo` is the model in the package, for load and outline alike; a folder of that name is ./demo."""
    shutil.copytree(llama, tmp_path / "demo")
    monkeypatch.chdir(tmp_path)
    loaded, outlined = ns.load("demo"), outline("demo")
    assert loaded.source == outlined.source == "demo" and loaded.tokenizer is not None
    assert len(loaded.anatomy.blocks) == len(outlined.anatomy.blocks) > 8
    assert len(ns.load("./demo").anatomy.blocks) == 2


def test_wrap_takes_a_model_as_it_is() -> None:
    """Mode, device and tokenizer stay what they were."""
    model, tokenizer = tiny_model("gpt2").train(), object()
    subject = ns.wrap(model, tokenizer)
    assert subject.model is model and subject.tokenizer is tokenizer and model.training
    assert subject.anatomy == ns.dissect(model) and subject.source == "GPT2LMHeadModel"


# -- GGUF


def write_gguf(path: Path, *, tokenizer: bool, kind: str = "Q8_0") -> np.ndarray[Any, Any]:
    """A two-block Llama with matrices of this type; returns its embedding before quantisation."""
    import gguf

    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(64)
    if tokenizer:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(["<unk>", "<s>", "</s>", "▁", *(chr(ord("A") + i) for i in range(60))])
        writer.add_token_scores([0.0] * 64)
        writer.add_token_types([2, 3, 3, *([1] * 61)])  # unknown, control, normal
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)

    def add(name: str, *shape: int) -> np.ndarray[Any, Any]:
        values = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            stored = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)
        return values

    embedding = add("token_embd", 64, 32)
    add("output_norm", 32)
    add("output", 64, 32)
    shapes = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "attn_norm": (32,)}
    shapes |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64), "ffn_norm": (32,)}
    for block in range(2):
        for name, shape in shapes.items():
            add(f"blk.{block}.{name}", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_gguf_file_is_dequantised(tokenizer: bool, tmp_path: Path) -> None:
    """A .gguf file loads with float weights, as near as Q8_0 keeps them, and the anatomy notes it."""
    embedding = write_gguf(tmp_path / "tiny.gguf", tokenizer=tokenizer)
    subject = ns.load(tmp_path / "tiny.gguf")
    assert subject.anatomy.notes == ("weights were dequantised on loading: F32, Q8_0 in the file",)
    assert (subject.tokenizer is not None) == tokenizer
    loaded = subject.model.model.embed_tokens.weight.detach().numpy()
    step = np.abs(embedding).max(axis=1, keepdims=True) / 127  # Q8_0: one scale for each 32 numbers, kept as float16,
    bound = (0.5 + 127 * 2.0**-11) * step  # so half a step, and up to 127 times the scale's own rounding
    error = np.abs(loaded - embedding)
    assert error.max() > 0 and (error <= bound).all()
    assert outline(tmp_path / "tiny.gguf").anatomy.units == subject.anatomy.units


def test_a_gguf_file_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package, the error is the pip line."""
    (tmp_path / "tiny.gguf").touch()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else find(name, *a))
    with pytest.raises(MissingExtra, match=r"a \.gguf file needs gguf: pip install 'noisescope\[gguf\]'"):
        ns.load(tmp_path / "tiny.gguf")


# -- state dicts


@pytest.fixture
def state_dict(broken: Path) -> Path:
    """The weights of that folder as model.pt beside the config and the tokenizer, and no safetensors."""
    torch.save(load_file(broken / "model.safetensors"), broken / "model.pt")
    (broken / "model.safetensors").unlink()
    return broken / "model.pt"


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_state_dict_beside_its_config(suffix: str, llama: Path, state_dict: Path) -> None:
    """It loads bit-equal, with the folder's class and tokenizer."""
    subject, folder = ns.load(state_dict.rename(state_dict.with_suffix(suffix))), ns.load(llama)
    assert type(subject.model) is type(folder.model) and not subject.model.training
    assert subject.tokenizer("noise")["input_ids"] == [1]
    loaded, expected = subject.model.state_dict(), folder.model.state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert subject.anatomy == folder.anatomy == outline(state_dict.with_suffix(suffix)).anatomy
    assert subject.model.generation_config.eos_token_id == folder.model.generation_config.eos_token_id


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert"])
def test_state_dicts_of_other_classes(name: str, tmp_path: Path) -> None:
    """Tied weights, an encoder and a masked language model come back with the logits they had."""
    model = tiny_model(name)
    model.save_pretrained(tmp_path)  # for a config that names its class
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with torch.no_grad():
        loaded = ns.load(tmp_path / "model.pt").model(**tiny_inputs(name))[0]
        assert torch.equal(loaded, model(**tiny_inputs(name))[0])


def test_the_dtype_of_a_state_dict(state_dict: Path) -> None:
    """As stored, whatever the config has; a wanted dtype, attention and device_map are used."""
    config = json.loads((state_dict.parent / "config.json").read_text())
    (state_dict.parent / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert ns.load(state_dict).model.dtype == torch.float32
    model = ns.load(state_dict, dtype="bf16", attn_implementation="eager", device_map="cpu").model
    assert model.dtype == torch.bfloat16 and model.config._attn_implementation == "eager"


def test_an_old_state_dict_and_a_config_without_a_class(llama: Path, state_dict: Path) -> None:
    """torch's format before 1.6 loads too, and a config that names no class is a causal language model."""
    weights = torch.load(state_dict, weights_only=True)
    torch.save(weights, state_dict, _use_new_zipfile_serialization=False)
    config = json.loads((state_dict.parent / "config.json").read_text())
    del config["architectures"]
    (state_dict.parent / "config.json").write_text(json.dumps(config))
    model = ns.load(state_dict).model
    assert type(model).__name__ == "LlamaForCausalLM" and torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_loaded_model_is_off_its_file(state_dict: Path) -> None:
    """A training run that overwrites the file does not change the model, nor does the model change the file."""
    model, before = ns.load(state_dict).model, state_dict.read_bytes()
    weight = model.lm_head.weight.detach().clone()
    with state_dict.open("r+b") as file:
        file.write(b"\xff" * len(before))
    assert torch.equal(model.lm_head.weight, weight)
    state_dict.write_bytes(before)
    with torch.no_grad():
        ns.load(state_dict).model.lm_head.weight.zero_()
    assert state_dict.read_bytes() == before


def test_a_state_dict_needs_its_config(state_dict: Path) -> None:
    """Without config.json beside it, it is a pickle like any other."""
    (state_dict.parent / "config.json").unlink()
    with pytest.raises(InvalidInput, match=r"opens only plain state dicts in a \.pt.* next to a config\.json"):
        ns.load(state_dict)


class _Trap:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickled_model_is_refused_and_not_run(archive: bool, state_dict: Path, tmp_path: Path) -> None:
    """The code in a pickle does not run; the trap is shown to work where a pickle is trusted."""
    model, sprung = tiny_model("llama"), tmp_path / "sprung"
    model.trap = _Trap(sprung)
    torch.save(model, state_dict, _use_new_zipfile_serialization=archive)
    with pytest.raises(InvalidInput, match=r"Opening a pickled model runs code.* Convert it to safetensors"):
        ns.load(state_dict)
    assert not sprung.exists()
    torch.load(state_dict, weights_only=False)
    assert sprung.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"model": {"weight": torch.zeros(2)}, "epoch": 3}, r"it contains model, epoch\. Save only the weights"),
        ([torch.zeros(2)], r"not a plain state dict \(tensors by name\); it contains list"),
        ({"lm_head.weight": torch.zeros(2, 2)}, "transformers can't load"),  # of another shape
        ({"module.norm": torch.zeros(2)}, r"lacks 21 weights of LlamaForCausalLM \(such as lm_head\.weight\)"),
    ],
)
def test_what_is_not_the_state_dict_of_this_model(content: Any, words: str, state_dict: Path) -> None:
    """A training checkpoint, a list, wrong shapes and wrong names are told apart."""
    torch.save(content, state_dict)
    with pytest.raises(InvalidInput, match=words):
        ns.load(state_dict)


@pytest.mark.parametrize("content", [b"", b"junk" * 100, b"PK\x03\x04 no archive"])
def test_a_broken_state_dict(content: bytes, state_dict: Path) -> None:
    """Garbage is no state dict."""
    state_dict.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"model\.pt is not a plain state dict"):
        ns.load(state_dict)


# -- tiny models


def test_tiny_models_are_a_function_of_their_seed() -> None:
    """Same seed, same weights; the caller's random state is not touched."""
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = (tiny_model("llama", seed=seed).lm_head.weight for seed in (1, 1, 2))
    tiny_inputs("llama")
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_tiny_model_is_a_source() -> None:
    """`tiny:NAME` loads wherever a model is asked for."""
    assert ns.load("tiny:gpt2", dtype="bf16", attn_implementation="eager").model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ns.load("tiny:lama"), "unknown tiny model 'lama'. Allowed: .* Did you mean 'llama'?"),
        (lambda: tiny_inputs("lama"), "unknown tiny model 'lama'"),
        (lambda: tiny_model("llama", layers=0), "at least one layer, got 0"),
    ],
)
def test_bad_tiny_models(call: Any, words: str) -> None:
    """A wrong name is met with the nearest right one."""
    with pytest.raises(InvalidInput, match=words):
        call()
