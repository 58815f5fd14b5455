"""Reading data: what each form becomes, and that each mistake is reported with its file and line."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import noisescope
from noisescope.data.dataset import DataSet, Item, built_in, gather, read_data
from noisescope.errors import InvalidInput, MissingExtra

CAPITALS = {"prompt": "Capital of France?", "choices": ["Rome", "Paris", "Bonn"], "label": 1}
TALK = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write objects as a data file of a suffix."""

    def write(objects: list[dict[str, Any]], suffix: str = ".jsonl") -> Path:
        path = tmp_path / f"data{suffix}"
        if suffix == ".jsonl":
            path.write_text("\n".join(json.dumps(one) for one in objects), encoding="utf-8")
        elif suffix == ".json":
            path.write_text(json.dumps(objects), encoding="utf-8")
        elif suffix == ".csv":
            with path.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(objects[0])
                for one in objects:
                    writer.writerow([v if isinstance(v, str) else json.dumps(v) for v in one.values()])
        else:
            arrow = pytest.importorskip("pyarrow")
            pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(objects), path)
        return path

    return write


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
@pytest.mark.parametrize(
    ("fields", "kind", "item"),
    [
        ({"text": "a, b\nc"}, "text", Item(0, text="a, b\nc")),
        ({"prompt": "1+1=", "answer": "2"}, "answer", Item(0, prompt="1+1=", answer="2")),
        (
            {"question": "1+1?", "answer": "2\n#### 2"},
            "answer",
            Item(0, prompt="Question: 1+1?\nAnswer:", answer="2\n#### 2"),
        ),
        (CAPITALS, "choice", Item(0, prompt="Capital of France?", choices=("Rome", "Paris", "Bonn"), label=1)),
        (TALK, "chat", Item(0, messages=(("user", "Hi"), ("assistant", "Hello")))),
    ],
)
def test_each_form_in_each_format(suffix: str, fields: Any, kind: str, item: Item, write: Any) -> None:
    """The same object gives the same item and the same fingerprint from every format, with other fields beside it."""
    data = read_data(write([fields | {"id": "7"}, fields | {"id": "8"}], suffix))
    assert data.kind == kind and data.items == (item, dataclasses.replace(item, number=1))
    assert data.source.endswith(f"data{suffix}") and data.note == ""
    assert data.fingerprint == gather([item, item], "elsewhere").fingerprint


def test_a_data_member_of_an_object(tmp_path: Path) -> None:
    """{"data": [...]} is a list as well."""
    (tmp_path / "x.json").write_text('{"version": 1, "data": [{"text": "a"}, {"text": "b"}]}')
    assert [item.text for item in read_data(tmp_path / "x.json").items] == ["a", "b"]


@pytest.mark.parametrize("label", [1, "B", "b", "Paris", " Paris "])
@pytest.mark.parametrize("field", ["label", "answer"])
@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_labels(label: Any, field: str, suffix: str, write: Any) -> None:
    """An index, a letter or the choice's text mean the same, under `label` or `answer`."""
    fields = {"question": "Capital?", "choices": CAPITALS["choices"], field: label}
    (item,) = read_data(write([fields], suffix)).items
    assert item.label == 1 and item.prompt == "Question: Capital?\nAnswer:" and item.answer == ""


def test_numbers_as_choices(write: Any) -> None:
    """In JSON a string is a choice's text and a number an index; in CSV, where both look alike, only a clash raises."""
    fields = {"prompt": "1+1?", "choices": ["1", "2", "3"]}
    assert read_data(write([fields | {"label": "2"}])).items[0].label == 1
    assert read_data(write([fields | {"label": 2}])).items[0].label == 2
    assert read_data(write([fields | {"label": "C"}], ".csv")).items[0].label == 2
    agreeing = {"prompt": "?", "choices": ["0", "1"], "label": "1"}
    assert read_data(write([agreeing], ".csv")).items[0].label == 1
    with pytest.raises(
        InvalidInput, match=r"data\.csv, line 2: `label` 2 can be an index or a choice's text: give the"
    ):
        read_data(write([fields | {"label": "2"}], ".csv"))


