"""What a device said: the last token's logits of fixed prompts, kept in a file and checked when it is read.

A record names the model by its numbers and the prompts by theirs, so that two records are only ever subtracted where
they are about the same thing. The file is a .npz without pickles: `logits` [P, V] in float32 and `about`, the bytes of
a JSON text, with a checksum of the logits in it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from noisescope.anatomy import Anatomy, dissect
from noisescope.data import built_in
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.probe.door import unwrap
from noisescope.runs.fingerprints import model_fingerprint

Prompts = tuple[tuple[int, ...], ...]  # token ids

COUNT, LENGTH = 8, 16  # of built-in prompts and of their tokens
FORMAT, VERSION = "noisescope outputs", 1
_TEXTS = ("format", "model", "architecture", "dtype", "device", "prompts_hash", "logits_hash")


@dataclass(frozen=True)
class OutputRecord:
    """The last token's logits of some prompts, and what computed them."""

    logits: NDArray[np.float32]  # [P, V]; 16-bit logits lose nothing in float32
    prompts: Prompts
    model: str  # fingerprint of its numbers, dtype included
    architecture: str
    dtype: str
    device: str

    @property
    def prompts_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        about = {
            "format": FORMAT,
            "version": VERSION,
            **{name: getattr(self, name) for name in ("model", "architecture", "dtype", "device", "prompts_hash")},
            "logits_hash": _hash(self.logits),
            "prompts": self.prompts,
        }
        text = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, logits=self.logits, about=text)
        target = Path(path)
        unfinished = target.with_name(f"{target.name}.unfinished")
        unfinished.write_bytes(buffer.getvalue())
        unfinished.replace(target)


def record_outputs(
    subject: Subject | nn.Module,
    *,
    prompts: Sequence[Any] | None = None,
    seed: int = 0,
    count: int = COUNT,
    length: int = LENGTH,
) -> OutputRecord:
    """Run a model on prompts and keep what it says: on the suspect device, and on a good one.

        with faulty(subject.model, "dead_zone:0.3@10"):
            record_outputs(subject).save("suspect.npz")

    Prompts are texts or token ids; by default the beginnings of built-in paragraphs. The model runs in this thread,
    inside the scopes that are open. Prompts of one length share a forward.
    """
    model, tokenizer, anatomy = parts_of(subject)
    chosen = prompt_ids(model, tokenizer, prompts, seed=seed, count=count, length=length)
    logits, _ = last_logits(model, chosen)
    kept = logits.numpy().astype(np.float32)
    return OutputRecord(
        kept, chosen, model_fingerprint(model), anatomy.architecture, _dtype_of(model), _device_words(_device_of(model))
    )


def load_outputs(
    path: str | Path, *, subject: Subject | nn.Module | None = None, like: OutputRecord | None = None
) -> OutputRecord:
    """A saved record; refused with the reason where the file is broken, or is not about `subject`, or not about the
    model and the prompts of `like`."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror or error}") from error
    record = _parsed(content, str(path))
    if subject is not None:
        check_model(record, parts_of(subject)[0], str(path))
    if like is not None:
        check_alike(record, like, str(path))
    return record


def check_model(record: OutputRecord, model: nn.Module, what: str = "the record") -> None:
    """Refuse a record of another model."""
    if record.model == model_fingerprint(model):
        return
    here = dissect(model).architecture
    if record.architecture == here and record.dtype != _dtype_of(model):
        raise InvalidInput(
            f"{what} was recorded in {record.dtype}, but the model here computes in {_dtype_of(model)}: load the model "
            f"with dtype={record.dtype!r}, or record again"
        )
    raise InvalidInput(
        f"{what} is about another model ({record.architecture}, {record.dtype}, fingerprint {record.model[:12]}) than "
        f"this one ({here}): weights or config differ. Record the outputs of this model, or load that one"
    )


def check_alike(record: OutputRecord, other: OutputRecord, what: str = "the record") -> None:
    """Refuse two records that can't be subtracted."""
    if record.model != other.model:
        raise InvalidInput(
            f"{what} is about another model ({record.architecture}, {record.dtype}, fingerprint {record.model[:12]}) "
            f"than the other record ({other.architecture}, {other.dtype}, {other.model[:12]})"
        )
    if record.prompts_hash != other.prompts_hash:
        raise InvalidInput(
            f"{what} was recorded on other prompts ({len(record.prompts)}, hash {record.prompts_hash[:12]}) than the "
            f"other record ({len(other.prompts)}, {other.prompts_hash[:12]}): record both on the same"
        )
    if record.logits.shape != other.logits.shape:
        raise InvalidInput(
            f"{what} holds logits {record.logits.shape}, the other record {other.logits.shape}: record both again"
        )


