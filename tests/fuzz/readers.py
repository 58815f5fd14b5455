"""Every reader of files from elsewhere, as a function of one input; each may refuse it, and do nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from noisescope.api import reports
from noisescope.api.plans import _table
from noisescope.api.records import _read_tensor, read_dump
from noisescope.cli.passport import print_passport
from noisescope.comparison.compare import Comparison, compare_records
from noisescope.comparison.records import read_record
from noisescope.comparison.safetensors_reader import TensorFile
from noisescope.data.dataset import read_data
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.jsonform import from_json
from noisescope.localization.inputs import prompts_in
from noisescope.model.checkpoint_folder_check import gguf_facts, shards_of
from noisescope.model.checkpoint_tensors import _readers as checkpoint_readers
from noisescope.model.loading import outline
from noisescope.options.files import read_file
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.passports.diff import diff, read_passport
from noisescope.plans.gate_rows import GateResult
from noisescope.probe.noise import Gaussian
from noisescope.reports.run_changes import trend
from noisescope.runs.store import FILE, Store
from noisescope.runs.store_file import checksum
from noisescope.training.launch import confirm
from noisescope.trials import Conditions, Result, Slice, Trial

CORPUS = Path(__file__).parent / "corpus"
SMALL_TRIAL = Trial(Conditions("m", "float32", "cpu", "sdpa", 2), "score", Slice("d", 0, 2), Injection(Gaussian(0.05)))

RESULT = '{"facts": {"n": 1}, "samples": [0, 1], "values": {"kl": [0.1, null]}}'


@dataclass(frozen=True)
class Reader:
    """`file` is the name under which an input is put into an empty folder; `read` gets its path."""

    name: str
    file: str
    read: Callable[[Path], object]
    corpus: tuple[bytes, ...]
    is_json: bool = False


def files(folder: str, pattern: str = "*") -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted((CORPUS / folder).glob(pattern)))


def _notes() -> dict[str, Any]:
    """What a finished run notes of itself."""
    report = json.loads((CORPUS / "report" / "diagnosis.json").read_text())
    named = ("model", "data", "settings", "metric", "conditions", "device", "kl_floor")
    asked = {name: report["run"][name] for name in named}
    command = {"name": "diagnose", "options": {"model": "demo", "samples": 4}, "again": ["trust_remote_code"]}
    return {"asked": asked, "answered": asked, "command": command, "report": report}


NOTES = _notes()


# -- what each does with a file: all that a command does before it computes


def report(path: Path) -> None:
    found = reports.load_any_report(path)
    found.to_markdown()
    found.to_json()


def record(path: Path) -> None:
    source = CORPUS / "record" / "tiny.record"
    shutil.copy(source / "0000.safetensors", path.parent)
    found = read_record(path.parent)
    compare_records(found, read_record(source)).to_json()


def tensors(path: Path) -> None:
    file = TensorFile(path, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
    for name in [*file._header.entries, *file._header.same]:
        file.read(name)


def passport(path: Path) -> None:
    found = read_passport(path)
    diff(found, read_passport(CORPUS / "passport" / "cpu.json"))
    print_as_the_command_does(found, path)


def print_as_the_command_does(found: dict[str, Any], path: Path) -> None:
    try:
        print_passport(found)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise InvalidInput(f"{path} is damaged ({error!r:.200})") from error


def store(path: Path) -> None:
    """Everything that is done with a run folder, whatever the others say; the last writes, as resuming does."""
    refused: list[InvalidInput] = []
    for read in (facts_shown, reports.find_runs, resumed, reports.read_run, reports.check_run, drawn, mended):
        try:
            read(path.parent)
        except InvalidInput as error:
            refused.append(error)
    if refused:
        raise max(refused, key=lambda error: len(str(error)))


def facts_shown(folder: Path) -> None:
    for whole in (False, True):
        json.dumps(reports.run_facts(folder, whole=whole), allow_nan=False)


def resumed(folder: Path) -> None:
    command, _ = reports.stored_command(folder)
    if command is not None:
        DiagnoseOptions.from_stored(command.options, output=folder)


def drawn(folder: Path) -> None:
    found = reports.load_any_report(folder)
    found.to_markdown()
    found.to_json()


def mended(folder: Path) -> None:
    with Store(folder) as kept:
        kept.mend()
        list(kept.values())


def row(path: Path, content: str | None = None, result: str | None = None) -> None:
    """A store whose checksums are right, with one more trial in it."""
    content = SMALL_TRIAL.content().replace("0x1", "0x2") if content is None else content
    result = RESULT if result is None else result
    (path.parent / FILE).write_bytes(_sound_store())
    with closing(sqlite3.connect(path.parent / FILE)) as db:
        cells = (
            hashlib.sha256(content.encode("utf-8", "replace")).hexdigest(),
            content,
            "score",
            result,
            None,
            "",
            1.0,
        )
        columns = "id, content, measure, result, arrays, error, seconds, checksum"
        db.execute(f"INSERT INTO trials ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*cells, checksum(*cells)))
        db.commit()
    store(path.parent / FILE)


def text_of(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def facts(path: Path) -> None:
    """A store whose checksums are right, with foreign facts about the run: the members of the file, or all of it."""
    text = text_of(path)
    try:
        found = json.loads(text)
        notes = {name: json.dumps(member) for name, member in found.items()}
        assert notes.keys() & NOTES.keys()
    except (ValueError, AttributeError, AssertionError, RecursionError):
        notes = dict.fromkeys(NOTES, text)
    (path.parent / FILE).write_bytes(_sound_store())
    with closing(sqlite3.connect(path.parent / FILE)) as db:
        for key, value in notes.items():
            key, value = (cell.encode("utf-8", "replace").decode() for cell in (key, value))
            db.execute("INSERT OR REPLACE INTO about VALUES (?, ?, ?)", (key, value, checksum(key, value)))
        db.commit()
    store(path.parent / FILE)


def gate(path: Path) -> None:
    text = text_of(path)
    (path.parent / FILE).write_bytes(_sound_store())
    with closing(sqlite3.connect(path.parent / FILE)) as db:
        db.execute("INSERT INTO gates VALUES (9, ?, ?)", (text, checksum(9, text)))
        db.commit()
    with Store(path.parent, create=False) as kept:
        trend([from_json(GateResult, row, "gate") for row in kept.gates()])
    reports.run_facts(path.parent)


def config(path: Path) -> None:
    outline(path.parent)


def index(path: Path) -> None:
    for file in shards_of(path.parent):
        assert file.parent == path.parent, file


def checkpoint(path: Path) -> None:
    from contextlib import ExitStack

    with ExitStack() as opened:
        for read in checkpoint_readers(path.parent, opened).values():
            read()


def dumped(path: Path) -> None:
    (path.parent / "dump_tensor_data").mkdir()
    found = json.loads((CORPUS / "dump" / "dump.json").read_text())
    for entry in found["data"].values():
        for about in entry["output"]:
            shutil.copy(CORPUS / "tensor" / "plain.pt", path.parent / "dump_tensor_data" / about["data_name"])
    read = read_dump(path.parent)
    compare_records(read, read).to_json()


def tensor(path: Path) -> None:
    _read_tensor(path, 2)


def tally(path: Path) -> None:
    confirm(path.parent, 1)


_STORE: list[bytes] = []


def _sound_store() -> bytes:
    """A run's store as noisescope writes it, in bytes; made once."""
    if not _STORE:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            with Store(folder) as made:
                result = Result((0, 1), {"kl": (0.1, None)}, {"injections": 3}, {"map": np.arange(4.0)})
                made.put(SMALL_TRIAL, result, 0.5)
                made.note(**NOTES)
                made.add_gate(json.loads(files("gate")[0]))
            with closing(sqlite3.connect(Path(folder) / FILE)) as db:
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                db.execute("PRAGMA journal_mode=DELETE")
            _STORE.append((Path(folder) / FILE).read_bytes())
    return _STORE[0]


