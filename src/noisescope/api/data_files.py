"""Data files and run folders checked before anything heavy is loaded. No torch here, and no report."""

from __future__ import annotations

from pathlib import Path

from noisescope.data.dataset import read_data
from noisescope.errors import InvalidInput
from noisescope.options.shared import DataFile, MeasuringOptions, SamplingOptions
from noisescope.runs.store import FILE, Store


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
