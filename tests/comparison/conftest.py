"""Log-probabilities compared as files, as users have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from noisescope.comparison.logprob_files import Array, read_logprobs
from noisescope.comparison.logprobs import LogprobComparison, compare_logprobs


@pytest.fixture
def compared(tmp_path: Path) -> Any:
    def compare(a: Sequence[Array], b: Sequence[Array]) -> LogprobComparison:
        files = []
        for name, side in (("a", a), ("b", b)):
            file = tmp_path / f"{name}.jsonl"
            file.write_text("".join(json.dumps({"logprobs": list(row)}) + "\n" for row in side), encoding="utf-8")
            files.append(read_logprobs(file))
        return compare_logprobs(*files)

    return compare
