"""A stored injection in words: "softmax, layer 3", "at 0.05"; and the order in which injections are listed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from noisescope.diagnosis.stored import Pairs, StoredInjection
from noisescope.identity import short_name
from noisescope.sites import Place, place_order

CLEAN = "no noise"
GAUSSIAN = "noisescope.Gaussian"  # the registered name of the noise that a diagnosis injects by default
_USUAL_FIELDS = (("relative_to", "element"),)


def target_of(injection: StoredInjection) -> str:
    """Where an injection falls: "gemm, layers 0-2", "lm_head", "linear, q_proj, channel 7"."""
    operators, modules, channels, layers = injection.operators, injection.modules, injection.channels, injection.layers
    parts = [" + ".join(operators)] if operators is not None else []
    if modules is not None:
        parts += modules
    elif layers:
        parts.append(f"layer {layers[0]}" if len(layers) == 1 else f"layers {_ranges(layers)}")
    parts += injection.places
    if channels is not None:
        parts.append(f"channel{'' if len(channels) == 1 else 's'} {_ranges(channels)}")
    if operators is None and (layers or not parts):
        parts.insert(0, "every operator")
    return ", ".join([*parts, *_unusual(injection)])


def _unusual(injection: StoredInjection) -> Iterable[str]:
    """What no diagnosis uses by itself."""
    if injection.tensor != "output":
        yield f"tensor {injection.tensor}"
    if injection.phases != ("forward",):
        yield f"phases {' + '.join(injection.phases)}"
    yield from _listed("phase_scales", injection.phase_scales)
    yield from _listed("operator_multipliers", injection.operator_multipliers)
    yield from _listed("layer_multipliers", injection.layer_multipliers)
    if injection.renormalise:
        yield "renormalised"


def _listed(name: str, values: Pairs) -> Iterable[str]:
    if values:
        yield f"{name} {', '.join(f'{key}: {value:g}' for key, value in values)}"


def noise_of(injection: StoredInjection) -> str:
    """What is injected: "at 0.05" for the usual noise, else its name with it."""
    noise = injection.noise
    if noise.is_function:
        return f"by {noise.name}"
    usual = noise.name == GAUSSIAN and noise.fields == _USUAL_FIELDS
    name = "" if usual else " ".join([short_name(noise.name), *(f"{k}={v}" for k, v in noise.fields)]) + " "
    return f"as {name}".rstrip() if noise.scale is None else f"at {name}{noise.scale:g}"


def label_of(injection: StoredInjection | None) -> str:
    return CLEAN if injection is None else f"{target_of(injection)} {noise_of(injection)}"


@dataclass(frozen=True, order=True)
class ListOrder:
    """Sort key: the clean model, what falls everywhere, then along the model; single modules last."""

    noisy: bool = False
    single: bool = False
    where: tuple[int, str] = (-1, "")
    blocks: int = 0
    label: str = ""


def order_of(injection: StoredInjection | None) -> ListOrder:
    if injection is None:
        return ListOrder()
    flow: list[Place] = [*injection.layers, *injection.places]
    where = place_order(flow[0]) if flow else (-1, "")
    return ListOrder(True, injection.modules is not None, where, len(injection.layers), label_of(injection))


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
