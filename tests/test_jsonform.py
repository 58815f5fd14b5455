"""Values as JSON: written, read back with every type checked, described by a schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema
import pytest

from noisescope.errors import InvalidInput
from noisescope.findings import Window
from noisescope.jsonform import from_json, schema_of, to_json


@dataclass(frozen=True)
class Leaf:
    """A leaf of the tree."""

    size: float | None
    kind: Literal["oak", "elm"]


@dataclass(frozen=True)
class Tree:
    """A tree with leaves."""

    name: str
    place: int | str
    leaves: tuple[Leaf, ...]
    ends: tuple[int, int]
    by_layer: Mapping[str, float]
    by_kind: Mapping[Literal["oak", "elm"], float]
    alive: bool


@dataclass(frozen=True)
class Layers:
    first: Window


TREE = Tree("t", "embed", (Leaf(0.5, "oak"), Leaf(None, "elm")), (1, 2), {"0": 1.0}, {"oak": 2.0}, True)
PLAIN = {
    "name": "t",
    "place": "embed",
    "leaves": [{"size": 0.5, "kind": "oak"}, {"size": None, "kind": "elm"}],
    "ends": [1, 2],
    "by_layer": {"0": 1.0},
    "by_kind": {"oak": 2.0},
    "alive": True,
}


def test_a_value_is_written_by_its_field_names() -> None:
    """Tuples become lists, None stays, and nothing else is added."""
    assert to_json(TREE) == PLAIN


def test_reading_gives_the_value_back() -> None:
    """Through real JSON text, so that nothing depends on Python's own types."""
    assert from_json(Tree, json.loads(json.dumps(to_json(TREE)))) == TREE


def test_whole_numbers_are_read_as_floats_where_floats_are_wanted() -> None:
    """JSON does not tell 1 from 1.0."""
    read = from_json(Leaf, {"size": 3, "kind": "oak"})
    assert read.size == 3.0 and isinstance(read.size, float)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "Tree.name: text was expected, got 3"),
        ({"place": 1.5}, "Tree.place: text was expected, got 1.5"),
        ({"alive": 1}, "Tree.alive: true or false was expected, got 1"),
        ({"ends": [1]}, "Tree.ends: a list of 2 was expected"),
        ({"ends": [1, True]}, r"Tree.ends\[1\]: a whole number was expected, got true"),
        ({"leaves": {}}, "Tree.leaves: a list was expected"),
        ({"leaves": [{"size": 1.0, "kind": "fir"}]}, r"Tree.leaves\[0\].kind: 'oak' or 'elm' was expected"),
        ({"leaves": [{"size": "1", "kind": "oak"}]}, r"Tree.leaves\[0\].size: a number was expected"),
        ({"leaves": [{"size": float("nan"), "kind": "oak"}]}, "a finite number was expected, got nan"),
        (
            {"leaves": [{"size": 10**400, "kind": "oak"}]},
            "number was expected, got a whole number of 1329 bits",
        ),
        ({"leaves": [{"size": 1.0}]}, r"Tree.leaves\[0\] has no 'kind'"),
        ({"by_layer": []}, "Tree.by_layer: an object was expected"),
        ({"by_kind": {"fir": 1.0}}, "Tree.by_kind.fir: 'oak' or 'elm' was expected, got \"fir\""),
        ({"new": 1}, 'Tree has "new", which this version does not know'),
    ],
)
def test_what_does_not_fit_is_refused_with_its_path(change: dict[str, Any], words: str) -> None:
    """The first part that does not fit is named, with what came and what was expected."""
    with pytest.raises(InvalidInput, match=words):
        from_json(Tree, {**PLAIN, **change})


def test_a_value_that_refuses_itself_is_named_by_its_path() -> None:
    """Checks of a value's own do not know where it stands; the reader does."""
    with pytest.raises(InvalidInput, match=r"^Layers\.first: a window needs a first and a last layer"):
        from_json(Layers, {"first": {"start": 3, "end": 1, "degradation": None}})


def test_an_error_shows_a_short_piece_of_what_came() -> None:
    """A hostile file can't fill the terminal."""
    with pytest.raises(InvalidInput) as refused:
        from_json(Tree, {**PLAIN, "place": ["x" * 10_000]})
    assert len(str(refused.value)) < 200


def test_what_json_cannot_say_is_refused_when_written() -> None:
    """NaN, infinity and objects without fields are programming errors here."""
    with pytest.raises(InvalidInput, match="nan can't be stored as JSON"):
        to_json(Leaf(float("nan"), "oak"))
    with pytest.raises(InvalidInput, match=r"object.* can't be stored as JSON"):
        to_json({"a": object()})


def test_the_schema_accepts_what_is_written_and_little_else() -> None:
    """Schema and reader come from the same annotations."""
    schema = schema_of(Tree, title="a tree")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert validator.is_valid(to_json(TREE))
    for change in (
        {"name": 3},
        {"leaves": [{"size": 1.0, "kind": "fir"}]},
        {"new": 1},
        {"ends": [1]},
        {"by_kind": {"fir": 1.0}},
    ):
        assert not validator.is_valid({**PLAIN, **change})
    assert schema["$defs"]["Leaf"]["description"] == "A leaf of the tree."
    assert not validator.is_valid({name: value for name, value in PLAIN.items() if name != "alive"})
