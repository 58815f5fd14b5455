"""Reads files of log-probabilities, as trainers and servers write them, into one form.

Understood, one JSON object per line (or a .json file with a list of them):

- OpenAI-style answers: choices[].logprobs.content[].logprob, legacy choices[].logprobs.token_logprobs (null first with
  echo), also inside the lines of a batch file (response.body);
- vLLM: prompt_logprobs (null first, then {token id: {logprob}}), outputs[].logprobs of an offline request; SGLang's
  meta_info.output_token_logprobs;
- fields of trainers, one number per token or one list per sample: rollout_log_probs and old_log_probs (verl),
  generation_logprobs and prev_logprobs (NeMo-RL), sampling_per_token_logps and old_per_token_logps (TRL), logprobs.

Masks of the same length (response_mask, token_loss_mask, completion_mask ...) leave tokens out. A leading null of
nearly all sequences, the first token that nothing precedes, is dropped. null and NaN are NaN here; what else stands for
a missing value (0, -9999) is left to the comparison, which has the other side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from noisescope.errors import InvalidInput, unknown
from noisescope.jsonform import Json

Array = NDArray[np.float64]
Token = int | str

ROLLOUT = ("rollout_log_probs", "rollout_logprobs", "generation_logprobs", "sampling_per_token_logps", "vllm_logprobs")
TRAINER = (
    "old_log_probs", "prev_logprobs", "old_per_token_logps", "per_token_logps", "actor_log_probs", "log_probs",
    "ref_log_prob", "reference_policy_logprobs", "ref_per_token_logps",
)  # fmt: skip
NEUTRAL = ("logprobs", "token_logprobs", "logps", "completion_logprobs")
FIELDS = (*ROLLOUT, *TRAINER, *NEUTRAL)
_MASKS = ("response_mask", "token_loss_mask", "completion_mask", "loss_mask", "token_mask")
_TOKENS = ("response_ids", "completion_ids", "token_ids", "output_ids", "responses", "tokens", "input_ids")
_KEYS = ("id", "custom_id", "request_id", "sample_id", "rollout_id", "idx")
_STEPS = ("step", "global_step", "training_step", "iteration", "weight_version", "policy_version")
_LARGEST = 2**31  # bytes of a file


@dataclass(frozen=True)
class LogprobRow:
    """One sequence: log-probabilities in order, NaN where one is missing."""

    number: int  # of the sequence in its file, from 0
    values: Array
    tokens: tuple[Token, ...] | None = None
    key: str | None = None
    step: float | None = None
    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class LogprobFile:
    path: str
    field: str  # where the numbers were found
    rows: tuple[LogprobRow, ...]
    fields: tuple[str, ...]  # all fields of log-probabilities that it holds
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(len(row.values) for row in self.rows)


def read_logprobs(path: Path, *, field: str | None = None) -> LogprobFile:
    """Read a file of log-probabilities; `field` selects one if the file has several."""
    objects = list(_objects(path))
    known = [name for name in FIELDS if any(isinstance(one.get(name), list) for one in objects)]
    if field is not None and field not in known:
        raise unknown(f"field of log-probabilities in {path}", field, known or FIELDS)
    chosen = field or (known[0] if known else None)
    rows: list[LogprobRow] = []
    where = chosen or ""
    for number, one in enumerate(objects):
        parts = list(_flat(one, chosen) if chosen is not None else _answers(one))
        if not parts:
            raise InvalidInput(
                f"{path}, object {number + 1}: no log-probabilities found. Give OpenAI-style answers (choices with "
                f"logprobs), vLLM outputs, or a field such as {', '.join(FIELDS[:6])}; its keys are "
                f"{', '.join(list(one)[:12])}"
            )
        for part in parts:
            where = where or part.where
            rows.append(_row(one, len(rows), part.values, part.tokens))
    leading = [row for row in rows if len(row.values) > 1 and math.isnan(row.values[0])]
    if len(leading) < 0.9 * len(rows):  # here and there it is a missing value
        return LogprobFile(str(path), where, tuple(rows), tuple(known))
    rows = [_without_first(row) if math.isnan(row.values[:1].sum()) else row for row in rows]
    note = f"{path}: a leading null of {len(leading)} sequences was dropped (the first token has no log-probability)"
    return LogprobFile(str(path), where, tuple(rows), tuple(known), (note,))


def _without_first(row: LogprobRow) -> LogprobRow:
    return replace(row, values=row.values[1:], tokens=None if row.tokens is None else row.tokens[1:])


@dataclass(frozen=True)
class _Part:
    where: str
    values: Array
    tokens: tuple[Token, ...] | None


def _objects(path: Path) -> Iterator[dict[str, Json]]:
    """The JSON objects of a file, each a response or a sample."""
    try:
        if path.stat().st_size > _LARGEST:
            raise InvalidInput(f"{path} is larger than 2 GiB: compare a part of it, such as one step")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"can't read {path}: {error}") from error
    found: list[Json] = []
    line = 0
    try:
        if path.suffix.lower() == ".json":
            whole = json.loads(text)
            found = whole if isinstance(whole, list) else [whole]
        else:
            for content in text.splitlines():
                line += 1
                found += [json.loads(content)] if content.strip() else []
    except (ValueError, RecursionError) as error:
        at = "" if path.suffix.lower() == ".json" else f", line {line}"
        raise InvalidInput(f"{path}{at} is not JSON ({error}): give one JSON object per line") from None
    if not found:
        raise InvalidInput(f"{path} is empty: give one JSON object per line, with log-probabilities")
    for number, one in enumerate(found, 1):
        if not isinstance(one, dict):
            raise InvalidInput(f"{path}, object {number} is a {type(one).__name__}: each line must be a JSON object")
        body = one.get("response", one)
        body = body.get("body", body) if isinstance(body, dict) else one
        yield {**one, **body} if isinstance(body, dict) else one


# -- fields of trainers


def _flat(one: Mapping[str, Json], field: str) -> Iterator[_Part]:
    """One sequence, or those of a batch."""
    found = one.get(field)
    if not isinstance(found, list) or not found:
        return
    batch = isinstance(found[0], list)
    lists = found if batch else [found]
    masks = _side_lists(one, _MASKS, batch)
    tokens = _side_lists(one, _TOKENS, batch)
    for number, values in enumerate(lists):
        read = _numbers(values)
        mask = next((m[number] for m in masks if number < len(m) and len(m[number]) == len(read)), None)
        ids = next((t[number] for t in tokens if number < len(t) and len(t[number]) == len(read)), None)
        keep = np.ones(len(read), dtype=bool) if mask is None else np.asarray([bool(flag) for flag in mask])
        kept = None if ids is None else tuple(token for token, stays in zip(ids, keep, strict=True) if stays)
        yield _Part(field, read[keep], kept)


def _side_lists(one: Mapping[str, Json], names: Sequence[str], batch: bool) -> list[list[list[Json]]]:
    found = []
    for name in names:
        value = one.get(name)
        if isinstance(value, list) and value:
            lists = value if batch else [value]
            if all(isinstance(part, list) for part in lists):
                found.append(lists)
    return found


def _numbers(values: Sequence[Json]) -> Array:
    return np.array([_number(value) for value in values], dtype=np.float64)


def _number(value: Json) -> float:
    if isinstance(value, Mapping):  # {"logprob": -0.3} or {"token id": {"logprob": -0.3}}
        inner = value.get("logprob", next(iter(value.values()), None))
        return _number(inner)
    if isinstance(value, list):  # SGLang: [log-probability, token id, text]
        return _number(value[0]) if value else math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value)


# -- answers of servers


def _answers(one: Mapping[str, Json]) -> Iterator[_Part]:
    choices = one.get("choices", one.get("outputs"))
    for choice in choices if isinstance(choices, list) else [one]:
        if not isinstance(choice, dict):
            continue
        part = _answer(choice) or _prompt(choice, one)
        if part is not None:
            yield part


def _answer(choice: Mapping[str, Json]) -> _Part | None:
    found = choice.get("logprobs")
    if isinstance(found, dict) and isinstance(found.get("content"), list):
        content = [entry for entry in found["content"] if isinstance(entry, dict)]
        tokens = tuple(str(entry.get("token")) for entry in content)
        return _Part("logprobs.content", _numbers([entry.get("logprob") for entry in content]), tokens)
    if isinstance(found, dict) and isinstance(found.get("token_logprobs"), list):
        named = found.get("tokens")
        values = _numbers(found["token_logprobs"])
        whole = isinstance(named, list) and len(named) == len(values)
        return _Part("logprobs.token_logprobs", values, tuple(map(str, named or ())) if whole else None)
    ids = choice.get("token_ids")
    if isinstance(found, list) and found:
        known = ids if isinstance(ids, list) and len(ids) == len(found) else None
        return _chosen("outputs.logprobs", found, known)
    meta = choice.get("meta_info")
    inner = meta.get("output_token_logprobs") if isinstance(meta, dict) else None
    if isinstance(inner, list) and inner:
        ids = [entry[1] if isinstance(entry, list) and len(entry) > 1 else None for entry in inner]
        return _Part("output_token_logprobs", _numbers(inner), _ids(ids))
    return None


def _prompt(choice: Mapping[str, Json], one: Mapping[str, Json]) -> _Part | None:
    found = choice.get("prompt_logprobs", one.get("prompt_logprobs"))
    if not isinstance(found, list) or not found:
        return None
    ids = choice.get("prompt_token_ids", one.get("prompt_token_ids"))
    return _chosen("prompt_logprobs", found, ids if isinstance(ids, list) and len(ids) == len(found) else None)


def _chosen(where: str, entries: Sequence[Json], ids: Sequence[Json] | None) -> _Part:
    """vLLM's entries {token id: {logprob}} hold the token itself and the likeliest ones; the token comes first."""
    values, tokens = [], []
    for at, entry in enumerate(entries):
        token = None if ids is None else ids[at]
        if isinstance(entry, Mapping) and entry and "logprob" not in entry:
            name = str(token) if str(token) in entry else next(iter(entry))
            values.append(_number(entry[name]))
            tokens.append(name)
        else:
            values.append(_number(entry))
            tokens.append(None if token is None else str(token))
    return _Part(where, np.array(values), _ids(tokens))


def _ids(tokens: Sequence[Json]) -> tuple[Token, ...] | None:
    """Token ids as ints, if all are; None if unknown. The first may be unknown, because nothing precedes it."""
    if len(tokens) < 2 or any(token is None for token in tokens[1:]):
        return None
    return tuple(int(token) if str(token).lstrip("-").isdigit() else str(token) for token in tokens)


def _row(one: Mapping[str, Json], number: int, values: Array, tokens: tuple[Token, ...] | None) -> LogprobRow:
    settings = one.get("sampling_params")
    chosen = {**(settings if isinstance(settings, dict) else {}), **one}
    key = next((str(one[name]) for name in _KEYS if isinstance(one.get(name), (str, int))), None)
    return LogprobRow(
        number, values, tokens, key, _first_number(one, _STEPS),
        _first_number(chosen, ("temperature",)), _first_number(chosen, ("top_p",)),
    )  # fmt: skip


def _first_number(one: Mapping[str, Json], names: Sequence[str]) -> float | None:
    for name in names:
        value = one.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return None
