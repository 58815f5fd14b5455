"""The report as Markdown: in the order a reader needs it, every number with its n and interval."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def to_markdown(report: Row) -> str:
    parts = [*_head(report)]
    if "executive_summary" in report:
        parts += [*_summary(report), *_recommendations(report), *_operators(report), *_layers(report)]
        parts += [*_channels(report), *_metrics(report), *_correlations(report)]
    if "robustness" in report:
        parts += _robustness(report["robustness"])
    parts += [*_limits(report), *_method(report)]
    return "\n".join(parts).rstrip() + "\n"


def _head(report: Row) -> list[str]:
    run = report.get("run", {})
    model, data = run.get("model", {}), run.get("data", {})
    lines = ["# noisescope report", ""]
    if model:
        lines += [f"**Model**: {cell(model['source'])} ({cell(model['architecture'])}, {model['blocks']} blocks)  "]
    if data:
        lines += [
            f"**Data**: {cell(data['source'])}, {data['samples']} samples, {data['scored_tokens']} scored tokens  "
        ]
    if run.get("settings"):
        lines += [f"**Noise**: {cell(run['settings']['perturbation'])}, {len(run['settings']['seeds'])} seeds"]
    return [*lines, ""]


def _summary(report: Row) -> list[str]:
    summary = report["executive_summary"]
    lines = [
        "## Summary",
        "",
        f"**Risk: {summary['overall_risk_level']}** (report score {summary['report_risk']['score']:g};",
    ]
    lines += [f"dashboard score {summary['dashboard_risk']['score']:g}: {summary['dashboard_risk']['level']})", ""]
    lines += [
        f"{i}. [{f['severity']}] {cell(f['component'])}: {cell(f['statement'])}"
        for i, f in enumerate(summary["top_findings"], 1)
    ]
    if not summary["top_findings"]:
        lines.append("Nothing stands out.")
    return [*lines, "", f"**Next step**: {summary['next_step']}", ""]


def _recommendations(report: Row) -> list[str]:
    rows = report["recommendations"]
    if not rows:
        return []
    lines = ["## Recommendations", ""]
    for i, row in enumerate(rows, 1):
        lines += [f"{i}. **[{row['priority']}] {cell(row['component'])}**: {cell(row['issue'])}. {cell(row['action'])}"]
    return [*lines, ""]


def _operators(report: Row) -> list[str]:
    rows = report.get("operator_analysis")
    if not rows:
        return []
    ordered = sorted(rows.items(), key=lambda pair: _order(pair[1]))
    body = [
        [
            name,
            *_loss_cells(row),
            _number(row.get("sensitivity_score")),
            row.get("sensitivity_band", ""),
            *_kl_cells(row),
        ]
        for name, row in ordered
    ]
    head = ["operator", "accuracy lost", "band", "score", "score band", "KL injected", "KL predicted", "evidence"]
    return ["## Operators", "", *table(head, body), ""]


def _layers(report: Row) -> list[str]:
    section = report.get("layer_analysis")
    if not section:
        return []
    windows = [
        [row["layer_range"], *_loss_cells(row), _interval(row.get("interaction_index")), *_kl_cells(row)]
        for row in section["windows"]
    ]
    lines = [f"## Layers (noise on {', '.join(section['operators'])})", ""]
    head = ["window", "accuracy lost", "band", "interaction index", "KL injected", "KL predicted", "evidence"]
    lines += [*table(head, windows), ""]
    if any(row["evidence"] == "injected" for row in section["windows"]):
        points = [p["layer_range"] + ("" if p["sure"] else " (not sure)") for p in section["avalanche_points"]]
        lines += ["Avalanche points: " + (", ".join(points) or "none") + ".  "]
        lines += ["Errors surely compound in: " + (", ".join(section["compounding"]) or "no window") + ".", ""]
    else:
        lines += ["Avalanche points and compounding were not looked at: nothing was injected.", ""]
    rows = [[f"layer {row['layer']}", *_loss_cells(row), *_kl_cells(row)] for row in section["layers"]]
    rows += [[str(place), *_loss_cells(row), *_kl_cells(row)] for place, row in section["places"].items()]
    head = ["place", "accuracy lost", "band", "KL injected", "KL predicted", "evidence"]
    return [*lines, "### Single layers and places", "", *table(head, rows), "", *_map(section)]


def _map(section: Row) -> list[str]:
    """Layer x operator, KL in nats; a star marks what was injected."""
    cells: dict[int, dict[str, str]] = {}
    names: list[str] = []
    for row in section["map"]:
        if row["operator"] not in names:
            names.append(row["operator"])
        known = row.get("kl") or row.get("predicted_kl") or {}
        mark = "*" if row["evidence"] == "injected" else ""
        cells.setdefault(row["layer"], {})[row["operator"]] = f"{_number(known.get('value'))}{mark}"
    if not cells:
        return []
    body = [[str(layer), *(cells[layer].get(name, "") for name in names)] for layer in sorted(cells)]
    return ["### Layer x operator: KL in nats (* injected, else predicted)", "", *table(["layer", *names], body), ""]


def _channels(report: Row) -> list[str]:
    section = report.get("channel_analysis")
    if not section:
        return []
    lines = ["## Channels", ""]
    if "summary" in section:
        s = section["summary"]
        lines += [
            f"{s['total_outlier_channels']} outlier channels of {s['total_channels']} "
            f"({s['outlier_percentage']:.2g} %) in "
            f"{s['layers_with_outliers']} modules; n = {section['n']} samples.",
            "",
        ]
        worst = sorted(section["per_layer"].items(), key=lambda pair: -pair[1]["max_ratio"])[:10]
        body = [
            [
                name,
                f"{row['num_outliers']}/{row['total_channels']}",
                f"{row['max_ratio']:.1f} x",
                row["band"],
                *(str(row["rules"][rule]) for rule in ("max", "mean", "quantile", "fisher")),
            ]
            for name, row in worst
        ]
        lines += [*table(["module", "outliers", "largest", "band", "max", "mean", "q99/q50", "Fisher"], body), ""]
    if section["costliest"]:
        body = [
            [
                row["module"],
                str(row["channel"]),
                _number(row["predicted_nats"]),
                _interval(row.get("kl")),
                row["evidence"],
            ]
            for row in section["costliest"][:10]
        ]
        head = ["module", "channel", "KL predicted", "KL injected", "evidence"]
        lines += ["### Channels whose noise costs most", "", *table(head, body), ""]
    return lines


def _metrics(report: Row) -> list[str]:
    metrics = report["metrics"]
    primary, secondary = metrics["primary"], metrics["secondary"]
    threshold = primary["critical_threshold"]
    ratio = secondary["gradient_ratio"]
    sparsity = secondary["activation_sparsity"]
    body = [
        ["relative degradation", _interval(primary["relative_degradation"], share=True), primary["degradation_band"]],
        ["noise tolerance index", _interval(primary["noise_tolerance_index"]), primary["noise_tolerance_band"]],
        ["critical threshold", _threshold(threshold), "" if not threshold else threshold["band"]],
        ["SNR of the logits (dB)", _interval(secondary["snr_db"]), secondary["snr_band"]],
        ["gradient ratio", f"{ratio['value']:.3g} (n = {ratio['n']})" if ratio else "", ratio["band"] if ratio else ""],
        ["activation sparsity", _number(sparsity and sparsity["relative"]), "" if not sparsity else sparsity["band"]],
    ]
    lines = ["## Metrics", "", *table(["metric", "value", "band"], body), ""]
    if metrics["baseline"]:
        known = [[name, _interval(row)] for name, row in metrics["baseline"].items() if isinstance(row, Mapping)]
        lines += ["Clean model:", "", *table(["metric", "mean"], known), ""]
    return lines + _curvature(metrics)


def _curvature(metrics: Row) -> list[str]:
    traces = metrics["hessian_trace"]
    if not traces or "error" in traces:
        return []
    body = [
        [layer, _interval({**row, "value": row["trace"]}), _number(row["per_parameter"])]
        for layer, row in traces.items()
    ]
    return ["### Hessian trace of each layer", "", *table(["layer", "trace", "per parameter"], body), ""]


def _correlations(report: Row) -> list[str]:
    rows = report["correlations"]
    if not rows:
        return []
    body = [
        [
            name,
            _interval(row),
            row.get("expected", ""),
            {True: "yes", False: "no"}.get(row.get("held"), ""),
            str(row["n"]),
        ]
        for name, row in rows.items()
    ]
    return ["## Correlations", "", *table(["pair", "r", "expected", "held", "n"], body), ""]


def _robustness(section: Row) -> list[str]:
    body = [
        [
            f"{row['noise_level']:g}",
            _interval(row["accuracy"], share=True),
            _interval(row.get("retention"), share=True),
            row.get("band", ""),
        ]
        for row in section["levels"]
    ]
    head = ["noise level", "accuracy", "retention (share of the clean accuracy)", "band of the loss"]
    return [f"## Robustness (noise on {', '.join(section['operators'])})", "", *table(head, body), ""]


def _limits(report: Row) -> list[str]:
    return ["## What this run could not see", "", *(f"- {cell(limit)}" for limit in report["could_not_see"]), ""]


def _method(report: Row) -> list[str]:
    run = report.get("run", {})
    if not run:
        return []
    cost = run["cost"]
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    return [
        "## Method",
        "",
        "Intervals are 95 %, paired on samples, with the same noise draws at every scale and in every window; p values "
        "of rows looked at together are corrected (Holm). KL is of the noisy output from the clean one, per token, in "
        f"nats; below {run.get('kl_floor', 0):.0e} it can't be told from 0.",
        "",
        f"{cost['trials']} trials; now {cost['forwards']:.1f} forwards of the test data, {cost['seconds']:.0f} s; "
        f"{run['device']}, {run['conditions']['dtype']}. {versions}. {run['finished']}.",
    ]


# -- cells


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> list[str]:
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(cell(text) for text in row) + " |" for row in body]


def cell(text: Any) -> str:
    """Text that can't break a table or become markup."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def _order(row: Row) -> tuple[int, float]:
    loss = row.get("degradation", {}).get("value")
    return (row["evidence"] == "absent", -(loss if loss is not None else -1.0))


def _loss_cells(row: Row) -> list[str]:
    if row["evidence"] == "failed":
        return [f"failed: {row['error']}"[:120], ""]
    return [_interval(row.get("degradation"), share=True), row.get("band", "")]


def _kl_cells(row: Row) -> list[str]:
    mark = " (parted)" if row.get("parted") else ""
    return [_interval(row.get("kl")), _interval(row.get("predicted_kl")), row["evidence"] + mark]


def _threshold(row: Row | None) -> str:
    if not row:
        return ""
    ends = [row.get("low"), row.get("high")]
    span = "" if ends == [None, None] else f" [{_number(ends[0]) or '...'}, {_number(ends[1]) or '...'}]"
    return f"{row['label']}{span} (n = {row['n']})"


def _interval(row: Row | None, *, share: bool = False) -> str:
    if not row:
        return ""
    if row.get("value") is None:
        return str(row.get("note", ""))
    show = _percent if share else _number
    ends = (show(row.get("low")) or "...", show(row.get("high")) or "...")
    span = "" if row.get("low") is None and row.get("high") is None else f" [{ends[0]}, {ends[1]}]"
    return f"{show(row['value'])}{span}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
