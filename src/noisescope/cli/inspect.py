"""`noisescope inspect MODEL`: places, operators and modules; what is fused, absent, quantised, left alone."""

from __future__ import annotations

import json
from typing import Any

from noisescope import api
from noisescope.cli.output import aligned, print_each, say, write_table
from noisescope.options.device_commands import InspectOptions


def inspect_model(options: InspectOptions) -> None:
    """Show where noise can fall in a model.

    Places, operators, and what is fused, absent or quantised.

    Reads the config, not the weights, so a model of any size is inspected in seconds and on any machine.

    \b
    Examples:
      noisescope inspect ./Qwen2.5-1.5B-Instruct
      noisescope inspect ./Qwen2.5-1.5B-Instruct --attn-implementation eager --verbose
      noisescope inspect ./llama-3.2-1b-q4_k_m.gguf
      noisescope inspect ./Mixtral-8x7B-v0.1 --json
      noisescope inspect tiny:llama      a tiny random Llama, to try without a model; also
                                         tiny:gpt2, tiny:mixtral, tiny:bert, tiny:t5 ...
    """
    subject = api.inspect(options.model, options=options)
    found = api.inspection.anatomy_facts(subject, verbose=options.verbose)
    paths = write_table(subject, options.csv)
    if options.json:
        say(json.dumps(found, indent=2))
    else:
        print_anatomy(found)
        print_each(paths)


def print_anatomy(found: dict[str, Any]) -> None:
    say(found["architecture"])
    say(f"  blocks      {found['blocks']}")
    say(f"  parameters  {found['parameters']:,} in {', '.join(found['dtypes'])}")
    name, how = found["attention"]["implementation"], "are plain calls"
    if found["attention"]["fused"]:
        how = f"run inside {name}; a targeted layer is opened to a decomposed path"
    say(f"  attention   {name}: softmax and matmul {how}")
    if found["experts"]:
        eager = found["experts"] == "eager"
        how = "each expert hit makes its own products, counted below as one" if eager else "one product for all experts"
        say(f"  experts     {found['experts']}: {how}")
    say(f"\nOperators in one forward, by place\n{_counts(found['operators'])}")
    if found["left_alone"]:
        say("\nLeft alone unless named: routers by modules=..., rotary angles by places={'rotary'}")
        say(_counts(found["left_alone"]))
    if found["possible"]:
        say(f"\nMay be called by a block itself, seen only when it runs: {', '.join(found['possible'])}")
    say(f"\nAbsent: {', '.join(found['absent']) or 'nothing'}")
    for kind, count in found["quantised"].items():
        say(f"Quantised: {count} x {kind}, packed; noise can fall on their output and input, not on their weight")
    print_each(found["notes"], "Note: ")
    if "modules" in found:
        rows = [[str(m["place"]), m["module"], _times(m["counts"]), m["remark"]] for m in found["modules"]]
        say("\nModules\n" + aligned([["place", "module", "operators", "remark"], *rows], "  "))


def _counts(rows: list[dict[str, Any]]) -> str:
    operators = [op for op in api.reports.OPERATORS if any(op in row["counts"] for row in rows)]
    lines = [
        [api.inspection.place_ranges(row["places"]), *(str(row["counts"].get(op, "")) for op in operators)]
        for row in rows
    ]
    return aligned([["place", *operators], *lines], "  ")


def _times(counts: dict[str, int]) -> str:
    return ", ".join(operator if count == 1 else f"{count} {operator}" for operator, count in counts.items())
