"""A data file as rows: where each stands, and its fields. JSONL, JSON, CSV, Parquet or plain text, by its suffix."""

from __future__ import annotations

import codecs
import contextlib
import csv
import difflib
import importlib
import io
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from noisescope.errors import InvalidInput, MissingExtra, unknown
from noisescope.text_escaping import LONG, cut
from noisescope.untrusted_files import MIB, FileKind, parse_json, read_bytes

FIELDS = ("text", "prompt", "question", "answer", "choices", "label", "messages")
DATA = FileKind("data file", "Split it, or save the data again as JSONL", max_bytes=1024 * MIB)
PARQUET = FileKind("Parquet file", "Save it again, or use JSONL")
_LONGEST_LINE = 64 * MIB
_ROWS = 1000  # of a Parquet file at a time: a few bytes of it can stand for many rows
Row = tuple[str, Mapping[str, Any]]  # ("test.jsonl, line 3", {"text": ...})


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


def count_rest(rows: Iterator[Row], most: int) -> int:
    """How many rows are left, as far as they can be read; nothing in them is looked at."""
    count = 0
    with contextlib.suppress(InvalidInput):
        for _ in itertools.islice(rows, max(most, 0)):
            count += 1
    return count


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


def has_paragraphs(path: Path) -> bool:
    return any(not line.strip() for line in _inner(_decoded(read_bytes(path, DATA), path).splitlines()))


SPLIT = {True: "the text file was split at blank lines", False: "every line of the text file is a sample"}
_READERS = {
    ".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows, ".txt": _text_rows
}  # fmt: skip
