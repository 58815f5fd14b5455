"""`noisescope passport`: the arithmetic of a device, and in words how it differs from another one's."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from noisescope import api
from noisescope.cli.command_builder import announcer
from noisescope.cli.output import aligned, say
from noisescope.errors import InvalidInput
from noisescope.options.device_commands import PassportOptions

_SHORT = {
    "nearest, ties to even": "nearest",
    "nearest, ties away from zero": "ties away",
    "each term cut toward zero before the sum": "terms cut",
    "fused multiply-add": "fma",
    "flushed to zero": "flushed",
    "float8_e4m3fn": "fp8 e4m3",
    "float8_e4m3fn, fast accumulation": "fp8 fast",
    "wider than the format": "wider",
    "that of the format": "format's",
    "the other operand": "other",
}
_PRODUCTS = {
    "bits kept in sums": "sum_bits",
    "sums rounded": "sum_rounding",
    "operand bits": "operand_bits",
    "result bits": "result_bits",
    "results rounded": "result_rounding",
    "terms": "terms",
    "small integers": "small_integers",
    "subnormal operands": "subnormal_operands",
    "subnormal results": "subnormal_results",
    "overflow": "overflow",
    "NaN x 1": "nan",
    "range of sums": "sum_range",
    "runs that differ": "repeats",
    "batch sizes that differ": "batch_sizes",
    "order of rows": "row_order",
    "order of columns": "column_order",
    "order of a batch": "batch_order",
    "layout": "layout",
    "f(0) = 0": "zero",
    "f(-x) = -f(x)": "odd",
    "f(2x) = 2 f(x)": "doubling",
    "unit rows": "one_hot",
}
_ELEMENTWISE = {
    "add rounded": "add_rounding",
    "cast rounded": "cast_rounding",
    "subnormal operands": "subnormal_operands",
    "subnormal results": "subnormal_results",
    "overflow": "overflow",
    "cast overflow": "cast_overflow",
    "maximum(NaN, 1)": "maximum_of_nan",
    "relu(NaN)": "relu_of_nan",
}
_ATTENTION = {
    "error, ulp": "error",
    "rows sum to 1, ulp": "rows_sum",
    "keys shifted, ulp": "key_shift",
    "-V": "odd",
    "2 V": "doubling",
    "run twice": "repeat",
}


def passport_of_device(options: PassportOptions) -> None:
    """Measure a device's arithmetic.

    Accumulator bits, rounding, subnormals, ulps, what repeats.

    Needs no model and no data, takes seconds and changes no setting. With --diff it says in words how the device
    differs from another one and why that matters; a difference is no error.

    \b
    Examples:
      noisescope passport
      noisescope passport --device cuda -o h200.json
      noisescope passport --device cpu --diff h200.json
      noisescope passport --from npu.json --diff h200.json      two files, nothing is measured
    """
    # a bad file is refused before anything is measured
    theirs = None if options.diff is None else api.comparison.read_passport(options.diff)
    if options.from_ is not None:
        passport = api.comparison.read_passport(options.from_)
    else:
        if "device" in options.left_open:
            device, why = api.defaults.default_device()
            announcer(options)(f"device {device} ({why})")
            options = dataclasses.replace(options, device=device)
        passport = api.comparison.passport(options=options)
    if options.output is not None:
        api.comparison.write_passport(passport, options.output)
    differences = api.comparison.diff(passport, theirs) if theirs is not None else None
    if options.json:
        found = dict(passport)
        if differences is not None:
            found["differences"] = [dataclasses.asdict(difference) for difference in differences]
        say(json.dumps(found, indent=1))
        return
    try:
        print_passport(passport)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if options.from_ is None:
            raise
        raise InvalidInput(f"{options.from_} is damaged ({error!r}): take the passport again") from error
    if differences is not None and theirs is not None:
        say(f"\nAgainst {options.diff}: {_device(theirs)}")
        if passport.get("quick") != theirs.get("quick"):
            say("One of the two is quick: functions are compared in their right bits only.")
        say(api.comparison.say(differences))
    if options.output is not None:
        say(f"\n  {options.output}")


def _device(passport: dict[str, Any]) -> str:
    facts = passport["facts"]
    parts = [f"torch {facts.get('torch', '?')}"]
    if "threads" in facts:
        parts.append(f"{facts['threads']} thread{'s' if facts['threads'] != 1 else ''}")
    parts += [str(facts[key]) for key in ("vector_unit", "cuda") if key in facts]
    return f"{facts.get('name', '?')} ({facts.get('device', '?')}), {', '.join(parts)}"


def print_passport(passport: dict[str, Any]) -> None:
    """A table by dtype, the switches that matter, and what is not as it should be."""
    say(_device(passport))
    on = [f"{name} {value}" for name, value in passport["facts"].get("flags", {}).items()]
    say(f"flags: {', '.join(on)}")
    dtypes = {name: found for name, found in passport["dtypes"].items() if "skipped" not in found}
    operations = list(dict.fromkeys(op for found in dtypes.values() for op in found.get("products", {})))
    # 8-bit products have a call of their own; they go into the first table beside the others
    main = {
        name: found["products"].get("matmul") or found["products"].get("scaled_mm", {})
        for name, found in dtypes.items()
    }
    _print_table("Products", main, _PRODUCTS)
    for op in operations:
        if op not in ("matmul", "scaled_mm"):
            _print_unlike(op, main, {name: found["products"].get(op, {}) for name, found in dtypes.items()})
    whole = {name: found for name, found in dtypes.items() if "functions" in found}
    _print_table("Element by element", {name: found["elementwise"] for name, found in whole.items()}, _ELEMENTWISE)
    functions = list(dict.fromkeys(name for found in whole.values() for name in found["functions"]))
    tables = {name: found["functions"] for name, found in whole.items()}
    _print_table("Functions: worst error in ulp", tables, dict(zip(functions, functions, strict=True)))
    _print_table("Fused attention", {name: found["attention"] for name, found in whole.items()}, _ATTENTION)
    for name, found in passport["dtypes"].items():
        if "skipped" in found:
            say(f"\n{name}: not measured: {found['skipped']}")
    wrong = _not_as_it_should_be(dtypes)
    if wrong:
        say("\nNot as it should be\n" + "\n".join(f"- {text}" for text in wrong))


def _print_table(title: str, tables: dict[str, dict[str, Any]], rows: dict[str, str]) -> None:
    if not tables:
        return
    cells = [[title, *(_SHORT.get(name, name) for name in tables)]]
    for label, key in rows.items():
        row = [_cell(key, lines.get(key)) for lines in tables.values()]
        if any(row):
            cells.append([f"  {label}", *(cell or "-" for cell in row)])
    say(f"\n{aligned(cells)}")


def _cell(key: str, line: Any) -> str:
    if not isinstance(line, dict) or "skipped" in line:
        return ""
    if "nonsense" in line:
        return "NONSENSE"
    value = line.get("value")
    if value is None:
        return "hidden" if "hidden" in line else ""
    if isinstance(value, bool):
        return "equal" if value else "differs"
    if key == "batch_sizes":
        return ",".join(map(str, value)) or "none"
    if key == "sum_bits" and line.get("at_least"):
        return f">= {value}"
    if key in ("operand_bits", "result_bits"):
        return f"{value} of {line.get('of', '?')}"
    if key == "repeats":
        return f"{value} of {line.get('repeats', '?')}"
    return f"{value:g}" if isinstance(value, float) else _SHORT.get(str(value), str(value))


def _print_unlike(op: str, main: dict[str, dict[str, Any]], tables: dict[str, dict[str, Any]]) -> None:
    """What another call of the same product does otherwise, in one line."""
    unlike = [
        f"{label} in {name}: {_cell(key, tables[name].get(key))}"
        for label, key in _PRODUCTS.items()
        for name in main
        if tables[name]
        and _cell(key, tables[name].get(key)) != _cell(key, main[name].get(key))
        and key != "batch_order"
    ]
    say(f"  {op}: {'; '.join(unlike) if unlike else 'the same'}")


def _not_as_it_should_be(dtypes: dict[str, Any]) -> list[str]:
    """Every probe whose answer no healthy arithmetic gives."""
    return [
        f"{name} ({op}, {key.replace('_', ' ')}): {line['nonsense']}"
        for name, sections in dtypes.items()
        for section, lines in sections.items()
        for op, table in (lines.items() if section == "products" else [(section, lines)])
        for key, line in table.items()
        if isinstance(line, dict) and "nonsense" in line
    ]
