"""Prompts and tasks from a file: JSONL, JSON, CSV, Parquet or plain text, in one of four kinds. No torch here.

Kinds and the fields that make them:
  text     `text`
  answer   `prompt` + `answer`, or `question` + `answer` (GSM8K; the prompt becomes "Question: ...\\nAnswer:")
  choice   `prompt` (or `question`) + `choices` + `label`: an index from 0, a letter from A, or the choice's own text
  chat     `messages`: a list of {"role", "content"}; the last is the assistant's and is the answer
Other fields are ignored. A `DataFile` names the fields of prompt and answer, whatever they are called. A .txt file is
split at blank lines; without any, every line is a text. Every mistake is reported with its file and line.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from noisescope.data.file_rows import SPLIT, count_rest, has_paragraphs, rows
from noisescope.errors import InvalidInput, unknown, whole_number
from noisescope.options.shared import DataFile
from noisescope.text_escaping import LONG, cut

FORMS = "text; prompt + answer; question + answer; prompt (or question) + choices + label; messages"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_COUNTED = 1000  # rows behind the last one that was asked for are counted that far


@dataclass(frozen=True)
class Item:
    """One sample; exactly one form is filled. `number` is its position in the data set, and names it in every trial."""

    number: int
    text: str = ""
    prompt: str = ""
    answer: str = ""
    choices: tuple[str, ...] = ()
    label: int = -1
    messages: tuple[tuple[str, str], ...] = ()  # (role, content)

    @property
    def kind(self) -> str:
        if self.messages:
            return "chat"
        if self.choices:
            return "choice"
        return "text" if self.text else "answer"


@dataclass(frozen=True)
class DataSet:
    """Items of one kind. The fingerprint is of their content, so a copy under another name is the same data.

    `available` is what the source holds where that is more, counted to a thousand.
    """

    kind: str
    items: tuple[Item, ...]
    source: str
    fingerprint: str
    note: str = ""
    available: int = field(default=0, compare=False)

    def take(self, n: int) -> DataSet:
        """The first n items (all of them where there are fewer), with a fingerprint of their own."""
        taken = gather(self.items[: whole_number(n, "take(n)")], self.source, note=self.note)
        return replace(taken, available=max(self.available, len(self.items)))


def gather(items: Iterable[Item], source: str, *, note: str = "") -> DataSet:
    """Items of one kind as a data set; numbers are given anew, by position."""
    numbered = tuple(replace(item, number=number) for number, item in enumerate(items))
    if not numbered:
        raise InvalidInput(f"{source} holds no data. An item has one of these forms: {FORMS}")
    kinds = sorted({item.kind for item in numbered})
    if len(kinds) > 1:
        raise InvalidInput(f"{source} mixes the kinds {' and '.join(kinds)}: a data set holds items of one kind")
    content = hashlib.sha256(kinds[0].encode())
    for item in numbered:
        fields = [item.text, item.prompt, item.answer, item.choices, item.label, item.messages]
        content.update(json.dumps(fields).encode() + b"\n")
    return DataSet(kinds[0], numbered, source, content.hexdigest(), note)


def built_in() -> DataSet:
    """Sixty paragraphs of plain prose with some numbers, dialogue, lists, code and other languages."""
    text = importlib.resources.files("noisescope.data").joinpath("built_in_text.txt").read_text(encoding="utf-8")
    paragraphs = (Item(0, text=part.strip("\n")) for part in text.split("\n%\n"))
    return gather(paragraphs, "built-in text", note="no data was given: built-in text")


def read_data(source: str | Path | DataFile, *, limit: int | None = None) -> DataSet:
    """The items of a file, at most `limit` of them. The file's suffix decides its format.

    >>> from noisescope.demo import test_file
    >>> data = ns.read_data(test_file(), limit=3)
    >>> len(data.items), data.kind
    (3, 'answer')
    """
    most = None if limit is None else whole_number(limit, "limit")
    file = source if isinstance(source, DataFile) else None
    path = file.path if file is not None else Path(str(source)).expanduser()
    items: list[Item] = []
    found_rows = rows(path, () if file is None else (file.prompt_field, file.answer_field or ""))
    for where, row in found_rows:
        fields = row if file is None else _renamed(file, row, where)
        item = _item(len(items), fields, where)
        if items and item.kind != items[0].kind:
            raise InvalidInput(
                f"{where} is of kind {item.kind}, but the items before it are of kind {items[0].kind}: "
                "a file holds items of one kind; split it"
            )
        items.append(item)
        if len(items) == most:
            break
    found = gather(items, str(source), note=SPLIT[has_paragraphs(path)] if path.suffix.lower() == ".txt" else "")
    return replace(found, available=len(items) + count_rest(found_rows, MOST_COUNTED - len(items)))


def _renamed(file: DataFile, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that the file's names stand for, and no others."""
    wanted = {"prompt": file.prompt_field, "answer": file.answer_field}
    if file.answer_field is None:
        wanted = {"text": file.prompt_field}
    for name in wanted.values():
        if name not in fields:
            raise unknown(f"field in {where}:", name, fields)
    return {ours: fields[str(theirs)] for ours, theirs in wanted.items()}


