"""Arithmetic problems in words: the language of the bundled model.

    Mia has 12 stickers. Mia buys 7 more. The stickers become 2 times as many. How many stickers are there now?
    38

The answer is the last number alone, so whoever answers works it out in their head. No torch here: a problem is a value,
and the same seed gives the same problems in the same order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LARGEST = 99  # every value on the way lies between 0 and this
STARTS = (2, 60)
TERMS = (1, 40)  # added or subtracted
FACTORS = (2, 3)
DIVISORS = (2, 3, 4)
STEPS = (2, 3, 4)

NAMES = (
    "Mia", "Tom", "Ana", "Ben", "Eva", "Leo", "Zoe", "Max", "Ida", "Sam", "Lin", "Ravi", "Noor", "Kai", "Ada", "Otto",
)  # fmt: skip
THINGS = (
    "apples", "books", "stickers", "coins", "marbles", "cards", "pencils", "stones", "shells", "stamps", "buttons",
    "nuts", "cookies", "flowers", "beads", "tickets",
)  # fmt: skip
# Every sentence ends with its only full stop or question mark: training reads the running value there.
OPENINGS = (
    "{name} has {n} {things}.",
    "{name} starts with {n} {things}.",
    "{name} counts {n} {things} on the table.",
    "There are {n} {things} in a box.",
    "A shop sells {n} {things} to {name}.",
    "{name} packs {n} {things} for a trip.",
)
ADD = (
    "Then {name} buys {n} more.",
    "{friend} gives {name} {n} {things}.",
    "{name} finds another {n} {things}.",
    "The next day {n} new {things} arrive.",
    "{n} {things} are added.",
    "{name} wins {n} {things} in a game.",
    "{friend} brings {n} more.",
)
SUBTRACT = (
    "{name} gives {n} {things} to {friend}.",
    "{n} of the {things} get lost.",
    "Then {name} sells {n} of them.",
    "{friend} takes {n} {things} away.",
    "{n} {things} break.",
    "{name} uses up {n} {things}.",
    "After that {n} are left behind.",
)
MULTIPLY = (
    "The {things} become {n} times as many.",
    "{friend} offers {n} times as many in exchange.",
    "Soon {name} has {n} times as many.",
    "A machine makes {n} of each one.",
)
DIVIDE = (
    "{name} makes {n} equal piles and keeps one.",
    "Only one of every {n} {things} stays.",
    "{n} friends share them and {name} keeps one share.",
    "Of {n} equal bags of {things} one stays.",
)
QUESTIONS = (
    "How many {things} does {name} have now?",
    "How many {things} are there in the end?",
    "What is the number of {things} now?",
    "How many {things} are left?",
)
TEMPLATES = (*OPENINGS, *ADD, *SUBTRACT, *MULTIPLY, *DIVIDE, *QUESTIONS)
_SENTENCES = {"+": ADD, "-": SUBTRACT, "*": MULTIPLY, "/": DIVIDE}


@dataclass(frozen=True)
class Problem:
    """A story with its question, the answer, and the running value after each sentence of the story."""

    prompt: str
    answer: str
    values: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.values) - 1


def make(rng: random.Random, steps: int) -> Problem:
    """One problem with that many operations."""
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}
    values = [rng.randint(*STARTS)]
    story = [rng.choice(OPENINGS).format(n=values[0], **words)]
    for _ in range(steps):
        operation, n, result = _step(rng, values[-1])
        story.append(rng.choice(_SENTENCES[operation]).format(n=n, **words))
        values.append(result)
    story.append(rng.choice(QUESTIONS).format(**words))
    return Problem(" ".join(story), str(values[-1]), tuple(values))


def _step(rng: random.Random, value: int) -> tuple[str, int, int]:
    """An operation that keeps the value whole and in range, with its number and its result."""
    while True:
        operation = rng.choice("++--*/")
        choices = {"*": FACTORS, "/": DIVISORS}.get(operation)
        n = rng.choice(choices) if choices else rng.randint(*TERMS)
        if operation == "/" and value % n:
            continue
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[operation]
        if 0 <= result <= LARGEST and not (value == 0 and operation in "*/"):  # 0 times 2 teaches nothing
            return operation, n, result


def stream(
    seed: int,
    *,
    steps: Sequence[int] = STEPS,
    weights: Sequence[float] | None = None,
    without: frozenset[str] = frozenset(),
) -> Iterator[Problem]:
    """Endless problems of a seed, none of whose prompts is in `without`."""
    rng = random.Random(seed)
    while True:
        problem = make(rng, rng.choices(steps, weights)[0])
        if problem.prompt not in without:
            yield problem


def held_out(count: int, seed: int, *, without: frozenset[str] = frozenset()) -> list[Problem]:
    """Distinct problems of a seed."""
    found: dict[str, Problem] = {}
    source = stream(seed, without=without)
    while len(found) < count:
        problem = next(source)
        found.setdefault(problem.prompt, problem)
    return list(found.values())
