"""Stored runs and reports, the words to print them with, and early checks of files. Needs neither model nor torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescope import __version__
from noisescope.atomic_write import folder_inside, write_file
from noisescope.data.dataset import read_data
from noisescope.diagnosis import changes
from noisescope.diagnosis.report import Diagnosis
from noisescope.diagnosis.stored_trials import StoredRun, stored_run
from noisescope.errors import InvalidInput
from noisescope.findings import pass_fail as pass_fail
from noisescope.findings import percent as percent
from noisescope.findings.finding import counted as counted
from noisescope.findings.finding import times_better as times_better
from noisescope.jsonform import Json, from_json, to_json
from noisescope.options.shared import DataFile, MeasuringOptions, SamplingOptions
from noisescope.plans.fault_tests import FaultTestResult
from noisescope.plans.gate_rows import GateRow
from noisescope.plans.precision_results import prediction_sentence as prediction_sentence
from noisescope.plans.smoothing import gain_sentence as gain_sentence
from noisescope.reports import cell_text as cell_text
from noisescope.reports import experiment as experiment
from noisescope.reports import junit
from noisescope.reports import locate_report as locate_report
from noisescope.reports import run_changes as run_changes
from noisescope.reports.document import Document
from noisescope.reports.experiment import PhasesReport
from noisescope.reports.markdown import to_markdown
from noisescope.reports.next_steps import next_steps as next_steps
from noisescope.reports.roundoff_sections import digit_rows as digit_rows
from noisescope.reports.roundoff_sections import roundoff_lines as roundoff_lines
from noisescope.reports.run_changes import Comparison
from noisescope.reports.saved_report import SUMMARY_FORMATS, SavedReport, drawn, read_report
from noisescope.reports.saved_report import Report as Report
from noisescope.reports.saved_report import schema as schema
from noisescope.runs.store import FILE as FILE
from noisescope.runs.store import Store, StoreCheck
from noisescope.runs.store_file import RESULTS, STORED
from noisescope.sites import OPERATORS as OPERATORS
from noisescope.text_escaping import last_part
from noisescope.untrusted_files import parse_json


def check_data(options: SamplingOptions) -> None:
    """Read the first item of every data file that is given: wrong columns are refused at once."""
    given = [options.source()] if options.data is not None else []
    if isinstance(options, MeasuringOptions):
        given.append(options.calibration)
    for data in given:
        if isinstance(data, (str, Path, DataFile)):
            read_data(data, limit=1)


def check_finished(run: Path) -> None:
    """Refuse the folder of a run that has no report yet."""
    if not (run / FILE).exists() or (run / "report.json").exists():
        return
    with Store(run, create=False) as store:
        if store.fact("report") is None:
            raise InvalidInput(unfinished(run))


def unfinished(run: Path) -> str:
    """What to do about a run that was interrupted."""
    return f"the run in {run} is not finished, so there is no report yet: noisescope runs resume {run}"


def write_text(path: Path, text: str) -> Path:
    """Write a text file, and make its folder where there is none; its path."""
    try:
        return write_file(path, text)
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror or error}") from error


def as_json(value: object) -> str:
    """A result as JSON text, as `--json` prints it."""
    return json.dumps(to_json(value), indent=1) + "\n"


def write_junit(
    path: Path,
    suite: str,
    rows: Sequence[GateRow | FaultTestResult],
    *,
    seconds: Sequence[float] | float,
    summary: str = "",
) -> Path:
    """Checks as JUnit XML, with what each took; `summary` where the rows alone do not decide the verdict."""
    each = [seconds] * len(rows) if isinstance(seconds, float) else seconds
    cases = [junit.Case(row.name, row.verdict, row.message, spent) for row, spent in zip(rows, each, strict=True)]
    return junit.write_junit(path, suite, cases, summary)


def save_figures(document: Document, folder: Path) -> list[Path]:
    """The charts of a report as PNG and SVG, in figures/ of the folder; matplotlib is loaded here and not before."""
    from noisescope.reports.figure_files import save_figures as save

    return save(document, folder_inside(folder, "figures"))


def save_summary(report: SavedReport[Any], folder: Path, formats: Sequence[str]) -> list[Path]:
    """The first page of a report as summary.md, .html and .pdf, or those of `formats`; the paths."""
    page = report.document().summary()
    wanted = [form for form in formats if form in SUMMARY_FORMATS]
    if not wanted:
        raise InvalidInput(f"a summary is for reading: choose --format from {', '.join(SUMMARY_FORMATS)}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [write_file(folder / f"summary.{form}", drawn(page, form)) for form in wanted]
    except OSError as error:
        raise InvalidInput(f"can't write into {folder}: {error.strerror or error}. Choose another with -o") from error


def append_step_summary(report: SavedReport[Any]) -> Path:
    """Add the first page of a report to the summary of the GitHub Actions job that this runs in; the file."""
    name = os.environ.get("GITHUB_STEP_SUMMARY")
    if not name:
        raise InvalidInput(
            "GITHUB_STEP_SUMMARY is not set, so this is no step of a GitHub Actions job: use --summary for files"
        )
    try:
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(to_markdown(report.document().summary()) + "\n")
    except OSError as error:
        raise InvalidInput(f"can't append to {name} (GITHUB_STEP_SUMMARY): {error.strerror or error}") from error
    return Path(name)


def find_runs(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each run up to two folders deep, and what is wrong with those that can't be read."""
    found = sorted(path.parent for depth in ("", "*/", "*/*/") for path in folder.glob(f"{depth}{FILE}"))
    rows, unreadable = [], []
    for path in found:
        try:
            rows.append({"folder": str(path), **run_facts(path)})
        except InvalidInput as error:  # one bad store must not hide the others
            unreadable.append(str(error))
    return rows, unreadable


