"""Two devices compared, by records or by passports. Torch is loaded only to measure a passport or to read msprobe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisescope.comparison.compare import Comparison as Comparison
from noisescope.comparison.compare import compare_records
from noisescope.comparison.priorities import DifferenceCosts as DifferenceCosts
from noisescope.comparison.records import Record, read_record
from noisescope.comparison.rows import SiteRow as SiteRow
from noisescope.comparison.rows import TokenRow as TokenRow
from noisescope.comparison.systems import SystemComparison as SystemComparison
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput
from noisescope.options.base import takes_options
from noisescope.options.device_commands import CompareOptions
from noisescope.passports.diff import diff as diff
from noisescope.passports.diff import read_passport as read_passport
from noisescope.passports.diff import say as say
from noisescope.passports.diff import write_passport as write_passport
from noisescope.reports.report_file import Report


@takes_options(CompareOptions, "a", "b")
def compare(options: CompareOptions) -> Comparison | SystemComparison:
    """How two devices or systems differ; `a` is the reference.

        found = ns.compare("gpu.record", "npu.record", max_mape=0.05, sensitivity="out/report.json")
        found.verdict, found.first.site, found.passed; found.save("comparison.json")

    Records are those of `record`, or dumps of msprobe (a folder with dump.json). Systems are run here:

        found = ns.compare("transformers:path/to/model", "vllm:path/to/model", data="gsm8k.jsonl")
        found.verdict, found.causes, found.round_off, found.remainder
    """
    if options.of_systems:
        from noisescope.api.systems import compare_models

        return compare_models(options)
    a, b, sensitivity = open_record(options.a), open_record(options.b), _diagnosed(options.sensitivity)
    return compare_records(a, b, sensitivity=sensitivity, **options.pick("layers", "max_mape", "affordable"))


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
        raise InvalidInput(f"{folder} is a file: a record is the folder that `noisescope record` writes")
    if not (folder / "record.json").is_file():
        from noisescope.api.records import dump_folder, read_dump

        if dump_folder(folder) is not None:
            return read_dump(folder)
    return read_record(folder)


def take_passport(device: str, *, quick: bool = False) -> dict[str, Any]:
    """The arithmetic of a device."""
    from noisescope.passports.measure import take_passport as take

    return take(device, quick=quick)
