"""Records of other devices, as locators take them: of this very model, on tokens that it knows."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from noisescope.anatomy import dissect
from noisescope.comparison.records import Record, read_record
from noisescope.errors import InvalidInput
from noisescope.runs.fingerprints import model_fingerprint
from noisescope.runs.forwards import check_vocabulary, dtype_of


def recorded(given: Record | str | Path, model: nn.Module) -> Record:
    """What `record` returned, or its folder read; refused with the reason where it is broken or of another model."""
    if not isinstance(given, (Record, str, Path)):
        raise InvalidInput(f"a record is what ns.record returned, or its folder; got {type(given).__name__}")
    record = given if isinstance(given, Record) else read_record(given)
    _check_model(record, model)
    check_vocabulary(model, record.prompts, record.path)
    return record


def _check_model(record: Record, model: nn.Module) -> None:
    if record.model == model_fingerprint(model):
        return
    here = dissect(model).architecture
    if record.architecture == here and record.dtype != dtype_of(model):
        raise InvalidInput(
            f"{record.path} was recorded in {record.dtype}, but the model here computes in {dtype_of(model)}: load the "
            f"model with dtype={record.dtype!r}, or record again"
        )
    raise InvalidInput(
        f"{record.path} is about another model ({record.architecture}, {record.dtype}, fingerprint "
        f"{record.model[:12]}) than this one ({here}): weights or config differ. Record this model, or load that one"
    )
