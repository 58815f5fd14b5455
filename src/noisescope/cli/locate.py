"""`noisescope locate MODEL`: where it computes wrongly."""

from __future__ import annotations

import json
from typing import Any

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.cli.output import say
from noisescope.options.device_commands import LocateOptions

CHECKS: dict[str, api.reports.pass_fail.Verdict] = {
    "healthy": "pass",
    "faulty": "fail",
    "undecided": "undecided",
}  # of a real device


def locate_fault(options: LocateOptions) -> None:
    """Find what computes wrongly.

    The layer, the operator, the channels, and the kind of fault.

    \b
    noisescope locate path/to/model --device cuda
    noisescope locate path/to/model --device cuda --quick       a prefill of 2 x 32 tokens alone
    noisescope locate path/to/model --tokens 4096 --batch 4 --decode 16      one shape of your own
    noisescope locate path/to/model --inputs prompts.txt --budget 120        your prompts, for two minutes
    noisescope locate path/to/model --repeat 50                 a fault that comes and goes
    noisescope locate path/to/model -o verdict.html             with a picture of what was judged
    noisescope locate demo --simulate gain:0.01@7/linear        a fault put in, and looked for
    noisescope locate demo --simulate stuck_bit:bit=12@3/softmax --dtype bfloat16
    noisescope locate demo --method relations                   by laws of arithmetic: no weights, no host
    noisescope locate demo --method scans
    noisescope locate demo --method fingerprint --simulate dead_zone:0.3@10
    noisescope locate path/to/model --device npu --reference gpu.record      modules on a good device's inputs
    noisescope locate path/to/model --method fingerprint --failure npu.record     a suspect's record, on a good device

    Records are written by `noisescope record`.

    The model's memory is compared with its checkpoint and its config first; --no-state leaves that out.

    No data and no second device is needed: the audit recomputes every operator on the host, in float64, from the
    inputs it really had; auto also tries relations where the audit could not look. It runs prefill at several lengths
    and batch sizes, with and without padding, and decode with the model's cache. The verdict says what ran, what was
    judged and the smallest fault that would have shown. Exit code 0 where the model is healthy, 1 where something
    computes wrongly (with --simulate: where the fault was not found), 3 where that could not be decided, or less than
    95 % was judged. --simulate works with every method: a record that the method needs is made of this model.
    """
    api.locate_simulated.check_fault(options.simulated)  # before torch is imported

    place, changed = None, None
    subject, options = command_builder.load_model(options)
    if options.simulated is None:
        verdict = api.locate(subject, options=options)
    else:
        verdict, place, changed = api.locate_simulated.locate_simulated(subject, options)
    simulated = {} if changed is None else {"simulated": options.simulated, "elements_changed": changed}
    text = json.dumps({**verdict.to_dict(), **simulated}, indent=1) + "\n"
    write_verdict(verdict, options, text)
    tables = output.write_table(verdict, options.csv)
    if options.json:
        say(text, nl=False)
    else:
        print_verdict(verdict)
        output.print_each(tables)
    if changed is None:
        command_builder.exit_by(CHECKS[verdict.verdict], options)
    right, words = was_found(verdict, place, changed)
    if not options.json:
        say(words)
    command_builder.exit_by("pass" if right else "undecided" if verdict.verdict == "undecided" else "fail", options)


def print_verdict(verdict: Any) -> None:
    """The verdict, the likeliest suspects, what ran and what did not, what could have been seen."""
    output.print_each(api.reports.locate_report.verdict_lines(verdict), "")


def write_verdict(verdict: Any, options: LocateOptions, text: str) -> None:
    """Into the output file, as its suffix says; `text` is the JSON form."""
    if options.output is None:
        return
    suffix = options.output.suffix.lower()
    if suffix != ".json":
        simulated = [("Simulated fault", options.simulated)] if options.simulated else []
        facts = [("Model", options.model), ("Device", options.device), *simulated, ("Date", api.reports.now())]
        text = api.reports.locate_report.as_text(verdict, suffix, facts)
    api.reports.write_text(options.output, text)


def was_found(verdict: Any, place: Any, changed: int) -> tuple[bool, str]:
    """Whether the verdict on a simulated fault is right, and in words; a fault that changed nothing is healthy."""
    if changed == 0:
        return verdict.verdict == "healthy", "the simulated fault changed no element"
    first = verdict.suspects[0].site.place if verdict.suspects else None
    here = first == place or place == "*"
    at, there = (f"block {one}" if isinstance(one, int) else one for one in (place, first))
    made = f"fault simulated at {at} ({changed:,} elements changed)"
    if verdict.verdict == "undecided" and here:
        return False, f"{made}: the first suspect, but nothing is decided"
    right = verdict.verdict == "faulty" and here
    instead = "nothing is suspected" if first is None else f"the first suspect is at {there}"
    return right, f"{made}: {'found' if right else f'not found, {instead}'}"
