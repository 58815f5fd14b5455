"""Reads a stored run as values, without torch: its question, and its trials, each with its injection.

An injection also has a description ("softmax, layer 3", "at 0.05") and a position in a list of injections.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from noisescope.diagnosis.report import Asked
from noisescope.errors import InvalidInput
from noisescope.jsonform import Json, from_json
from noisescope.names_in_trial_ids import short_name
from noisescope.sites import Place, place_order
from noisescope.text_escaping import shown
from noisescope.trials import Conditions, Result, Slice

CLEAN = "no noise"
GAUSSIAN = "noisescope.Gaussian"  # the registered name of the noise that a diagnosis injects by default
_USUAL_FIELDS = (("relative_to", "element"),)

Pairs = tuple[tuple[str, float], ...]
_PAIRS = ("phase_scales", "operator_multipliers", "layer_multipliers")  # stored as mappings, which have no hash


@dataclass(frozen=True)
class StoredNoise:
    """A perturbation by the name of its class or function; `scale` is None where it has none (a number format)."""

    name: str
    scale: float | None
    fields: tuple[tuple[str, str], ...]  # the others, with their values as text
    is_function: bool


@dataclass(frozen=True)
class StoredInjection:
    """An injection of a stored trial, equal to another where both injected the same, whatever their seeds.

    Fields are those of `noisescope.injection.Injection`; `layers` holds all blocks, `places` only what lies outside
    them, and both are () where the injection falls everywhere.
    """

    perturbation: StoredNoise
    operators: tuple[str, ...] | None
    layers: tuple[int, ...]
    places: tuple[Place, ...]
    modules: tuple[str, ...] | None
    channels: tuple[int, ...] | None
    tensor: str
    phases: tuple[str, ...]
    phase_scales: Pairs
    operator_multipliers: Pairs
    layer_multipliers: Pairs
    renormalise: bool
    seed: int = field(compare=False)


@dataclass(frozen=True)
class StoredTrial:
    """A trial and its result. `question` is what else must agree before two trials may be compared: its settings."""

    measure: str
    conditions: Conditions
    data: str  # fingerprint of the tokens
    texts: str | None  # of generation: fingerprint of prompts and answers, whatever the tokenizer makes of them
    question: str
    injection: StoredInjection | None  # None is the clean model
    result: Result

    @property
    def seed(self) -> int:
        return 0 if self.injection is None else self.injection.seed


@dataclass(frozen=True)
class StoredRun:
    """A run's folder: the last question, and every trial."""

    name: str
    asked: Asked
    trials: Sequence[StoredTrial]

    @property
    def measure(self) -> str:
        return self.asked.data.measure

    @property
    def metric(self) -> str:
        """The column that stands for accuracy; the scores of the caller's own metric are kept under that name, too."""
        return self.asked.metric if self.measure == "score" else "accuracy"

    @property
    def answers(self) -> list[StoredTrial]:
        """Trials of the last question: a folder may also hold those of other models, devices and data sets."""
        wanted = (self.measure, self.asked.conditions, self.asked.data.fingerprint)
        return [trial for trial in self.trials if (trial.measure, trial.conditions, trial.data) == wanted]


# -- words


def target_of(injection: StoredInjection) -> str:
    """Where an injection applies: "gemm, layers 0-2", "lm_head", "linear, q_proj, channel 7"."""
    operators, modules, channels, layers = injection.operators, injection.modules, injection.channels, injection.layers
    parts = [" + ".join(operators)] if operators is not None else []
    if modules is not None:
        parts += modules
    elif layers:
        parts.append(f"layer {layers[0]}" if len(layers) == 1 else f"layers {_ranges(layers)}")
    parts += map(str, injection.places)
    if channels is not None:
        parts.append(f"channel{'' if len(channels) == 1 else 's'} {_ranges(channels)}")
    if operators is None and (layers or not parts):
        parts.insert(0, "every operator")
    return ", ".join([*parts, *_unusual(injection)])


def _unusual(injection: StoredInjection) -> Iterable[str]:
    """Settings that no diagnosis uses by itself."""
    if injection.tensor != "output":
        yield f"tensor {injection.tensor}"
    if injection.phases != ("forward",):
        yield f"phases {' + '.join(injection.phases)}"
    for name in _PAIRS:
        values: Pairs = vars(injection)[name]
        if values:
            yield f"{name} {', '.join(f'{key}: {value:g}' for key, value in values)}"
    if injection.renormalise:
        yield "renormalised"


def noise_of(injection: StoredInjection) -> str:
    """What is injected: "at 0.05" for the default noise, else with its name."""
    noise = injection.perturbation
    if noise.is_function:
        return f"by {noise.name}"
    usual = noise.name == GAUSSIAN and noise.fields == _USUAL_FIELDS
    name = "" if usual else " ".join([short_name(noise.name), *(f"{k}={v}" for k, v in noise.fields)]) + " "
    return f"as {name}".rstrip() if noise.scale is None else f"at {name}{noise.scale:g}"


