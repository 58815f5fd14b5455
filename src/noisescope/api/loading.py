"""The model that options name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from noisescope.model import Subject, load
from noisescope.options.groups import DeviceOptions, LoadingOptions, ReportModelOptions


def load_subject(asked: LoadingOptions) -> Subject:
    """The model of a command."""
    return _loaded(asked.model, asked.dtype, asked)


def subject_of_report(report: Mapping[str, Any], asked: ReportModelOptions) -> Subject:
    """The model that a report is of, in the dtype it was measured in; or another one."""
    run = report["run"]
    return _loaded(asked.model or run["model"]["source"], asked.dtype or run["conditions"]["dtype"], asked)


def _loaded(model: str, dtype: str | None, asked: DeviceOptions) -> Subject:
    """Without the loader's own progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    return load(
        model,
        device=asked.device,
        dtype=dtype,
        device_map=asked.device_map,
        revision=asked.revision,
        trust_remote_code=asked.trust_remote_code,
    )
