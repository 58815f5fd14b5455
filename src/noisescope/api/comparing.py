"""What two devices compute on the same prompts: recorded on each, compared anywhere."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from noisescope.api.msprobe import dump_folder, read_dump
from noisescope.comparison.compare import Comparison, compare_records
from noisescope.comparison.records import Record, read_record
from noisescope.diagnosis.report import Diagnosis
from noisescope.errors import InvalidInput, unknown
from noisescope.locators.prompts import prompt_ids
from noisescope.model import Subject
from noisescope.preparation import material_of, versions
from noisescope.reports.report import Report
from noisescope.runs.forwards import Prompts, device_name
from noisescope.runs.recorded_batch import Detail
from noisescope.runs.recording import write_record

DETAILS = ("sketch", "full")
_GRID = 16  # prompts are cut to a multiple of so many tokens, so that many share a forward without padding


def record(
    subject: Subject,
    data: Any = None,
    output: str | Path = "noisescope.record",
    *,
    detail: str = "sketch",
    full_layers: Iterable[int] = (),
    inputs: bool = True,
    samples: int = 32,
    max_tokens: int = 128,
    batch: int = 16,
    prompts: Sequence[Any] | None = None,
) -> Record:
    """Run a model on prompts and write what every operator gave into the folder `output`.

        ns.record(ns.load("path/to/model", device="cuda"), "gsm8k.jsonl", "gpu.record", full_layers={9, 10})

    Sketches of every operator always; whole tensors (and with `inputs` what modules were given, for a replay by
    `locate`) of all with detail="full", else of the blocks in `full_layers`. `data` is as for `diagnose`; samples are
    cut to a multiple of 16 tokens. `prompts` (texts or token ids) are taken as they are instead. `batch` prompts of one
    length share a forward.
    """
    if detail not in DETAILS:
        raise unknown("detail", detail, DETAILS)
    for name, value in (("samples", samples), ("max_tokens", max_tokens), ("batch", batch)):
        if value < 1:
            raise InvalidInput(f"{name} must be at least 1, got {value}")
    anatomy, layers = subject.anatomy, frozenset(full_layers)
    if not layers <= set(range(len(anatomy.blocks))):
        raise InvalidInput(f"full_layers {sorted(layers)} are out of range: blocks are 0 to {len(anatomy.blocks) - 1}")
    if prompts is not None:
        chosen = prompt_ids(subject.model, subject.tokenizer, prompts, seed=0, count=samples, length=max_tokens)
        source = "prompts"
    else:
        chosen, source = _prompts_of(subject, data, samples, max_tokens)
    about = {
        "model": {"source": subject.source, "architecture": anatomy.architecture, "blocks": len(anatomy.blocks)},
        "data": {"source": source, "samples": len(chosen)},
        "device": device_name(subject.model),
        "versions": versions(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    kept = Detail(detail == "full", layers, inputs)
    return read_record(write_record(subject.model, anatomy, chosen, output, detail=kept, batch=batch, about=about))


def _prompts_of(subject: Subject, data: Any, samples: int, max_tokens: int) -> tuple[Prompts, str]:
    if data is None and subject.tokenizer is None:  # a bare module: seeded token ids
        ids = prompt_ids(subject.model, None, None, seed=0, count=samples, length=min(max_tokens, _GRID))
        return ids, "random token ids"
    material, found = material_of(subject, data, samples, max_tokens, which="test")
    rows = (group[0].ids for group in material.encoded.sequences)
    cut = tuple(ids[: len(ids) // _GRID * _GRID] or ids for ids in rows)
    return cut, "tokenised batches" if found is None else found.source


def compare(
    a: Record | str | Path,
    b: Record | str | Path,
    *,
    layers: Iterable[int] | None = None,
    max_mape: float | None = None,
    sensitivity: Diagnosis | Mapping[str, Any] | str | Path | None = None,
    affordable: float | None = None,
) -> Comparison:
    """How two devices differ; `a` is the reference.

        found = ns.compare("gpu.record", "npu.record", max_mape=0.05, sensitivity="out/report.json")
        found.verdict, found.first.site, found.passed; found.save("comparison.json")

    Records are those of `record`, or dumps of msprobe (a folder with dump.json). `layers` limits the rows and what
    `max_mape` is checked on. With the report of a diagnosis of the same model, differences are given in nats;
    `affordable` is what one layer's may cost, 0.01 if not given.
    """
    known = _diagnosed(sensitivity)
    return compare_records(
        opened(a), opened(b), layers=layers, max_mape=max_mape, sensitivity=known, affordable=affordable
    )


def _diagnosed(sensitivity: Diagnosis | Mapping[str, Any] | str | Path | None) -> Diagnosis | None:
    """A diagnosis from its value, its report, the JSON of that, or a file."""
    if sensitivity is None or isinstance(sensitivity, Diagnosis):
        return sensitivity
    if isinstance(sensitivity, (str, Path)):
        return Report.load(sensitivity).diagnosis
    if isinstance(sensitivity, Report):
        return sensitivity.diagnosis
    return Report.checked(sensitivity, "the sensitivity report").diagnosis


def opened(record: Record | str | Path) -> Record:
    """A record from wherever it comes."""
    if isinstance(record, Record):
        return record
    if Path(record).is_file():
        raise InvalidInput(f"{record} is a file: a record is the folder that `noisescope record` writes")
    if not (Path(record) / "record.json").is_file() and dump_folder(record) is not None:
        return read_dump(record)
    return read_record(record)
