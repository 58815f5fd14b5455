"""What the commands share."""

from __future__ import annotations

import logging
from pathlib import Path

from typer.testing import CliRunner

from noisescope.cli import app


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
