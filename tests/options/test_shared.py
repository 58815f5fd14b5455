"""`ns.load` and the options that name a model agree."""

from __future__ import annotations

import inspect

from noisescope.model.loading import load
from noisescope.options.fields import options_of
from noisescope.options.shared import DeviceOptions


def test_loading_options_are_the_keywords_of_load() -> None:
    """Same names, same defaults."""
    keywords = {name: one.default for name, one in inspect.signature(load).parameters.items()}
    options = {name: one.default for name, one in options_of(DeviceOptions, "command").items()}
    assert options.items() <= keywords.items()
