"""From a name on the command line to a model under test: `load`, `wrap`, and `outline` where weights aren't needed.

Nothing is downloaded and no pickle is run: a pickle is a program, and a checkpoint is untrusted data. Of pickles
only a plain state dict is read, by torch's reader that takes tensors and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noisescope import demo
from noisescope.errors import InvalidInput, MissingExtra, NoisescopeError, unknown
from noisescope.model.anatomy import Anatomy, dissect
from noisescope.model.checkpoint_folder_check import GgufFacts, check_folder_files, gguf_facts
from noisescope.model.quantised_checkpoint import UNPACKED, asks_to_dequantise, quantiser_of
from noisescope.model.streaming import check_stream, notes_on_memory, placed
from noisescope.options.shared import ALLOWED, refuse_missing_path, uncached
from noisescope.tables import Sheet, Tabular
from noisescope.text_escaping import one_line

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}
_STATE_DICTS = (".pt", ".pth", ".bin")
_PICKLES = (*_STATE_DICTS, ".pkl", ".pickle", ".ckpt")
_CONVERT = "Convert it to safetensors (model.save_pretrained(folder), where you trust it) and pass that folder."
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "*.model", "vocab.txt", "vocab.json", "tekken.json")


@dataclass(frozen=True)
class Subject(Tabular):
    """The model under test, with what is needed to run it and to target its parts."""

    model: nn.Module
    tokenizer: Any  # None where the source has none (a vision model, a bare module)
    anatomy: Anatomy
    source: str
    loading: Mapping[str, Any] | None = None  # `load`'s keyword arguments as plain values; None: wrapped

    def sheet(self) -> Sheet:
        found = list(self.model.parameters())  # a tied weight counts once
        dtypes = ", ".join(sorted({str(one.dtype).removeprefix("torch.") for one in found}))
        size = f"{sum(one.numel() for one in found):,} parameters in {dtypes}"
        return replace(self.anatomy.sheet(), title=f"{repr(self)[len('<Subject ') : -1]}, {size}")

    def __repr__(self) -> str:
        return f"<Subject {self.source}: {self.anatomy.architecture}, {len(self.anatomy.blocks)} blocks>"


@dataclass(frozen=True)
class _Checkpoint:
    """Where a model is stored: a folder, and the GGUF file or the state dict in it if that was requested."""

    source: str
    folder: Path
    gguf: str | None
    trusted: bool
    state_dict: str | None = None

    def arguments(self) -> dict[str, Any]:
        """What every `from_pretrained` of transformers is given."""
        arguments: dict[str, Any] = {"local_files_only": True, "trust_remote_code": self.trusted}
        return arguments if self.gguf is None else {**arguments, "gguf_file": self.gguf}


def load(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    device_map: Any = None,
    stream: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Subject:
    """Load a model with its tokenizer and anatomy, in eval mode.

    `source` is a Hugging Face folder, an id from the local Hugging Face cache, a `.gguf` file, a state dict (`.pt`)
    next to its config.json, `demo` (the small trained model in the package, noisescope.demo; a folder of that name is
    `./demo`), or `tiny:llama` and similar (noisescope.testing). `dtype` defaults to the stored one. `device` is any
    torch device; with a `device_map`, accelerate places the model instead. With `stream` the weights of blocks stay in
    the host's memory ("host") or in the checkpoint's files ("disk"), and are copied to the device block by block
    (model/streaming.py). The class is the one the checkpoint names, else a causal language model. Weights of GGUF files
    and of compressed-tensors are dequantised on loading, so noise applies to the arithmetic of the dequantised model.

    >>> ns.load("demo")
    <Subject demo: LlamaForCausalLM (llama), 16 blocks>
    """
    wanted, where = _dtype(dtype), _device(device)
    if str(source) == "demo" and dtype is None and where.type == "cpu":
        wanted = torch.float32  # stored in bfloat16 to be small; most CPUs are slow in it
    loading = {
        "device": str(device),
        "dtype": None if wanted is None else str(wanted).removeprefix("torch."),
        "attn_implementation": attn_implementation,
        "device_map": device_map,
        "stream": stream,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
    }
    check_stream(stream, device_map)
    if str(source).startswith("tiny:"):
        found = _tiny(str(source), wanted, attn_implementation)
        return replace(found, model=placed(found.model, where, stream), loading=loading)
    checkpoint = _find(source, revision, trust_remote_code)
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise MissingExtra("device_map needs the package accelerate: pip install 'noisescope[accelerate]'")
    header = _checked_files(checkpoint)
    with _explained(checkpoint.source):
        config = _config(checkpoint)
        quantiser = quantiser_of(config)
        if device_map is None and quantiser:  # packed weights can't be moved afterwards
            device_map = {"": str(where)}
            check_stream(stream, f"what the quantiser ({quantiser}) needs")
        given = {"attn_implementation": attn_implementation, "device_map": device_map}.items()
        settings = {name: value for name, value in given if value is not None}
        if asks_to_dequantise(config):
            settings["config"] = config
        if checkpoint.state_dict:
            model, info = _from_state_dict(checkpoint, config, wanted, settings)
        else:
            model, info = _model_class(config).from_pretrained(
                checkpoint.folder,
                **checkpoint.arguments(),
                **settings,
                dtype="auto" if wanted is None else wanted,
                **({} if checkpoint.gguf else {"use_safetensors": True}),
                output_loading_info=True,
            )
        tokenizer = _tokenizer(checkpoint, header)
    if info["missing_keys"] and not quantiser:  # a quantiser renames its tensors
        raise InvalidInput(
            f"{source} lacks {len(info['missing_keys'])} weights of {type(model).__name__} (such as "
            f"{min(info['missing_keys'])}): they would be initialised randomly. Is a checkpoint file missing?"
        )
    if device_map is None:
        placed(model, where, stream)
    notes = []
    if info["unexpected_keys"]:
        notes.append(f"{len(info['unexpected_keys'])} tensors of the checkpoint are not used by {type(model).__name__}")
    if header is not None:
        notes.append(f"weights were dequantised on loading: {', '.join(header.formats)} in the file")
    notes += [f"weights were dequantised on loading ({quantiser})"] if quantiser == UNPACKED else []
    notes += notes_on_memory(model) if stream == "disk" else []
    return replace(_subject(model.eval(), tokenizer, str(source), notes), loading=loading)


def wrap(model: nn.Module, tokenizer: Any = None) -> Subject:
    """Wrap a model you already have, unchanged: mode, device and wrappers stay.

    >>> ns.wrap(ns.load("tiny:llama").model).anatomy.blocks
    ('model.layers.0', 'model.layers.1')
    """
    anatomy = dissect(model, require_blocks=False)
    return Subject(model, tokenizer, anatomy, getattr(model, "name_or_path", "") or type(model).__name__)


def outline(
    source: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Subject:
    """The same model on the meta device, without tokenizer: only the config is read, so size does not matter.

    A quantised checkpoint shows plain linears here, since quantisers replace them on loading (with a note).
    """
    wanted = _dtype(dtype)
    if str(source).startswith("tiny:"):
        return _tiny(str(source), wanted, attn_implementation)
    checkpoint = _find(source, revision, trust_remote_code, weights=False)
    header = _checked_files(checkpoint)
    with _explained(checkpoint.source), torch.device("meta"):
        config = _config(checkpoint)
        build = _model_class(config)
        # A class's own `from_config` has a leading underscore; AutoModel's public one calls it.
        build = build.from_config if hasattr(build, "from_config") else build._from_config
        settings = {"dtype": wanted, "attn_implementation": attn_implementation}
        model = build(config, **{name: value for name, value in settings.items() if value is not None})
    quantiser, notes = quantiser_of(config), []
    if quantiser == UNPACKED:
        notes.append(f"weights are dequantised on loading ({quantiser})")
    elif quantiser:
        notes.append(
            f"the checkpoint is quantised ({quantiser}): its linears are packed once loaded, and noise can be "
            f"injected into their output and input, not their weight"
        )
    if header is not None:
        notes.append(f"weights are dequantised on loading: {', '.join(header.formats)} in the file")
    return _subject(model.eval(), None, str(source), notes)


def _subject(model: nn.Module, tokenizer: Any, source: str, notes: list[str]) -> Subject:
    anatomy = dissect(model)
    return Subject(model, tokenizer, replace(anatomy, notes=(*anatomy.notes, *notes)), source)


def _tiny(source: str, dtype: torch.dtype | None, attention: str | None) -> Subject:
    from noisescope.testing import tiny_model

    settings: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    with _explained(source):
        model = tiny_model(source.removeprefix("tiny:"), **settings)
    return _subject(model.to(dtype), None, source, [])


def _find(source: str | Path, revision: str | None, trusted: bool, *, weights: bool = True) -> _Checkpoint:
    """Where the files of a source are, or an error that names what would be right."""
    text, path = str(source), Path(source).expanduser()
    if text == "demo":  # a folder of that name is ./demo
        path = demo.folder()
    if path.exists() and revision is not None:
        raise InvalidInput(f"revision={revision!r} selects a version of a hub id, but {text} is a path: omit it")
    if path.suffix.lower() in _STATE_DICTS and path.is_file() and (path.parent / "config.json").exists():
        return _Checkpoint(text, path.parent, None, trusted, state_dict=path.name)
    if path.suffix.lower() in _PICKLES:
        raise InvalidInput(
            f"{text} is a pickle. Opening one runs code, so noisescope opens only plain state dicts in a .pt, .pth "
            f"or .bin file next to a config.json. {_CONVERT}"
        )
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
            if missing:
                raise MissingExtra(f"a .gguf file needs {' and '.join(missing)}: pip install 'noisescope[gguf]'")
            return _Checkpoint(text, path.parent, path.name, trusted)
        hint = f"pass its folder, {path.parent}" if path.suffix == ".safetensors" else ALLOWED
        raise InvalidInput(f"{text} is a file that can't be loaded as a model: {hint}")
    folder = path if path.is_dir() else _cached(text, path, revision)
    _check_folder(text, folder, weights=weights)
    return _Checkpoint(text, folder, None, trusted)


def checkpoint_folder(source: str, revision: str | None = None) -> tuple[Path, str | None]:
    """The folder of a source's files, and the GGUF file or the state dict in it if that is what the source names."""
    found = _find(source, revision, False)
    return found.folder, found.gguf or found.state_dict


