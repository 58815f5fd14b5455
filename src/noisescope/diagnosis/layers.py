"""Level 2: which layers are sensitive to noise, where errors compound, and a map of layer x operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Array, StudyContext
from noisescope.diagnosis.effects import StudyResults, effects_table, on_one_scale, prediction_scale, ratio
from noisescope.diagnosis.predicted_kl import Screened, finite_mean
from noisescope.diagnosis.rows import (
    AvalanchePoint,
    CellEffect,
    Interaction,
    LayerAnalysis,
    LayerEffect,
    WindowEffect,
    as_row,
)
from noisescope.findings import LIMITS, PointAvalanche, Window, avalanche_points, neighbours
from noisescope.injection import Injection
from noisescope.sites import GROUPS, OUTER_PLACES, OuterPlace, matches_operator
from noisescope.trials import Results, Trial

CONFIRMED = 8  # sites of the map that `standard` confirms by injection because they matter most ...
CONTROLS = 4  # ... and so many others, spread over the ranking, to see whether the prediction holds there, too
CLOSEST = 3  # windows whose single layers are injected as well

Cell = tuple[int, str]  # block and operator
_ROUNDED_OUTSIDE = {"weights": ("linear", "embedding"), "activations": ("linear",), "kv-cache": ()}  # of the blocks


def window_injection(context: StudyContext, window: tuple[int, int]) -> Injection:
    return context.injection(layers=frozenset(range(window[0], window[1] + 1)))


def layer_injection(context: StudyContext, layer: int) -> Injection:
    return context.injection(layers=frozenset({layer}))


def place_injection(context: StudyContext, place: str) -> Injection:
    """Noise on everything that one place outside the blocks computes; or the format on its weights or inputs.

    A weight that lm_head shares with the embedding is rounded in both, as it is stored.
    """
    if context.settings.question is None:
        return context.injection(places=frozenset({place}), operators=None)
    rounded = [site for site in context.default_sites if site.operator in _ROUNDED_OUTSIDE[context.settings.on]]
    if place == "lm_head" and context.tied and context.settings.on == "weights":
        both = frozenset({"embed", place})
        operators = frozenset(site.operator for site in rounded if site.module in context.tied)
        return context.injection(places=both, operators=operators, modules=context.tied)
    here = frozenset(site.operator for site in rounded if site.place == place)
    return context.injection(places=frozenset({place}), operators=here)


def cell_injection(context: StudyContext, block: int, operator: str) -> Injection:
    return context.injection(places=frozenset({block}), operators=frozenset({operator}))


def outer_places(context: StudyContext) -> list[OuterPlace]:
    sites = context.default_sites
    if context.settings.question is not None:
        sites = tuple(site for site in sites if site.operator in _ROUNDED_OUTSIDE[context.settings.on])
        if context.tied:
            sites = tuple(site for site in sites if site.place != "embed")
    return [place for place in OUTER_PLACES if any(site.place == place for site in sites)]


def cells(context: StudyContext) -> list[Cell]:
    """The existing cells of the map; groups are sums of their parts and have no cell."""
    computed = {(site.place, site.operator) for site in context.default_sites}
    wanted = [name for name in context.present_operators if name not in GROUPS]
    if context.settings.question is not None and len(wanted) == 1:
        return []  # a cell would be its layer again
    return [(block, name) for block in range(context.blocks) for name in wanted if (block, name) in computed]


def propose(context: StudyContext, results: Results, screened: Screened | None) -> list[Trial]:
    if context.settings.effort == "screen":
        return []
    study, full = StudyResults(context, results, screened), context.settings.effort == "full"
    questions = [
        *(window_injection(context, window) for window in context.windows),
        *(place_injection(context, place) for place in outer_places(context)),
        *(layer_injection(context, layer) for layer in (range(context.blocks) if full else _layers_to_confirm(study))),
        *(cell_injection(context, *cell) for cell in (cells(context) if full else _cells_to_confirm(study))),
    ]
    return [trial for question in questions for trial in context.ask(question)]


def _layers_to_confirm(study: StudyResults) -> list[int]:
    """The layers of the windows with the largest loss or divergence: where compounding would matter."""
    context = study.context
    strengths = {window: _strength(study, window) for window in context.windows}
    if any(strength is None for strength in strengths.values()) or context.settings.window == 1:
        return []
    worst = sorted(strengths, key=lambda window: strengths[window] or (0.0,), reverse=True)[:CLOSEST]
    chosen = {layer for start, end in worst for layer in range(start, end + 1)}
    screened = study.screened
    if context.settings.question is not None and screened is not None:
        # large errors are predicted poorly: what the screen ranks first must not stand there unmeasured
        ranked = sorted(range(context.blocks), key=partial(_predicted, screened), reverse=True)
        chosen |= set(ranked[:CLOSEST])
    return sorted(chosen)


def _predicted(screened: Screened, layer: int) -> float:
    return finite_mean(screened.in_layer(layer))


def _strength(study: StudyResults, window: tuple[int, int]) -> tuple[float, ...] | None:
    noisy = study.answer(window_injection(study.context, window))
    if noisy is None:
        return None
    if noisy.error:
        return (0.0, 0.0)
    known = noisy.mean("kl") if "kl" in noisy.metrics else np.zeros(1)
    divergence = float(np.nanmedian(known)) if np.isfinite(known).any() else 0.0
    return (divergence, -float(np.nanmean(noisy.mean(study.context.metric))))


def _cells_to_confirm(study: StudyResults) -> list[Cell]:
    """The cells predicted to matter most, and a few evenly spread over the rest."""
    screened = study.screened
    if screened is None:
        return []

    def predicted(cell: Cell) -> float:
        block, operator = cell
        found = screened.predicted(
            lambda site: site.place == block and matches_operator({operator}, site.operator, site.component)
        )
        return finite_mean(found)

    ranked = sorted(cells(study.context), key=lambda cell: -predicted(cell))
    rest = ranked[CONFIRMED:]
    spread = [rest[round(i * (len(rest) - 1) / max(CONTROLS - 1, 1))] for i in range(min(CONTROLS, len(rest)))]
    return ranked[:CONFIRMED] + spread


def conclude(context: StudyContext, results: Results, screened: Screened | None) -> LayerAnalysis:
    """Windows, single layers, places outside the blocks, the map, and avalanche points by both rules."""
    study = StudyResults(context, results, screened)
    outer, wanted = outer_places(context), cells(context)
    every_window = [window_injection(context, window) for window in context.windows]
    every_layer = [layer_injection(context, layer) for layer in range(context.blocks)]
    every_place = [place_injection(context, place) for place in outer]
    every_cell = [cell_injection(context, *cell) for cell in wanted]
    tables = [
        effects_table(study, every_window, comparisons=len(every_window), bands="window"),
        effects_table(study, every_layer, comparisons=_injected(study, every_layer)),
        effects_table(study, every_place, comparisons=len(outer)),
        effects_table(study, every_cell, comparisons=_injected(study, every_cell)),
    ]
    scale = prediction_scale(list(chain.from_iterable(tables)))
    by_window, by_layer, by_place, by_cell = (on_one_scale(table, scale) for table in tables)
    windows = tuple(
        as_row(
            row,
            WindowEffect,
            layer_range=f"L{start}-{end}",
            start_layer=start,
            end_layer=end,
            interaction_index=interaction(study, (start, end)),
        )
        for (start, end), row in zip(context.windows, by_window, strict=True)
    )
    measured = [
        Window(row.start_layer, row.end_layer, row.degradation.value)
        for row in windows
        if row.injected and row.degradation is not None and row.degradation.value is not None
    ]
    by_points = avalanche_points(measured)
    return LayerAnalysis(
        operators=context.settings.layer_operators,
        window=min(context.settings.window, context.blocks),
        step=context.settings.step,
        windows=windows,
        layers=tuple(as_row(row, LayerEffect, layer=layer) for layer, row in enumerate(by_layer)),
        places=dict(zip(outer, by_place, strict=True)),
        map=tuple(
            as_row(row, CellEffect, layer=layer, operator=name)
            for (layer, name), row in zip(wanted, by_cell, strict=True)
        ),
        avalanche_points=tuple(_decided(study, windows, measured, point) for point in by_points),
        compounding=tuple(
            row.layer_range for row in windows if row.interaction_index is not None and row.interaction_index.compounds
        ),
        prediction_scale=scale,
        point_rule_avalanches=tuple(by_points),
    )


def _injected(study: StudyResults, injections: Sequence[Injection]) -> int:
    """How many rows of a table were injected: those that are compared; all of them in a screen."""
    injected = sum(study.answer(injection) is not None for injection in injections)
    return max(injected or len(injections), 1)


def interaction(study: StudyResults, window: tuple[int, int]) -> Interaction | None:
    """KL of the window over the sum of the KL of its layers, injected if all of them were, else predicted."""
    context, (start, end) = study.context, window
    together = study.answer(window_injection(context, window))
    if together is None or together.error or "kl" not in together.metrics or start == end:
        return None
    apart = [study.answer(layer_injection(context, layer)) for layer in range(start, end + 1)]
    known = [answer.mean("kl") for answer in apart if answer is not None and not answer.error]
    if len(known) == len(apart):
        return Interaction(ratio(together.mean("kl"), np.sum(known, axis=0)), "injected")
    if study.screened is None:
        return None
    return Interaction(
        ratio(together.mean("kl"), study.screened.predicted_by(window_injection(context, window))), "predicted"
    )


def _decided(
    study: StudyResults, windows: Sequence[WindowEffect], measured: list[Window], point: PointAvalanche
) -> AvalanchePoint:
    """An avalanche point by point values, with what the intervals say about it.

    Both limits must be cleared: 15 % by the interval that holds for all windows together, and 1.5 times each
    neighbour's loss by the interval of loss - 1.5 x neighbour's loss, sample by sample.
    """
    here = (point.start, point.end)
    row = next(row for row in windows if (row.start_layer, row.end_layer) == here)
    assert row.degradation is not None
    beside = neighbours(Window(*here, point.degradation), measured)
    worst = max(beside, key=lambda window: window.degradation or 0.0, default=None)
    factor, level = LIMITS["avalanche_neighbour_factor"], stats.simultaneous_level(len(windows))
    excess = [stats.degradation_excess(*_scores(study, here, other), factor=factor, level=level) for other in beside]
    times = None if worst is None else stats.degradation_ratio(*_scores(study, here, worst))
    decided = all(one.above(0.0) for one in excess) and row.degradation.above(LIMITS["avalanche_degradation"])
    return AvalanchePoint(
        start=point.start,
        end=point.end,
        layer_range=row.layer_range,
        state="avalanche" if decided else "borderline",
        severity="CRITICAL" if row.degradation.above(LIMITS["avalanche_critical"]) else "HIGH",
        degradation=row.degradation,
        neighbours=point.neighbours,
        ratio=times if times is not None and times.value is not None and times.bounded else None,
        common=point.common,
        interaction_index=row.interaction_index,
    )


def _scores(study: StudyResults, window: tuple[int, int], other: Window) -> tuple[Array, Array, Array]:
    """The clean score of each sample, and its scores with noise in either window."""
    injections = (window_injection(study.context, ends) for ends in (window, (other.start, other.end)))
    found = study.scores(*injections)
    assert found is not None
    return found[0], found[1], found[2]