# -- running


def parts_of(subject: Subject | nn.Module) -> tuple[nn.Module, Any, Anatomy]:
    """Model, tokenizer and anatomy."""
    if isinstance(subject, Subject):
        return unwrap(subject.model), subject.tokenizer, subject.anatomy
    return unwrap(subject), None, dissect(subject)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout; each module back in its own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def last_logits(model: nn.Module, prompts: Prompts) -> tuple[Tensor, int]:
    """The last token's logits [P, V] on the host in float32 (float64 where the model is), and the forwards it took."""
    lengths = sorted({len(prompt) for prompt in prompts})
    found: dict[int, Tensor] = {}
    with evaluating(model):
        for length in lengths:
            chosen = [at for at, prompt in enumerate(prompts) if len(prompt) == length]
            ids = torch.tensor([prompts[at] for at in chosen], device=_device_of(model))
            found.update(zip(chosen, _forward(model, ids), strict=True))
    return torch.stack([found[at] for at in range(len(prompts))]), len(lengths)


def _forward(model: nn.Module, ids: Tensor) -> Tensor:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        y: Any = model(input_ids=ids, decoder_input_ids=ids)
    else:
        y = model(ids)
    logits = getattr(y, "logits", y)
    if not isinstance(logits, Tensor) or logits.dim() != 3:
        raise InvalidInput(
            f"{type(model).__name__} gave no logits [batch, tokens, vocabulary] for token ids: outputs are recorded of "
            "language models"
        )
    last = logits[:, -1].detach().to("cpu")
    return last if last.dtype == torch.float64 else last.float()


def prompt_ids(
    model: nn.Module, tokenizer: Any, prompts: Sequence[Any] | None, *, seed: int, count: int, length: int
) -> Prompts:
    """Prompts as token ids: the caller's texts or ids, else built-in text, or seeded ids without a tokenizer."""
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if prompts is None:
        if vocabulary is None:
            raise InvalidInput(f"{type(model).__name__} takes no token ids: prompts can't be made up for it")
        return _built_in(tokenizer, vocabulary, seed, count, length)
    if isinstance(prompts, (str, Tensor)):
        prompts = [prompts] if isinstance(prompts, str) or prompts.dim() == 1 else list(prompts)
    if not isinstance(prompts, Sequence) or not prompts:
        raise InvalidInput(f"prompts are a list of texts or of token ids, got {prompts!r:.60}")
    return tuple(_ids(prompt, tokenizer) for prompt in prompts)


def _ids(prompt: Any, tokenizer: Any) -> tuple[int, ...]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidInput("prompts are texts, but the model has no tokenizer: pass token ids, or wrap it with one")
        prompt = tokenizer(prompt, verbose=False)["input_ids"]
    try:
        ids = tuple(int(token) for token in prompt)
    except (TypeError, ValueError):
        raise InvalidInput(f"a prompt is a text or a list of token ids, got {prompt!r:.60}") from None
    if not ids:
        raise InvalidInput("a prompt has no tokens")
    return ids


