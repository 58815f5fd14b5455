"""What a report was made on, found again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from noisescope import demo
from noisescope.data import built_in
from noisescope.errors import InvalidInput
from noisescope.model import Subject
from noisescope.plans.comparable import refuse_architecture

BUILT_IN = "built-in text"


def data_of(report: Mapping[str, Any]) -> Any:
    """What `diagnose` takes as data: the same file, the demo's problems, or the built-in text."""
    source = str(report["run"]["data"]["source"])
    if source == "demo":
        return demo.test_file()
    if source == BUILT_IN:
        return built_in()
    if not Path(source).exists():
        raise InvalidInput(f"the report was made on {source}, which is not there: give the data with --data")
    return source


def check_model(report: Mapping[str, Any], subject: Subject) -> None:
    """Refuse a model of another architecture or depth than the report's; its weights may be others."""
    refuse_architecture(report["run"], subject.anatomy.architecture, len(subject.anatomy.blocks))
