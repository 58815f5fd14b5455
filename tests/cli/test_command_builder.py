"""Commands made from options: other names of the original method notes, lists with blanks; quiet logs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from noisescope.cli import app
from noisescope.cli.command_builder import rewritten
from noisescope.options.device_commands import CompareOptions
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
    assert rewritten(line.split(), options_of(options, "command")) == ours.split()


def logged(name: str, text: str) -> bool:
    record = logging.LogRecord(name, logging.WARNING, __file__, 1, text, (), None)
    return bool(logging.getLogger(name).filter(record))


def test_torchao_is_quiet_in_commands(tmp_path: Path) -> None:
    """Its two known remarks are left out; anything else that it or torch has to say is still said."""
    assert CliRunner().invoke(app, ["runs", "list", str(tmp_path)]).exit_code == 0
    assert not logged("torchao", "Failed to load /somewhere/torchao/_C_mxfp8.so: Could not load this library")
    assert not logged("torch.utils._pytree", "<enum 'KernelPreference'> is an Enum subclass and is now natively ...")
    assert logged("torchao", "Skipping import of cpp extensions due to incompatible torch version.")
    assert logged("torch.utils._pytree", "something else")
    assert logged("noisescope", "Failed to load a file")
