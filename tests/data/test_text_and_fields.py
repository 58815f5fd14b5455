"""Text files as data, and fields under names of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from noisescope.data.dataset import read_data
from noisescope.errors import InvalidInput
from noisescope.options.shared import DataFile, SamplingOptions


@pytest.mark.parametrize(
    ("text", "texts", "note"),
    [
        ("\n\none\nline\n\n  \ntwo\n", ["one\nline", "two"], "split at blank lines"),
        ("one\ntwo\n\n", ["one", "two"], "every line"),
        ("one", ["one"], "every line"),
    ],
)
def test_a_text_file_is_split(text: str, texts: list[str], note: str, tmp_path: Path) -> None:
    """At blank lines between texts, else at every line; the note says which."""
    file = tmp_path / "wiki.txt"
    file.write_text(text)
    found = read_data(file)
    assert [item.text for item in found.items] == texts and note in found.note
    assert len(read_data(file, limit=1).items) == 1


def test_an_empty_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(InvalidInput, match="holds no data"):
        read_data(tmp_path / "empty.txt")


def test_fields_have_names_of_their_own(tmp_path: Path) -> None:
    """Prompt and answer by the names given, whatever else the rows hold; a prompt alone is a text."""
    file = tmp_path / "qa.jsonl"
    file.write_text('{"query": "1 + 1", "reply": "2", "text": "not this"}\n')
    (item,) = read_data(DataFile(file, "query", "reply")).items
    assert (item.prompt, item.answer, item.kind) == ("1 + 1", "2", "answer")
    assert read_data(DataFile(file, "query")).items[0].text == "1 + 1"
    with pytest.raises(InvalidInput, match=r"unknown field in .*line 1: 'querry'.* Did you mean 'query'"):
        read_data(DataFile(file, "querry"))


def test_parquet_reads_named_fields(tmp_path: Path) -> None:
    """Columns that are no usual fields are read where they are named."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"query": ["q"], "reply": ["r"]}), tmp_path / "x.parquet")
    assert read_data(DataFile(tmp_path / "x.parquet", "query", "reply")).items[0].answer == "r"


def test_options_name_the_fields(tmp_path: Path) -> None:
    """A file with its names, or the default's file; a name without a file is refused, as is an answer alone."""
    named = SamplingOptions(prompt_field="q", answer_field="a")
    assert named.source(tmp_path / "x.jsonl") == DataFile(tmp_path / "x.jsonl", "q", "a")
    assert SamplingOptions().source("x.jsonl") == "x.jsonl"
    with pytest.raises(InvalidInput, match="give the file as data"):
        named.source()
    with pytest.raises(InvalidInput, match="answer_field needs prompt_field"):
        SamplingOptions(answer_field="a")


def test_what_a_file_holds_besides_is_counted(tmp_path: Path) -> None:
    """As far as it can be read, and not beyond a thousand; it is no part of the data's identity."""
    file = tmp_path / "many.jsonl"
    file.write_text("".join(f'{{"text": "number {n}"}}\n' for n in range(12)) + "broken\n" + '{"text": "after"}\n')
    few = read_data(file, limit=5)
    assert (len(few.items), few.available) == (5, 12)
    assert few.take(2).available == 12 and few.take(5) == few
    file.write_text('{"text": "again"}\n' * 1500)
    assert read_data(file, limit=5).available == 1000 and read_data(file).available == 1500