def _built_in(tokenizer: Any, vocabulary: int, seed: int, count: int, length: int) -> Prompts:
    """`count` prompts of one length: the beginnings of paragraphs, from the one that the seed chooses on."""
    if count < 1 or length < 1:
        raise InvalidInput(f"at least one prompt of one token is needed, got count={count}, length={length}")
    if tokenizer is not None:
        texts = [item.text for item in built_in().items]
        turned = texts[seed % len(texts) :] + texts[: seed % len(texts)]
        found = [ids[:length] for ids in (_ids(text, tokenizer) for text in turned) if len(ids) >= length][:count]
        if len(found) == count and max(map(max, found)) < vocabulary:
            return tuple(found)
    generator = torch.Generator("cpu").manual_seed(seed)
    lowest = min(3, vocabulary - 1)  # the first ids are special tokens as a rule
    drawn = torch.randint(lowest, vocabulary, (count, length), generator=generator, device="cpu")
    return tuple(tuple(row) for row in drawn.tolist())


def _device_of(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))


def _dtype_of(model: nn.Module) -> str:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return str(dtype).removeprefix("torch.")


def _device_words(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


# -- reading


def _parsed(content: bytes, path: str) -> OutputRecord:
    arrays = _arrays(content, path)
    about, logits = _about(arrays["about"], path), arrays["logits"]
    if logits.dtype != np.float32 or logits.ndim != 2 or logits.shape[0] != len(about["prompts"]):
        raise InvalidInput(
            f"{path} holds logits of {logits.dtype} {logits.shape}, but float32 [{len(about['prompts'])} prompts, "
            "vocabulary] belongs there: it is damaged; record again"
        )
    if _hash(logits) != about["logits_hash"]:
        raise InvalidInput(f"{path}: the logits do not fit their checksum, so the file is damaged; record again")
    prompts = tuple(tuple(prompt) for prompt in about["prompts"])
    names = [field.name for field in dataclasses.fields(OutputRecord) if field.name not in ("logits", "prompts")]
    record = OutputRecord(logits, prompts, **{name: about[name] for name in names})
    if record.prompts_hash != about["prompts_hash"]:
        raise InvalidInput(f"{path}: the prompts do not fit their hash, so the file is damaged; record again")
    return record


def _arrays(content: bytes, path: str) -> dict[str, NDArray[Any]]:
    if not content.startswith(b"PK"):
        raise InvalidInput(f"{path} is no record of outputs: record_outputs(...).save(path) writes one (a .npz file)")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return {name: archive[name] for name in ("logits", "about")}
    except KeyError as error:
        raise InvalidInput(f"{path} is a .npz file, but no record of outputs: {error.args[0]}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError, NotImplementedError) as error:
        raise InvalidInput(f"{path} is truncated or damaged: {error}. Copy it again, or record again") from error


def _about(text: NDArray[Any], path: str) -> dict[str, Any]:
    try:
        about = json.loads(text.astype(np.uint8, casting="safe").tobytes())
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"{path}: its description is no JSON ({error}): damaged, record again") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise InvalidInput(f"{path} is no record of outputs: its description does not say {FORMAT!r}")
    if about.get("version") != VERSION:
        raise InvalidInput(f"{path} has version {about.get('version')!r} of the format; this one reads {VERSION}")
    for name in _TEXTS:
        if not isinstance(about.get(name), str):
            raise InvalidInput(f"{path}: {name!r} is missing in its description or is no text; record again")
    prompts: Any = about.get("prompts")
    if not isinstance(prompts, list) or not all(
        isinstance(p, list) and all(type(i) is int for i in p) for p in prompts
    ):
        raise InvalidInput(f"{path}: 'prompts' in its description is no list of lists of token ids; record again")
    return about


def _hash(logits: NDArray[np.float32]) -> str:
    return hashlib.sha256(repr(logits.shape).encode() + np.ascontiguousarray(logits).tobytes()).hexdigest()
