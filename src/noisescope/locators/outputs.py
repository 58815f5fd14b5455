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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from noisescope.anatomy import dissect
from noisescope.comparison.records import read_record
from noisescope.errors import InvalidInput
from noisescope.locators.prompts import COUNT, LENGTH, Prompts, last_logits, parts_of, prompt_ids
from noisescope.model import Subject
from noisescope.runs.fingerprints import model_fingerprint
from noisescope.runs.forwards import device_name, dtype_of

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
        kept, chosen, model_fingerprint(model), anatomy.architecture, dtype_of(model), device_name(model)
    )


def load_outputs(
    path: str | Path, *, subject: Subject | nn.Module | None = None, like: OutputRecord | None = None
) -> OutputRecord:
    """A saved record, or the folder that `noisescope record` wrote; refused with the reason where it is broken, or is
    not about `subject`, or not about the model and the prompts of `like`."""
    if Path(path).is_dir():
        record = _from_folder(path)
    else:
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
    check_fingerprint(record.model, record.architecture, record.dtype, model, what)


def check_fingerprint(fingerprint: str, architecture: str, dtype: str, model: nn.Module, what: str) -> None:
    """Refuse what was recorded of another model."""
    if fingerprint == model_fingerprint(model):
        return
    here = dissect(model).architecture
    if architecture == here and dtype != dtype_of(model):
        raise InvalidInput(
            f"{what} was recorded in {dtype}, but the model here computes in {dtype_of(model)}: load the model "
            f"with dtype={dtype!r}, or record again"
        )
    raise InvalidInput(
        f"{what} is about another model ({architecture}, {dtype}, fingerprint {fingerprint[:12]}) than this one "
        f"({here}): weights or config differ. Record the outputs of this model, or load that one"
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


# -- reading


def _from_folder(path: str | Path) -> OutputRecord:
    record = read_record(path)
    logits = record.logits()
    if logits is None:
        raise InvalidInput(f"{path} holds no logits: it is no record of a language model")
    kept = logits.astype(np.float32)
    return OutputRecord(kept, record.prompts, record.model, record.architecture, record.dtype, record.device)


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
