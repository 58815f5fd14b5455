"""A simulated fault, located. Torch is loaded once the fault is known to be one."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from noisescope.faults.parsing import parse_fault
from noisescope.options.device_commands import LocateOptions
from noisescope.sites import Place

if TYPE_CHECKING:
    from noisescope.localization.verdict import Verdict
    from noisescope.model.loading import Subject

_PROMPTS, _LENGTH = 16, 16  # of the records that a simulated fault needs


def check_fault(text: str | None) -> None:
    """Refuse a fault that can't be simulated, before a model is loaded."""
    if text is not None:
        fault, where = parse_fault(text)
        where.of(fault)


def locate_simulated(subject: Subject, options: LocateOptions) -> tuple[Verdict, Place, int]:
    """The verdict while the fault of `simulated` is in the model, its place, and how many elements it changed.

    Methods that need a record get one of this model: replay that of the good device, fingerprint the suspect's.
    """
    from noisescope.api.records import record
    from noisescope.faults.simulator import faulty
    from noisescope.localization.locate import locate

    fault, where = parse_fault(str(options.simulated))
    broken = faulty(subject.model, fault, where, anatomy=subject.anatomy)
    with tempfile.TemporaryDirectory(prefix="noisescope-") as folder:
        output = Path(folder) / "simulated.record"
        if options.method == "fingerprint":  # the suspect computes elsewhere: candidates are tried on a healthy model
            with broken as scope:
                record(subject, output=output, samples=_PROMPTS, max_tokens=_LENGTH)
            suspect = LocateOptions(
                method="fingerprint", failure=output, reference=options.reference, seed=options.seed
            )
            return locate(subject, options=suspect), where.place, scope.changed
        if options.method == "replay" and options.reference is None:
            record(subject, output=output, samples=_PROMPTS, max_tokens=_LENGTH, detail="full")
            options = dataclasses.replace(options, reference=output)
        with broken as scope:
            verdict = locate(subject, options=options)
    return verdict, where.place, scope.changed
