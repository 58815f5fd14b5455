"""Data files checked before a model is loaded. No torch here."""

from __future__ import annotations

from pathlib import Path

from noisescope.data.dataset import read_data
from noisescope.options.shared import DataFile, MeasuringOptions, SamplingOptions


def check_data(options: SamplingOptions) -> None:
    """Read the first item of every data file that is given: wrong columns are refused at once."""
    given = [options.source()] if options.data is not None else []
    if isinstance(options, MeasuringOptions):
        given.append(options.calibration)
    for data in given:
        if isinstance(data, (str, Path, DataFile)):
            read_data(data, limit=1)
