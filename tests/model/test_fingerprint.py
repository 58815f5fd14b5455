"""A model is given to another process as a path, and only where that path holds the very same model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.model.fingerprint import Source, _placement, _renumbered, model_fingerprint, source_of
from noisescope.testing import tiny_model


def nowhere() -> Path:
    raise AssertionError("nothing is to be written")


def source_in(folder: Path, subject: Any) -> Source:
    return source_of(subject, model_fingerprint(subject.model), lambda: folder)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("llama", {"dtype": torch.float64}), ("gpt2", {"attn_implementation": "eager"}), ("mixtral", {})],
)
def test_a_loaded_model_comes_back(name: str, arguments: dict[str, Any]) -> None:
    """Path and arguments of `load` are all that is needed, and nothing is written."""
    subject = ns.load(f"tiny:{name}", **arguments)
    again = source_of(subject, "", nowhere).load()
    assert model_fingerprint(again.model) == model_fingerprint(subject.model)
    assert again.model.config._attn_implementation == subject.model.config._attn_implementation
    assert again.loading == subject.loading


def test_a_path_is_absolute_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker has another working directory; a name that is no path stays a name."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert source_of(ns.load("model"), "", nowhere).path == str(tmp_path / "model")
    (tmp_path / "tiny:llama").mkdir()
    (tmp_path / "demo").mkdir()
    for name in ("tiny:llama", "demo"):
        subject = SimpleNamespace(model=torch.nn.Linear(2, 2), loading={"device": "cpu"}, source=name)
        assert source_of(subject, "", nowhere).path == name  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "gemma3", "bert"])
def test_a_wrapped_model_is_written_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes back with class, weights and attention; a second run finds it and writes nothing."""
    model = tiny_model(name, seed=3, attn_implementation="eager")
    source = source_in(tmp_path, ns.wrap(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert not any(path.suffix in (".bin", ".pt", ".pkl") for path in (tmp_path / "model").iterdir())
    again = source.load()
    assert type(again.model) is type(model) and again.model.config._attn_implementation == "eager"
    assert model_fingerprint(again.model) == model_fingerprint(model)
    monkeypatch.setattr(model, "save_pretrained", nowhere)
    assert source_in(tmp_path, ns.wrap(model)) == source


def test_the_tokenizer_is_written_too(tmp_path: Path) -> None:
    """Generation in a worker needs it."""
    words = Tokenizer(WordLevel({"<unk>": 0, "noise": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    again = source_in(tmp_path, ns.wrap(tiny_model("llama"), tokenizer)).load()
    assert again.tokenizer("noise")["input_ids"] == [1]


def hooked() -> Any:
    model = tiny_model("llama")
    model.model.layers[1].register_forward_hook(lambda module, x, y: None)
    return model


def patched() -> Any:
    model = tiny_model("llama")
    model.model.norm.forward = lambda x: x
    return model


def quantised() -> Any:
    model = tiny_model("llama")
    model.hf_quantizer = object()
    return model


def unwritable() -> Any:
    model = tiny_model("llama")
    model.save_pretrained = lambda folder: (_ for _ in ()).throw(RuntimeError("no room\non the disk"))
    return model


def a_class_of_its_own() -> Any:
    model = tiny_model("llama")
    model.__class__ = type("MyLlama", (type(model),), {})
    return model


def cast() -> Any:
    return tiny_model("llama").to(torch.bfloat16)  # the rotary table, too, which a file does not hold


def with_a_layer_of_its_own() -> Any:
    model = tiny_model("llama")
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: tiny_model("transformer_encoder"), "TransformerEncoder has no save_pretrained"),
        (hooked, "hooks are registered on model.layers.1"),
        (patched, "the forward of model.norm is replaced"),
        (quantised, "it is quantised.*use noisescope.load on its folder"),
        (unwritable, "writing it failed: RuntimeError: no room on the disk"),
        (a_class_of_its_own, "a different model .a LlamaForCausalLM, not a MyLlama"),
        (cast, r"a different model .model.rotary_emb.inv_freq is torch.float32, not torch.bfloat16.*in its dtype"),
        (with_a_layer_of_its_own, "a different model .only one of them has model.layers.0.mlp.extra.bias"),
    ],
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_a_model_that_no_file_holds_is_refused(make: Any, reason: str, tmp_path: Path) -> None:
    """The reason is given, with the way out."""
    with pytest.raises(InvalidInput, match=f"can't be sent to Ray workers: .*{reason}.*--executor local"):
        source_in(tmp_path, ns.wrap(make()))
    assert not list(tmp_path.glob(".*"))  # no half-written folder is left


def test_an_open_scope_is_not_forgotten() -> None:
    """Noise that is switched on here would be missing in the workers, for a loaded model as well."""
    subject = ns.load("tiny:llama")
    with (
        ns.inject(subject.model, ns.Injection(ns.Gaussian(0.05), operators={"norm"})),
        pytest.raises(InvalidInput, match=r"replaced .by an open noisescope scope"),
    ):
        try:
            source_of(subject, "", nowhere)
        finally:
            subject.model(torch.tensor([[1, 2, 3]]))  # a scope that injects nothing raises


def test_another_model_is_never_overwritten(tmp_path: Path) -> None:
    """A folder `model` that is there already may be somebody's work."""
    tiny_model("llama", seed=1).save_pretrained(tmp_path / "model")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    with pytest.raises(InvalidInput, match=r"lm_head.weight has different values.*already held another model"):
        source_in(tmp_path, ns.wrap(tiny_model("llama", seed=2)))
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == before


def test_hooks_that_come_with_loading_are_no_alteration(tmp_path: Path) -> None:
    """Asking for hidden states leaves transformers' own hooks on a model; accelerate replaces forwards."""
    model = tiny_model("llama")
    add_hook_to_module(model.lm_head, ModelHook())
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert source_in(tmp_path, ns.wrap(model)).path == str(tmp_path / "model")


def test_a_worker_numbers_its_accelerators_from_zero() -> None:
    """cuda:2 and cuda:5 of this machine are cuda:0 and cuda:1 of a worker; cpu and disk stay."""
    devices = [torch.device("cuda", 2), torch.device("cuda", 5)]
    loading = {"device": "cuda:2", "dtype": "bfloat16", "device_map": {"a": 2, "b": "cuda:5", "c": "cpu", "d": "disk"}}
    assert _renumbered(loading, devices) == {
        "device": "cuda:0",
        "dtype": "bfloat16",
        "device_map": {"a": 0, "b": "cuda:1", "c": "cpu", "d": "disk"},
    }
    for asked, given in (("auto", "auto"), ("cuda:5", "cuda:1"), (torch.device("cuda", 5), "cuda:1"), (2, 0)):
        assert _renumbered({"device": "cuda", "device_map": asked}, devices)["device_map"] == given


def test_a_wrapped_model_goes_where_it_lies() -> None:
    """One accelerator becomes `device`, several become the device map that accelerate made."""
    weights = [SimpleNamespace(device=torch.device("cuda", index)) for index in (1, 3)]
    spread: Any = SimpleNamespace(parameters=lambda: iter(weights), hf_device_map={"model": 1, "lm_head": 3})
    assert _placement(spread) == {"device": "cuda", "device_map": {"model": 0, "lm_head": 1}}
    single: Any = SimpleNamespace(parameters=lambda: iter(weights[:1]), hf_device_map={"": 1})
    assert _placement(single) == {"device": "cuda", "device_map": None}
