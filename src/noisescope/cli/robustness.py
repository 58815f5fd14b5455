"""`noisescope robustness MODEL`: accuracy at several noise levels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common, outcome


def robustness_of_model(
    model: common.Model,
    data: common.Data = None,
    noise_levels: Annotated[str, typer.Option("--noise-levels", help="Scales with commas between.")] = "0,0.05,0.10",
    operators: Annotated[str, typer.Option("--operators", help="What is noised.")] = "gemm",
    samples: common.Samples = 100,
    seeds: common.Seeds = 3,
    metric: common.Metric = "accuracy",
    generate: Annotated[
        bool | None, typer.Option("--generate/--no-generate", help="By generation. Default: where there are answers.")
    ] = None,
    max_tokens: common.MaxTokens = 256,
    max_new_tokens: common.MaxNewTokens = 256,
    slice_samples: common.SliceSamples = 50,
    executor: common.Executor = "local",
    workers: common.Workers = 2,
    address: common.Address = None,
    device: common.Device = "cpu",
    device_map: common.DeviceMap = None,
    dtype: common.Dtype = None,
    revision: common.Revision = None,
    trust_remote_code: common.Trust = False,
    retry_failed: common.RetryFailed = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Folder for the store and the reports.")] = None,
    as_json: common.Json = False,
) -> None:
    """Accuracy at several noise levels.

    With the share of the clean accuracy that is retained, and intervals.

    \b
    noisescope robustness demo
    noisescope robustness path/to/model --data gsm8k.jsonl --noise-levels 0,0.02,0.05 --samples 200 --device cuda
    """
    asked = {name: value for name, value in locals().items() if name != "as_json"}
    asked |= {"data": None if data is None else str(data), "output": None if output is None else str(output)}
    run_robustness(asked, as_json=as_json)


def run_robustness(asked: dict[str, Any], *, as_json: bool = False) -> None:
    """The command from its options as plain values."""
    from noisescope import api
    from noisescope.cli.progress import Shown

    output = None if asked["output"] is None else Path(asked["output"])
    with common.plain_warnings():
        subject = common.subject_asked_for(asked)
        with common.resumable(output), Shown() as progress:
            report = api.robustness(
                subject,
                asked["data"],
                noise_levels=common.numbers(asked["noise_levels"], "--noise-levels"),
                operators=common.names(asked["operators"]) or (),
                samples=asked["samples"],
                seeds=asked["seeds"],
                metric=asked["metric"],
                generate=asked["generate"],
                max_tokens=asked["max_tokens"],
                max_new_tokens=asked["max_new_tokens"],
                slice_samples=asked["slice_samples"],
                options=common.run_options("robustness", asked, progress),
            )
    outcome.finish(report, output, say_levels, as_json=as_json)


def say_levels(report: Any) -> None:
    from noisescope.reports.words import estimate

    data = report["run"]["data"]
    how = {"generate": "by generation", "score": "teacher-forced"}.get(data["measure"], "by your metric")
    typer.echo(f"{report['run']['model']['source']}: {data['source']}, {data['samples']} samples, {how}\n")
    typer.echo(f"{'noise':>8}  {'accuracy':>26}  {'retention':>26}  band of the loss")
    for row in report["robustness"]["levels"]:
        if row.get("error"):
            typer.echo(f"{row['noise_level']:>8g}  failed: {row['error']}")
            continue
        accuracy, retention = (estimate(row.get(name), share=True).text for name in ("accuracy", "retention"))
        typer.echo(f"{row['noise_level']:>8g}  {accuracy:>26}  {retention:>26}  {row.get('band', '')}")
