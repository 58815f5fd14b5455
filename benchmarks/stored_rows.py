"""Rows that a benchmark wrote before it was stopped: JSON, one per line."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def stored_rows(store: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """By cell, method and tag; a line cut off by a crash is left out, and so run again."""
    known = {}
    for line in store.read_text().splitlines() if store.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            row = json.loads(line)
            known[row["cell"], row["method"], row["tag"]] = row
    return known
