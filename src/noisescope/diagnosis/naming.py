"""A stored injection in plain words: "softmax, layer 3", "at 0.05". From the content of a trial, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from noisescope.identity import short_name
from noisescope.sites import Place, place_order

GAUSSIAN = "noisescope.Gaussian"  # the registered name of the noise that a diagnosis injects by default
# What every diagnosis uses; whatever differs from it is said.
_USUAL = {
    "tensor": "output",
    "phases": ["forward"],
    "phase_scales": {},
    "operator_multipliers": {},
    "layer_multipliers": {},
    "renormalise": False,
}


def plain(value: Any) -> Any:
    """Canonical JSON (`trials.canonical`) back as plain values: numbers, text, lists.

    >>> plain({"scale": {"float": "0x1.8p-1"}, "layers": {"set": [1, 2]}})
    {'scale': 0.75, 'layers': [1, 2]}
    """
    if isinstance(value, list):
        return [plain(member) for member in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"float"}:
        return float.fromhex(value["float"])
    if set(value) == {"set"}:
        return [plain(member) for member in value["set"]]
    return {name: plain(member) for name, member in value.items()}


def aim_of(injection: Mapping[str, Any]) -> str:
    """Where a plain injection falls: "gemm, layers 0-2", "lm_head", "linear, q_proj, channel 7"."""
    operators, modules, channels = (injection.get(name) for name in ("operators", "modules", "channels"))
    layers, places = places_of(injection)
    parts = [" + ".join(operators)] if operators is not None else []
    if modules is not None:
        parts += modules
    elif layers:
        parts.append(f"layer {layers[0]}" if len(layers) == 1 else f"layers {_ranges(layers)}")
    parts += places
    if channels is not None:
        parts.append(f"channel{'' if len(channels) == 1 else 's'} {_ranges(channels)}")
    if operators is None and (layers or not parts):
        parts.insert(0, "every operator")
    unusual = [name for name, usual in _USUAL.items() if injection.get(name, usual) != usual]
    return ", ".join([*parts, *(f"{name} {injection[name]}" for name in unusual)])


def noise_of(injection: Mapping[str, Any]) -> str:
    """What is injected: "at 0.05" for the usual noise, else its name with it."""
    noise = injection["perturbation"]
    if set(noise) == {"callable"}:
        return f"by {noise['callable']}"
    fields = {name: value for name, value in noise.items() if name not in ("type", "scale") and value is not None}
    usual = noise["type"] == GAUSSIAN and fields == {"relative_to": "element"}
    name = "" if usual else " ".join([short_name(noise["type"]), *(f"{k}={v}" for k, v in fields.items())]) + " "
    scale = noise.get("scale")
    return f"as {name}".rstrip() if scale is None else f"at {name}{scale:g}"


def places_of(injection: Mapping[str, Any]) -> tuple[list[int], list[str]]:
    """Blocks, and places outside them; both empty where the injection falls everywhere."""
    places = injection.get("places") or []
    blocks = {*(injection.get("layers") or []), *(place for place in places if isinstance(place, int))}
    return sorted(blocks), sorted((p for p in places if not isinstance(p, int)), key=place_order)


def order_of(injection: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """Sort key: the clean model, what falls everywhere, then along the model."""
    if injection is None:
        return (0,)
    layers, places = places_of(injection)
    flow: list[Place] = [*layers, *places]
    where = place_order(flow[0]) if flow else (-1, "")
    named = injection.get("modules") is not None
    return (1, named, where, len(layers), aim_of(injection), noise_of(injection))


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)
