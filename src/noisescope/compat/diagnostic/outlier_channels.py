"""Activations and outlier channels under the names of the original method notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from noisescope.api.plan_trials import smooth_outliers
from noisescope.api.records import linears, site_label
from noisescope.compat.diagnostic.adapter import Question, Row, ask, batches_of, subject_of
from noisescope.diagnosis import channels, predicted_kl
from noisescope.diagnosis.context import Array, StudyContext
from noisescope.diagnosis.predicted_kl import Screened
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.findings import LIMITS
from noisescope.jsonform import to_json
from noisescope.measures.smoothquant import Smoothed
from noisescope.model.forwards import evaluating, input_device
from noisescope.model.loading import Subject
from noisescope.probe.capture import Capture, Captured, ChannelStatistics, capture
from noisescope.sites import Place, Site
from noisescope.trials import Result, Results, Trial


class ActivationCapture:
    """Captures the outputs of chosen linears while you run the model, with statistics of their channels.

        capture = ActivationCapture(model, layer_patterns=["self_attn.o_proj", "mlp.down_proj"])
        capture.register_hooks()
        for batch in batches:
            model(**batch)
        outliers = capture.detect_outliers(threshold=10.0)
        capture.activations["model.layers.0.mlp.down_proj"]  # a tensor per call, on the CPU
        capture.remove_hooks()

    Also as `with ActivationCapture(model) as capture:`. A pattern is a part of a linear's dotted name. Without patterns
    they are those of the example, and all linears of attention or MLP where a model names them otherwise. Statistics
    take memory for the channels alone, however much runs through; activations take host memory for every token, and
    `keep_activations=False` does without them. Registering again starts over.
    """

    def __init__(
        self,
        model: Subject | nn.Module,
        layer_patterns: Sequence[str] | str | None = None,
        *,
        keep_activations: bool = True,
    ) -> None:
        self.subject = subject_of(model)
        self.layer_patterns = (layer_patterns,) if isinstance(layer_patterns, str) else layer_patterns
        self.modules = linears(self.subject, self.layer_patterns)
        self.keep_activations = keep_activations
        self._scope: Capture | None = None
        self._captured = Captured()

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    def register_hooks(self) -> None:
        """Start capturing."""
        if self._scope is not None:
            raise InvalidInput("this capture already has hooks registered: call remove_hooks() first")
        watching = capture(
            self.subject.model,
            operators={"linear"},
            modules=self.modules,
            keep="both" if self.keep_activations else "statistics",
            inputs=False,
            device="cpu",
            quantiles=True,
            anatomy=self.subject.anatomy,
        )
        watching.scope.any_order = True  # hooks are removed whenever their owner likes, also under later noise
        self._captured = watching.__enter__()
        self._scope = watching

    def remove_hooks(self) -> None:
        """Restore the model; statistics are kept."""
        self.__exit__(None, None, None)

    def __enter__(self) -> ActivationCapture:
        self.register_hooks()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, trace)

    def tokens(self, mask: Tensor | None) -> None:
        """Which tokens [B, T] of the forwards that follow count (an attention mask); None for all."""
        if self._scope is None:
            raise InvalidInput("a token mask needs registered hooks: call register_hooks() first")
        self._scope.tokens(mask)

    @property
    def activations(self) -> dict[str, list[Tensor]]:
        """By module, the output of each call since the last register_hooks(): detached, on the CPU, with padding."""
        if not self.keep_activations:
            raise InvalidInput("this capture was created with keep_activations=False: it has only `statistics`")
        return {site_label(site): [output for _, output in calls] for site, calls in self._captured.raw.items()}

    @property
    def statistics(self) -> dict[str, ChannelStatistics]:
        """By module, over everything seen since the last register_hooks()."""
        return {site_label(site): statistics for site, statistics in self._captured.statistics.items()}

    def rows(self, threshold: float) -> dict[str, Row]:
        """Every watched module's channels under the outlier rules."""
        if not self._captured.statistics:
            raise InvalidInput("nothing has been captured yet: call register_hooks(), then the model")
        return {
            name: {"layer": layer, **outlier_row(name, columns, threshold)}
            for name, (layer, columns) in self.columns().items()
        }

    def columns(self) -> dict[str, tuple[Place, dict[str, Array]]]:
        """By module, its layer and the statistics [C] of its channels."""
        return {
            site_label(site): (site.place, _columns(statistics))
            for site, statistics in self._captured.statistics.items()
        }

    def detect_outliers(self, threshold: float = LIMITS["outlier_channel_ratio"]) -> dict[str, Row]:
        """Modules with channels whose largest |x| is over `threshold` times the median channel's."""
        return {name: row for name, row in self.rows(threshold).items() if row["num_outliers"]}