def compare_runs(a: str | Path, b: str | Path) -> Comparison:
    """What changed from one run to another, by their folders: a new checkpoint, another dtype, another device.

    >>> for name in ("monday", "friday"):
    ...     report = ns.robustness(subject, batches, noise_levels=(0, 0.05), metric="agreement", output=name)
    >>> ns.compare_runs("monday", "friday").changes.verdict.word
    'no significant difference'
    """
    first, second = read_run(Path(a)), read_run(Path(b))
    with RESULTS.explaining(f"{a} or {b}"):
        return Comparison(changes.compare_runs(first, second))


@dataclass(frozen=True)
class StoredCommand:
    """The command that a run was made by, as its store has it: data from wherever the folder came from."""

    name: str
    options: Mapping[str, Json]
    again: tuple[str, ...]  # options that were given and are never stored


def stored_command(folder: Path) -> tuple[StoredCommand | None, str]:
    """The command that a run was made by (None for a call from Python), and its model's fingerprint."""
    with Store(folder, create=False) as store:
        command, asked = store.fact("command"), store.fact("asked")
    model = asked.get("model") if isinstance(asked, dict) else None
    fingerprint = model.get("fingerprint") if isinstance(model, dict) else None
    if isinstance(command, dict):
        command = {"again": [], **command}  # runs of versions that stored every option have none
    found = None if command is None else from_json(StoredCommand, command, f"the command stored in {folder}")
    return found, fingerprint if isinstance(fingerprint, str) else ""


def as_report(report: Report | Diagnosis | Mapping[str, Any] | str | Path) -> Report:
    """The report of a diagnosis from its value, its JSON form, its file or its run's folder."""
    if isinstance(report, (str, Path)):
        return load_report(report)
    if isinstance(report, Diagnosis):
        return Report(report)
    return report if isinstance(report, Report) else Report.from_data(report, "the report")


def load_report(run: str | Path) -> Report:
    """The report of a diagnosis, by its run's folder or its report.json.

    >>> paths = report.save("out", formats=["json"])  # of ns.diagnose(subject, batches)
    >>> dict(ns.load_report("out")) == dict(report)
    True
    """
    found = load_any_report(Path(run))
    if not isinstance(found, Report):
        raise InvalidInput(f"{run} holds {found!r}, and this needs the report of a diagnosis (noisescope diagnose)")
    return found


