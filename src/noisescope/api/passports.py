"""Passports: read, written, compared without torch; torch is loaded where one is measured."""

from __future__ import annotations

from typing import Any

from noisescope.locators.passport_diff import diff as diff
from noisescope.locators.passport_diff import say as say
from noisescope.locators.passport_file import read_passport as read_passport
from noisescope.locators.passport_file import write_passport as write_passport


def take_passport(device: str, *, quick: bool = False) -> dict[str, Any]:
    """The arithmetic of a device."""
    from noisescope.locators.passport import take_passport as take

    return take(device, quick=quick)
