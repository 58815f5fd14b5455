"""`noisescope diagnose MODEL`: the three levels, the metrics, the report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from noisescope.cli import common, outcome
from noisescope.cli.common import names
from noisescope.cli.config import use_config


def _config(ctx: typer.Context, path: Path | None) -> Path | None:
    return use_config(ctx, path, diagnose_model)


def diagnose_model(
    model: common.Model,
    data: common.Data = None,
    calibration: Annotated[Path | None, typer.Option("--calibration", help="Data for channel statistics.")] = None,
    level: Annotated[str, typer.Option("--level", help="Any of operator,layer,channel.")] = "operator,layer,channel",
    noise_scale: Annotated[float, typer.Option("--noise-scale", help="Relative size of the noise.")] = 0.05,
    window: Annotated[int, typer.Option("--window", help="Layers in a sliding window.")] = 3,
    step: Annotated[int, typer.Option("--step", help="Layers between windows.")] = 1,
    outlier_threshold: Annotated[
        float, typer.Option("--outlier-threshold", help="An outlier is that many medians.")
    ] = 10.0,
    operators: Annotated[
        str | None, typer.Option("--operators", help="Such as softmax,norm. Default: gemm and seven.")
    ] = None,
    calibration_samples: Annotated[int, typer.Option("--calibration-samples", help="For channels.")] = 1000,
    save_activations: Annotated[
        bool,
        typer.Option("--save-activations", help="Write calibration activations to OUTPUT/activations."),
    ] = False,
    samples: common.Samples = 100,
    seeds: common.Seeds = 3,
    metric: common.Metric = "accuracy",
    effort: Annotated[
        str, typer.Option("--effort", help="screen: predict; standard: confirm what matters; full: all.")
    ] = "standard",
    generate: Annotated[bool, typer.Option("--generate", help="Score answers by generation (slow).")] = False,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say forwards, time and memory, and stop.")] = False,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder for the store and the reports.")] = Path(
        "noisescope-run"
    ),
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=_config,
            help="YAML with any of these options (and model); the command line wins. Paths in it are relative to the "
            "current folder, as here.",
        ),
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Find what can't stand numerical error.

    Which operators, layers and channels lose most when their arithmetic gets a little wrong.

    \b
    noisescope diagnose demo
    noisescope diagnose path/to/model --data gsm8k.jsonl --device cuda -o out
    noisescope diagnose path/to/model --effort screen          two backward passes, seconds
    noisescope diagnose path/to/model --level operator --operators softmax,norm
    noisescope diagnose path/to/model --dry-run                what it would cost
    noisescope diagnose --config run.yaml --seeds 5            the file's options, and another number of seeds

    The same command into the same folder resumes. Levels: operator (which kind of operation), layer (sliding windows,
    avalanche points, layer x operator map), channel (outliers).
    """
    asked = {name: value for name, value in locals().items() if name not in ("as_json", "config")}
    paths = {"data": _text(data), "calibration": _text(calibration), "output": str(output)}
    run_diagnosis({**asked, **paths}, as_json=as_json)


def run_diagnosis(asked: dict[str, Any], *, as_json: bool = False) -> None:
    """The command from its options as plain values: what `runs resume` repeats."""
    from noisescope import api
    from noisescope.cli.progress import Shown
    from noisescope.diagnosis import whole

    output = Path(asked["output"])
    with common.plain_warnings():
        subject = common.subject_asked_for(asked)
        prepared = api.prepare_diagnosis(
            subject,
            asked["data"],
            calibration=asked["calibration"],
            noise_scale=asked["noise_scale"],
            levels=names(asked["level"]) or (),
            operators=names(asked["operators"]),
            window=asked["window"],
            step=asked["step"],
            outlier_threshold=asked["outlier_threshold"],
            samples=asked["samples"],
            calibration_samples=asked["calibration_samples"],
            seeds=asked["seeds"],
            metric=asked["metric"],
            effort=asked["effort"],
            generate=asked["generate"],
            max_tokens=asked["max_tokens"],
            max_new_tokens=asked["max_new_tokens"],
            slice_samples=asked["slice_samples"],
        )
        if asked["dry_run"]:
            typer.echo(str(prepared.cost(whole)))
            return
        with common.resumable(output), Shown() as progress:
            report = prepared.run(whole, common.run_options("diagnose", asked, progress))
        if asked["save_activations"]:
            source = asked["calibration"] or asked["data"]
            size = {"samples": asked["calibration_samples"], "max_tokens": asked["max_tokens"]}
            api.save_activations(subject, source, output / "activations", **size)
    outcome.finish(report, output, outcome.say_summary, as_json=as_json)


def _text(path: Path | None) -> str | None:
    """Absolute, so that a resumed run finds it from another folder."""
    return None if path is None else str(path.absolute())
