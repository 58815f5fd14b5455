"""The three levels and the metrics as sections: tables, charts and the heat map."""

from __future__ import annotations

from collections.abc import Iterable

from noisescope.reports.document import Bar, Block, Cell, Chart, HeatMap, Paragraph, Section, Table
from noisescope.reports.words import METRICS, SHARES, Row, band, counted, estimate, number, plain, text, whole

WORST = 10  # rows of a table that only shows the worst


def operators(report: Row) -> Iterable[Section]:
    rows = report.get("operator_analysis")
    if not rows:
        return
    ordered = sorted(rows.items(), key=lambda pair: _order(pair[1]))
    body = tuple(
        (
            text(name),
            *_loss(row),
            plain(row.get("sensitivity_score")),
            band(row.get("sensitivity_band")),
            *_divergence(row),
            whole(row.get("total_injections")),
        )
        for name, row in ordered
    )
    head = ("operator", "accuracy lost", "band", "score", "score band", *_DIVERGENCE, "evidence", "injections")
    yield Section("operators", "Operators", (Table("operators", head, body),))


def layers(report: Row) -> Iterable[Section]:
    section = report.get("layer_analysis")
    if not section:
        return
    blocks: list[Block] = [*_window_chart(section), *_points(section)]
    windows = tuple(
        (text(row["layer_range"]), *_loss(row), estimate(row.get("interaction_index")), *_divergence(row))
        for row in section["windows"]
    )
    columns = ("accuracy lost", "band", *_DIVERGENCE, "evidence")
    head = ("window", *columns[:2], "interaction index", *columns[2:])
    blocks.append(Table("windows", head, windows, "Sliding windows"))
    named = [(f"layer {row['layer']}", row) for row in section["layers"]]
    named += [(str(place), row) for place, row in section["places"].items()]
    singles = tuple((text(name), *_loss(row), *_divergence(row)) for name, row in named)
    blocks.append(Table("layers", ("place", *columns), singles, "Single layers and places"))
    title = f"Layers (noise on {', '.join(section['operators'])})"
    yield Section("layers", title, tuple(blocks))
    yield from _map(section)


def _window_chart(section: Row) -> Iterable[Chart]:
    """Accuracy lost in each window; where nothing was injected, the predicted divergence."""
    sure = {point["layer_range"]: point["sure"] for point in section["avalanche_points"]}
    injected = [row for row in section["windows"] if (row.get("degradation") or {}).get("value") is not None]
    rows = injected or [row for row in section["windows"] if row.get("predicted_kl")]
    bars = []
    for row in rows:
        known = row["degradation"] if injected else row["predicted_kl"]
        cell = estimate(known, share=bool(injected))
        name = row["layer_range"]
        mark = "" if name not in sure else "avalanche point" + ("" if sure[name] else " (not sure)")
        toned = Cell(cell.text, cell.value, band(row.get("band")).tone)
        bars.append(Bar(name, toned, known.get("low"), known.get("high"), mark))
    if bars:
        title = "Accuracy lost by window" if injected else "Predicted divergence by window"
        yield Chart("windows-chart", title, "share of the accuracy" if injected else "nats a token", tuple(bars))


def _points(section: Row) -> Iterable[Block]:
    if not any(row["evidence"] == "injected" for row in section["windows"]):
        yield Paragraph("Avalanche points and compounding were not looked at: nothing was injected.")
        return
    points = [p["layer_range"] + ("" if p["sure"] else " (not sure)") for p in section["avalanche_points"]]
    yield Paragraph(", ".join(points) or "none", "Avalanche points:")
    yield Paragraph(", ".join(section["compounding"]) or "no window", "Errors surely compound in:")
    yield Paragraph(
        "An avalanche point is a window that costs far more accuracy than those beside it. The interaction index is "
        "the KL of a window over the sum of the KL of its layers: surely above 1, errors compound."
    )


