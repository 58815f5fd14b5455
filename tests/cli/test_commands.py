"""Commands made from options: other names of the original method notes, lists with blanks, and who may import whom."""

from __future__ import annotations

import pytest

from noisescope.cli.commands import rewritten
from noisescope.options.devices import CompareOptions
from noisescope.options.fields import options_of
from noisescope.options.sensitivity import DiagnoseOptions, GateOptions, RobustnessOptions


@pytest.mark.parametrize(
    ("options", "line", "ours"),
    [
        (DiagnoseOptions, "--mode operator --noise-scale 0.05 m", "--level operator --noise-scale 0.05 m"),
        (DiagnoseOptions, "m --mode=layer --window-size 3 --step-size 1", "m --level=layer --window 3 --step 1"),
        (
            DiagnoseOptions,
            "--model m --test-data t --calibration-data c --output o",
            "m --data t --calibration c --output o",
        ),
        (DiagnoseOptions, "--model_path m --calibration_samples 5", "m --calibration-samples 5"),
        (RobustnessOptions, "--checkpoint c --noise-levels 0.0 0.05 .1 --n-samples 9",
         "c --noise-levels 0.0,0.05,.1 --samples 9"),
        (RobustnessOptions, "--noise-levels 0 1e-2 m", "--noise-levels 0,1e-2 m"),
        (GateOptions, "--checkpoint c --baseline-report b", "c --baseline b"),
        (CompareOptions, "--npu-checkpoint n --layers 9 10 --gpu-checkpoint g", "g n --layers 9,10"),
        (CompareOptions, "--layers 9,10 -- a b", "--layers 9,10 -- a b"),
        (DiagnoseOptions, "m --unknown_option x", "m --unknown_option x"),
    ],
)  # fmt: skip
def test_other_names_are_ours(options: type, line: str, ours: str) -> None:
    """Each name of the notes that stands for one option; numbers may have blanks between."""
    known = {n: o for n, o in options_of(options).items() if o.surface in ("both", "command")}
    assert rewritten(line.split(), known) == ours.split()
