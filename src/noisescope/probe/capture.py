"""`capture`: records the values at chosen operators, as running statistics per channel or as tensors.

Statistics take memory for the channels only, however many samples pass. A channel is the last dimension; inside
attention (products, softmax) it is the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, NothingInjected, unknown
from noisescope.model.anatomy import Anatomy
from noisescope.probe.watch import RecordedCall, Selection, WatchScope, selected_by, sites_of, watch
from noisescope.sites import FUSED, Place, Site

KEEP = ("statistics", "raw", "both")
LOWEST, HIGHEST = -24, 16  # exponents of 2
BINS = (HIGHEST - LOWEST) * 4 + 2
_FIRST = (127 + LOWEST) * 4  # the shifted bits of 2^LOWEST: float32 stores exponent + 127


def capture(
    model: nn.Module,
    *,
    operators: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    places: Iterable[Place] | None = None,
    modules: Iterable[str] | None = None,
    keep: str = "statistics",
    inputs: bool = True,
    device: str | None = None,
    quantiles: bool = False,
    anatomy: Anatomy | None = None,
) -> Capture:
    """A scope that records the outputs of operators (and, with keep="raw" or "both", inputs and outputs as tensors).

    >>> import torch, noisescope as ns
    >>> model = ns.load("tiny:llama").model
    >>> with ns.capture(model, operators={"norm"}, layers={1}) as captured:
    ...     output = model(torch.arange(8)[None])
    >>> {site.module: tuple(found.maximum.shape) for site, found in captured.statistics.items()}
    {'model.layers.1.input_layernorm': (32,), 'model.layers.1.post_attention_layernorm': (32,)}

    `inputs=False` keeps raw outputs alone. `device` moves raw tensors there (default: they stay where they are).
    `quantiles` keeps a histogram of each channel as well: captured.statistics[site].histogram.quantile(0.99).
    """
    if keep not in KEEP:
        raise unknown("keep", keep, KEEP)
    chosen = sites_of(operators, layers, places, modules)
    scope = Capture(model, selected_by(chosen), keep, device, anatomy, quantiles=quantiles, inputs=inputs)
    scope.scope.anatomy.check_layers(chosen.named_places)
    return scope


class Capture:
    """Collects the outputs of operators and, for raw tensors, their inputs."""

    def __init__(
        self,
        model: nn.Module,
        where: Selection,
        keep: str = "statistics",
        device: str | None = None,
        anatomy: Anatomy | None = None,
        *,
        quantiles: bool = False,
        inputs: bool = True,
    ) -> None:
        self._collector = _Collector(keep, device, quantiles)
        self._scope = watch(
            model,
            self._collector.on_call,
            lambda unit, operator: operator != FUSED and where(unit, operator),
            before=self._collector.before if inputs and keep != "statistics" else None,
            anatomy=anatomy,
        )
        self.captured = self._collector.captured

    @property
    def scope(self) -> WatchScope:
        """The scope on the model, for what all scopes have: `rows`, `any_order`, `forwards`."""
        return self._scope

    def tokens(self, mask: Tensor | None) -> None:
        """Which tokens [B, T] of the following forwards count for statistics (None = all), to exclude padding."""
        if mask is not None and mask.dim() != 2:
            raise InvalidInput(f"a token mask must have the shape [batch, tokens], got {tuple(mask.shape)}")
        self._collector.mask = None if mask is None else mask.bool()

    def quantile_rows(self, samples: Tensor | None) -> None:
        """Which samples [B] of the following forwards enter the histograms (None = all), which cost the most."""
        self._collector.sampled = None if samples is None else samples.bool()

    def __enter__(self) -> Captured:
        self._scope.__enter__()
        return self.captured

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._scope.__exit__(kind, *error)
        if kind is None and self._scope.forwards and not (self.captured.statistics or self.captured.raw):
            raise NothingInjected(
                "the model ran, but nothing was captured: see `noisescope inspect` for what is visible"
            )


class _Collector:
    """Keeps what a capture's calls returned. It does not refer to the scope that calls it: in a cycle of references,
    tensors would stay on the device until Python's garbage collector runs."""

    def __init__(self, keep: str, device: str | None, quantiles: bool) -> None:
        self.captured = Captured()
        self.mask: Tensor | None = None
        self.sampled: Tensor | None = None
        self._keep = keep
        self._device = device
        self._quantiles = quantiles
        self._inputs: dict[Site, tuple[Tensor, ...]] = {}  # of calls under way, as they were given

    def before(self, call: RecordedCall) -> None:
        self._inputs[call.site] = tuple(self._stored(x) for x in call.inputs)  # an operator may overwrite its input

    def on_call(self, call: RecordedCall) -> None:
        tensor = call.output[0] if isinstance(call.output, tuple) else call.output
        site = call.site
        if self._keep != "raw":
            statistics = self.captured.statistics.setdefault(site, ChannelStatistics())
            statistics.add(self._rows(tensor, call, None))
            if self._quantiles:
                rows = self._rows(tensor, call, self.sampled)
                statistics.histogram = statistics.histogram or LogHistogram(rows.shape[-1], rows.device)
                statistics.histogram.add(rows)
        if self._keep != "statistics":
            pair = (self._inputs.pop(site, ()), self._stored(tensor))
            self.captured.raw.setdefault(site, []).append(pair)

    def _stored(self, x: Tensor) -> Tensor:
        kept = x.detach()
        return kept.to(self._device) if self._device not in (None, str(kept.device)) else kept.clone()

    def _rows(self, y: Tensor, call: RecordedCall, sampled: Tensor | None) -> Tensor:
        """The rows [R, C] that count: heads last inside attention, without masked tokens, of sampled samples only."""
        if call.by_head and y.dim() == 4:
            y = y.transpose(1, 3).transpose(1, 2)  # [B, H, T, S] -> [B, T, S, H]
        mask = self.mask
        if sampled is not None and mask is not None:
            mask = mask & sampled.to(mask.device)[:, None]
        if mask is not None and tuple(y.shape[:2]) == tuple(mask.shape):
            y = y[mask.to(y.device)]
        elif mask is not None and y.dim() == 2 and y.shape[0] == mask.numel():
            y = y[mask.to(y.device).flatten()]
        return y.reshape(-1, y.shape[-1])