def _cached(text: str, path: Path, revision: str | None) -> Path:
    """The snapshot of a hub id in the hub library's own cache."""
    refuse_missing_path(text)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(text, revision=revision, local_files_only=True))
    except HFValidationError:
        raise InvalidInput(f"{text!r} is not a file, a folder or a hub id. {ALLOWED}") from None
    except LocalEntryNotFoundError:
        raise uncached(text, revision) from None


def _check_folder(text: str, folder: Path, *, weights: bool) -> None:
    if (folder / "adapter_config.json").exists():
        raise InvalidInput(
            f"{text} is a PEFT adapter, not a model: merge it into its base first (in Python: "
            "model.merge_and_unload().save_pretrained(folder)) and pass that folder"
        )
    if not (folder / "config.json").exists():
        found = next(iter(sorted(folder.glob("*.gguf"))), None)
        hint = f"Pass the file: {found}" if found else ALLOWED
        raise InvalidInput(f"the folder {text} has no config.json. {hint}")
    if weights and not any(folder.glob("*.safetensors")):
        raise InvalidInput(
            f"the folder {text} has no *.safetensors files (noisescope does not open pickles such as "
            f"pytorch_model.bin, because they run code). Download the safetensors files, or convert with "
            f"model.save_pretrained(folder)."
        )