def all_readers() -> Iterator[Reader]:
    yield Reader("report", "report.json", report, files("report"), is_json=True)
    yield Reader("record", "record.json", record, files("record/tiny.record", "*.json"), is_json=True)
    yield Reader("record tensors", "0000.safetensors", tensors, files("record/tiny.record", "*.safetensors"))
    yield Reader(
        "comparison", "comparison.json", lambda path: Comparison.load(path).to_json(), files("comparison"), True
    )
    yield Reader("passport", "passport.json", passport, files("passport"), is_json=True)
    yield Reader("YAML", "run.yaml", lambda path: read_file(path, DiagnoseOptions), files("yaml"))
    yield Reader("store, its bytes", FILE, store, (_sound_store(),))
    yield Reader("store, its facts", "x.json", facts, (json.dumps(NOTES).encode(),), is_json=True)
    yield Reader("store, its results", "x.json", lambda path: row(path, None, text_of(path)), (RESULT.encode(),), True)
    trial = (SMALL_TRIAL.content().replace("0x1", "0x2").encode(),)
    yield Reader("store, its trials", "x.json", lambda path: row(path, text_of(path)), trial, is_json=True)
    yield Reader("gate history", "gate.json", gate, files("gate"), is_json=True)
    yield Reader("config.json", "config.json", config, files("config"), is_json=True)
    yield Reader("shard index", "model.safetensors.index.json", index, files("index"), is_json=True)
    yield Reader("safetensors", "model.safetensors", checkpoint, files("safetensors"))
    yield Reader("GGUF", "tiny.gguf", gguf_facts, files("gguf"))
    yield Reader("msprobe dump.json", "dump.json", dumped, files("dump"), is_json=True)
    yield Reader("msprobe tensor", "tensor.pt", tensor, files("tensor"))
    yield Reader("Parquet", "data.parquet", read_data, files("parquet"))
    yield Reader("JSONL", "data.jsonl", read_data, files("jsonl"))
    yield Reader("JSON data", "data.json", read_data, files("json"), is_json=True)
    yield Reader("CSV", "data.csv", read_data, files("csv"))
    yield Reader("latency table", "latency.json", _table, files("latency"), is_json=True)
    yield Reader("worker tally", "rank0-1.json", tally, files("tally"), is_json=True)
    yield Reader("text of prompts", "prompts.txt", prompts_in, files("prompts"))
