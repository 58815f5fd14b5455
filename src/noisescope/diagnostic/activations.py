"""Activations captured by the names of the original method notes: tensors, and statistics of their channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import torch
from torch import Tensor, nn

from noisescope.api.activations import linears
from noisescope.diagnosis.frame import Array
from noisescope.diagnostic.asking import Row, subject_of
from noisescope.diagnostic.outliers import outlier_row, site_label
from noisescope.errors import InvalidInput
from noisescope.evaluation import evaluating
from noisescope.findings import LIMITS
from noisescope.model import Subject
from noisescope.probe.capture import Capture, Captured, ChannelStatistics, capture
from noisescope.runs.forwards import input_device
from noisescope.sites import Place


class ActivationCapture:
    """The outputs of chosen linears while you run the model, and statistics of their channels.

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
    `keep_activations=False` does without them. Registering again starts anew.
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
        """Begin to watch."""
        if self._scope is not None:
            raise InvalidInput("this capture is watching already: remove_hooks() first")
        scope = capture(
            self.subject.model,
            operators={"linear"},
            modules=self.modules,
            keep="both" if self.keep_activations else "statistics",
            inputs=False,
            device="cpu",
            quantiles=True,
            anatomy=self.subject.anatomy,
        )
        scope.any_order = True  # hooks are removed whenever their owner likes, also under noise enabled meanwhile
        self._captured = scope.__enter__()
        self._scope = scope

    def remove_hooks(self) -> None:
        """Leave the model as it was; statistics stay."""
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(None, None, None)

    def __enter__(self) -> ActivationCapture:
        self.register_hooks()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(kind, error, trace)

    def tokens(self, mask: Tensor | None) -> None:
        """Which tokens [B, T] of the forwards that follow count (an attention mask); None for all."""
        if self._scope is None:
            raise InvalidInput("a token mask is for forwards that are watched: register_hooks() first")
        self._scope.tokens(mask)

    @property
    def activations(self) -> dict[str, list[Tensor]]:
        """By module, what each call since the last register_hooks() gave: detached, on the CPU, padding included."""
        if not self.keep_activations:
            raise InvalidInput("this capture was made with keep_activations=False: it has `statistics` alone")
        return {site_label(site): [output for _, output in calls] for site, calls in self._captured.raw.items()}

    @property
    def statistics(self) -> dict[str, ChannelStatistics]:
        """By module, over everything seen since the last register_hooks()."""
        return {site_label(site): statistics for site, statistics in self._captured.statistics.items()}

    def rows(self, threshold: float) -> dict[str, Row]:
        """Every watched module's channels under the outlier rules."""
        if not self._captured.statistics:
            raise InvalidInput("nothing was captured yet: register_hooks(), then call the model")
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
    """What a block (by index) or a module (by name: a linear, a norm) gives for a batch: [B, T, C]."""
    subject = subject_of(model)
    device = input_device(subject.model)
    scope = capture(subject.model, keep="raw", anatomy=subject.anatomy, **_aim(subject, layer))
    with evaluating(subject.model), scope as seen, torch.no_grad():
        if isinstance(batch, Tensor):
            subject.model(batch.to(device))
        else:
            subject.model(**{name: value.to(device) for name, value in batch.items()})
    _, output = next(iter(seen.raw.values()))[-1]
    return output


def _aim(subject: Subject, layer: int | str) -> Row:
    """Where one tensor comes out: a block's end, or a module that is an operator."""
    if isinstance(layer, str):
        units = [u for u in subject.anatomy.units if u.kind == "module" and u.module == layer]
        if not units:
            raise InvalidInput(f"{layer!r} is no module with one output; `noisescope inspect -v` lists them")
        return {"modules": [layer], "operators": units[0].operators}
    blocks = len(subject.anatomy.blocks)
    if not 0 <= layer < blocks:
        raise InvalidInput(f"layer {layer} is out of range: the model has {blocks} blocks, 0 to {blocks - 1}")
    return {"operators": {"residual"}, "layers": {layer}}


def _columns(statistics: ChannelStatistics) -> dict[str, Array]:
    assert statistics.maximum is not None and statistics.mean_abs is not None and statistics.histogram is not None
    assert statistics.mean is not None and statistics.std is not None
    found = {
        "max": statistics.maximum,
        "mean": statistics.mean,
        "mean_abs": statistics.mean_abs,
        "std": statistics.std,
        "q50": statistics.histogram.quantile(0.5),
        "q99": statistics.histogram.quantile(0.99),
    }
    return {name: column.double().cpu().numpy() for name, column in found.items()}