def capture_layer_output(model: Subject | nn.Module, layer: int | str, batch: Tensor | Mapping[str, Tensor]) -> Tensor:
    """The output of a block (by index) or a module (by name: a linear, a norm) for a batch: [B, T, C]."""
    subject = subject_of(model)
    device = input_device(subject.model)
    scope = capture(subject.model, keep="raw", anatomy=subject.anatomy, **_where(subject, layer))
    with evaluating(subject.model), scope as seen, torch.no_grad():
        if isinstance(batch, Tensor):
            subject.model(batch.to(device))
        else:
            subject.model(**{name: value.to(device) for name, value in batch.items()})
    _, output = next(iter(seen.raw.values()))[-1]
    return output


def _where(subject: Subject, layer: int | str) -> Row:
    """The selection of one output: of a block, or of a module that is an operator."""
    if isinstance(layer, str):
        units = [u for u in subject.anatomy.units if u.kind == "module" and u.module == layer]
        if not units:
            raise InvalidInput(f"{layer!r} is not a module with one output; `noisescope inspect -v` lists the modules")
        return {"modules": [layer], "operators": units[0].operators}
    subject.anatomy.check_layers([layer])
    return {"operators": {"residual"}, "layers": {layer}}


def _columns(statistics: ChannelStatistics) -> dict[str, Array]:
    return {name: column.double().cpu().numpy() for name, column in statistics.columns().items()}


def detect_outliers(activations: Tensor, threshold: float = LIMITS["outlier_channel_ratio"]) -> Tensor:
    """Which channels [C] of activations [..., C] have a largest |x| over `threshold` times the median channel's."""
    if activations.dim() < 2:
        raise InvalidInput(f"activations must have the shape [..., channels], got {tuple(activations.shape)}")
    largest = activations.detach().abs().flatten(0, -2).amax(0).double().cpu().numpy()
    return torch.from_numpy(_ratios(largest, "the activations") > threshold).to(activations.device)


def detect_outliers_quantile(activations: Tensor, quantile: float = 0.99) -> bool:
    """Whether the `quantile` of all |x| is over 5 times their median. False where most are 0: nothing to compare."""
    if not 0 < quantile < 1:
        raise InvalidInput(f"quantile must be between 0 and 1, such as 0.99; got {quantile}")
    size = activations.detach().abs().double().cpu().numpy()
    high, middle = np.quantile(size, [quantile, 0.5])
    return bool(high > LIMITS["outlier_quantile_ratio"] * middle > 0)


def detect_outliers_fisher(model: Subject | nn.Module, calibration_data: Any, **more: Any) -> dict[str, Tensor]:
    """Which channels [C] of each linear carry a Fisher information above the 95th percentile of that linear's."""
    screened: Screened | None = ask(model, calibration_data, _SCREEN, levels=("operator",), **more)
    assert screened is not None  # the run ends when nothing more is proposed: all is known
    if screened.error:
        raise NoisescopeError(f"the screen failed: {screened.error}")
    shares = {site_label(site): screened.by_channel(site) for site in screened.sites if site.operator == "linear"}
    limit = LIMITS["outlier_fisher_quantile"]
    return {name: torch.from_numpy(share > np.quantile(share, limit)) for name, share in shares.items()}


def outlier_row(name: str, columns: Mapping[str, Array], threshold: float) -> Row:
    """The rules on the channels of the module `name`, with every outlier listed in the order of channels."""
    ratio = _ratios(columns["max"], name)
    found = np.flatnonzero(ratio > threshold)
    row = to_json(channels.outliers(columns, None, threshold))
    return {**row, "outlier_indices": found.tolist(), "outlier_ratios": ratio[found].tolist()}


def _ratios(largest: Array, what: str) -> Array:
    """Each channel's largest |x| over the median channel's. NaN would compare as "no outlier", so it is refused."""
    if np.isnan(largest).any():
        raise InvalidInput(
            f"{what}: {int(np.isnan(largest).sum())} channels contain NaN, so outliers can't be detected"
        )
    return channels.over_median(largest)