@dataclass
class ChannelStatistics:
    """Running statistics of each channel over all rows seen; Chan's parallel update of mean and variance."""

    count: int = 0
    maximum: Tensor | None = None  # max |x|, [C]
    mean: Tensor | None = None
    mean_abs: Tensor | None = None
    histogram: LogHistogram | None = None  # if quantiles were requested
    _spread: Tensor | None = field(default=None, repr=False)  # sum of squared deviations

    def add(self, rows: Tensor) -> None:
        """Add rows [R, C]."""
        if rows.shape[0] == 0:
            return
        values = rows.detach().float()  # sums over the rows of one call in float32, over calls in float64
        wide = torch.float32 if rows.device.type == "mps" else torch.float64
        count, centre = values.shape[0], values.mean(0)
        spread = (values - centre).square_().sum(0).to(wide)
        size, mean = values.abs(), centre.to(wide)
        largest, mean_abs = size.amax(0).to(wide), size.mean(0).to(wide)
        if self.maximum is None or self.mean is None or self.mean_abs is None or self._spread is None:
            self.count, self.maximum, self.mean, self.mean_abs, self._spread = (
                count,
                largest,
                mean,
                mean_abs,
                spread,
            )
            return
        total = self.count + count
        gap = mean - self.mean
        self.maximum = torch.maximum(self.maximum, largest)
        self._spread = self._spread + spread + gap.square() * (self.count * count / total)
        self.mean = self.mean + gap * (count / total)
        self.mean_abs = self.mean_abs + (mean_abs - self.mean_abs) * (count / total)
        self.count = total

    @property
    def std(self) -> Tensor | None:
        """Population standard deviation of each channel."""
        return None if self._spread is None else (self._spread / self.count).sqrt()

    def columns(self) -> dict[str, Tensor]:
        """Each statistic by name, [C]; only after values were added, with quantiles requested."""
        assert self.maximum is not None and self.mean is not None and self.mean_abs is not None
        assert self.std is not None and self.histogram is not None
        return {
            "max": self.maximum,
            "mean": self.mean,
            "mean_abs": self.mean_abs,
            "std": self.std,
            "q50": self.histogram.quantile(0.5),
            "q99": self.histogram.quantile(0.99),
        }

    def relative_sparsity(self, threshold: float = 0.01) -> float:
        """The share of values smaller than `threshold` times the rms of all: an absolute 1e-6 finds almost nothing."""
        assert self.histogram is not None and self.mean is not None and self._spread is not None
        rms = float((self.mean.square() + self._spread / self.count).mean().sqrt())
        return self.histogram.share_below(threshold * rms)