def _map(section: Row) -> Iterable[Section]:
    """Layer x operator, KL in nats; a star marks what was injected."""
    names = tuple(dict.fromkeys(row["operator"] for row in section["map"]))
    places = tuple(sorted({row["layer"] for row in section["map"]}))
    if not places:
        return
    cells: dict[tuple[int, str], Cell] = {}
    notes: dict[tuple[int, str], str] = {}
    for row in section["map"]:
        known = row.get("kl") or row.get("predicted_kl") or {}
        value = known.get("value")
        mark = "*" if row["evidence"] == "injected" and value is not None else ""
        where = row["layer"], row["operator"]
        cells[where] = Cell(f"{number(value) or row['evidence']}{mark}", value)
        notes[where] = _hover(row, known)
    heat = HeatMap(
        "map",
        "Divergence of the output, by layer and operator",
        "nats a token",
        tuple(f"layer {place}" for place in places),
        names,
        tuple(tuple(cells.get((place, name)) for name in names) for place in places),
        tuple(tuple(notes.get((place, name), "") for name in names) for place in places),
        "* injected; without a star predicted by the Fisher screen",
    )
    yield Section("map", "Layer x operator", (heat,))


def _hover(row: Row, known: Row) -> str:
    parts = [f"{row['evidence']} KL {estimate(known).text or row.get('error', 'not known')}"]
    if row["evidence"] == "injected" and row.get("predicted_kl"):
        parts.append(f"predicted {estimate(row['predicted_kl']).text}")
    if (row.get("degradation") or {}).get("value") is not None:
        parts.append(f"accuracy lost {estimate(row['degradation'], share=True).text}")
    parts += ["injection and prediction part: not linear here"] if row.get("parted") else []
    return "; ".join(parts) + (f"; n = {known['n']}" if known.get("n") else "")


def channels(report: Row) -> Iterable[Section]:
    section = report.get("channel_analysis")
    if not section:
        return
    blocks: list[Block] = []
    if "summary" in section:
        found = section["summary"]
        blocks.append(
            Paragraph(
                f"{found['total_outlier_channels']} outlier channels of {found['total_channels']} "
                f"({found['outlier_percentage']:.2g} %) in {found['layers_with_outliers']} modules; "
                f"n = {section['n']} samples. The largest value of an outlier is more than {section['threshold']:g} "
                "times that of the median channel (by max). Other rules: the mean in place of the largest; a 99th "
                "percentile above 5 times the channel's own median (q99/q50); the 5 % whose noise costs most (Fisher)."
            )
        )
        worst = sorted(section["per_layer"].items(), key=lambda pair: -pair[1]["max_ratio"])[:WORST]
        body = tuple((text(name), *_outliers(row)) for name, row in worst)
        head = ("module", "outliers", "channels", "largest / median", "band", "by max", "by mean", "by q99/q50",
                "by Fisher")  # fmt: skip
        blocks.append(Table("outliers", head, body, "Modules with the largest outliers"))
    if section["costliest"]:
        costs = tuple(
            (
                text(row["module"]),
                whole(row["channel"]),
                plain(row["predicted_nats"]),
                estimate(row.get("kl")),
                text(row["evidence"]),
            )
            for row in section["costliest"][:WORST]
        )
        columns = ("module", "channel", "KL predicted", "KL injected", "evidence")
        blocks.append(Table("costliest", columns, costs, "Channels whose noise costs most"))
    yield Section("channels", "Channels", tuple(blocks))


def _outliers(row: Row) -> tuple[Cell, ...]:
    """How many, which (the largest four), and what each rule says."""
    ratios = sorted(zip(row["outlier_ratios"], row["outlier_indices"], strict=True), reverse=True)
    which = ", ".join(str(index) for _, index in ratios[:4]) + (", ..." if len(ratios) > 4 else "")
    count = Cell(f"{row['num_outliers']} of {row['total_channels']}", row["num_outliers"])
    by_rule = (whole(row["rules"][rule]) for rule in ("max", "mean", "quantile", "fisher"))
    return (count, text(which), Cell(f"{row['max_ratio']:.1f} x", row["max_ratio"]), band(row["band"]), *by_rule)


