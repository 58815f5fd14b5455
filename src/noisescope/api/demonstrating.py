"""The demo: a diagnosis of the bundled model, put to the test, planned for, and a fault found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from noisescope import demo
from noisescope.api.diagnosing import diagnose, put_to_the_test, with_fault_located
from noisescope.api.loading import load_subject
from noisescope.api.planning import with_precision_planned
from noisescope.data import read_data
from noisescope.options.groups import LoadingOptions, Options
from noisescope.probe.formats import Format
from noisescope.reports.report import Report

SAMPLES = 64  # and two seeds: enough for the avalanche point to be sure, in the time that a first look may take
HELD_OUT = 100
BITS = 5
BROKEN = "stuck_bit:bit=16@6/linear/down_proj"  # what is put in, and has to be found
FAULT = "int4"  # 4-bit integers with one scale per tensor


def demonstrated(output: Path, progress: object, say: Callable[[str], None]) -> Report:
    """The report of all steps; `say` is told which one begins."""
    problems = read_data(demo.test_file(), limit=SAMPLES + HELD_OUT)
    unseen = dataclasses.replace(problems, items=problems.items[SAMPLES:])
    subject = load_subject(LoadingOptions(model="demo"))
    report = diagnose(
        subject,
        samples=SAMPLES,
        seeds=2,
        slice=SAMPLES,
        calibration_samples=128,
        options=Options(output=output, progress=progress, repeat={"name": "demo", "options": {}}),
    )
    say("2. simulating a fault where the report warns, and where it does not")
    report = put_to_the_test(
        subject,
        report,
        unseen,
        Format(FAULT),
        name="4-bit integers (one scale per tensor)",
        samples=HELD_OUT,
        output=output,
    )
    say(f"3. planning {BITS} bits per weight, and measuring what that costs")
    report = with_precision_planned(subject, report, BITS)
    say("4. breaking one operation on purpose, and looking for it without a reference")
    return with_fault_located(subject, report, BROKEN, output=output)
