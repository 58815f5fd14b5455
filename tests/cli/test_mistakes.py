"""Typical mistakes are answered in one line, at once, and without torch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

import noisescope
from noisescope.cli import app, command_builder
from noisescope.runs.store import Store

# Each line of arguments that comes in is answered with exit code, stdout, stderr and seconds of processor time.
BLOCKED = """
import contextlib, io, json, sys, time
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in ('torch', 'transformers'):
            raise AssertionError(f'{name} is imported')
sys.meta_path.insert(0, Block())
from noisescope.cli import main
start = 0.0
for line in sys.stdin.read().splitlines():
    sys.argv = ['noisescope', *line.split()]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main()
        except SystemExit as left:
            code = left.code
    print(json.dumps([code, out.getvalue(), err.getvalue(), time.process_time() - start]))
    start = time.process_time()
"""


MISTAKES = [
    ("diagnose demo --effort standrad", "unknown effort 'standrad'.*Did you mean 'standard'"),
    ("diagnose demo --data nowhere.jsonl", "there is no file nowhere.jsonl"),
    ("diagnose path/to/nothing", "there is no file or folder 'path/to/nothing'"),
    ("diagnose demo --samples -3", "--samples must be at least 1, got -3"),
    ("diagnose demo --max-tokens many", "--max-tokens must be a whole number, got the text 'many'"),
    ("diagnose demo --config tokens.yaml", "tokens.yaml: max_tokens must be a whole number, got the text 'many'"),
    ("compare a.record a.record --affordable 1", "--affordable needs --sensitivity"),
    ("compare a.record a.record --config x", "there is no option --config. See noisescope compare --help"),
    ("plan precision . --average-bits 99", "--average-bits must be from 3 to 16, got 99"),
    ("plan precision . --average-bits 2", "--average-bits must be from 3 to 16, got 2"),
    (
        "diagnose demo --smaples 3",
        "no option --smaples. Did you mean --samples\\? See noisescope diagnose",
    ),
    ("diagnose demo --no_such_thing", "there is no option --no_such_thing. See noisescope diagnose --help"),
    ("plan precision . --varify", "Did you mean --verify\\? See noisescope plan precision --help"),
    ("diagnoze demo", "No such command 'diagnoze'.*See noisescope --help"),
    ("plan precison .", "No such command 'precison'.*See noisescope plan --help"),
    ("--smaples 3", "No such option: --smaples. See noisescope --help"),
    ("diagnose demo --samples", "--samples needs a value, and nothing follows it. See noisescope diagnose --help"),
    ("diagnose demo --data --samples 3", "--data needs a value, and --samples follows it. See noisescope diagnose"),
    ("diagnose demo other", "unexpected extra argument.*other.*See noisescope diagnose --help"),
    ("compare a.record", "B is missing: .*See noisescope compare --help"),
    ("locate tiny:foo", "unknown tiny model .foo."),
    ("locate demo --device meta", "unknown device .meta."),
    ("locate demo --simulate nonsense", "'nonsense' does not say where the fault is. The format is family"),
    ("locate demo --simulate deadzone:0.3@10", "unknown fault family 'deadzone'.*Did you mean 'dead_zone'"),
    ("locate demo --simulate dead_zone:-1@10", "magnitude of dead_zone must be at least 0, got -1"),
    ("locate demo --simulate stuck_bit:bit=99@3", "bit of stuck_bit must be from 0 to 63, got 99"),
    ("locate demo --simulate gain:0.01@head", "unknown place 'head'.*lm_head"),
    ("locate demo --simulate gain:0.01@-1", "blocks are numbered from 0"),
    ("locate demo --simulate exp_table@3/linear", "exp_table acts on softmax, not on linear"),
    ("locate demo --fault_type deadzone --ground_truth_layer 3", "unknown fault family 'deadzone'"),
    ("record demo --simulate gain:much@3 -o x.record", "magnitude of gain must be a finite number, got 'much'"),
    ("locate demo --device quux", "unknown device 'quux'. Allowed: cpu, cuda"),
    ("diagnose demo --noise-scale 0", "a noise scale of 0 injects nothing"),
    ("diagnose demo --noise-scale much", "--noise-scale must be a number, got the text 'much'"),
    ("diagnose demo --operators sofmax", "unknown operator 'sofmax'.*Did you mean 'softmax'"),
    ("diagnose demo --mode operators", "unknown level 'operators'.*Did you mean 'operator'"),
    ("robustness demo --executor slurm", "unknown executor 'slurm'"),
    ("diagnose demo --device cudaa", "unknown device 'cudaa'.*Did you mean 'cuda'"),
    ("passport --device cuda:one", "a device is a name such as cuda, or with a number cuda:1; got 'cuda:one'"),
    ("diagnose --config run.yaml", "unknown option 'windw'.*Did you mean 'window'"),
    ("report . --format docx", "unknown report format 'docx'"),
    ("diagnose", "MODEL is missing"),
    ("gate demo", "--baseline is missing"),
    ("gate demo --baseline none.json", "there is no report at none.json"),
    ("compare a.record b.record", "there is no folder b.record"),
    ("locate demo --inputs none.txt", "there is no file none.txt \\(--inputs\\)"),
    ("locate demo --inputs run.yaml", "unknown format of --inputs '.yaml'. Allowed: .txt, .jsonl"),
    ("locate demo --quick --decode 4", "--quick runs 2 x 32 tokens and no others: leave it out, or --decode"),
    ("locate demo --method scans --no-state", "--state is for the audit.*got method scans"),
    ("locate demo --method scans --budget 9", "--budget is for the audit.*got method scans"),
    ("locate demo --tokens 0", "--tokens must be at least 1, got 0"),
    ("locate demo -o verdict.pdf", "unknown format of the verdict '.pdf'. Allowed: .json, .md, .html"),
    ("locate demo --method audti", "unknown method 'audti'.*Did you mean 'audit'"),
    ("plan precision none --average-bits 5", "there is no report at none"),
    ("experiment phases --noise-levels 0 five", "extra argument"),
    (
        "diagnose demo --data columns.jsonl",
        "none of the allowed forms. Fields found: query, reply.*--prompt-field query --answer-field reply",
    ),
    ("gate demo --baseline . --data columns.jsonl", "Or name them, such as --prompt-field query"),
    ("diagnose demo --data columns.jsonl --prompt-field querry", "unknown field .*'querry'.*Did you mean 'query'"),
    ("diagnose demo --data columns.jsonl --answer-field reply", "--answer-field needs --prompt-field"),
    ("diagnose demo --prompt-field query --data data.docx", "unknown format of the data file.*Allowed: .jsonl"),
    ("diagnose demo --metric perplexty", "unknown metric 'perplexty'.*Did you mean 'perplexity'"),
    ("diagnose unfinished -o unfinished", "-o unfinished is the model's own folder: give another folder"),
    ("record ./unfinished -o unfinished", "-o unfinished is the model's own folder"),
    ("report unfinished", "not finished, so there is no report yet: noisescope runs resume unfinished"),
    ("plan precision unfinished --average-bits 5", "is not finished.*noisescope runs resume unfinished"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("mistakes")
    (here / "run.yaml").write_text("windw: 3\n")
    (here / "tokens.yaml").write_text("max_tokens: many\n")
    (here / "a.record").mkdir()
    (here / "columns.jsonl").write_text('{"query": "1 + 1", "reply": "2"}\n')
    (here / "data.docx").write_text("x")
    (here / "unfinished").mkdir()
    with Store(here / "unfinished") as store:
        store.note(command={"name": "diagnose", "options": {"model": "demo"}, "again": []})
    return here


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, tuple[int, str, str, float]]:
    """What one process answers to all of them, one after the other; the first includes its start."""
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parents[1])}
    lines = [arguments for arguments, _ in MISTAKES]
    ran = subprocess.run(
        [sys.executable, "-c", BLOCKED], input="\n".join(lines), cwd=folder, env=environment, capture_output=True,
        text=True,
    )  # fmt: skip
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return dict(zip(lines, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_answered_at_once(
    arguments: str, words: str, answers: dict[str, tuple[int, str, str, float]]
) -> None:
    """Exit code 2, one line, under a second of processor time, torch never imported."""
    code, out, err, seconds = answers[arguments]
    assert code == 2, err
    assert "Traceback" not in err and not out
    assert len(err.splitlines()) == 1, err
    assert re.search(words, " ".join(err.split())), err
    assert seconds < 1.0


@pytest.mark.parametrize(
    ("arguments", "package", "words"),
    [
        ("diagnose demo --executor ray", "ray", "--executor ray needs the package ray: pip install 'noisescope[ray]'"),
        (
            "experiment phases --method grpo",
            "trl",
            "grpo needs the package trl: pip install 'noisescope[trl]'",
        ),
        ("locate demo --device-map auto", "accelerate", "pip install 'noisescope[accelerate]'"),
    ],
)
def test_a_missing_extra_names_its_pip_line(
    arguments: str, package: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before torch is imported."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else found(name, *more)
    )
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2 and words in result.output


def test_no_cuda_in_this_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's version file says so; what to do is said for the command line."""
    monkeypatch.setattr(command_builder, "_lacks_cuda", lambda: True)
    result = CliRunner().invoke(app, ["locate", "demo", "--device", "cuda:1"])
    assert (
        result.exit_code == 2
        and "--device cuda:1: this build of torch has no CUDA. Leave --device out" in result.output
    )


