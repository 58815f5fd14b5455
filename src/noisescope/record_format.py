"""What a record looks like, wherever it is written (runs/recording.py) or read (comparison/records.py)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

FORMAT = "noisescope record"
VERSION = 2  # 2: prompts have a checksum
DESCRIPTION = "record.json"
UNFINISHED = "record.json.unfinished"  # while it is written
# 0003.safetensors: the sketches of batch 3; 0003-012-7.safetensors: its thirteenth file of whole tensors, of block 7
TENSORS = re.compile(r"(?P<batch>\d{4,})(?:-\d{3,}-(?P<place>\w+))?\.safetensors")


def prompts_digest(prompts: Sequence[Sequence[int]]) -> str:
    """SHA-256 of token ids: two records are about the same prompts, and none was altered."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def is_unfinished(folder: Path) -> bool:
    """Whether a folder holds files of a record that was never finished, and nothing else."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    ours = [name for name in names if not name.startswith(".tmp")]  # as safetensors calls a file while it writes it
    return bool(ours) and all(name == UNFINISHED or TENSORS.fullmatch(name) for name in ours)