TEXT = "fill it or leave the item out"
MISTAKES: list[tuple[Any, str]] = [
    (
        {"label": 1, "id": 2},
        r"has none of the allowed forms\. Fields found: label, id\. Allowed: text; prompt \+ answer;",
    ),
    ({"prompt": "a"}, r"none of the allowed forms\. Fields found: prompt\. "),
    ({}, r"none of the allowed forms\. Fields found: none"),
    ({"text": "a", **TALK}, r"fits several forms \(text; messages\): keep the fields of one"),
    ({"text": ""}, f": `text` is empty: {TEXT}"),
    ({"text": " \n"}, f": `text` is empty: {TEXT}"),
    ({"text": 3}, r": `text` must be a string, got 3 \(int\)"),
    ({"text": None}, ": `text` must be a string, got null"),
    ({"text": "\ud800"}, ": `text` holds half of a surrogate pair"),
    ({"prompt": "a", "answer": ""}, f": `answer` is empty: {TEXT}"),
    ({"prompt": "a", "answer": 42}, r': `answer` must be a string, got 42 \(int\)\. Write it in quotes \("42"\)'),
    ({"prompt": "a", "answer": float("nan")}, r": `answer` must be a string, got nan \(float\)"),
    ({"prompt": "", "answer": "b"}, f": `prompt` is empty: {TEXT}"),
    ({"prompt": "a", "choices": ["x", "y"]}, "has choices but no `label`: add the index of the right choice"),
    (CAPITALS | {"label": 3}, ": `label` is 3, but there are 3 choices; allowed: 0 to 2, A to C, or the text"),
    (CAPITALS | {"label": -1}, ": `label` is -1, but there are 3 choices"),
    (CAPITALS | {"label": "D"}, ": `label` 'D' is none of the choices; allowed: 0 to 2, A to C, or the text"),
    (CAPITALS | {"label": "Oslo"}, ": `label` 'Oslo' is none of the choices"),
    (CAPITALS | {"label": True}, r": `label` must be an index, a letter or a choice's text, got True \(bool\)"),
    (CAPITALS | {"label": 1.0}, r"got 1\.0 \(float\)"),
    (CAPITALS | {"label": None}, "choice's text, got null"),
    (CAPITALS | {"choices": ["B", "A"], "label": "A"}, ": `label` 'A' can mean choice 0 or 1: give the index"),
    (CAPITALS | {"choices": ["x", "x"], "label": "x"}, ": `label` 'x' can mean choice 0 or 1: give the index"),
    (CAPITALS | {"choices": ["one"]}, "`choices` must be a list of two strings or more"),
    (CAPITALS | {"choices": "Rome, Paris"}, "`choices` must be a list of two strings or more, got 'Rome, Paris'"),
    (CAPITALS | {"choices": ["a", 2, "c"]}, r"choice 1 must be a string, got 2 \(int\)"),
    (CAPITALS | {"choices": ["a", " ", "c"]}, "choice 1 is empty"),
    ({"messages": "hi"}, "`messages` must be a list: a question, and the assistant's answer as the last"),
    ({"messages": TALK["messages"][1:]}, "`messages` must be a list: a question"),
    ({"messages": TALK["messages"][::-1]}, "the last of the `messages` is from 'user'; it must be from 'assistant'"),
    ({"messages": [{"role": "user"}, *TALK["messages"]]}, 'message 0 must be an object with "role" and "content"'),
    ({"messages": ["hi", "ho"]}, "message 0 must be an object"),
    ({"messages": [TALK["messages"][0], {"role": "assistant", "content": ""}]}, "message 1: `content` is empty"),
]


@pytest.mark.parametrize(("fields", "words"), MISTAKES)
def test_mistakes_name_file_and_line(fields: Any, words: str, write: Any) -> None:
    """A wrong object in the second place of a file is reported with file and line, and what is allowed."""
    good = next(one for one in (CAPITALS, TALK, {"text": "x"}) if set(one) & set(fields) or one == {"text": "x"})
    path = write([good, fields])
    with pytest.raises(InvalidInput, match=rf"data\.jsonl, line 2.*{words}"):
        read_data(path)
    with pytest.raises(InvalidInput, match=rf"data\.json, item 2.*{words}"):
        read_data(write([good, fields], ".json"))


