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

import codecs
import csv
import difflib
import hashlib
import importlib
import importlib.resources
import io
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput, MissingExtra, unknown, whole_number
from noisescope.foreign import MIB, FileKind, parse_json, read_bytes
from noisescope.options.shared import DataFile
from noisescope.plain_text import LONG, cut

FORMS = "text; prompt + answer; question + answer; prompt (or question) + choices + label; messages"
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FIELDS = ("text", "prompt", "question", "answer", "choices", "label", "messages")
DATA = FileKind("data file", "Split it, or save the data again as JSONL", max_bytes=1024 * MIB)
PARQUET = FileKind("Parquet file", "Save it again, or use JSONL")
_LONGEST_LINE = 64 * MIB
_ROWS = 1000  # of a Parquet file at a time: a few bytes of it can stand for many rows
Row = tuple[str, Mapping[str, Any]]  # ("test.jsonl, line 3", {"text": ...})


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
    """Items of one kind. The fingerprint is of their content, so a copy under another name is the same data."""

    kind: str
    items: tuple[Item, ...]
    source: str
    fingerprint: str
    note: str = ""

    def take(self, n: int) -> DataSet:
        """The first n items (all of them where there are fewer), with a fingerprint of their own."""
        return gather(self.items[: whole_number(n, "take(n)")], self.source, note=self.note)


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
    for where, row in rows(path, () if file is None else (file.prompt_field, file.answer_field or "")):
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
    return gather(items, str(source), note=_SPLIT[_has_paragraphs(path)] if path.suffix.lower() == ".txt" else "")


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


# -- a data file as rows: where each stands, and its fields


def rows(path: Path, fields: Iterable[str] = ()) -> Iterator[Row]:
    """The rows of a file, in order; its suffix decides its format. Blank lines are skipped.

    `fields` are wanted besides the usual ones: of a Parquet file no others are read.
    """
    if path.is_dir():
        inside = sorted(file.name for file in path.iterdir() if file.suffix.lower() in _READERS)
        hint = f"pass one of its files: {', '.join(inside[:5])}" if inside else "it holds no data file"
        raise InvalidInput(f"{path} is a folder; {hint}")
    if not path.exists():
        beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, beside, n=1)
        hint = f" Did you mean {str(path.parent / near[0])!r}?" if near else ""
        raise InvalidInput(f"there is no file {str(path)!r}.{hint}")
    if not path.is_file():
        raise InvalidInput(f"{path} is a pipe or a device: give a file")
    if path.suffix.lower() not in _READERS:
        raise unknown(f"format of the data file {path}:", path.suffix, _READERS)
    try:
        yield from _READERS[path.suffix.lower()](path, (*FIELDS, *fields))
    except OSError as error:
        raise InvalidInput(f"{path} can't be read: {error.strerror or error}") from error


def _decoded(raw: bytes, path: Path, line: int = 1) -> str:
    """UTF-8 bytes that begin at a line of a file. A UTF-8 byte order mark, as Windows writes it, is dropped."""
    if line == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidInput(f"{path}, line 1: this is UTF-16; save the file as UTF-8")
    if line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        wrong = raw[error.start]
        raise InvalidInput(f"{path}, line {line}: byte {wrong:#x} is not UTF-8; save the file as UTF-8") from None


def _parsed(text: str, where: str, hint: str = "") -> Any:
    """NaN passes: in a field that is not used it does no harm, and in one that is, it is no text."""
    cure = hint.strip() or "Correct it, or leave it out"
    return parse_json(text, where, FileKind("JSON value", cure, max_depth=32, infinite=True))


def _jsonl_rows(path: Path, wanted: Container[str]) -> Iterator[Row]:
    with path.open("rb") as file:  # binary: str.splitlines would also cut at U+2028
        for number, raw in enumerate(iter(lambda: file.readline(_LONGEST_LINE + 1), b""), 1):
            if len(raw) > _LONGEST_LINE:
                raise InvalidInput(f"{path}, line {number} is longer than {_LONGEST_LINE:,} bytes: is it JSONL?")
            line, where = _decoded(raw, path, number).strip(), f"{path}, line {number}"
            if not line:
                continue
            hint = " If the whole file is one JSON list, name it .json" if line[0] in "[]" else ""
            fields = _parsed(line, where, hint)
            if not isinstance(fields, dict):
                raise InvalidInput(f"{where}: each line must be a JSON object, got {fields!r:.60}.{hint}")
            yield where, fields