def metrics(report: Row) -> Iterable[Section]:
    found = report["metrics"]
    primary, secondary = found["primary"], found["secondary"]
    threshold, ratio = primary["critical_threshold"], secondary["gradient_ratio"]
    sparsity = secondary["activation_sparsity"]
    body = (
        (text("relative degradation"), counted(primary["relative_degradation"], share=True),
         band(primary["degradation_band"])),
        (text("noise tolerance index"), counted(primary["noise_tolerance_index"]),
         band(primary["noise_tolerance_band"])),
        (text("critical threshold"), _threshold(threshold), band(threshold and threshold["band"])),
        (text("SNR of the logits (dB)"), counted(secondary["snr_db"]), band(secondary["snr_band"])),
        (text("gradient ratio"), counted(ratio), band(ratio and ratio["band"])),
        (text("activation sparsity"), plain(sparsity and sparsity["relative"]), band(sparsity and sparsity["band"])),
    )  # fmt: skip
    blocks: list[Block] = [Table("metrics", ("metric", "value", "band"), body)]
    if found["baseline"]:
        known = tuple(
            (text(METRICS.get(name, name)), counted(row, share=name in SHARES))
            for name, row in found["baseline"].items()
            if isinstance(row, dict) and name != "agreement"  # of the clean model with itself
        )
        blocks.append(Table("baseline", ("metric", "mean"), known, "The clean model"))
    traces = found["hessian_trace"]
    if traces and "error" not in traces:
        ordered = sorted(traces.items(), key=lambda pair: int(pair[0]))
        curved = tuple(
            (
                Cell(f"layer {layer}", float(layer)),
                estimate({**row, "value": row["trace"]}),
                plain(row["per_parameter"]),
            )
            for layer, row in ordered
        )
        blocks.append(Table("hessian", ("layer", "trace", "per parameter"), curved, "Hessian trace of each layer"))
    yield Section("metrics", "Metrics", tuple(blocks))


def correlations(report: Row) -> Iterable[Section]:
    rows = report["correlations"]
    if not rows:
        return
    body = tuple(
        (
            text(name.replace("_", " and ")),
            estimate(row),
            text(row.get("expected", "")),
            text({True: "yes", False: "no"}.get(row.get("held"), "")),
            whole(row["n"]),
        )
        for name, row in rows.items()
    )
    head = ("pair", "r", "expected", "held", "n")
    yield Section("correlations", "Correlations", (Table("correlations", head, body),))


def formats(report: Row) -> Iterable[Section]:
    """What one number format for all weights would cost; plans mix them."""
    section = report.get("format_scores")
    if not section or not section["uniform"]:
        return
    body = tuple(
        (text(name), whole(row["bits"]), plain(row["effective_bits"]), plain(row["predicted_kl"]))
        for name, row in section["uniform"].items()
    )
    told = (
        "Predicted from the rounding error that each weight really has, and added up over the linears of all blocks; "
        "the order is to be trusted, the size only roughly. noisescope plan precision mixes formats, and measures."
    )
    head = ("format of every linear", "bits", "bits with scales", "KL predicted")
    yield Section("formats", "Number formats for the weights", (Paragraph(told), Table("formats", head, body)))


# -- cells

_DIVERGENCE = ("KL injected", "KL predicted")


def _loss(row: Row) -> tuple[Cell, Cell]:
    if row["evidence"] == "failed":
        return Cell(f"failed: {row['error']}"[:120], tone="unsure"), Cell("")
    return estimate(row.get("degradation"), share=True), band(row.get("band"))


def _divergence(row: Row) -> tuple[Cell, Cell, Cell]:
    mark = " (parted)" if row.get("parted") else ""
    return estimate(row.get("kl")), estimate(row.get("predicted_kl")), text(row["evidence"] + mark)


def _threshold(row: Row | None) -> Cell:
    if not row:
        return Cell("")
    ends = [row.get("low"), row.get("high")]
    span = "" if ends == [None, None] else f" [{number(ends[0]) or '...'}, {number(ends[1]) or '...'}]"
    return Cell(f"{row['label']}{span} (n = {row['n']})", row.get("value"))


def _order(row: Row) -> tuple[int, float]:
    loss = (row.get("degradation") or {}).get("value")
    return (row["evidence"] == "absent", -(loss if loss is not None else -1.0))