def test_one_file_holds_one_kind(write: Any) -> None:
    """The first item of another kind is named."""
    with pytest.raises(InvalidInput, match=r"line 3 is of kind chat, but the items before it are of kind text"):
        read_data(write([{"text": "a"}, {"text": "b"}, TALK]))
    assert len(read_data(write([{"text": "a"}, {"text": "b"}, TALK]), limit=2).items) == 2
    with pytest.raises(InvalidInput, match="x mixes the kinds chat and text"):
        gather([Item(0, text="a"), Item(1, messages=(("user", "a"), ("assistant", "b")))], "x")


RAW: list[tuple[str, bytes, str]] = [
    (
        "a.jsonl",
        b'{"text": "a"}\n\n{"text": }',
        r"a\.jsonl, line 3 is not a valid JSON value: Expecting value: line 1 column 10",
    ),
    (
        "a.jsonl",
        b'[\n{"text": "a"}\n]',
        r"line 1 is not a valid JSON value.* If the whole file is one JSON list, name it \.json",
    ),
    ("a.jsonl", b'[{"text": "a"}]', r"line 1: each line must be a JSON object, got \[\{.* name it \.json"),
    ("a.jsonl", b"3\n", r"line 1: each line must be a JSON object, got 3"),
    ("a.jsonl", b"9" * 5000, r"line 1 is not a valid JSON value: the whole number 99.* has 5000 digits, at most 100"),
    ("a.jsonl", b"[" * 200_000, r"line 1 is not a valid JSON value: it is nested deeper than 32"),
    ("a.jsonl", b"", r"a\.jsonl holds no data\. An item has one of these forms: text; prompt"),
    ("a.jsonl", b"\n \n", r"a\.jsonl holds no data"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}', r"line 2: byte 0xe9 is not UTF-8; save the file as UTF-8"),
    ("a.jsonl", '{"text": "a"}'.encode("utf-16"), r"line 1: this is UTF-16; save the file as UTF-8"),
    (
        "a.json",
        b'[\n{"text": "a"},\n{"text" "b"}]',
        r"a\.json is not a valid JSON value: Expecting ':' delimiter: line 3 column 9",
    ),
    (
        "a.json",
        b'{"text": "a"}\n{"text": "b"}',
        r"Extra data: line 2.*\. If each line is an object of its own, name .* \.jsonl",
    ),
    ("a.json", b'{"text": "a"}', r'must hold a list of objects, or {"data": \[\.\.\.\]}; got .{"text"'),
    ("a.json", b'[{"text": "a"}, 3]', r"a\.json, item 2: must be an object, got 3"),
    ("a.json", b"[]", r"a\.json holds no data"),
    ("a.json", b"", r"a\.json holds no data"),
    ("a.json", b'[{"text": "a"},\n{"text": "\xff"}]', r"a\.json, line 2: byte 0xff is not UTF-8"),
    ("a.csv", b"", r"a\.csv holds no data"),
    ("a.csv", b"prompt,answer\n", r"a\.csv holds no data"),
    ("a.csv", b"prompt,answer\na,b\n,\nc\n", r"a\.csv, line 4 has 1 cells, but the header has 2: a comma inside"),
    ("a.csv", b'prompt,answer\n"a\nb",c\nd,\n', r"a\.csv, line 4: `answer` is empty"),
    ("a.csv", b"prompt,answer\na,NaN\n", r"a\.csv, line 2: `answer` is NaN, a missing value"),
    ("a.csv", b'text\n"a\n', r"a\.csv, line 2: broken CSV: unexpected end of data"),
    ("a.csv", b"text,text\na,b\n", r"line 1: a column name occurs twice: text, text"),
    (
        "a.csv",
        b"prompt,choices,label\na,x|y,0\n",
        r"`choices` is not a valid JSON value.* In a CSV file it is a JSON list in one",
    ),
    ("a.csv", b'prompt,choices,label\na,"[""x"",""y""]",7\n', r"a\.csv, line 2: `label` is 7, but there are 2"),
    ("a.csv", b'prompt,choices,label\na,"[""x"",""y""]",' + b"9" * 5000, r"line 2: `label` '999.* is none of the"),
    ("a.csv", b"prompt;answer\na;b\n", r"line 2 has none of the allowed forms\. Fields found: prompt;answer"),
    (
        "a.docx",
        b"a",
        r"unknown format of the data file .*a\.docx: '\.docx'\. Allowed: \.jsonl, \.json, \.csv, \.parquet",
    ),
    ("a.jsn", b"a", r"unknown format .*Did you mean '\.json'\?"),
]