def _checked_files(checkpoint: _Checkpoint) -> GgufFacts | None:
    """Refuse what can't be a model before transformers reads it; what a GGUF file says of itself."""
    if checkpoint.gguf:
        return gguf_facts(checkpoint.folder / checkpoint.gguf)
    check_folder_files(checkpoint.folder)
    return None


def _config(checkpoint: _Checkpoint) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(checkpoint.folder, **checkpoint.arguments())


def _model_class(config: Any) -> Any:
    """The class the checkpoint was saved from, so a BERT, ViT or T5 comes with its own head."""
    import transformers

    named = (getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ())
    models = (known for known in named if isinstance(known, type) and issubclass(known, transformers.PreTrainedModel))
    return next(models, transformers.AutoModelForCausalLM)


def _from_state_dict(
    checkpoint: _Checkpoint, config: Any, dtype: torch.dtype | None, settings: dict[str, Any]
) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a config with the weights of a state dict, in their own dtype unless another is wanted."""
    import transformers

    path = checkpoint.folder / str(checkpoint.state_dict)
    try:  # only archives can be mapped: torch before 1.6 wrote none
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a broken file raises anything
        raise InvalidInput(
            f"{checkpoint.source} is not a plain state dict. Opening a pickled model runs code, so noisescope does "
            f"not open it. {_CONVERT}"
        ) from error
    if not isinstance(weights, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        found = ", ".join(map(str, weights)) if isinstance(weights, dict) else type(weights).__name__
        raise InvalidInput(
            f"{checkpoint.source} is not a plain state dict (tensors by name); it contains {found:.200}. Save only "
            f"the weights: torch.save(model.state_dict(), path)"
        )
    floats = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    build = _model_class(config)
    if hasattr(build, "from_config"):  # an Auto class takes no state dict: ask it for the class it stands for
        with torch.device("meta"):
            build = type(build.from_config(config, trust_remote_code=checkpoint.trusted))
    model, info = build.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype or max(floats, key=lambda kept: kept.itemsize, default=None),
        **settings,
        output_loading_info=True,
    )
    for tensor in (*model.parameters(), *model.buffers()):  # off the file: a training run may overwrite it
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    if (checkpoint.folder / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(checkpoint.folder)
    return model, info


def _tokenizer(checkpoint: _Checkpoint, header: GgufFacts | None) -> Any:
    from transformers import AutoTokenizer

    if header is not None:
        present = header.has_tokenizer
    else:
        present = any(True for pattern in _TOKENIZERS for _ in checkpoint.folder.glob(pattern))
    return AutoTokenizer.from_pretrained(checkpoint.folder, **checkpoint.arguments()) if present else None


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """None means as stored."""
    if dtype is None or dtype == "auto":
        return None
    known = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype))
    if known not in _DTYPES.values():
        raise unknown("dtype", str(dtype), [*_DTYPES, "auto"])
    return known


def _device(device: str | torch.device) -> torch.device:
    """The device, tried out: a tensor of no elements fails where the device isn't there."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InvalidInput(
            f"device {str(device)!r} can't be used here: {_one_line(error)}. Leave --device out to take one that can"
        ) from error


@contextlib.contextmanager
def _explained(source: str) -> Iterator[None]:
    """transformers' errors as one line of ours; --debug and __cause__ still show the whole."""
    try:
        yield
    except (NoisescopeError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise MissingExtra(f"{source} needs a package that is missing: {_one_line(error)}") from error
    except Exception as error:  # a config or a file of weights that does not fit fails anywhere in the building
        raise InvalidInput(f"transformers can't load {source}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    return one_line(str(error), 500) or type(error).__name__
