"""Two devices compared, by records or by passports. Torch is loaded only to measure a passport or to read msprobe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisescope.comparison.compare import Comparison as Comparison
from noisescope.comparison.compare import compare_records
from noisescope.comparison.logprob_files import ROLLOUT, TRAINER, LogprobFile, read_logprobs
from noisescope.comparison.logprobs import LogprobCause as LogprobCause
from noisescope.comparison.logprobs import LogprobComparison as LogprobComparison
from noisescope.comparison.logprobs import compare_logprobs
from noisescope.comparison.priorities import DifferenceCosts as DifferenceCosts
from noisescope.comparison.records import Record, read_record
from noisescope.comparison.records import is_unfinished as is_unfinished
from noisescope.comparison.rows import SiteRow as SiteRow
from noisescope.comparison.rows import TokenRow as TokenRow
from noisescope.comparison.system_comparison import SystemComparison as SystemComparison
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.options.base import takes_options
from noisescope.options.device_commands import CompareOptions, PassportOptions
from noisescope.passports.diff import diff as diff
from noisescope.passports.diff import read_passport as read_passport
from noisescope.passports.diff import say as say
from noisescope.passports.diff import write_passport as write_passport
from noisescope.reports.saved_report import Report


@takes_options(CompareOptions, "a", "b")
def compare(options: CompareOptions) -> Comparison | LogprobComparison | SystemComparison:
    """How two devices or systems differ; `a` is the reference.

    >>> import noisescope as ns
    >>> subject = ns.load("tiny:llama")
    >>> good = ns.record(subject, output="good.record", detail="full")
    >>> bad = ns.record(subject, output="bad.record", detail="full", simulate="gain:0.01@1/linear/*down_proj")
    >>> found = ns.compare(good, bad, max_mape=0.05)  # records or their folders
    >>> found.verdict, found.first.module, found.passed
    ('diverged', 'model.layers.1.mlp.down_proj', True)

    Records are those of `record`, or dumps of msprobe (a folder with dump.json). Two .jsonl files are compared as
    log-probabilities: `found.causes`, `found.remainder`. Systems are run here, by name ("vllm:path/to/model") or as
    subjects: `found.causes`, `found.round_off`, `found.remainder`.
    """
    if options.of_logprobs:
        return _compare_files(options)
    if options.of_systems:
        from noisescope.api.systems import compare_models

        return compare_models(options)
    a, b, sensitivity = open_record(options.a), open_record(options.b), _diagnosed(options.sensitivity)
    return compare_records(a, b, sensitivity=sensitivity, **options.pick("layers", "max_mape", "affordable"))


def _compare_files(options: CompareOptions) -> LogprobComparison:
    a, b = (read_logprobs(Path(side)) for side in (options.a, options.b))
    if options.fields:
        a, b = (read_logprobs(Path(s), field=f) for s, f in zip((options.a, options.b), options.fields, strict=True))
    elif Path(options.a) == Path(options.b) or a.field == b.field:
        a, b = _two_fields(a, b)
    band = None if options.roundoff is None else _roundoff_report(options.roundoff).roundoff.roundoff.band
    return compare_logprobs(a, b, band=band, max_gap=options.max_gap)


def _two_fields(a: LogprobFile, b: LogprobFile) -> tuple[LogprobFile, LogprobFile]:
    """Of files that hold both sides, as trainers write them, the rollout's of A and the trainer's of B."""
    ours = [name for name in a.fields if name in ROLLOUT]
    theirs = [name for name in b.fields if name in TRAINER]
    if not ours or not theirs:
        if Path(a.path) == Path(b.path):
            raise InvalidInput(
                f"{a.path} is compared with itself: it holds {', '.join(a.fields) or 'one set of log-probabilities'}. "
                "Give another file, or two fields of it by --fields"
            )
        return a, b
    return read_logprobs(Path(a.path), field=ours[0]), read_logprobs(Path(b.path), field=theirs[0])


def _roundoff_report(report: Mapping[str, Any] | str | Path) -> Report:
    if isinstance(report, Report):
        return report
    return Report.load(report) if isinstance(report, (str, Path)) else Report.from_data(report, "the round-off report")


def _diagnosed(sensitivity: Diagnosis | Mapping[str, Any] | str | Path | None) -> Diagnosis | None:
    """A diagnosis from its value, its report, the JSON of that, or a file."""
    if sensitivity is None or isinstance(sensitivity, Diagnosis):
        return sensitivity
    if isinstance(sensitivity, (str, Path)):
        return Report.load(sensitivity).diagnosis
    if isinstance(sensitivity, Report):
        return sensitivity.diagnosis
    return Report.from_data(sensitivity, "the sensitivity report").diagnosis


def open_record(record: Record | str | Path) -> Record:
    """A record from wherever it comes."""
    if isinstance(record, Record):
        return record
    folder = Path(record)
    if folder.is_file():
        raise InvalidInput(
            f"{folder} is a file: a record is the folder that `noisescope record` writes, and log-probabilities are "
            "two files that end in .jsonl"
        )
    if not (folder / "record.json").is_file():
        from noisescope.api.records import dump_folder, read_dump

        if dump_folder(folder) is not None:
            return read_dump(folder)
    return read_record(folder)


@takes_options(PassportOptions, "device")
def passport(options: PassportOptions) -> dict[str, Any]:
    """The arithmetic of a device: accumulator bits, rounding, subnormals, ulps, what repeats. No model is needed.

    >>> import noisescope as ns
    >>> found = ns.passport(quick=True)
    >>> found["dtypes"]["float32"]["products"]["matmul"]["sum_bits"]["value"] >= 24
    True
    """
    from noisescope.passports.measure import take_passport as take

    return take(options.device, quick=options.quick)
