"""MODEL as text: refused where nothing can lie there, before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path

from noisescope.errors import InvalidInput

ALLOWED = (
    "A model is a Hugging Face folder (config.json beside *.safetensors), an id from the local Hugging Face cache, "
    "a .gguf file, a .pt state dict beside its config.json, demo (the small trained model in the package; a folder of "
    "that name is ./demo), or tiny:NAME (a tiny random model, such as tiny:llama)."
)


def refuse_missing_path(text: str) -> None:
    """Refuse what can only be a path and leads nowhere."""
    path = Path(text).expanduser()
    is_path = path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1
    if not path.exists() and (is_path or path.suffix.lower() == ".gguf"):
        raise InvalidInput(f"there is no file or folder {text!r}. {ALLOWED}")


def uncached(text: str, revision: str | None) -> InvalidInput:
    """The error for a hub id that is not in the local cache."""
    version = f" --revision {revision}" if revision else ""
    return InvalidInput(
        f"{text!r} is neither a folder here nor in the local Hugging Face cache, and noisescope downloads nothing. "
        f"Fetch it with the hub's own tool first: hf download {text}{version}"
    )


def checked_model(text: str) -> str:
    """The text, where a model may lie there."""
    if text == "demo" or text.startswith("tiny:") or Path(text).expanduser().exists():
        return text
    refuse_missing_path(text)
    if "/" in text and not (_hub_cache() / f"models--{text.replace('/', '--')}").exists():
        raise uncached(text, None)
    return text


def _hub_cache() -> Path:
    """Where the hub library keeps models, by its own variables."""
    given = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if given:
        return Path(given).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser() / "hub"
