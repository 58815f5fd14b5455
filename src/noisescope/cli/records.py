"""`noisescope record MODEL`: what this device computes; `noisescope compare A B`: how two devices differ, and where."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from noisescope import api
from noisescope.cli import command_builder, output
from noisescope.cli.output import say
from noisescope.options.device_commands import CompareOptions, RecordOptions

MOST_ROWS = 12
MOST_CELLS = 5
MOST_TOKENS = 3
DETAILED = ("MAPE", "band", "Pearson", "max ulp")  # columns that whole tensors alone can fill


def record_device(options: RecordOptions) -> None:
    """Record what this device computes, operator by operator.

    \b
    noisescope record path/to/model --data gsm8k.jsonl --device cuda -o gpu.record
    noisescope record path/to/model --data gsm8k.jsonl --device npu -o npu.record --full-layers 9,10
    noisescope compare gpu.record npu.record
    noisescope record path/to/model --data gsm8k.jsonl --engine vllm -o vllm.record
    noisescope record demo --simulate dead_zone:0.3@10 -o broken.record     as a faulty device would record

    Sketches of every operator's output take about 1 % of the tensors' size. Use the same data, --samples and
    --max-tokens on both machines. Whole tensors (--detail full) let `noisescope locate --reference` replay each module
    on the other device's inputs.
    """
    folder = options.output
    api.locate_simulated.check_fault(options.simulate)  # before torch is imported
    if options.engine == "transformers":
        subject, options = command_builder.load_model(options)
        found = api.records.record(subject, options=options)
    else:
        found = api.systems.record_engine(options)
    size = sum(file.stat().st_size for file in folder.iterdir())
    facts = {
        "record": str(folder),
        "bytes": size,
        "sites": len(found.sites),
        "prompts": found.count,
        "tokens": sum(map(len, found.prompts)),
        "device": found.device,
        "dtype": found.dtype,
        "notes": list(found.notes),
    }
    if options.json:
        say(json.dumps(facts, indent=1))
        return
    counts = f"{facts['sites']} sites, {facts['prompts']} prompts, {facts['tokens']} tokens"
    say(f"{folder}: {counts}, {found.dtype} on {found.device}, {size / 1e6:.1f} MB")
    output.print_each(found.notes, "note: ")


def compare_devices(options: CompareOptions) -> None:
    """Compare what two devices computed, or run two systems and say why they disagree.

    \b
    noisescope compare transformers:path/to/model vllm:path/to/model --data gsm8k.jsonl
    noisescope compare transformers:step100 transformers:step200        two checkpoints
    noisescope compare transformers:demo transformers:demo --engine-args b.dtype=bfloat16
    noisescope compare gpu.record npu.record
    noisescope compare gpu.record npu.record --layers 9,10 --max-mape 0.05
    noisescope compare gpu.record npu.record --sensitivity out/report.json
    noisescope compare gpu_dump/step0/rank0 npu_dump/step0/rank0        dumps of msprobe
    noisescope compare rollout.jsonl trainer.jsonl --roundoff out       log-probabilities of the same tokens

    Says whether they differ by round-off only, else the first operator at which they diverge. Exit code 1 if
    they diverge (with --max-mape: if that limit is exceeded), 3 if no site decides; records of other prompts are
    refused with code 2.

    Of log-probability files (OpenAI-style, vLLM, TRL, verl, NeMo-RL) it names causes, each in nats: misalignment,
    truncation, temperature, top-p or top-k, missing values, growth with position or step, duplicated or reordered
    rows. Exit code 1 where a cause is found or more than round-off remains, 3 where nothing says what may remain.

    Of systems (ENGINE:MODEL) the divergence of the next token's distribution is split into semantics, state, operators,
    round-off and a remainder. Exit code 1 where they differ by more than round-off.
    """
    if options.of_systems:
        api.preparation.load_quietly()
    found = api.comparison.compare(options=options)
    output.emit(found, options, print_found)
    command_builder.exit_by(found.outcome, options)


def print_found(
    found: api.comparison.Comparison | api.comparison.LogprobComparison | api.comparison.SystemComparison,
) -> None:
    if isinstance(found, api.comparison.SystemComparison):
        print_systems(found)
    elif isinstance(found, api.comparison.LogprobComparison):
        _print_logprobs(found)
    else:
        print_comparison(found)


def print_comparison(found: api.comparison.Comparison) -> None:
    """Both sides, the verdict, a table of the sites that matter, tokens, costs, what was not seen."""
    for name, side in (("a", found.sides.a), ("b", found.sides.b)):
        say(f"{name}: {side.path} ({side.architecture}, {side.dtype}, {side.device})")
    say(f"\n{found.verdict}. {found.words}\n")
    print_rows(found)
    print_tokens(found.tokens)
    if found.sensitivity is not None:
        print_costs(found.sensitivity)
    if found.max_mape is not None:
        say(f"\n{_decision(found)}")
    output.print_each(found.notes, "note: ")


def print_systems(found: api.comparison.SystemComparison) -> None:
    """Both systems, the verdict, and the divergence as a table of its parts."""
    for name, side in (("a", found.a), ("b", found.b)):
        attention = f", {side.attention} attention" if side.attention else ""
        say(f"{name}: {side.model} ({side.engine} {side.version}, {side.dtype}, {side.device}{attention})")
    say(f"\n{found.verdict}. {found.words}\n")
    rows = [("", "nats per token", "95 %", "|log-prob. difference|", "")]
    rows.append(("all", *_estimate(found.total), _estimate(found.token_gap)[0], ""))
    rows += [
        (f"  {cause.stage}", *_estimate(cause.nats), _estimate(cause.token_gap)[0], cause.name)
        for cause in found.causes
    ]
    rows.append(("  round-off", *_estimate(found.round_off), _estimate(found.round_off_gap)[0], ""))
    rows.append(("  remainder", *_estimate(found.remainder), "", ""))
    say(output.aligned(rows))
    if found.band is not None:
        say(
            f"healthy systems: |log-prob. difference| of {_estimate(found.band.expected)[0]}, below "
            f"{found.band.high:.3g} for {100 * (1 - found.band.false_alarm):g} % of pairs; here, causes mended, "
            f"{_estimate(found.unexplained_gap)[0]}"
        )
    for cause in found.causes:
        say(f"{cause.name}: {cause.words}")
    if found.weight_costs:
        costs = sorted(found.weight_costs, key=lambda row: -(row.nats.value or 0.0))
        say(f"a with b's weights in one layer alone, the {min(MOST_ROWS, len(costs))} costliest of {len(costs)}:")
        head = ("layer", "nats per token", "95 %", "relative L2 of the weights")
        layers = [
            ("outside" if row.layer is None else str(row.layer), *_estimate(row.nats), f"{row.relative_l2:.2g}")
            for row in costs[:MOST_ROWS]
        ]
        say(output.aligned([head, *layers], "  "))
    for source in found.sources[:MOST_TOKENS]:
        say(
            f"round-off of {source.role}: {_estimate(source.nats)[0]} nats; {source.sites} sites, relative L2 "
            f"{source.relative_l2:.2g}, {100 * source.changed:.0f} % of elements differ"
        )
    say(f"{found.prompts} prompts, {found.tokens} tokens. Mended in this order: {', '.join(found.order)}.")
    output.print_each(found.notes, "note: ")


def _estimate(found: Any) -> tuple[str, str]:
    """A value and its interval."""
    if found.value is None:
        return found.note, ""
    ends = ["" if end is None else f"{end:.2g}" for end in (found.low, found.high)]
    interval = f"{ends[0]} to {ends[1]}" if all(ends) else f"at least {ends[0]}" if ends[0] else ""
    return f"{found.value:.3g}", interval


def _decision(found: api.comparison.Comparison) -> str:
    worst = found.worst_mape
    largest = "not measurable" if worst is None else f"{worst:.3g} at {found.worst_mape_site}"
    broken = sum(row.critical for row in found.sites)
    undecided = sum(not row.decided for row in found.sites)
    if found.passed is None:
        outcome = "undecided, no site has a finite number on both sides"
    elif found.passed:
        outcome = "passed" + (f"; {undecided} of {len(found.sites)} sites are undecided" if undecided else "")
    elif worst is not None and found.max_mape is not None and worst > found.max_mape:
        outcome = "exceeded"
    elif broken:
        outcome = f"not passed, {broken} sites have NaN or infinite numbers on one side only"
    else:
        outcome = f"not passed, {len(found.uncompared)} sites can't be compared"
    return f"largest MAPE {largest}; allowed {found.max_mape:g}: {outcome}"


def print_tokens(tokens: Sequence[api.comparison.TokenRow]) -> None:
    """The tokens that differ most; sizes only where whole tensors are known."""
    if not tokens:
        return
    by_sketch = all(token.relative_l2 is None and not token.nonfinite for token in tokens)
    say("tokens that differ most" + (", by sketch (sizes need full detail):" if by_sketch else ":"))
    for token in tokens[:MOST_TOKENS]:
        size = "" if token.relative_l2 is None else f": relative L2 {token.relative_l2:.2g}"
        size = ": NaN or infinite on one side only" if token.nonfinite else size
        say(f"  token {token.token} of prompt {token.prompt}{size}")


def print_rows(found: api.comparison.Comparison) -> None:
    """The first site that diverges and those with the largest error, in the order they ran."""
    if found.verdict == "identical" and not any(row.nonfinite_both for row in found.sites):
        say(f"{len(found.sites)} sites are compared, none differs; --json lists them")
        return
    ranked = sorted(found.sites, key=lambda row: (not row.diverges, row.measurable, -(row.size or 0)))
    chosen = {id(row) for row in ranked[:MOST_ROWS]} | ({id(found.first)} if found.first else set())
    shown = [row for row in found.sites if id(row) in chosen]
    whole = any(row.elements for row in shown)
    header = ("place", "operator", "module", "rel. L2", *(DETAILED if whole else ()), "")
    say(output.aligned([header, *(_cells(row, row is found.first, whole) for row in shown)]))
    if len(found.sites) > len(shown):
        say(f"... the largest of {len(found.sites)} sites; --json lists all")
    if not whole:
        say("~ by sketch: MAPE, Pearson and ulps need records of --detail full, or of --full-layers")


def _cells(row: api.comparison.SiteRow, first: bool, whole: bool) -> tuple[str, ...]:
    sign = "" if row.elements else "~"
    cells: tuple[str, ...] = (str(row.place), row.operator, row.module, _number(row.size, f"{sign}{{:.2g}}"))
    if whole:
        band = row.bands.mape if row.elements or not row.measurable else "needs full detail"
        cells += (_number(row.mape, "{:.2g}"), band, _number(row.pearson, "{:.5f}"), _number(row.max_ulp, "{:.3g}"))
    return (*cells, "; ".join(_marks(row, first)))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _marks(row: api.comparison.SiteRow, first: bool) -> Iterator[str]:
    """What a row's figures don't show."""
    if row.diverges:
        gain = f", gain {100 * row.gain:+.2f} %" if row.gain else ""
        yield ("diverges here" if first else "differs") + gain
    if row.nonfinite:
        yield f"CRITICAL: {row.nonfinite} {row.counted} NaN or infinite on one side only"
    if row.nonfinite_both:
        yield f"{row.nonfinite_both} {row.counted} NaN or infinite on both sides, left out"
    if row.where is not None and row.where.outlier_channel:
        yield f"max in outlier channel {row.where.channel}"


def print_costs(crossing: api.comparison.DifferenceCosts) -> None:
    """What to fix first, and which layers are within what they can afford."""
    say(f"\nestimated cost of the differences (affordable per layer: {crossing.affordable_nats:g} nats):")
    for cell in [cell for cell in crossing.cells if cell.cost >= 0][:MOST_CELLS]:
        mark = "  fix first" if cell.fix_first else ""
        cost = "infinite difference, no cost can be given"
        if cell.nats is not None:
            cost = f"{cell.nats:.2g} nats (relative L2 {cell.relative_l2:.2g}, affordable {cell.affordable:.2g})"
            cost += f", {cell.priced_by}{', not linear there' if cell.nonlinear else ''}"
        say(f"  layer {cell.layer} {cell.operator}: {cost}{mark}")
    say(f"  {'layer':>5}  {'affordable':>10}  {'has':>7}  within")
    for row in crossing.tolerances:
        has = _number(row.relative_l2, "{:.2g}")
        within = {True: "yes", False: "no", None: "-"}[row.within]
        broken = f"  {row.unmeasurable} sites not measurable" if row.unmeasurable else ""
        rough = "  rough: noise is not linear there" if row.nonlinear else ""
        say(f"  {row.layer:>5}  {row.affordable_relative_l2:>10.2g}  {has:>7}  {within}{broken}{rough}")


def _print_logprobs(found: api.comparison.LogprobComparison) -> None:
    """Both sides, the verdict, each cause with its nats, what remains, where to look, what can't be told."""
    for name, side in (("a", found.a), ("b", found.b)):
        say(f"{name}: {side.path} ({side.field}, {side.sequences} sequences, {side.tokens} tokens)")
    say(f"matched by {found.matched_by}: {found.sequences} sequences, {found.tokens} tokens compared\n")
    say(f"{found.verdict}. {found.words}\n")
    words = api.reports.cell_text.estimate
    rows = [("", "mean |difference|, nats per token [95 % interval]", "tokens")]
    rows.append(("all", words(found.gap).text, ""))
    rows += [(cause.name, words(cause.nats).text, str(cause.tokens)) for cause in found.causes]
    rows.append(("remains", words(found.remainder).text, str(found.tokens)))
    say(output.aligned(rows))
    for cause in found.causes:
        say(f"\n{cause.name}: {cause.statement}\n  next: {cause.next_step}")
    if found.worst:
        apart = ", ".join(f"{row.sequence} ({row.nats:.3g})" for row in found.worst)
        say(f"\nsequences that stand apart, in nats per token: {apart}")
    if found.signed.value is not None:
        say(f"\nmean of B - A after mending: {words(found.signed).text}")
    if found.max_gap is not None:
        say(f"allowed: {found.max_gap:g} nats per token: {found.outcome}")
    output.print_each((*found.notes, *found.limits), "note: ")