def label_of(injection: StoredInjection | None) -> str:
    return CLEAN if injection is None else f"{target_of(injection)} {noise_of(injection)}"


def order_of(injection: StoredInjection | None) -> tuple[bool, bool, tuple[int, str], int, str]:
    """Sort key: the clean model, what falls everywhere, then along the model; single modules last."""
    if injection is None:
        return False, False, (-1, ""), 0, ""
    places = (*injection.layers, *injection.places)
    where = place_order(places[0]) if places else (-1, "")
    return True, injection.modules is not None, where, len(injection.layers), label_of(injection)


def _ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] as "0-2, 5"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][-1] == number - 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}-{span[-1]}" for span in spans)


# -- reading


def stored_run(name: str, asked: Json, trials: Iterable[tuple[Json, Result]]) -> StoredRun:
    """A run from what its store holds: what was asked, and (content, result) of its trials."""
    if not asked:
        raise InvalidInput(f"{name} does not say what was asked, so it can't be compared: run it again")
    try:
        known = from_json(Asked, asked, "asked")
        return StoredRun(name, known, [stored_trial(content, result) for content, result in trials])
    except InvalidInput as error:
        raise InvalidInput(f"{name} holds no run that can be compared: {error}") from None


@dataclass(frozen=True)
class _Content:
    conditions: Json
    measure: str
    slice: Json
    injection: Json
    settings: Mapping[str, Json]


def stored_trial(content: Json, result: Result) -> StoredTrial:
    """From the canonical JSON of a trial (`trials.canonical`)."""
    fields = from_json(_Content, _members(content, "trial"), "trial")
    settings = dict(fields.settings)
    texts = settings.pop("texts", None)
    return StoredTrial(
        measure=fields.measure,
        conditions=from_json(Conditions, _members(fields.conditions, "trial.conditions"), "trial.conditions"),
        data=from_json(Slice, _members(fields.slice, "trial.slice"), "trial.slice").data,
        texts=None if texts is None else str(texts),
        question=json.dumps(settings, sort_keys=True),
        injection=None if fields.injection is None else stored_injection(fields.injection),
        result=result,
    )


def stored_injection(content: Json) -> StoredInjection:
    """From the canonical JSON of an injection."""
    fields = _members(_plain(content), "trial.injection")
    for name, value in fields.items():
        if name == "perturbation":
            fields[name] = _noise(value)
        elif name in ("layers", "places") and value is None:
            fields[name] = []
        elif name in _PAIRS and isinstance(value, Mapping):  # a block's index is stored as "int:3"
            fields[name] = [[key.removeprefix("int:"), number] for key, number in value.items()]
    found = from_json(StoredInjection, fields, "trial.injection")
    blocks = {*found.layers, *(place for place in found.places if isinstance(place, int))}
    outer = (place for place in found.places if isinstance(place, str))
    return replace(found, layers=tuple(sorted(blocks)), places=tuple(sorted(outer, key=place_order)))


def _noise(content: Json) -> Json:
    """The fields of a `StoredNoise`."""
    if isinstance(content, Mapping) and set(content) == {"callable"}:
        return {"name": str(content["callable"]), "scale": None, "fields": [], "is_function": True}
    if not isinstance(content, Mapping) or not isinstance(content.get("type"), str):
        raise InvalidInput(f"trial.injection.perturbation: a class or a function was expected, got {shown(content)}")
    fields = {name: value for name, value in content.items() if name != "type" and value is not None}
    scale = fields.pop("scale") if isinstance(fields.get("scale"), float) else None
    texts = [[name, str(value)] for name, value in fields.items() if value is not False]
    return {"name": content["type"], "scale": scale, "fields": texts, "is_function": False}


def _plain(value: Json) -> Json:
    """Canonical JSON back as plain values: numbers, text, lists.

    >>> _plain({"scale": {"float": "0x1.8p-1"}, "layers": {"set": [1, 2]}})
    {'scale': 0.75, 'layers': [1, 2]}
    """
    if isinstance(value, list):
        return [_plain(member) for member in value]
    if not isinstance(value, Mapping):
        return value
    if set(value) == {"float"}:
        return _from_hex(value["float"])
    if set(value) == {"set"} and isinstance(value["set"], list):
        return [_plain(member) for member in value["set"]]
    return {name: _plain(member) for name, member in value.items()}


def _from_hex(digits: Json) -> float:
    try:
        return float.fromhex(digits)
    except (TypeError, ValueError, OverflowError):
        raise InvalidInput(f"trial: a number in hexadecimal was expected, got {shown(digits)}") from None


def _members(value: Json, where: str) -> dict[str, Json]:
    """The fields of a stored dataclass, without the name of its class."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where}: an object was expected, got {shown(value)}")
    return {str(name): member for name, member in value.items() if name != "type"}
