"""The problems of the bundled model: right answers, known ranges, and nothing shared between training and test."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope import demo
from noisescope.demo import problems

# What each kind of sentence does, read from its words and not from the generator's tables.
GROWS = r"buys|gives \w+ \d+ \w+\.|finds|arrive|added|wins|brings"
SHRINKS = r"gives \d+|lost|sells \d+ of them|takes|break|uses up|left behind"
TIMES = r"times as many|of each one"
PARTS = r"equal piles|one of every|keeps one share|equal bags"


def solve(prompt: str) -> list[int]:
    """The running values by reading the sentences, independently of how they were made."""
    opening, *story = re.findall(r"[^.?]+\.", prompt)
    values = [int(re.findall(r"\d+", opening)[0])]
    for sentence in story:
        (n,) = map(int, re.findall(r"\d+", sentence))
        kinds = [bool(re.search(pattern, sentence)) for pattern in (GROWS, SHRINKS, TIMES, PARTS)]
        assert sum(kinds) == 1, sentence
        value = values[-1]
        if kinds[3]:
            assert value % n == 0, prompt
        values.append([value + n, value - n, value * n, value // n][kinds.index(True)])
    return values


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4]))
def test_answers_are_right(seed: int, steps: int) -> None:
    """Reading the story gives the values and the answer; every value is in range and divisions come out whole."""
    problem = problems.make(random.Random(seed), steps)
    assert solve(problem.prompt) == list(problem.values) and problem.answer == str(problem.values[-1])
    assert problem.steps == steps and 2 <= problem.values[0] <= 60
    assert all(0 <= value <= 99 for value in problem.values)
    assert problem.prompt.endswith("?") and "{" not in problem.prompt


def test_same_seed_same_problems() -> None:
    """A seed decides the stream, and another seed gives another one."""
    first, again, other = (list(itertools.islice(problems.stream(seed), 200)) for seed in (5, 5, 6))
    assert first == again and first != other


def test_variety() -> None:
    """At least 20 distinct templates, all of them used; steps are 2 to 4, evenly; every operation occurs."""
    sample = list(itertools.islice(problems.stream(0), 3000))
    assert len(set(problems.TEMPLATES)) == len(problems.TEMPLATES) >= 20
    text = " ".join(item.prompt for item in sample)
    for template in problems.TEMPLATES:
        words = re.escape(template).replace(r"\{n\}", r"\d+")
        assert re.search(re.sub(r"\\\{\w+\\\}", r"\\w+", words), text), template
    counts = Counter(item.steps for item in sample)
    assert set(counts) == {2, 3, 4} and min(counts.values()) > 900
    assert len({item.answer for item in sample}) > 90


def test_stream_leaves_out_what_it_is_told_to() -> None:
    """A prompt in `without` never comes, and the rest of the stream stays as it was."""
    first = list(itertools.islice(problems.stream(1), 50))
    left_out = frozenset(item.prompt for item in first[::2])
    assert list(itertools.islice(problems.stream(1, without=left_out), 25)) == first[1::2]


def read(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.parametrize(
    ("path", "least"), [(demo.test_file(), 500), (demo.calibration_file(), 256)], ids=["test", "calibration"]
)
def test_files_hold_right_problems(path: Path, least: int) -> None:
    """Each line of the bundled files is a distinct problem of 2 to 4 steps with the right answer."""
    rows = read(path)
    assert len(rows) >= least and len({row["prompt"] for row in rows}) == len(rows)
    for row in rows:
        values = solve(row["prompt"])
        assert set(row) == {"prompt", "answer"} and row["answer"] == str(values[-1]) and 3 <= len(values) <= 5


def test_nothing_is_shared() -> None:
    """No prompt of the test is in the calibration, and none of both in 20,000 problems of the training stream."""
    from noisescope.demo.training_data import training_problems

    tests, calibration = ({row["prompt"] for row in read(path)} for path in (demo.test_file(), demo.calibration_file()))
    assert not tests & calibration
    training = {item.prompt for item in training_problems(0, 20_000, frozenset(tests | calibration))}
    assert len(training) > 15_000 and not training & (tests | calibration)
