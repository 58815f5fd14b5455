"""Is a generated answer right? Numbers are compared as numbers, other answers as plain words. No torch here."""

from __future__ import annotations

import collections
import re
import unicodedata
from decimal import Decimal
from fractions import Fraction

# A sign or digits that begin a number: not inside a word (H2O, v1.2), and a minus after a value is a subtraction.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\w)\]}%])(?P<sign>-))?\$?(?P<inner>-)?"
    r"(?P<digits>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?P<power>[eE][+-]?[0-9]{1,3}(?![0-9A-Za-z]))?"
    r"(?:\s?/\s?(?P<below>[0-9]{1,50})(?![0-9/]|\.[0-9]|,[0-9]{3}))?"
)
_MARKED = re.compile(r"####[\s*:]*")
_STATED = re.compile(r"\banswer\s+is\b[^\S\n]*:?", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")
_DATE = re.compile(r"\b([0-9]{1,4})/([0-9]{1,4})/([0-9]{1,4})\b")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_REACH = 500  # characters after a mark in which its number is looked for
_NEXT_QUESTION = "\nQuestion:"  # a model that isn't tuned to stop writes the next question of our own prompt form


def extract_number(text: str) -> str | None:
    """The number a text gives as its answer, in one spelling: "38.0" and "$38" are "38", "1,000." is "1000".

    That is the number after the last "####", else the one in the last \\boxed{}, else the one after the last "answer
    is", else the last number. A fraction stays a fraction in lowest terms; % and $ are dropped.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    for mark in reversed(list(_MARKED.finditer(text))):
        found = _NUMBER.match(_plain(text[mark.end() : mark.end() + _REACH]))
        if found:
            return _canonical(found)
    boxed = _boxed(text)
    if boxed is not None and (found := _last(boxed)):
        return _canonical(found)
    for mark in reversed(list(_STATED.finditer(text))):
        sentence = _SENTENCE_END.split(text[mark.end() : mark.end() + _REACH], maxsplit=1)[0]
        result = _plain(sentence).rpartition("=")[2]  # "the answer is 3 + 4 = 7"
        if found := _NUMBER.search(result):
            return _canonical(found)
    found = _last(text)
    return _canonical(found) if found else None


def answers_match(predicted_text: str, answer: str) -> bool:
    """Whether a generated text gives the reference answer.

    A reference with a number is compared by that number, exactly (38.0 equals 38, 3/4 equals 0.75); any other by its
    words, without case, punctuation and blanks: with the whole text, its first line, or what follows "answer is".
    """
    predicted = predicted_text.split(_NEXT_QUESTION)[0]
    wanted = extract_number(answer)
    if wanted is not None:
        found = extract_number(predicted)
        return found is not None and (found == wanted or _value(found) == _value(wanted))
    lines = predicted.strip().splitlines() or [""]
    stated = _STATED.split(predicted)[-1].strip().partition("\n")[0]  # the whole text where there is no "answer is"
    return _words(answer) in {_words(candidate) for candidate in (predicted, lines[0], stated)}


def _plain(text: str) -> str:
    """Dates apart, and LaTeX's ways to write a number undone: \\frac{3}{4}, 1{,}000, \\$5, 50\\%."""
    text = _FRACTION.sub(r"\1/\2", _DATE.sub(r"\1 \2 \3", text))
    return text.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%").replace("\\!", "").lstrip(" *$\\({[")


def _boxed(text: str) -> str | None:
    """What the last \\boxed{...} holds, braces within it included."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inner, depth = start + len("\\boxed{"), 1
    for at in range(inner, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[inner:at]
    return text[inner:]


def _last(text: str) -> re.Match[str] | None:
    return next(iter(collections.deque(_NUMBER.finditer(_plain(text)), maxlen=1)), None)


def _canonical(found: re.Match[str]) -> str:
    sign = "-" if bool(found["sign"]) != bool(found["inner"]) else ""
    digits = found["digits"].replace(",", "")
    below = found["below"]
    if below and int(below) and not found["power"] and len(digits) <= 50:
        ratio = Fraction(digits) / int(below)
        digits = str(ratio)  # lowest terms, and no "/1"
    else:
        digits = format(Decimal(digits + (found["power"] or "")), "f")  # not normalize(): it rounds to 28 digits
        if "." in digits:
            digits = digits.rstrip("0").rstrip(".")
        digits = digits.lstrip("0") or "0"
        digits = f"0{digits}" if digits.startswith(".") else digits
    return "0" if digits == "0" else sign + digits


def _value(canonical: str) -> Fraction | str:
    """As a number; one of a thousand digits, which a model out of control may write, stays the text it is."""
    return Fraction(canonical) if len(canonical) < 1000 else canonical


def _words(text: str) -> str:
    folded = unicodedata.normalize("NFKC", text).casefold()
    kept = "".join(" " if unicodedata.category(letter)[0] == "P" else letter for letter in folded)
    return " ".join(kept.split()) or folded.strip()
