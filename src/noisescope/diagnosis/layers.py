"""Level 2: which layers can't stand noise, where errors compound, and a map of layer x operator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Array, StudyContext, present_operators
from noisescope.diagnosis.effects import (
    correct_looks,
    effect,
    on_one_scale,
    paired,
    pick_largest,
    prediction_scale,
    ratio,
)
from noisescope.diagnosis.rows import (
    AvalanchePoint,
    CellEffect,
    E,
    Interaction,
    LayerAnalysis,
    LayerEffect,
    WindowEffect,
    as_row,
)
from noisescope.diagnosis.screen import Screened
from noisescope.findings import LIMITS, PointAvalanche, Window, avalanche_points, neighbours
from noisescope.injection import Injection
from noisescope.sites import GROUPS, OUTER_PLACES, OuterPlace, Place, matches_operator
from noisescope.trials import Results, Trial

CONFIRMED = 8  # sites of the map that `standard` confirms by injection because they matter most ...
CONTROLS = 4  # ... and so many others, spread over the ranking, to see whether the prediction holds there, too
CLOSEST = 3  # windows whose single layers are injected as well


def window_injection(context: StudyContext, window: tuple[int, int]) -> Injection:
    return context.injection(layers=frozenset(range(window[0], window[1] + 1)))


def layer_injection(context: StudyContext, layer: int) -> Injection:
    return context.injection(layers=frozenset({layer}))


def place_injection(context: StudyContext, place: str) -> Injection:
    """Noise on everything that one place outside the blocks computes."""
    return context.injection(places=frozenset({place}), operators=None)


def cell_injection(context: StudyContext, place: Place, operator: str) -> Injection:
    return context.injection(places=frozenset({place}), operators=frozenset({operator}))


def outer_places(context: StudyContext) -> list[OuterPlace]:
    return [place for place in OUTER_PLACES if any(site.place == place for site in context.aimed)]


def cells(context: StudyContext) -> list[tuple[Place, str]]:
    """(place, operator) pairs of the map that exist; groups are sums of their parts and have no cell."""
    wanted = [name for name in present_operators(context) if name not in GROUPS]
    return [
        (block, operator)
        for block in range(context.blocks)
        for operator in wanted
        if any(site.place == block and site.operator == operator for site in context.aimed)
    ]


def propose(context: StudyContext, results: Results, screened: Screened | None) -> list[Trial]:
    if context.settings.effort == "screen":
        return []
    questions = [window_injection(context, window) for window in context.windows]
    questions += [place_injection(context, place) for place in outer_places(context)]
    if context.settings.effort == "full":
        questions += [layer_injection(context, layer) for layer in range(context.blocks)]
        questions += [cell_injection(context, *cell) for cell in cells(context)]
    else:
        questions += [layer_injection(context, layer) for layer in _layers_to_confirm(context, results)]
        questions += [cell_injection(context, *cell) for cell in _cells_to_confirm(context, screened)]
    return [trial for question in questions for trial in context.ask(question)]


def _layers_to_confirm(context: StudyContext, results: Results) -> list[int]:
    """The layers of the windows with the largest loss or divergence: where compounding would matter."""
    strengths = {window: _strength(context, results, window) for window in context.windows}
    if any(strength is None for strength in strengths.values()) or context.settings.window == 1:
        return []
    worst = sorted(strengths, key=lambda window: strengths[window] or (0.0,), reverse=True)[:CLOSEST]
    return sorted({layer for start, end in worst for layer in range(start, end + 1)})


def _strength(context: StudyContext, results: Results, window: tuple[int, int]) -> tuple[float, ...] | None:
    noisy = context.answer(results, window_injection(context, window))
    if noisy is None:
        return None
    if noisy.error:
        return (0.0, 0.0)
    divergence = float(np.nanmedian(noisy.mean("kl"))) if "kl" in noisy.metrics else 0.0
    return (divergence, -float(np.nanmean(noisy.mean(context.metric))))


def _cells_to_confirm(context: StudyContext, screened: Screened | None) -> list[tuple[Place, str]]:
    """The cells predicted to matter most, and a few evenly spread over the rest."""
    if screened is None or screened.error:
        return []
    ranked = sorted(cells(context), key=lambda cell: -float(_predicted(context, screened, cell).mean()))
    rest = ranked[CONFIRMED:]
    spread = [rest[round(i * (len(rest) - 1) / max(CONTROLS - 1, 1))] for i in range(min(CONTROLS, len(rest)))]
    return ranked[:CONFIRMED] + spread


def _predicted(context: StudyContext, screened: Screened, cell: tuple[Place, str]) -> Array:
    place, operator = cell
    return screened.predicted(
        lambda site: site.place == place and matches_operator({operator}, site.operator, site.component)
    )


def conclude(context: StudyContext, results: Results, screened: Screened | None) -> LayerAnalysis:
    """Windows, single layers, places outside the blocks, the map, and avalanche points by both rules."""
    windows = _table(context, results, [window_injection(context, window) for window in context.windows],
                     [_window(context, results, screened, window) for window in context.windows])  # fmt: skip
    aimed = [layer_injection(context, layer) for layer in range(context.blocks)]
    looks = _looks(context, results, aimed)
    layers = _table(context, results, aimed, [
        as_row(effect(context, results, injection, screened, looks=looks), LayerEffect, layer=layer)
        for layer, injection in enumerate(aimed)
    ])  # fmt: skip
    outer = outer_places(context)
    aimed = [place_injection(context, place) for place in outer]
    places = _table(
        context, results, aimed, [effect(context, results, one, screened, looks=len(outer)) for one in aimed]
    )
    wanted = cells(context)
    aimed = [cell_injection(context, *cell) for cell in wanted]
    looks = _looks(context, results, aimed)
    table = _table(context, results, aimed, [
        as_row(effect(context, results, injection, screened, looks=looks), CellEffect, layer=layer, operator=name)
        for (layer, name), injection in zip(wanted, aimed, strict=True)
    ])  # fmt: skip
    scale = prediction_scale([*windows, *layers, *places, *table])
    by_points = avalanche_points(
        Window(row.start_layer, row.end_layer, row.degradation.value)
        for row in windows
        if row.injected and row.degradation is not None
    )
    return LayerAnalysis(
        operators=context.settings.layer_operators,
        window=min(context.settings.window, context.blocks),
        step=context.settings.step,
        windows=tuple(on_one_scale(windows, scale)),
        layers=tuple(on_one_scale(layers, scale)),
        places=dict(zip(outer, on_one_scale(places, scale), strict=True)),
        map=tuple(on_one_scale(table, scale)),
        avalanche_points=tuple(_decided(context, results, windows, point) for point in by_points),
        compounding=tuple(
            row.layer_range for row in windows if row.interaction_index is not None and row.interaction_index.compounds
        ),
        prediction_scale=scale,
        point_rule_avalanches=tuple(by_points),
    )


def _looks(context: StudyContext, results: Results, injections: Sequence[Injection]) -> int:
    """How many rows of a table were injected: those that are looked at together; all of them in a screen."""
    injected = sum(context.answer(results, injection) is not None for injection in injections)
    return max(injected or len(injections), 1)


def _table(context: StudyContext, results: Results, injections: Sequence[Injection], rows: Sequence[E]) -> list[E]:
    """The rows of a table with what takes all of them to say: corrected p values, the size of the largest."""
    return pick_largest(context, results, correct_looks(rows), injections)


def _window(
    context: StudyContext, results: Results, screened: Screened | None, window: tuple[int, int]
) -> WindowEffect:
    start, end = window
    found = effect(
        context, results, window_injection(context, window), screened, looks=len(context.windows), bands="window"
    )
    return as_row(
        found,
        WindowEffect,
        layer_range=f"L{start}-{end}",
        start_layer=start,
        end_layer=end,
        interaction_index=interaction(context, results, screened, window),
    )


def interaction(
    context: StudyContext, results: Results, screened: Screened | None, window: tuple[int, int]
) -> Interaction | None:
    """KL of the window over the sum of the KL of its layers, injected where all of them were, else predicted."""
    together = context.answer(results, window_injection(context, window))
    if together is None or together.error or "kl" not in together.metrics or window[0] == window[1]:
        return None
    apart = [context.answer(results, layer_injection(context, layer)) for layer in range(window[0], window[1] + 1)]
    known = [answer.mean("kl") for answer in apart if answer is not None and not answer.error]
    if len(known) == len(apart):
        return Interaction(ratio(together.mean("kl"), np.sum(known, axis=0)), "injected")
    if screened is None or screened.error:
        return None
    predicted = screened.predicted_by(window_injection(context, window))
    return Interaction(ratio(together.mean("kl"), predicted), "predicted")


def _decided(
    context: StudyContext, results: Results, windows: list[WindowEffect], point: PointAvalanche
) -> AvalanchePoint:
    """An avalanche point by point values, with what the intervals say of it.

    Both limits must be cleared: 15 % by the interval that holds for all windows together, and 1.5 times each
    neighbour's loss by the interval of loss - 1.5 x neighbour's loss, sample by sample.
    """
    row = _at(windows, point.start, point.end)
    beside = [
        _at(windows, other.start, other.end)
        for other in neighbours(
            Window(point.start, point.end, point.degradation),
            [Window(one.start_layer, one.end_layer, 0.0) for one in windows if _measured(one)],
        )
    ]
    assert row.degradation is not None
    level = stats.simultaneous_level(len(windows))
    stands_out = all(_excess(context, results, row, other, level).above(0.0) for other in beside)
    decided = stands_out and row.degradation.above(LIMITS["avalanche_degradation"])
    worst = max(beside, key=lambda one: _loss(one), default=None)
    return AvalanchePoint(
        start=point.start,
        end=point.end,
        layer_range=row.layer_range,
        state="avalanche" if decided else "borderline",
        severity="CRITICAL" if row.degradation.above(LIMITS["avalanche_critical"]) else "HIGH",
        degradation=row.degradation,
        neighbours=point.neighbours,
        ratio=None if worst is None else _times(context, results, row, worst),
        common=point.common,
        interaction_index=row.interaction_index,
    )


def _at(windows: list[WindowEffect], start: int, end: int) -> WindowEffect:
    return next(row for row in windows if (row.start_layer, row.end_layer) == (start, end))


def _measured(row: WindowEffect) -> bool:
    return row.injected and row.degradation is not None and row.degradation.value is not None


def _loss(row: WindowEffect) -> float:
    return row.degradation.value or 0.0 if row.degradation is not None else 0.0


def _scores(context: StudyContext, results: Results, *rows: WindowEffect) -> tuple[Array, ...]:
    """The clean score of each sample, and its scores [samples, seeds] with noise in each window."""
    clean = context.answer(results, None)
    assert clean is not None
    found: list[Array] = []
    for row in rows:
        noisy = context.answer(results, window_injection(context, (row.start_layer, row.end_layer)))
        assert noisy is not None
        before, after = paired(context, clean, noisy)
        found = [before, *found[1:], after]
    return tuple(found)


def _excess(
    context: StudyContext, results: Results, row: WindowEffect, other: WindowEffect, level: float
) -> stats.Estimate:
    """What a window loses beyond 1.5 times its neighbour's loss."""
    clean, here, there = _scores(context, results, row, other)
    return stats.degradation_excess(clean, here, there, factor=LIMITS["avalanche_neighbour_factor"], level=level)


def _times(context: StudyContext, results: Results, row: WindowEffect, other: WindowEffect) -> stats.Estimate | None:
    """How many times the neighbour's loss; None where that has no interval."""
    found = stats.degradation_ratio(*_scores(context, results, row, other))
    return found if found.value is not None and found.bounded else None
