"""Imports transformers without torchao, which it imports where installed, for a function that saves models.

That takes seconds of every command and prints warnings about kernels that nobody asked for. Only commands do this: in a
process of the user's, torchao models must stay savable.
"""

from __future__ import annotations

import importlib
import sys

_IMPORTER = "transformers.quantizers.quantizer_torchao"


def import_transformers() -> None:
    """Import the part of transformers that looks for torchao, without it. torchao itself stays usable."""
    if "torchao" in sys.modules or _IMPORTER in sys.modules:
        return
    from transformers.utils import import_utils

    looked = import_utils.is_torchao_available
    sys.modules["torchao"] = None  # type: ignore[assignment]  # "not installed", as importlib reads it
    try:
        looked.cache_clear()
        importlib.import_module(_IMPORTER)
    except (ImportError, AttributeError):
        pass  # another version of transformers: its models are imported as they are
    finally:
        del sys.modules["torchao"]
        getattr(looked, "cache_clear", lambda: None)()
