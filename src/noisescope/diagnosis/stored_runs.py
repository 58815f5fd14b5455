"""A stored injection in words: "softmax, layer 3", "at 0.05"; and the order in which injections are listed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from noisescope.diagnosis.report import Asked
from noisescope.errors import InvalidInput
from noisescope.identity import short_name
from noisescope.jsonform import Json, from_json
from noisescope.sites import Place, place_order
from noisescope.trials import Conditions, Result

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


# A stored run as values: what it asked, and its trials, each with its injection. Read from the store without torch.


Pairs = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class StoredNoise:
    """A perturbation by the name of its class or function; `scale` is None where it has none (a number format)."""

    name: str
    scale: float | None
    fields: tuple[tuple[str, str], ...]  # the others, with their values as text
    is_function: bool


@dataclass(frozen=True)
class StoredInjection:
    """An injection of a stored trial without its seed: equal where two runs injected the same.

    Fields are those of `noisescope.injection.Injection`; `layers` holds all blocks, `places` only what lies outside
    them, and both are () where the injection falls everywhere.
    """

    noise: StoredNoise
    operators: tuple[str, ...] | None
    layers: tuple[int, ...]
    places: tuple[str, ...]
    modules: tuple[str, ...] | None
    channels: tuple[int, ...] | None
    tensor: str
    phases: tuple[str, ...]
    phase_scales: Pairs
    operator_multipliers: Pairs
    layer_multipliers: Pairs
    renormalise: bool


@dataclass(frozen=True)
class StoredTrial:
    """A trial and its result. `question` is what else must agree before two trials may be compared: its settings."""

    measure: str
    conditions: Conditions
    data: str  # fingerprint of the tokens
    texts: str | None  # of generation: fingerprint of prompts and answers, whatever the tokenizer makes of them
    question: str
    injection: StoredInjection | None  # None is the clean model
    seed: int
    result: Result


@dataclass(frozen=True)
class StoredRun:
    """A run's folder: what was asked last, and every trial."""

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
        """Trials of the last question: a folder may hold those of other models, devices and data sets, too."""
        return [
            trial
            for trial in self.trials
            if trial.measure == self.measure
            and trial.conditions == self.asked.conditions
            and trial.data == self.asked.data.fingerprint
        ]


def stored_run(name: str, asked: Json, trials: Iterable[tuple[Json, Result]]) -> StoredRun:
    """A run from what its store holds: what was asked, and (content, result) of its trials."""
    if not asked:
        raise InvalidInput(f"{name} does not say what was asked, so it can't be compared: run it again")
    try:
        return StoredRun(
            name, from_json(Asked, asked, "asked"), [stored_trial(content, result) for content, result in trials]
        )
    except InvalidInput as error:
        raise InvalidInput(f"{name} holds no run that can be compared: {error}") from None


def stored_trial(content: Json, result: Result) -> StoredTrial:
    """From the canonical JSON of a trial (`trials.canonical`)."""
    fields = from_json(_Content, _members(content, "trial"), "trial")
    part = from_json(_Slice, _members(fields.slice, "trial.slice"), "trial.slice")
    settings = dict(fields.settings)
    texts = settings.pop("texts", None)
    injection = None if fields.injection is None else _members(plain(fields.injection), "trial.injection")
    return StoredTrial(
        measure=fields.measure,
        conditions=from_json(Conditions, _members(fields.conditions, "trial.conditions"), "trial.conditions"),
        data=part.data,
        texts=None if texts is None else str(texts),
        question=json.dumps(settings, sort_keys=True),
        injection=None if injection is None else _injection(injection),
        seed=0 if injection is None else int(injection["seed"]),
        result=result,
    )


def plain(value: Json) -> Json:
    """Canonical JSON back as plain values: numbers, text, lists.

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


def stored_injection(content: Json) -> StoredInjection:
    """From the canonical JSON of an injection, whose seed is left out."""
    return _injection(_members(plain(content), "injection"))


@dataclass(frozen=True)
class _Content:
    conditions: Json
    measure: str
    slice: Json
    injection: Json
    settings: Mapping[str, Json]


@dataclass(frozen=True)
class _Slice:
    data: str
    start: int
    stop: int


@dataclass(frozen=True)
class _Injection:
    """The fields of an injection as they are stored, sets as lists."""

    perturbation: Json
    operators: tuple[str, ...] | None
    layers: tuple[int, ...] | None
    places: tuple[Place, ...] | None
    modules: tuple[str, ...] | None
    channels: tuple[int, ...] | None
    tensor: str
    phases: tuple[str, ...]
    phase_scales: Mapping[str, float]
    operator_multipliers: Mapping[str, float]
    layer_multipliers: Mapping[str, float]
    renormalise: bool
    seed: int


def _injection(fields: Mapping[str, Json]) -> StoredInjection:
    found = from_json(_Injection, fields, "trial.injection")
    everywhere: tuple[Place, ...] = ()
    places = everywhere if found.places is None else found.places
    blocks = {*(found.layers or ()), *(place for place in places if isinstance(place, int))}
    return StoredInjection(
        noise=_noise(found.perturbation),
        operators=found.operators,
        layers=tuple(sorted(blocks)),
        places=tuple(sorted((place for place in places if isinstance(place, str)), key=place_order)),
        modules=found.modules,
        channels=found.channels,
        tensor=found.tensor,
        phases=found.phases,
        phase_scales=_pairs(found.phase_scales),
        operator_multipliers=_pairs(found.operator_multipliers),
        layer_multipliers=_pairs(found.layer_multipliers),
        renormalise=found.renormalise,
    )


def _noise(content: Json) -> StoredNoise:
    if isinstance(content, Mapping) and set(content) == {"callable"}:
        return StoredNoise(str(content["callable"]), None, (), True)
    if not isinstance(content, Mapping) or not isinstance(content.get("type"), str):
        raise InvalidInput(f"trial.injection.perturbation: a class or a function was expected, got {content!r:.60}")
    fields = {name: value for name, value in content.items() if name != "type" and value is not None}
    scale = fields.pop("scale") if isinstance(fields.get("scale"), float) else None
    return StoredNoise(content["type"], scale, tuple((name, str(value)) for name, value in fields.items()), False)


def _pairs(values: Mapping[str, float]) -> Pairs:
    """By name; a block's index is stored as "int:3"."""
    return tuple((name.removeprefix("int:"), value) for name, value in values.items())


def _members(value: Json, where: str) -> dict[str, Json]:
    """The fields of a stored dataclass, without the name of its class."""
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{where}: an object was expected, got {value!r:.60}")
    return {str(name): member for name, member in value.items() if name != "type"}