@pytest.mark.parametrize(("name", "content", "words"), RAW)
def test_broken_files(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    """What is wrong with a file itself is reported with its name and its line."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=words) as caught:
        data = read_data(tmp_path / name)
        raise AssertionError(f"read {data}")
    assert "\n" not in str(caught.value)


def test_what_is_no_mistake(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, blank lines, U+2028 in a text and an upper-case suffix are fine."""
    path = tmp_path / "A.JSONL"
    path.write_bytes('\ufeff{"text": "a"}\r\n\r\n{"text": "b\u2028c"}\r\n'.encode())
    assert [item.text for item in read_data(path).items] == ["a", "b\u2028c"]
    (tmp_path / "a.csv").write_bytes("\ufefftext\r\n\r\na\r\n".encode())
    assert [item.text for item in read_data(str(tmp_path / "a.csv")).items] == ["a"]


def test_a_missing_file_and_a_folder(write: Any, tmp_path: Path) -> None:
    """The nearest name is offered; a folder's data files are listed."""
    path = write([{"text": "a"}])
    with pytest.raises(InvalidInput, match=r"there is no file '.*dta\.jsonl'\. Did you mean '.*data\.jsonl'\?"):
        read_data(tmp_path / "dta.jsonl")
    with pytest.raises(InvalidInput, match=r"there is no file '/no/such/folder/x\.jsonl'\.$"):
        read_data("/no/such/folder/x.jsonl")
    with pytest.raises(InvalidInput, match=r"is a folder; pass one of its files: data\.jsonl"):
        read_data(path.parent)


def test_limit_and_take(write: Any) -> None:
    """`limit` reads the first n and no further; `take` gives the same data set, with its own fingerprint."""
    objects: list[Any] = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    whole = read_data(write(objects))
    two = read_data(write([*objects[:2], {"text": 3}]), limit=2)  # the mistake in line 3 is not reached
    assert whole.take(2) == two and two.fingerprint != whole.fingerprint and len(two.items) == 2
    assert whole.take(9) == whole and dataclasses.replace(whole, note="n").take(1).note == "n"
    for wrong in (0, -1, True, 1.5, "3"):
        with pytest.raises(InvalidInput, match="must be an integer of at least 1, got"):
            whole.take(wrong)
        with pytest.raises(InvalidInput, match="limit must be an integer of at least 1, got"):
            read_data("nowhere.jsonl", limit=wrong)


def test_the_fingerprint_is_of_the_content() -> None:
    """Every field counts, and so do order and where one field ends and the next begins; source and note don't."""
    base = Item(0, prompt="ab", answer="c")
    others = [
        [dataclasses.replace(base, prompt="a", answer="bc")],
        [base, base],
        [Item(0, text="ab")],
        [Item(0, prompt="ab", choices=("c", "d"), label=0)],
        [Item(0, prompt="ab", choices=("c", "d"), label=1)],
        [Item(0, prompt="ab", choices=("cd", "d"), label=1)],
        [Item(0, messages=(("user", "a"), ("assistant", "b")))],
        [Item(0, messages=(("user", "a"), ("assistant", "c")))],
    ]
    prints = [gather(items, "x").fingerprint for items in ([base], *others)]
    assert len(set(prints)) == len(prints)
    assert gather([base], "y", note="z").fingerprint == prints[0]
    a, b = Item(0, text="a"), Item(0, text="b")
    assert gather([a, b], "x").fingerprint != gather([b, a], "x").fingerprint
    assert [item.number for item in gather([a, b], "x").items] == [0, 1]


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
items = st.one_of(
    st.builds(lambda text: {"text": text}, words),
    st.builds(lambda a, b: {"prompt": a, "answer": b}, words, words),
    st.builds(
        lambda p, c, i: {"prompt": p, "choices": c, "label": i % len(c)},
        words, st.lists(words, min_size=2, max_size=5), st.integers(0, 99),
    ),
    st.builds(
        lambda turns: {"messages": [*turns, {"role": "assistant", "content": "so"}]},
        st.lists(st.fixed_dictionaries({"role": words, "content": words}), min_size=1, max_size=4),
    ),
)  # fmt: skip


@given(fields=items, suffix=st.sampled_from([".jsonl", ".json", ".csv"]))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_is_read(fields: Any, suffix: str, write: Any) -> None:
    """Any text survives the way through any format, character by character."""
    if suffix == ".csv":  # there NaN is a missing value, and a label of digits may clash with a choice
        assume(not any(isinstance(value, str) and value.strip().lower() == "nan" for value in fields.values()))
        assume(str(fields.get("label")) not in fields.get("choices", []))
    (item,) = read_data(write([fields], suffix)).items
    written = {
        "text": item.text,
        "prompt": item.prompt,
        "answer": item.answer,
        "choices": list(item.choices),
        "label": item.label,
        "messages": [{"role": role, "content": content} for role, content in item.messages],
    }
    assert {name: written[name] for name in fields} == fields


def test_parquet_mistakes(tmp_path: Path, write: Any) -> None:
    """Rows are counted from 1; nulls, numbers and files of another kind are reported."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for column, words in ([["a", None], "row 2: `text` must be a string, got null"], [[1.5], r"row 1: .*got 1\.5"]):
        parquet.write_table(arrow.table({"text": column, "other": column}), tmp_path / "x.parquet")
        with pytest.raises(InvalidInput, match=words):
            read_data(tmp_path / "x.parquet")
    parquet.write_table(arrow.table({"body": ["a"], "id": [1]}), tmp_path / "x.parquet")
    with pytest.raises(InvalidInput, match=r"x\.parquet, row 1 has none .* Fields found: body, id"):
        read_data(tmp_path / "x.parquet")
    (tmp_path / "x.parquet").write_bytes(b"no parquet")
    with pytest.raises(InvalidInput, match=r"x\.parquet is not a valid Parquet file: ArrowInvalid"):
        read_data(tmp_path / "x.parquet")


def test_parquet_needs_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pyarrow the error is the pip line."""
    (tmp_path / "x.parquet").touch()
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(MissingExtra, match=r"needs the package pyarrow: pip install 'noisescope\[parquet\]'"):
        read_data(tmp_path / "x.parquet")


def test_the_built_in_text() -> None:
    """Sixty paragraphs of at least a hundred words, no two alike, and always the same: results depend on it."""
    data: DataSet = built_in()
    lengths = [len(item.text.split()) for item in data.items]
    assert data.kind == "text" and data.note == "no data was given: built-in text"
    assert len(lengths) == 60 and min(lengths) >= 100 and max(lengths) <= 250 and sum(lengths) > 9000
    assert len({item.text[:40] for item in data.items}) == 60 and all(
        item.text == item.text.strip() for item in data.items
    )
    assert any("def gcd(a, b):\n    " in item.text for item in data.items)  # code keeps its lines
    assert data.fingerprint == "e3d99d03473ccf22d313cd54fcd0880701c2dbcbcc3a4e34429e6837fae104be"


def test_reading_needs_no_torch() -> None:
    """Data is read where torch can't be imported."""
    code = "import sys; sys.modules['torch'] = None; from noisescope.data.dataset import built_in; built_in()"
    environment = {**os.environ, "PYTHONPATH": str(Path(noisescope.__file__).parent.parent)}
    subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, check=True)