@dataclass
class Captured:
    """The captured values, by site."""

    statistics: dict[Site, ChannelStatistics] = field(default_factory=dict)
    raw: dict[Site, list[tuple[tuple[Tensor, ...], Tensor]]] = field(default_factory=dict)  # (inputs, output) per call


class LogHistogram:
    """Counts [C, BINS] of the magnitudes of each channel: quantiles in memory that does not grow with the data.

    A bin is what the exponent and the first two bits of the mantissa of a float32 say, so it is found by a shift: four
    bins per octave from 2^-24 to 2^16, one below (with the zeros) and one above. A quantile is interpolated inside its
    bin; it is off by at most the bin's width, a quarter, and by a few percent for smooth data.
    """

    def __init__(self, channels: int, device: torch.device) -> None:
        self.counts = torch.zeros(channels, BINS, dtype=torch.int64, device=device)

    def add(self, rows: Tensor) -> None:
        """Add rows [R, C]."""
        if rows.shape[0] == 0:
            return
        bits = rows.detach().abs().float().contiguous().view(torch.int32)
        place = (bits >> 21).sub_(_FIRST - 1).clamp_(0, BINS - 1)
        place += torch.arange(rows.shape[1], device=rows.device, dtype=torch.int32) * BINS
        self.counts += torch.bincount(place.flatten(), minlength=self.counts.numel()).view_as(self.counts)

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of |x| in each channel [C]."""
        return _quantile(self.counts.double(), q)

    def share_below(self, size: float) -> float:
        """The share of all values with |x| < size, over all channels."""
        counts = self.counts.sum(0).double().cpu()
        total = float(counts.sum())
        edges = _edges(torch.arange(BINS + 1, dtype=torch.float64))
        whole = int((edges <= size).sum()) - 1  # bins that lie below it as a whole
        if size <= 0 or not total or whole >= BINS:
            return 0.0 if size <= 0 or not total else 1.0
        part = (size - float(edges[whole])) / float(edges[whole + 1] - edges[whole]) if whole > 0 else 0.0
        return float(counts[:whole].sum() + counts[whole] * part) / total


def _edges(position: Tensor) -> Tensor:
    """The size at a position in bins: bin i lies between positions i and i + 1, linear in between."""
    octave, quarter = torch.div(position - 1, 4, rounding_mode="floor"), (position - 1) % 4
    return torch.where(position < 1, 0.0, (octave + LOWEST).exp2() * (1 + quarter / 4))


def _quantile(counts: Tensor, q: float) -> Tensor:
    total = counts.sum(1, keepdim=True)
    cumulative = counts.cumsum(1)
    target = (q * total).clamp_min(1e-9)
    at = torch.searchsorted(cumulative, target).clamp_(max=BINS - 1)
    before = cumulative.gather(1, at) - counts.gather(1, at)
    fraction = ((target - before) / counts.gather(1, at).clamp_min(1)).clamp_(0, 1)
    return torch.where(at == 0, 0.0, _edges(at + fraction))[:, 0]
