"""Which functions are operators, whatever was replaced before noisescope was imported."""

from __future__ import annotations

import subprocess
import sys

PATCHED_FIRST = """
import torch
import torch.nn.functional as F
shipped = {name: getattr(F, name) for name in ("linear", "gelu")}
for name in shipped:
    setattr(F, name, lambda *args, **kwargs: None)
from noisescope.probe.functions import operators_within
assert [operators_within("").get(function) for function in shipped.values()] == ["linear", "gelu"]
"""


def test_functions_that_were_replaced_before_the_import_are_known_by_what_runs():
    subprocess.run([sys.executable, "-c", PATCHED_FIRST], check=True, timeout=120)
