"""The reader of files from elsewhere: limits, one line, nothing outside its folder, and each reader's known attacks."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import noisescope as ns
from noisescope import demo
from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.model.checkpoint_folder_check import shards_of
from noisescope.model.loading import outline
from noisescope.options.files import read_file
from noisescope.options.sensitivity import DiagnoseOptions
from noisescope.passports.diff import read_passport
from noisescope.reports.saved_report import Report
from noisescope.runs.store import Store
from noisescope.trials import Conditions, Result, Slice, Trial
from noisescope.untrusted_files import FileKind, inside, parse_json, parse_yaml, read_bytes, read_foreign

CORPUS = Path(__file__).parent / "fuzz" / "corpus"
KIND = FileKind("thing", "Make it again", max_bytes=10_000, max_depth=5)
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@dataclass(frozen=True)
class Small:
    count: int
    names: tuple[str, ...]


def one_line(message: str, most: int = 500) -> bool:
    return message.isprintable() and len(message) <= most


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"count": 3, "names": ["a"]}', ""),
        (b'{"count": 3}', "x.json is not a valid thing: it has no 'names'. Make it again"),
        (b'{"count": "3", "names": []}', 'it.count: a whole number was expected, got "3"'),
        (b'{"count": 3, "names": [], "more": 1}', '"more", which this version does not know'),
        (b'{"count": 3, "count": 3, "names": []}', 'the key "count" occurs twice'),
        (b'{"count": NaN, "names": []}', "NaN is not a number in JSON"),
        (b'{"count": 1e999, "names": []}', "the number 1e999 is too large"),
        (b'{"count": 1' + b"0" * 5000 + b"}", "has 5001 digits, at most 100"),
        (b'{"count": 1' + b"0" * 80 + b', "names": []}', "a whole number below 2^128"),
        (b"[" * 6 + b"]" * 6, "it is nested deeper than 5"),
        (b"[" * 9000, "it is nested deeper than 5"),
        (b" " * 20_000, "it is larger than 10,000 bytes"),
        (b"\xff{}", "byte 0xff at 0 is not UTF-8"),
        (b'{"count": 3, "names": ["\\u202e"]}', "text without control characters was expected"),
        (b'{"count": "' + b"x" * 5000 + b'"}', "it has no 'names'"),
        (b'{"count": "' + b"x" * 5000 + b'", "names": 1}', 'got "xxxxx'),
        (b"", "Expecting value"),
    ],
    ids=range(17),
)
def test_what_does_not_fit_is_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    """What came, what is allowed, what to do."""
    (tmp_path / "x.json").write_bytes(content)
    if not words:
        assert read_foreign(tmp_path / "x.json", Small, KIND) == Small(3, ("a",))
        return
    with pytest.raises(InvalidInput) as caught:
        read_foreign(tmp_path / "x.json", Small, KIND)
    assert words in str(caught.value) and "Make it again" in str(caught.value) and one_line(str(caught.value))


def test_only_a_file_is_read(tmp_path: Path) -> None:
    """A pipe would never end, a folder and a socket are no files, and a path may be nonsense."""
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(tmp_path / "socket"))
        for name in ("pipe", "socket", "."):
            with pytest.raises(InvalidInput, match="it is a folder, a pipe or a device"):
                read_bytes(tmp_path / name, KIND)
    with pytest.raises(InvalidInput, match="it is a folder, a pipe or a device"):
        read_bytes(Path("/dev/zero"), KIND)
    for path in (tmp_path / "none", tmp_path / "a\0b", tmp_path / ("x" * 5000)):
        with pytest.raises(InvalidInput) as caught:
            read_bytes(path, KIND)
        assert one_line(str(caught.value))


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b", "~/x/y", "9" * 300])
def test_a_named_file_lies_in_the_folder(name: str, tmp_path: Path) -> None:
    """Whatever a file from elsewhere names."""
    with pytest.raises(InvalidInput, match="the name of a file in this folder was expected"):
        inside(tmp_path, name, KIND)
    assert inside(tmp_path, "a.safetensors", KIND) == tmp_path / "a.safetensors"


def test_infinity_only_where_it_is_known() -> None:
    """Configs of Mamba hold it; reports never."""
    python = FileKind("config", "", infinite=True)
    assert parse_json('{"limit": [0.0, Infinity]}', "x", python) == {"limit": [0.0, float("inf")]}


# -- YAML


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BOMB, "more than 10,000 values after expanding its aliases"),
        ("a: &a [*a]", "line 1: an alias of itself"),
        ("a: &a {b: *a}", "line 1: an alias of itself"),
        ("a: " + "9" * 5000, "line 1: a whole number of too many digits"),
        ("a: 0x" + "f" * 5000, "line 1: a whole number of too many digits"),
        ("[" * 800, "it is nested deeper than 16"),
        ("a: " + "{b: " * 17 + "1" + "}" * 17, "nested deeper than 16"),
        ("a: 1\nb: {c: 1, c: 2}", "line 2: c occurs twice (first on line 2): keep one"),
        ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("a: \x1b[31m", "special characters are not allowed"),
        ("[a, b]: 1", "line 1: found unhashable key"),
    ],
    ids=range(11),
)  # fmt: skip
def test_hostile_yaml_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    """Nine lines that stand for a billion values, numbers without end, keys that are no keys."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_file(file, DiagnoseOptions)
    assert words in str(caught.value) and one_line(str(caught.value))
    assert CliRunner().invoke(app, ["diagnose", "demo", "--config", str(file)]).exit_code == 2


