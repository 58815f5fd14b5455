"""Data in any form as encoded samples, and what can be said of them before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisescope import tasks
from noisescope.data import DataSet, built_in, read_data
from noisescope.model import Subject
from noisescope.runs.batches import Material


def material_of(
    subject: Subject, data: Any, count: int, max_tokens: int, *, which: str
) -> tuple[Material, DataSet | None]:
    """Encoded samples from whatever form data comes in."""
    found = _data_set(subject, data, count, which)
    if found is None:
        encoded = tasks.from_batches(data)
        encoded = replace(encoded, sequences=encoded.sequences[:count])
        return Material(encoded, "text"), None
    encoded = tasks.encode(found, subject.tokenizer, max_tokens=max_tokens)
    labels = tuple(item.label for item in found.items) if found.kind == "choice" else ()
    prompts: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    if found.kind in ("answer", "chat"):
        prompts = tuple(tasks.prompts(found, subject.tokenizer))
        answers = tuple(item.answer or item.messages[-1][1] for item in found.items)
    return Material(encoded, found.kind, labels, prompts, answers), found


def _data_set(subject: Subject, data: Any, count: int, which: str) -> DataSet | None:
    """A data set of at most `count` items, or None where `data` is tokenised batches."""
    if data is None and subject.source == "demo":
        from noisescope import demo

        path = demo.test_file() if which == "test" else demo.calibration_file()
        return replace(read_data(path, limit=count), source="demo", note="the bundled model's own problems")
    if data is None:
        return built_in().take(count)
    if isinstance(data, DataSet):
        return data.take(count)
    if isinstance(data, (str, Path)):
        return read_data(Path(data).expanduser().absolute(), limit=count)  # a report is read from other folders, too
    return None


def data_notes(test: Material, found: DataSet | None, wanted: int) -> Iterable[str]:
    if found is not None and found.note and found.source != "demo":
        yield found.note
    if len(test) < wanted:
        yield f"the data holds {len(test)} samples, {wanted} were asked for"
    if test.encoded.truncated:
        yield f"{test.encoded.truncated} of {len(test)} samples were cut to fit (--max-tokens)"
    yield from test.encoded.notes


def chance_of(test: Material, found: DataSet | None, metric: str) -> float:
    """What guessing gets: of one's own metric nothing is known, and tokens are guessed as the commonest one."""
    if metric == "custom" or metric == "agreement":
        return 0.0
    if metric == "next_token_accuracy" or test.kind == "text":
        return _commonest(test)
    return 0.0 if found is None else tasks.chance(found)


def _commonest(test: Material) -> float:
    """The share of the commonest scored token: what always saying the same would get right."""
    tokens = Counter(token for group in test.encoded.sequences for s in group for token in s.ids[s.start :])
    return max(tokens.values()) / max(sum(tokens.values()), 1)


def scored_tokens(test: Material) -> int:
    return sum(len(s.ids) - s.start for group in test.encoded.sequences for s in group)
