"""What every record.json says, wherever it is written (runs/recording.py) or read (comparison/records.py)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

FORMAT = "noisescope record"
VERSION = 2  # 2: prompts have a checksum


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of token ids: two records are about the same prompts, and none was altered."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