def load_any_report(run: Path) -> Report | PhasesReport | Comparison:
    """What a run's folder or a report.json holds: a report, an experiment or a comparison."""
    found = stored_report(run) or read_report(run)
    if isinstance(found, dict) and "hypotheses" in found:
        return PhasesReport.from_data(found, str(run))
    if isinstance(found, dict) and "comparison" in found:
        return Comparison.from_data(found, str(run))
    return Report.from_data(found, str(run))


def _stored(run: Path, fact: str) -> Any:
    with Store(run, create=False) as store:
        return store.fact(fact)


def stored_report(run: Path) -> Json:
    """What a finished run keeps in its store, if there is one."""
    if not (run / FILE).exists():
        return None
    found: Json = _stored(run, "report")
    if found is None and not (run / "report.json").exists():
        raise InvalidInput(unfinished(run))
    return found


def read_run(folder: Path) -> StoredRun:
    """A store as the comparison needs it."""
    with Store(folder, create=False) as store:
        contents = store.contents().items()
        trials = [
            (parse_json(content, f"a trial in {folder}", STORED), store[identity]) for identity, content in contents
        ]
        return stored_run(str(folder), store.fact("asked"), trials)


def check_run(folder: Path) -> StoreCheck:
    """Every row of a store verified: what a disk or a copy damaged."""
    with Store(folder, create=False) as store:
        return store.check()


def run_facts(folder: Path, *, whole: bool = False) -> dict[str, Any]:
    """A store in numbers; the whole of it with its errors and settings. No trial is read."""
    with Store(folder, create=False) as store:
        about, gates, counts = store.about(), store.gates(), store.counts()
        asked = _part(about, "asked")
        history = bool(gates) and not asked  # what `gate --history` keeps: verdicts, and no run of its own
        row: dict[str, Any] = {
            "command": "gate history" if history else _part(about, "command").get("name", "a call from Python"),
            "model": _part({"gate": gates[-1]}, "gate").get("model", "?") if history else _source(asked, "model"),
            "data": _source(asked, "data"),
            "state": counted(len(gates), "verdict") if history else state_of(folder, about),
            "trials": counts.trials,
            "gates": len(gates),
            "failed": counts.failed,
            "seconds": counts.seconds,
            "measures": dict(counts.measures),
        }
        if whole:
            row |= {"errors": dict(counts.errors), "settings": _settings(asked)}
        return row


def state_of(folder: Path, about: dict[str, Any]) -> str:
    """complete, or how to resume. A report of an earlier question in the same folder does not count."""
    asked, run = _part(about, "asked"), _part(about, "report", "run")
    if run and all(run.get(name) == value for name, value in asked.items()):
        return "complete"
    if asked and about.get("answered") == asked:  # a gate: its verdict is no report
        return "complete"
    if about.get("command"):
        return f"not finished: noisescope runs resume {folder}"
    return f"not finished: call the same function again with output={str(folder)!r}"


def _part(data: Mapping[str, Json], *names: str) -> dict[str, Json]:
    """An object inside what a store noted; {} where there is none, for a store may come from elsewhere."""
    found: Json = data
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}


def _source(asked: Mapping[str, Json], name: str) -> str:
    return str(_part(asked, name).get("source", "?"))


def _settings(asked: dict[str, Any]) -> dict[str, Any]:
    """What was asked: the settings of the diagnosis, data, metric, dtype and device."""
    data, conditions = _part(asked, "data"), _part(asked, "conditions")
    rest = {"samples": data.get("samples"), "measure": data.get("measure"), "metric": asked.get("metric")}
    rest |= {"dtype": conditions.get("dtype"), "device": asked.get("device")}
    return {name: value for name, value in {**_part(asked, "settings"), **rest}.items() if value is not None}


def versions() -> dict[str, str]:
    """Of everything that could change a number."""
    found = {"noisescope": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "numpy", "scipy"):
        found[name] = importlib.metadata.version(name)
    return found


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def end_facts(output: Path | None, *, full_paths: bool) -> dict[str, Any]:
    """When a run came to its end; where it did so only if asked, for reports are passed on."""
    folder = None if output is None else str(output) if full_paths else last_part(str(output))
    host = platform.node() if full_paths else ""
    return {"finished": now(), "versions": versions(), "host": host, "store": folder}
