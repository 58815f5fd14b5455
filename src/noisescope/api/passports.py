"""Passports: read, written, compared without torch; torch is loaded where one is measured."""

from __future__ import annotations

from typing import Any

from noisescope.passports.diff import diff as diff
from noisescope.passports.diff import read_passport as read_passport
from noisescope.passports.diff import say as say
from noisescope.passports.diff import write_passport as write_passport


def take_passport(device: str, *, quick: bool = False) -> dict[str, Any]:
    """The arithmetic of a device."""
    from noisescope.passports.measure import take_passport as take

    return take(device, quick=quick)