def test_aliases_of_a_usual_size_are_read() -> None:
    """They are part of YAML."""
    kind = FileKind("x", "", max_depth=9)
    assert parse_yaml("a: &b {c: 1}\nd: *b\ne:\n  <<: *b\n", "x", kind) == {"a": {"c": 1}, "d": {"c": 1}, "e": {"c": 1}}


def test_a_long_value_of_an_option_is_cut(tmp_path: Path) -> None:
    """The 254 MB error line: a value is shown by its start."""
    file = tmp_path / "run.yaml"
    for text in (f"window: {'x' * 50_000}", f"{'y' * 50_000}: 1", f"operators: [{', '.join(['[z]'] * 5000)}]"):
        file.write_text(text)
        with pytest.raises(InvalidInput) as caught:
            read_file(file, DiagnoseOptions)
        assert one_line(str(caught.value), 800)


# -- models


def model_folder(folder: Path, config: Any = None, **files: Any) -> Path:
    found = json.loads((CORPUS / "config" / "llama.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(found))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": 10**9}, "config.num_hidden_layers: 0 to 2000 was expected, got 1000000000"),
        ({"num_hidden_layers": "2"}, 'config.num_hidden_layers: a whole number was expected, got "2"'),
        ({"hidden_size": 2**40}, "config.hidden_size: 0 to 2147483648 was expected"),
        ({"num_attention_heads": 0}, "transformers can't load"),
        ({"architectures": [3]}, "config.architectures[0]: text was expected, got 3"),
        ({"architectures": "pipeline"}, "config.architectures: a list was expected"),
        ({"model_type": ["x"]}, "config.model_type: text was expected"),
        ({"rope_parameters": 3}, "transformers can't load"),
        ({"hidden_act": "no such function"}, "transformers can't load"),
    ],
)  # fmt: skip
def test_a_hostile_config_is_one_line(config: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Sizes that would never end, types that no code expects."""
    with pytest.raises(InvalidInput) as caught:
        outline(model_folder(tmp_path, config))
    assert words in str(caught.value) and one_line(str(caught.value), 800)


def test_only_models_are_built_by_name(tmp_path: Path) -> None:
    """`architectures` may name anything that transformers has: `pipeline`, `Trainer`, a module."""
    for name in ("pipeline", "Trainer", "AutoConfig", "utils", "__loader__"):
        found = outline(model_folder(tmp_path, {"architectures": [name]}))
        assert type(found.model).__name__ == "LlamaForCausalLM"


def test_code_in_a_model_folder_is_not_run(tmp_path: Path) -> None:
    """`auto_map` leads to it; without trust it is not followed."""
    (tmp_path / "evil.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    config = {"auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    outline(model_folder(tmp_path, config))
    with pytest.raises(InvalidInput, match="transformers can't load"):
        outline(model_folder(tmp_path, {**config, "model_type": "unknown"}))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "a/../../b", ""])
def test_an_index_can_not_leave_the_model_folder(shard: str, tmp_path: Path) -> None:
    """Neither ours nor transformers reads another place through it."""
    index = {"metadata": {}, "weight_map": {"lm_head.weight": shard}}
    folder = tmp_path / "model"
    folder.mkdir()
    model_folder(folder, model__safetensors__index__json=index)
    (tmp_path / "other.safetensors").touch()
    (folder / "x.safetensors").touch()
    for read in (shards_of, ns.load):
        with pytest.raises(InvalidInput, match="the name of a file in this folder was expected"):
            read(folder)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 3}, {"weight_map": {"a": 3}}])
def test_an_index_of_another_shape_is_refused(index: Any, tmp_path: Path) -> None:
    """It raised a KeyError or worse."""
    with pytest.raises(InvalidInput, match="is not a valid shard index"):
        shards_of(model_folder(tmp_path, model__safetensors__index__json=index))


def test_a_damaged_gguf_is_one_line(tmp_path: Path) -> None:
    """Cut off in its header."""
    file = tmp_path / "x.gguf"
    file.write_bytes((CORPUS / "gguf" / "tiny.gguf").read_bytes()[:900])
    with pytest.raises(InvalidInput, match=r"x\.gguf is not a valid GGUF file: .*Download it again"):
        ns.load(file)


# -- dumps, stores, passports, noise


def test_a_dump_of_zero_strides_takes_no_memory(tmp_path: Path) -> None:
    """A kilobyte that stands for a terabyte."""
    folder = tmp_path / "dump"
    shutil.copytree(CORPUS / "dump", folder)
    (folder / "dump_tensor_data").mkdir()
    entries = json.loads((folder / "dump.json").read_text())["data"].values()
    for name in [about["data_name"] for entry in entries for about in entry["output"]]:
        torch.save(torch.zeros(1).expand(2**20, 2**20), folder / "dump_tensor_data" / name)
    with pytest.raises(InvalidInput, match="elements can't lie in a file of"):
        ns.compare(folder, folder)


@pytest.mark.parametrize(
    "change", [{"data_name": "../../x.pt"}, {"shape": [0, 3, 3]}, {"shape": "x"}, {"dtype": "x" * 9000}]
)
def test_a_dump_names_nothing_outside(change: dict[str, Any], tmp_path: Path) -> None:
    """And shapes that lie do no harm."""
    shutil.copytree(CORPUS / "dump", tmp_path / "dump")
    file = tmp_path / "dump" / "dump.json"
    found = json.loads(file.read_text())
    for entry in found["data"].values():
        for about in entry["output"]:
            about.update(change)
    found["data"]["Module.layers." + "9" * 5000 + ".Linear.forward." + "9" * 5000] = {"output": [{"data_name": "x"}]}
    file.write_text(json.dumps(found))
    with pytest.raises(InvalidInput, match=r"the name of a file in this folder|lacks ") as caught:
        ns.compare(tmp_path / "dump", tmp_path / "dump")
    assert one_line(str(caught.value), 800)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"model_max_length": "256"}', 'config.model_max_length: a number was expected, got "256"'),
        ("[]", "tokenizer_config.json is not a valid tokenizer config: an object was expected"),
        ("{", "tokenizer_config.json is not a valid tokenizer config: "),
    ],
)
def test_a_hostile_tokenizer_config_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    """transformers compares the length when a text is encoded, far from any reader."""
    shutil.copytree(demo.folder(), tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        ns.load(tmp_path / "model")
    assert words in str(caught.value) and one_line(str(caught.value))


def test_a_stored_result_of_another_shape_is_refused(tmp_path: Path) -> None:
    """With the right checksum: a run folder may come from elsewhere."""
    from noisescope.runs.store_file import decode

    parts = (
        "3, 'values': {}",
        "[], 'values': {'a': ['b']}",
        "[0], 'values': {'a': [NaN]}",
        "[0], 'values': {'a': []}",
    )
    wrong = [f"{{'samples': {one}, 'facts': {{}}}}".replace("'", '"') for one in parts]
    for text in ("3", "{}", b"{}", "[" * 5000, *wrong):
        with pytest.raises(InvalidInput, match="is not a valid noisescope run"):
            decode(text, None, "")
    good = '{"samples": [0], "values": {"a": [0.5]}, "facts": {}}'
    for arrays in (b"x", b"PK\x03\x04" + b"\0" * 40, b"\x93NUMPY\x01\x00v\x00" + b"\xff" * 200):
        with pytest.raises(InvalidInput, match="the arrays of a result is not a valid noisescope run"):
            decode(good, arrays, "")
    for other in ((good, "x", ""), (good, None, b"")):
        with pytest.raises(InvalidInput, match="a result is not a valid noisescope run: a cell of another"):
            decode(*other)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "notes",
    [
        {"asked": [1], "command": 3, "report": "x"},
        {"asked": {"model": 3, "data": [], "settings": "x", "conditions": 3, "device": {}}, "answered": 3},
        {"asked": {"model": {"source": ["a\nb"]}, "settings": {"a\nb": ["\u202e", {}]}}, "command": {"name": [3]}},
        {"report": {"run": [3]}, "command": {"name": "x" * 5000}},
    ],
)
def test_notes_of_another_shape_are_shown_as_what_they_are(notes: dict[str, Any], tmp_path: Path) -> None:
    """A line each, however long; none is taken for more than text."""
    with Store(tmp_path) as store:
        store.note(**notes)
        store.add_gate({"x": 1})
    for command in ("list", "show", "check"):
        found = CliRunner().invoke(app, ["runs", command, str(tmp_path)])
        assert found.exit_code == 0 and found.output.replace("\n", "").isprintable(), found.output
        assert max(map(len, found.output.splitlines())) < 1100 and len(found.output.splitlines()) < 12
    assert one_line(CliRunner().invoke(app, ["runs", "resume", str(tmp_path)]).output.strip(), 2100)


@pytest.mark.parametrize("cell", ["measure = x'00ff'", "error = x'00ff'", "seconds = 9e999", "seconds = x'00'"])
def test_a_cell_of_another_kind_is_one_line(cell: str, tmp_path: Path) -> None:
    """SQLite keeps any kind of value in any column."""
    with Store(tmp_path) as store:
        store.put(Trial(Conditions("m", "float32", "cpu", "sdpa", 1), "score", Slice("d", 0, 1)), Result(), 1.0)
    with closing(sqlite3.connect(tmp_path / "run.sqlite")) as db:
        db.execute(f"UPDATE trials SET {cell}")
        db.commit()
    for command in ("show", "list", "check", "resume"):
        found = CliRunner().invoke(app, ["runs", command, str(tmp_path)])
        assert "Traceback" not in found.output and (found.exception is None or isinstance(found.exception, SystemExit))
    assert "1 trials, 1 damaged" in CliRunner().invoke(app, ["runs", "check", str(tmp_path)]).output


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("dtypes", "float32", "products", "matmul", "sum_bits", "value"), {"a": 1}),
        (("dtypes", "float32", "products", "matmul", "sum_bits"), [1]),
        (("dtypes", "float32", "functions", "exp", "bits_right"), "8"),
        (("dtypes", "float32"), 3),
        (("facts", "flags"), 3),
        (("facts", "name"), ["x"]),
        (("quick",), "yes"),
    ],
)
def test_a_passport_is_checked_line_by_line(place: tuple[str, ...], value: Any, tmp_path: Path) -> None:
    """By a schema, before anything is printed of it."""
    found = json.loads((CORPUS / "passport" / "cpu.json").read_text())
    part = found
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    (tmp_path / "x.json").write_text(json.dumps(found))
    with pytest.raises(InvalidInput, match=r"is not a valid passport: .*was expected, got") as caught:
        read_passport(tmp_path / "x.json")
    assert one_line(str(caught.value))


@pytest.mark.parametrize("make", [lambda: ns.Gaussian(1e308), lambda: ns.Uniform(1e10), lambda: ns.Shrink(10**400),
                                  lambda: ns.Injection(ns.Gaussian(0.1), layer_multipliers={0: 1e300})])  # fmt: skip
def test_noise_beyond_all_bounds_is_one_line(make: Any) -> None:
    """It overflowed somewhere inside the model."""
    with pytest.raises(InvalidInput, match=r"must be at most 1e\+09, got") as caught:
        make()
    assert one_line(str(caught.value))
    found = CliRunner().invoke(app, ["diagnose", "demo", "--noise-scale", "1e308"])
    assert found.exit_code == 2 and "at most 1e+09" in found.output


def test_a_report_can_hide_no_characters(tmp_path: Path) -> None:
    """A report whose texts would turn a terminal or a page is refused."""
    found = json.loads((CORPUS / "report" / "robustness.json").read_text())
    for text in ("a\x1b[2J", "a\u202eb", "a\nverdict: healthy", "a\u200bb"):
        found["run"]["model"]["source"] = text
        (tmp_path / "report.json").write_text(json.dumps(found))
        with pytest.raises(InvalidInput, match=r"run\.model\.source: text without control characters was expected"):
            Report.load(tmp_path)


@pytest.mark.parametrize("count", [0, -5])
def test_a_module_without_weights_is_refused(count: int, tmp_path: Path) -> None:
    """Plans divide by the number of weights."""
    found = json.loads((CORPUS / "report" / "diagnosis.json").read_text())
    for row in found["format_scores"]["modules"]:
        row["parameters"] = count
    (tmp_path / "report.json").write_text(json.dumps(found))
    with pytest.raises(InvalidInput, match=rf"parameters must be an integer of at least 1, got {count}"):
        Report.load(tmp_path)