def _item(number: int, fields: Mapping[str, Any], where: str) -> Item:
    def text(name: str) -> str:
        return _string(fields[name], f"{where}: `{name}`")

    asked = next((name for name in ("prompt", "question") if name in fields), "")
    choice = bool(asked) and "choices" in fields
    forms = {
        "text": "text" in fields,
        f"{asked} + choices": choice,
        f"{asked} + answer": bool(asked) and "answer" in fields and not choice,
        "messages": "messages" in fields,
    }
    fitting = [form for form, fits in forms.items() if fits]
    if not fitting:
        names = [str(name) for name in fields]
        found = ", ".join(names) or "none"
        example = f" --answer-field {cut(names[1])}" if len(names) > 1 else ""
        hint = f". Or name them, such as --prompt-field {cut(names[0])}{example}" if names else ""
        raise InvalidInput(
            f"{where} has none of the allowed forms. Fields found: {cut(found, LONG)}. Allowed: {FORMS}{hint}"
        )
    if len(fitting) > 1:
        raise InvalidInput(f"{where} fits several forms ({'; '.join(fitting)}): keep the fields of one of them")
    if fitting == ["text"]:
        return Item(number, text=text("text"))
    if fitting == ["messages"]:
        return Item(number, messages=_messages(fields["messages"], where))
    prompt = text(asked)
    if asked == "question":
        prompt = f"Question: {prompt}\nAnswer:"
    if not choice:
        return Item(number, prompt=prompt, answer=text("answer"))
    given = fields["choices"]
    if not isinstance(given, (list, tuple)) or len(given) < 2:
        raise InvalidInput(f"{where}: `choices` must be a list of two strings or more, got {given!r:.60}")
    choices = tuple(_string(choice, f"{where}: choice {number}") for number, choice in enumerate(given))
    named = next((name for name in ("label", "answer") if name in fields), None)
    if named is None:
        raise InvalidInput(f"{where} has choices but no `label`: add the index of the right choice, from 0")
    return Item(number, prompt=prompt, choices=choices, label=_label(fields[named], choices, f"{where}: `{named}`"))


def _shown(value: Any) -> str:
    return "null" if value is None else f"{value!r:.60} ({type(value).__name__})"


def _string(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InvalidInput(
            f'{what} must be a string, got {_shown(value)}. Write it in quotes ("42"), or leave the item out'
        )
    if not value.strip():
        raise InvalidInput(f"{what} is empty: fill it or leave the item out")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} holds half of a surrogate pair, which is no character: {value!r:.60}") from None
    return value


def _label(value: Any, choices: tuple[str, ...], what: str) -> int:
    letters = _LETTERS[: len(choices)]
    allowed = f"allowed: 0 to {len(choices) - 1}, {letters[0]} to {letters[-1]}, or the text of a choice"
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise InvalidInput(f"{what} must be an index, a letter or a choice's text, got {_shown(value)}; {allowed}")
    if isinstance(value, int):
        if not 0 <= value < len(choices):
            raise InvalidInput(f"{what} is {value}, but there are {len(choices)} choices; {allowed}")
        return value
    text = value.strip()
    readings = {index for index, choice in enumerate(choices) if choice.strip() == text}
    if len(text) == 1 and text.upper() in letters:
        readings.add(letters.index(text.upper()))
    if len(readings) > 1:
        raise InvalidInput(
            f"{what} {value!r:.60} can mean choice {cut(' or '.join(map(str, sorted(readings))))}: give the index"
        )
    if not readings:
        raise InvalidInput(f"{what} {value!r:.60} is none of the choices; {allowed}")
    return readings.pop()


def _messages(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, (list, tuple)) or len(value) < 2:
        raise InvalidInput(
            f"{where}: `messages` must be a list: a question, and the assistant's answer as the last one"
        )
    turns = []
    for number, message in enumerate(value):
        what = f"{where}: message {number}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise InvalidInput(f'{what} must be an object with "role" and "content", got {message!r:.60}')
        turns.append((_string(message["role"], f"{what}: `role`"), _string(message["content"], f"{what}: `content`")))
    if turns[-1][0] != "assistant":
        raise InvalidInput(
            f"{where}: the last of the `messages` is from {turns[-1][0]!r:.60}; it must be from 'assistant', "
            "as it is the answer"
        )
    return tuple(turns)