@pytest.mark.parametrize(("cuda", "lacks"), [("None", True), ("'12.8'", False)])
def test_which_torch_is_installed(cuda: str, lacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the file that torch's wheels write their build into."""
    (tmp_path / "version.py").write_text(f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
    installed = types.SimpleNamespace(locate_file=lambda name: tmp_path / "version.py")
    monkeypatch.setattr(command_builder, "distribution", lambda name: installed)
    assert command_builder._lacks_cuda() == lacks


def device(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The check of a device's name in a process without torch, where packages of `folder` are installed."""
    code = f"from noisescope.options.shared import device_name; import sys; print(device_name({text!r}))"
    paths = os.pathsep.join([str(Path(noisescope.__file__).parents[1]), str(folder)])
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )


def test_a_backend_may_bring_its_own_device(tmp_path: Path) -> None:
    """A name that torch does not know is refused, unless a package is installed that torch loads as a backend."""
    for known in ("npu:1", "privateuseone:0", "maia"):
        assert device(known, tmp_path).stdout.strip() == known
    assert "unknown device 'quux:0'" in device("quux:0", tmp_path).stderr
    package = tmp_path / "torch_quux-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_quux\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torch.backends]\ntorch_quux = torch_quux:autoload\n")
    assert device("quux:0", tmp_path).stdout.strip() == "quux:0"
