"""Compares passports, with one sentence per real difference and why it matters; reads and writes them.

Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from noisescope.atomic_write import write_file
from noisescope.errors import InvalidInput
from noisescope.jsonform import Json
from noisescope.passports.words import ATTENTION_ERRORS, FACTS, NAMES, RULES, accumulation_switch, operand_switch, shown
from noisescope.text_escaping import cut
from noisescope.untrusted_files import MIB, FileKind, fitting, members, parse_json, read_text

KIND = "noisescope passport"
PASSPORT = FileKind("passport", "Create it with `noisescope passport -o FILE`", max_bytes=16 * MIB)
SCHEMA_VERSION = 2
SAME = "same: the two passports agree in everything measured on both"
KINDS = ("health", "arithmetic", "coverage", "settings")
ULPS_APART = 0.1  # worst errors of a function closer than this are the same for any purpose
BITS_APART = 3  # right bits fewer than the other's: a coarse table, reported by itself

Line = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """One way in which two devices differ.

    kind: "health" (one computes wrong results), "arithmetic", "coverage" (measured on one only) or "settings".
    """

    kind: str
    key: str
    dtypes: tuple[str, ...]
    first: Any
    second: Any
    sentence: str


def diff(a: dict[str, Any], b: dict[str, Any]) -> list[Difference]:
    """Every real difference between two passports, the most serious kind first; [] if they are the same."""
    check_passport(a, "the first passport")
    check_passport(b, "the second passport")
    try:
        found = [*_lines(a, b), *_functions(a, b), *_coverage(a, b), *_facts(a, b)]
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # a value of another type than is written
        raise InvalidInput(f"one of the passports is damaged ({error}): create it again") from error
    return sorted(found, key=lambda difference: KINDS.index(difference.kind))  # stable


def say(differences: list[Difference]) -> str:
    """All differences as text, or that there are none."""
    if not differences:
        return SAME
    if all(difference.kind == "settings" for difference in differences):
        head = "same arithmetic; only settings differ"
    else:
        head = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}"
    return "\n".join([f"{head}:", *(f"- {difference.sentence}" for difference in differences)])


def _names(a: dict[str, Any], b: dict[str, Any]) -> tuple[str, str]:
    first, second = (f"{p['facts'].get('name', '?')} ({p['facts'].get('device', '?')})" for p in (a, b))
    return ("the first", "the second") if first == second else (first, second)


def _measured_on_both(a: dict[str, Any], b: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, mine in a["dtypes"].items():
        theirs = b["dtypes"].get(name, {"skipped": ""})
        if "skipped" not in mine and "skipped" not in theirs:
            yield name, mine, theirs


def _flat(dtype: dict[str, Any]) -> dict[tuple[str, str, str], Line]:
    """(section, operation, key) -> line, functions apart. What was skipped has no line."""
    flat = {("products", op, key): line for op, t in dtype.get("products", {}).items() for key, line in t.items()}
    for section in ("elementwise", "attention"):
        flat |= {(section, "", key): line for key, line in dtype.get(section, {}).items()}
    return {place: line for place, line in flat.items() if isinstance(line, dict) and "skipped" not in line}


def _coverage(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    """dtypes and operations that only one device has."""
    first, second = _names(a, b)
    for name in sorted(a["dtypes"].keys() | b["dtypes"].keys()):
        mine, theirs = (p["dtypes"].get(name, {"skipped": "passport from an older version"}) for p in (a, b))
        if ("skipped" in mine) != ("skipped" in theirs):
            lacking, why = (first, mine["skipped"]) if "skipped" in mine else (second, theirs["skipped"])
            has = ("skipped" not in mine, "skipped" not in theirs)
            sentence = f"{name}: not measured on {lacking} ({why}), so it was not compared."
            yield Difference("coverage", "dtype", (name,), *has, sentence)
    for name, mine, theirs in _measured_on_both(a, b):
        for op in sorted(mine["products"].keys() | theirs["products"].keys()):
            tables = [
                dtype["products"].get(op, {"skipped": "passport from an older version"}) for dtype in (mine, theirs)
            ]
            has = ("skipped" not in tables[0], "skipped" not in tables[1])
            if has[0] != has[1]:
                lacking, table = (second, tables[1]) if has[0] else (first, tables[0])
                sentence = f"{name} ({op}): not measured on {lacking} ({table['skipped']})."
                yield Difference("coverage", op, (name,), *has, sentence)


def _lines(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    """Lines of the same place that differ; equal differences in several dtypes and operations are merged."""
    groups: dict[tuple[str, str, str, str], list[tuple[str, str, Line, Line]]] = {}
    names = _names(a, b)
    for dtype, mine, theirs in _measured_on_both(a, b):
        others = _flat(theirs)
        for (section, op, key), line in _flat(mine).items():
            other = others.get((section, op, key))
            found = _compared(section, key, line, other, names, a["facts"], b["facts"]) if other else None
            if found:
                groups.setdefault((section, key, *found), []).append((dtype, op, line, other or {}))
    for (section, key, kind, body), places in groups.items():
        dtypes = tuple(dict.fromkeys(dtype for dtype, *_ in places))
        ops = ", ".join(dict.fromkeys(op for _, op, *_ in places if op)) or section
        left, right = (place.get("value") for place in places[0][2:])
        yield Difference(kind, key, dtypes, left, right, f"{', '.join(dtypes)} ({ops}): {body}")


def _compared(
    section: str, key: str, mine: Line, theirs: Line, names: tuple[str, str], *facts: dict[str, Any]
) -> tuple[str, str] | None:
    """(kind, sentence) of two lines that differ, else None."""
    first, second = names
    nonsense = [line.get("nonsense") for line in (mine, theirs)]
    if nonsense[0] or nonsense[1]:
        if nonsense[0] == nonsense[1]:
            return None
        what, both = NAMES.get(key, key.replace("_", " ")), zip(names, nonsense, strict=True)
        each = " and ".join(f"{name} gives wrong results for {what}: {seen}" for name, seen in both if seen)
        return "health", f"{each}. Look for a fault with noisescope locate."
    if section == "attention" and key in ATTENTION_ERRORS:
        return _attention_error(key, mine, theirs, names)
    x, y = shown(key, mine), shown(key, theirs)
    if mine.get("value") == theirs.get("value") and mine.get("at_least") == theirs.get("at_least"):
        return None
    if key == "sum_bits":
        bits = min(mine["value"], theirs["value"])
        return "arithmetic", (
            f"sums keep {x} bits on {first}, {y} on {second}. On the device with fewer bits, a sum of K terms is "
            f"off by up to K x 2^-{bits} of sum |x||w|, so differences grow with the inner dimension."
            f"{accumulation_switch(facts)}"
        )
    if key == "operand_bits":
        if not mine.get("cut") and not theirs.get("cut"):  # on one, short sums hide how many bits operands have
            return None
        return "arithmetic", _operands(mine, theirs, names, facts)
    if key == "result_bits":
        return "arithmetic", (
            f"results have {x} bits after the leading one on {first}, {y} on {second}. The shorter results were "
            f"accumulated or stored in fewer bits: expect differences from that bit on in every element."
        )
    if key in RULES.get(section, {}):
        subject, why = RULES[section][key]
        return "arithmetic", f"{subject} {x} on {first}, {y} on {second}. {why}"
    return None  # the size of an error, or order along the inner dimension: no difference by itself


def _operands(mine: Line, theirs: Line, names: tuple[str, str], facts: tuple[dict[str, Any], ...]) -> str:
    """Operands truncated on one device (or differently on both): the size of the error, and the setting behind it."""
    whole = max(mine.get("of") or 0, theirs.get("of") or 0)
    kept, error, switches = [], 0.0, []
    for name, line, fact in zip(names, (mine, theirs), facts, strict=True):
        if not line.get("cut"):
            kept.append(f"{name} keeps {'all ' + str(whole) if line.get('value') else 'as many as its sums keep'}")
            continue
        known = line["cut"][line["cut"].index("(") :] if "(" in line["cut"] else ""
        kept.append(
            f"{name} keeps the operands of a product to {line['value']} bits after the leading one {known}".strip()
        )
        half = 1 if "nearest" in str(line.get("rounding")) else 0
        error = max(error, 2.0 ** -(line["value"] + half))
        switches.append(operand_switch(fact))
    kept.sort(key=lambda text: "operands" not in text)
    cure = f" To compare like with like, {' and '.join(dict.fromkeys(switches))}." if switches else ""
    return f"{', '.join(kept)}. Each operand is off by up to {error:.1g} of itself.{cure}"


def _attention_error(key: str, mine: Line, theirs: Line, names: tuple[str, str]) -> tuple[str, str] | None:
    x, y = mine["value"], theirs["value"]
    if x is None or y is None or abs(x - y) < 1 or max(x, y) < 2 * min(x, y):
        return None
    why = "The device with the larger error keeps scores, weights or sums in fewer bits."
    return "arithmetic", f"{ATTENTION_ERRORS[key]} {x:g} ulp on {names[0]}, {y:g} on {names[1]}. {why}"


def _functions(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    """Functions: coarse ones by themselves, the rest as one list per dtype."""
    first, second = _names(a, b)
    for dtype, mine, theirs in _measured_on_both(a, b):
        listed = []
        for name in mine.get("functions", {}):
            x, y = mine["functions"][name], theirs.get("functions", {}).get(name, {"skipped": ""})
            if "skipped" in x or "skipped" in y:
                continue
            found = _compared("functions", name, x, y, (first, second))
            if found:
                yield Difference(found[0], name, (dtype,), x["value"], y["value"], f"{dtype} ({name}): {found[1]}")
            elif x["value"] is None or y["value"] is None:
                continue
            elif abs(x["bits_right"] - y["bits_right"]) >= BITS_APART:
                yield _coarse(name, dtype, (x, y), (first, second))
            elif x["points"] == y["points"] and abs(x["value"] - y["value"]) >= ULPS_APART:
                listed.append((name, x["value"], y["value"]))
        if listed:
            values = ", ".join(f"{name} {x:g} and {y:g}" for name, x, y in listed)
            why = "Both errors are of normal size: expect the last bits to differ; this is not a fault."
            sentence = f"{dtype} (functions): worst error in ulp on {first} and on {second}: {values}. {why}"
            names = [name for name, *_ in listed]
            yield Difference("arithmetic", "functions", (dtype,), names, names, sentence)


def _coarse(name: str, dtype: str, lines: tuple[Line, Line], names: tuple[str, str]) -> Difference:
    x, y = lines
    coarse, fine = (0, 1) if x["bits_right"] < y["bits_right"] else (1, 0)
    bad, good = lines[coarse], lines[fine]
    sentence = (
        f"{dtype} ({name}): {names[coarse]} is off by up to {bad['value']:g} ulp, worst at {bad['at']} "
        f"({bad['bits_right']} bits are correct), {names[fine]} by {good['value']:g}. Likely cause: a coarse table "
        f"or a low-precision unit. Softmax, norms and activations that use it carry that error."
    )
    return Difference("arithmetic", name, (dtype,), x["value"], y["value"], sentence)


def _facts(a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    first, second = _names(a, b)
    mine, theirs = a["facts"], b["facts"]
    for key, why in FACTS.items():
        if key in mine and key in theirs and mine[key] != theirs[key]:
            sentence = f"{key.replace('_', ' ')} is {mine[key]} on {first}, {theirs[key]} on {second}. {why}"
            yield Difference("settings", key, (), mine[key], theirs[key], sentence)
    flags = mine.get("flags", {}), theirs.get("flags", {})
    for key in flags[0]:
        if key in flags[1] and flags[0][key] != flags[1][key]:
            x, y = flags[0][key], flags[1][key]
            why = "Set it to the same value on both before comparing: it decides how products are computed."
            sentence = f"torch's {key} is {x} on {first}, {y} on {second}. {why}"
            yield Difference("settings", key, (), x, y, sentence)


# -- files


def write_passport(passport: dict[str, Any], path: str | Path) -> None:
    """Write to a file; creates folders as needed."""
    try:
        write_file(Path(path), json.dumps(passport, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise InvalidInput(f"can't write {path}: {error.strerror or error}. Choose another place with -o") from error


def read_passport(path: str | Path) -> dict[str, Any]:
    """Read a passport from a file; anything else is rejected with the reason."""
    file = Path(path)
    return check_passport(parse_json(read_text(file, PASSPORT), file, PASSPORT), str(path))


def check_passport(found: Any, what: str) -> dict[str, Any]:
    """The passport itself, if this version of noisescope can read it."""
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InvalidInput(
            f"{what} is not a passport (no kind {KIND!r} in it). Create one: noisescope passport -o FILE"
        )
    if found.get("schema_version") != SCHEMA_VERSION:
        version = found.get("schema_version")
        raise InvalidInput(
            f"{what} has schema version {cut(repr(version))}; this noisescope reads {SCHEMA_VERSION}: create it again"
        )
    for name, kind in _PASSPORT.items():
        fitting(kind, found.get(name), f"{what}, {name},", PASSPORT)
    for name in found["facts"].keys() & _FACTS.keys():
        fitting(_FACTS[name], found["facts"][name], f"{what}, facts.{name},", PASSPORT)
    for name, dtype in found["dtypes"].items():
        for where, line in _all_lines(dtype):
            _check_line(line, f"{what}, {cut(name)}.{cut(where)},")
    return found


# -- the schema: a line holds some of these keys, and what is not among them labels it and is not computed with

_Number = int | float | None
_PASSPORT: dict[str, Any] = {
    "quick": bool, "facts": dict[str, Any], "run": dict[str, Any] | None, "dtypes": dict[str, dict[str, Any]],
}  # fmt: skip
_LINE: dict[str, Any] = {
    "value": bool | int | float | str | tuple[int, ...] | None, "how": str, "skipped": str, "hidden": str,
    "nonsense": str, "cut": str | None, "rounding": str | None, "at_least": bool, "of": _Number, "worst": _Number,
    "repeats": _Number, "points": int, "bits_right": int, "at": Json,
}  # fmt: skip
_FACTS: dict[str, Any] = {"device": str, "name": str, "torch": str, "threads": int, "flags": dict[str, Json]}


def _all_lines(dtype: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    """Every line of a dtype with its place; "skipped" stands for a whole table."""
    for section, table in dtype.items():
        if section == "skipped":
            continue
        tables = table if section == "products" and isinstance(table, dict) else {"": table}
        for op, lines in tables.items():
            if not isinstance(lines, dict):
                yield section, lines
                continue
            yield from ((f"{section}.{op}.{key}", line) for key, line in lines.items() if key != "skipped")


def _check_line(line: Json, where: str) -> None:
    found = members(line, where, PASSPORT)
    for key in found.keys() & _LINE.keys():
        fitting(_LINE[key], found[key], f"{where} {key},", PASSPORT)
