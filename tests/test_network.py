"""No network, at import or at run time: every socket but Unix's own is refused, and everything still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import noisescope

SOURCE = Path(noisescope.__file__).parent

BLOCKED = """
import sys
EVENTS = [f"socket.{name}" for name in ("connect", "getaddrinfo", "gethostbyname", "bind", "sendto", "sendmsg")]
def refuse(event, arguments):
    if event in EVENTS and not (event in ("socket.connect", "socket.bind") and isinstance(arguments[1], (str, bytes))):
        raise RuntimeError(f"network: {event} {arguments}")
sys.addaudithook(refuse)
"""

IMPORTS = """
import importlib, pkgutil, warnings
import noisescope
warnings.simplefilter("ignore")
names = [one.name for one in pkgutil.walk_packages(noisescope.__path__, "noisescope.")]
names = [name for name in names if not name.endswith(("__main__", "lm_eval", "cuda_noise", "cuda_kernels"))]
assert len(names) > 150
for name in names:
    importlib.import_module(name)
"""

COMMANDS = """
from typer.testing import CliRunner
from noisescope.cli import app
def run(line, *codes):
    found = CliRunner().invoke(app, line.split())
    if found.exit_code not in (codes or (0,)):
        raise SystemExit(f"{line}: {found.exit_code} {found.output} {found.exception!r}")
run("diagnose demo --effort screen --samples 4 --calibration-samples 2 --level operator,layer -o out")
run("report out --format json,md,html")
run("plan migration out")
run("gate demo --baseline out/report.json --samples 4 --effort screen", 0, 1, 3)
run("record demo --samples 1 --max-tokens 16 -o a.record")
run("compare a.record a.record")
run("locate tiny:llama --method relations", 0, 1, 3)
run("passport --quick")
run("inspect demo")
run("runs list .")
run("inspect some-user/some-model", 2)
"""

PROOF = """
import socket
try:
    socket.create_connection(("127.0.0.1", 9))
except RuntimeError as error:
    assert "network: socket" in str(error)
else:
    raise SystemExit("the hook does not see connections")
"""


def blocked(code: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent), "OMP_NUM_THREADS": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    script = f"{BLOCKED}\n{code}\n{PROOF}"
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr[-2000:]


def test_nothing_connects(tmp_path: Path) -> None:
    """No module when it is imported, no command, and no library below: no variable is set that keeps them offline."""
    blocked(IMPORTS + COMMANDS, tmp_path)
