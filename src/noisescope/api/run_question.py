"""What a run asks: a number format as a question, the models that can't be asked it, and the command that asks."""

from __future__ import annotations

from typing import Any

import torch

from noisescope.diagnosis.context import Settings
from noisescope.diagnosis.report import Asked, GivenCommand
from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.injection import Injection
from noisescope.model.anatomy import ATTENTION
from noisescope.model.loading import Subject
from noisescope.options.command_text import command_values
from noisescope.options.fields import DTYPES
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.options.shared import ExecutionOptions
from noisescope.probe.formats import Format, format_on
from noisescope.probe.inject import Probe
from noisescope.text_escaping import last_part

_CASTS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def format_settings(subject: Subject, options: DiagnoseOptions, on: str, **chosen: Any) -> Settings:
    """The settings of `--perturbation FORMAT --on ...`; refused where this model has nothing to round."""
    given = options.perturbation
    fmt = given
    if not isinstance(given, Format):
        fmt = format_on(given, on, group_size=options.group_size, asymmetric=options.asymmetric)
    _refuse_same_dtype(subject, fmt)
    if on == "kv-cache":
        if not any(unit.kind == ATTENTION for unit in subject.anatomy.units):
            raise UnsupportedModel(f"{subject.anatomy.architecture} has no attention module, so no KV cache to round")
        cache = Injection(fmt, operators=frozenset({"kv_cache"}))
        Probe(subject.model, cache, anatomy=subject.anatomy)  # refuses a cache of compressed latents
    else:
        _refuse_adapters(subject)
    if on == "weights":
        _refuse_packed(subject)
    return Settings.of_format(fmt, on, **chosen)


def tied_modules(subject: Subject) -> tuple[str, ...]:
    """Modules whose weight is also that of lm_head, lm_head among them; () where it has its own."""
    modules = dict(subject.model.named_modules(remove_duplicate=False))
    units = [unit for unit in subject.anatomy.units if {"linear", "embedding"} & set(unit.operators)]
    weights = {unit.module: getattr(modules[unit.module], "weight", None) for unit in units}
    heads = [weights[unit.module] for unit in units if unit.place == "lm_head" and weights[unit.module] is not None]
    tied = tuple(name for name, weight in weights.items() if any(weight is head for head in heads))
    return tied if len(tied) > 1 else ()


def _refuse_same_dtype(subject: Subject, fmt: Format) -> None:
    dtype = next(p.dtype for p in subject.model.parameters() if p.is_floating_point())
    if _CASTS.get(fmt.name) is dtype:
        raise InvalidInput(
            f"the model computes in {str(dtype).removeprefix('torch.')}, so rounding to {fmt.name} changes nothing: "
            "load it in float32 (--dtype float32) to see what that costs"
        )


def _refuse_packed(subject: Subject) -> None:
    """A weight that is quantised already can't be rounded by itself."""
    packed = [unit for unit in subject.anatomy.units if unit.packed]
    if packed:
        more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
        raise UnsupportedModel(
            f"{packed[0].module} is a {packed[0].packed} whose weight is packed{more}, in a number format already. Ask "
            "of the checkpoint before quantisation, or of --on activations or kv-cache"
        )


def _refuse_adapters(subject: Subject) -> None:
    """An adapter is kept in 16 bits beside a rounded weight, or merged before rounding: two different questions."""
    for name, module in subject.model.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            raise UnsupportedModel(
                f"{name} is a {type(module).__name__} with an adapter beside its weight: merge the adapters first "
                "(model.merge_and_unload()), or unload them, and ask again"
            )


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