class ChannelOutlierDetector:
    """Outlier channels of every linear and of the residual stream, on calibration data.

        detector = ChannelOutlierDetector(model, calibration_data)
        detector.collect_statistics()
        detector.get_report()["summary"], detector.outlier_channels

    To run the model yourself, call it between register_hooks() and remove_hooks(): then linears alone are watched.
    """

    def __init__(
        self,
        model: Subject | nn.Module,
        calibration_data: Any,
        quantile_threshold: float = LIMITS["outlier_channel_ratio"],
    ) -> None:
        self.subject = subject_of(model)
        self.calibration_data = calibration_data
        self.quantile_threshold = quantile_threshold
        self._capture = ActivationCapture(self.subject, "", keep_activations=False)
        self._rows: dict[str, Row] | None = None
        self._columns: dict[str, dict[str, Array]] = {}

    @property
    def model(self) -> nn.Module:
        return self.subject.model

    def collect_statistics(self, *, samples: int = 1000, **more: Any) -> None:
        """Run at most `samples` of the calibration data through the model, padding left out."""
        data, levels = self.calibration_data, ("channel",)
        found = ask(self.subject, data, _CAPTURE, levels=levels, samples=samples, calibration_samples=samples, **more)
        self._columns = {name: columns for name, (_, columns) in found.items()}
        self._rows = {
            name: {**facts, **outlier_row(name, columns, self.quantile_threshold)}
            for name, (facts, columns) in found.items()
        }

    def register_hooks(self) -> None:
        """Start capturing the linears."""
        self._capture.register_hooks()

    def remove_hooks(self) -> None:
        """Leave the model as it was, and apply the outlier rules to what was captured."""
        self._capture.remove_hooks()
        if self._capture.statistics:
            self._columns = {name: columns for name, (_, columns) in self._capture.columns().items()}
            self._rows = self._capture.rows(self.quantile_threshold)

    @property
    def activation_stats(self) -> dict[str, dict[str, list[Tensor]]]:
        """max, mean, std and q99 of |x| in each channel [C], by module; lists of one, for all batches."""
        return {name: _of_sizes(columns) for name, columns in self._columns.items()}

    @property
    def outlier_channels(self) -> dict[str, Row]:
        """Modules that have outliers; {} before anything was collected."""
        return {name: row for name, row in (self._rows or {}).items() if row["num_outliers"]}

    def get_report(self) -> Row:
        """{"summary": counts, "per_layer": outlier_channels}."""
        if self._rows is None:
            raise InvalidInput("no statistics yet: call collect_statistics() first")
        summary = {
            "layers_with_outliers": len(self.outlier_channels),
            "total_outlier_channels": sum(row["num_outliers"] for row in self._rows.values()),
            "total_channels": sum(row["total_channels"] for row in self._rows.values()),
        }
        return {"summary": summary, "per_layer": self.outlier_channels}

    def apply_smoothquant_scaling(self, alpha: float = 0.5) -> Smoothed:
        """A copy of the model, smoothed where outliers are produced and where they are read: in the next block."""
        self.get_report()  # refuses where no statistics were collected
        made = {row["layer"] for row in self.outlier_channels.values() if isinstance(row["layer"], int)}
        if not made:
            raise InvalidInput(f"no channel is {self.quantile_threshold:g} times the median: nothing to smooth")
        places = frozenset(made | {layer + 1 for layer in made})
        return smooth_outliers(self.subject, batches_of(self.calibration_data), alpha=alpha, places=places)


def _of_sizes(columns: dict[str, Array]) -> dict[str, list[Tensor]]:
    """Statistics of |x|; its variance is E x^2 - (E |x|)^2."""
    square = columns["std"] ** 2 + columns["mean"] ** 2
    spread = np.sqrt(np.maximum(square - columns["mean_abs"] ** 2, 0.0))
    found = {"max": columns["max"], "mean": columns["mean_abs"], "std": spread, "q99": columns["q99"]}
    return {name: [torch.from_numpy(column.copy())] for name, column in found.items()}


def _propose_capture(context: StudyContext, results: Results) -> list[Trial]:
    trial = channels.capture_trial(context)
    assert trial is not None  # the level asked for is "channel"
    return [trial]


def _captured(context: StudyContext, results: Results) -> dict[str, tuple[Row, dict[str, Array]]]:
    """Facts and statistics [C] of every module captured."""
    result: Result = results[_propose_capture(context, results)[0].id]
    if result.failed:
        raise NoisescopeError(f"the capture failed: {result.error}")
    facts = result.facts["sites"]
    ends = np.cumsum([entry["channels"] for entry in facts])[:-1]
    columns = {name: np.split(array.astype(np.float64), ends) for name, array in result.arrays.items()}
    found = {}
    for i, entry in enumerate(facts):
        site = Site(entry["operator"], entry["place"], entry["module"], occurrence=entry["occurrence"])
        about = {"layer": site.place, "operator": site.operator}
        found[site_label(site)] = (about, {name: parts[i] for name, parts in columns.items()})
    return found


_CAPTURE = Question(_propose_capture, _captured)
_SCREEN = Question(predicted_kl.propose, predicted_kl.conclude)