def _json_rows(path: Path, wanted: Container[str]) -> Iterator[Row]:
    text = _decoded(read_bytes(path, DATA), path)
    if not text.strip():
        return
    whole = _parsed(text, str(path), " If each line is an object of its own, name the file .jsonl")
    objects = whole.get("data") if isinstance(whole, dict) else whole
    if not isinstance(objects, list):
        raise InvalidInput(f'{path} must hold a list of objects, or {{"data": [...]}}; got {text.strip()!r:.60}')
    for number, fields in enumerate(objects, 1):
        if not isinstance(fields, dict):
            raise InvalidInput(f"{path}, item {number}: must be an object, got {fields!r:.60}")
        yield f"{path}, item {number}", fields


def _csv_rows(path: Path, wanted: Container[str]) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(_decoded(read_bytes(path, DATA), path), newline=""), strict=True)
    header: list[str] = []
    while True:
        where = f"{path}, line {reader.line_num + 1}"  # a row may span lines: this is its first
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise InvalidInput(f"{where}: broken CSV: {error}. For long or nested texts JSONL is safer") from None
        if cells is None:
            return
        if not any(cell.strip() for cell in cells):
            continue
        if not header:
            header = [cell.strip() for cell in cells]
            if len(set(header)) < len(header):
                raise InvalidInput(f"{where}: a column name occurs twice: {cut(', '.join(header), LONG)}")
        elif len(cells) != len(header):
            raise InvalidInput(
                f"{where} has {len(cells)} cells, but the header has {len(header)}: a comma inside a text needs quotes"
            )
        else:
            yield where, _typed(dict(zip(header, cells, strict=True)), where)


def _typed(cells: dict[str, str], where: str) -> dict[str, Any]:
    """A CSV row's texts as what they stand for: lists are JSON, a label of digits is an index."""
    fields: dict[str, Any] = dict(cells)
    for name in cells:
        if name in FIELDS and cells[name].strip().lower() == "nan":
            raise InvalidInput(f"{where}: `{name}` is NaN, a missing value: fill it or leave the row out")
    for name in {"choices", "messages"} & set(cells):
        fields[name] = _parsed(cells[name], f"{where}: `{name}`", " In a CSV file it is a JSON list in one cell")
    named = next((name for name in ("label", "answer") if name in cells), "")
    label = cells.get(named, "").strip()
    if "choices" in cells and label.isdecimal() and len(label) < 4:
        choices = fields["choices"] if isinstance(fields["choices"], list) else []
        if label in choices and choices[int(label) : int(label) + 1] != [label]:
            raise InvalidInput(
                f"{where}: `{named}` {label} can be an index or a choice's text: give the letter, A for the first"
            )
        fields[named] = int(label)
    return fields


def _parquet_rows(path: Path, wanted: Container[str]) -> Iterator[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise MissingExtra(f"{path}: Parquet needs the package pyarrow: pip install 'noisescope[parquet]'") from None
    number = 0
    with PARQUET.explaining(path), parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        for batch in file.iter_batches(batch_size=_ROWS, columns=[name for name in names if name in wanted]):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", {**dict.fromkeys(names), **row}


def _text_rows(path: Path, wanted: Container[str]) -> Iterator[Row]:
    text: list[str] = []
    first = 1
    lines = _decoded(read_bytes(path, DATA), path).splitlines()
    by_line = all(line.strip() for line in _inner(lines))
    for number, line in enumerate([*lines, ""], 1):
        if line.strip():
            first = first if text else number
            text.append(line)
        if text and (by_line or not line.strip()):
            yield f"{path}, line {first}", {"text": "\n".join(text)}
            text = []


def _inner(lines: list[str]) -> list[str]:
    """Without blank lines at both ends."""
    kept = [number for number, line in enumerate(lines) if line.strip()]
    return lines[kept[0] : kept[-1]] if kept else []


def _has_paragraphs(path: Path) -> bool:
    return any(not line.strip() for line in _inner(_decoded(read_bytes(path, DATA), path).splitlines()))


_SPLIT = {True: "the text file was split at blank lines", False: "every line of the text file is a sample"}
_READERS = {
    ".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows, ".txt": _text_rows
}  # fmt: skip
