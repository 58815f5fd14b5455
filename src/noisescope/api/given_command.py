"""The command that asks what a run asked, from the command line or from Python."""

from __future__ import annotations

from noisescope.diagnosis.report import Asked, GivenCommand
from noisescope.options.command_text import command_values
from noisescope.options.fields import DTYPES
from noisescope.options.shared import ExecutionOptions
from noisescope.text_escaping import last_part

PATHS = ("model", "data", "calibration", "output")


def given_command(options: ExecutionOptions, model: str, facts: Asked) -> GivenCommand | None:
    """None where no command line can ask it. Paths are cut as in the report."""
    values, here = command_values(options), facts.conditions
    if not options.command or values is None:
        return None
    values["model"] = model
    whole = {name: values[name] for name in PATHS if name in values}
    values |= {} if options.full_paths else {name: last_part(path) for name, path in whole.items()}
    cut = tuple(values[name] for name, path in whole.items() if values[name] != path)
    if "device_map" in values:
        values["device"] = None
    elif not values["device"].startswith(here.device):  # Python loads its model itself
        values["device"] = here.device
    if values["dtype"] is None and here.dtype in DTYPES:
        values["dtype"] = here.dtype
    return GivenCommand(options.command, {name: value for name, value in values.items() if value is not None}, cut)
