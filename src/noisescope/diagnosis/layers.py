"""Level 2: which layers can't stand noise, where errors compound, and a map of layer x operator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from noisescope import stats
from noisescope.diagnosis.context import Array, Frame, present_operators
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


def window_injection(frame: Frame, window: tuple[int, int]) -> Injection:
    return frame.injection(layers=frozenset(range(window[0], window[1] + 1)))


def layer_injection(frame: Frame, layer: int) -> Injection:
    return frame.injection(layers=frozenset({layer}))


def place_injection(frame: Frame, place: str) -> Injection:
    """Noise on everything that one place outside the blocks computes."""
    return frame.injection(places=frozenset({place}), operators=None)


def cell_injection(frame: Frame, place: Place, operator: str) -> Injection:
    return frame.injection(places=frozenset({place}), operators=frozenset({operator}))


def outer_places(frame: Frame) -> list[OuterPlace]:
    return [place for place in OUTER_PLACES if any(site.place == place for site in frame.aimed)]


def cells(frame: Frame) -> list[tuple[Place, str]]:
    """(place, operator) pairs of the map that exist; groups are sums of their parts and have no cell."""
    wanted = [name for name in present_operators(frame) if name not in GROUPS]
    return [
        (block, operator)
        for block in range(frame.blocks)
        for operator in wanted
        if any(site.place == block and site.operator == operator for site in frame.aimed)
    ]


def propose(frame: Frame, results: Results, screened: Screened | None) -> list[Trial]:
    if frame.settings.effort == "screen":
        return []
    questions = [window_injection(frame, window) for window in frame.windows]
    questions += [place_injection(frame, place) for place in outer_places(frame)]
    if frame.settings.effort == "full":
        questions += [layer_injection(frame, layer) for layer in range(frame.blocks)]
        questions += [cell_injection(frame, *cell) for cell in cells(frame)]
    else:
        questions += [layer_injection(frame, layer) for layer in _layers_to_confirm(frame, results)]
        questions += [cell_injection(frame, *cell) for cell in _cells_to_confirm(frame, screened)]
    return [trial for question in questions for trial in frame.ask(question)]


def _layers_to_confirm(frame: Frame, results: Results) -> list[int]:
    """The layers of the windows with the largest loss or divergence: where compounding would matter."""
    strengths = {window: _strength(frame, results, window) for window in frame.windows}
    if any(strength is None for strength in strengths.values()) or frame.settings.window == 1:
        return []
    worst = sorted(strengths, key=lambda window: strengths[window] or (0.0,), reverse=True)[:CLOSEST]
    return sorted({layer for start, end in worst for layer in range(start, end + 1)})


def _strength(frame: Frame, results: Results, window: tuple[int, int]) -> tuple[float, ...] | None:
    noisy = frame.answer(results, window_injection(frame, window))
    if noisy is None:
        return None
    if noisy.error:
        return (0.0, 0.0)
    divergence = float(np.nanmedian(noisy.mean("kl"))) if "kl" in noisy.metrics else 0.0
    return (divergence, -float(np.nanmean(noisy.mean(frame.metric))))


def _cells_to_confirm(frame: Frame, screened: Screened | None) -> list[tuple[Place, str]]:
    """The cells predicted to matter most, and a few evenly spread over the rest."""
    if screened is None or screened.error:
        return []
    ranked = sorted(cells(frame), key=lambda cell: -float(_predicted(frame, screened, cell).mean()))
    rest = ranked[CONFIRMED:]
    spread = [rest[round(i * (len(rest) - 1) / max(CONTROLS - 1, 1))] for i in range(min(CONTROLS, len(rest)))]
    return ranked[:CONFIRMED] + spread


def _predicted(frame: Frame, screened: Screened, cell: tuple[Place, str]) -> Array:
    place, operator = cell
    return screened.predicted(
        lambda site: site.place == place and matches_operator({operator}, site.operator, site.component)
    )


def conclude(frame: Frame, results: Results, screened: Screened | None) -> LayerAnalysis:
    """Windows, single layers, places outside the blocks, the map, and avalanche points by both rules."""
    windows = _table(frame, results, [window_injection(frame, window) for window in frame.windows],
                     [_window(frame, results, screened, window) for window in frame.windows])  # fmt: skip
    aimed = [layer_injection(frame, layer) for layer in range(frame.blocks)]
    looks = _looks(frame, results, aimed)
    layers = _table(frame, results, aimed, [
        as_row(effect(frame, results, injection, screened, looks=looks), LayerEffect, layer=layer)
        for layer, injection in enumerate(aimed)
    ])  # fmt: skip
    outer = outer_places(frame)
    aimed = [place_injection(frame, place) for place in outer]
    places = _table(frame, results, aimed, [effect(frame, results, one, screened, looks=len(outer)) for one in aimed])
    wanted = cells(frame)
    aimed = [cell_injection(frame, *cell) for cell in wanted]
    looks = _looks(frame, results, aimed)
    table = _table(frame, results, aimed, [
        as_row(effect(frame, results, injection, screened, looks=looks), CellEffect, layer=layer, operator=name)
        for (layer, name), injection in zip(wanted, aimed, strict=True)
    ])  # fmt: skip
    scale = prediction_scale([*windows, *layers, *places, *table])
    by_points = avalanche_points(
        Window(row.start_layer, row.end_layer, row.degradation.value)
        for row in windows
        if row.injected and row.degradation is not None
    )
    return LayerAnalysis(
        operators=frame.settings.layer_operators,
        window=min(frame.settings.window, frame.blocks),
        step=frame.settings.step,
        windows=tuple(on_one_scale(windows, scale)),
        layers=tuple(on_one_scale(layers, scale)),
        places=dict(zip(outer, on_one_scale(places, scale), strict=True)),
        map=tuple(on_one_scale(table, scale)),
        avalanche_points=tuple(_decided(frame, results, windows, point) for point in by_points),
        compounding=tuple(
            row.layer_range for row in windows if row.interaction_index is not None and row.interaction_index.compounds
        ),
        prediction_scale=scale,
        point_rule_avalanches=tuple(by_points),
    )


def _looks(frame: Frame, results: Results, injections: Sequence[Injection]) -> int:
    """How many rows of a table were injected: those that are looked at together; all of them in a screen."""
    injected = sum(frame.answer(results, injection) is not None for injection in injections)
    return max(injected or len(injections), 1)


def _table(frame: Frame, results: Results, injections: Sequence[Injection], rows: Sequence[E]) -> list[E]:
    """The rows of a table with what takes all of them to say: corrected p values, the size of the largest."""
    return pick_largest(frame, results, correct_looks(rows), injections)


def _window(frame: Frame, results: Results, screened: Screened | None, window: tuple[int, int]) -> WindowEffect:
    start, end = window
    found = effect(frame, results, window_injection(frame, window), screened, looks=len(frame.windows), bands="window")
    return as_row(
        found,
        WindowEffect,
        layer_range=f"L{start}-{end}",
        start_layer=start,
        end_layer=end,
        interaction_index=interaction(frame, results, screened, window),
    )


def interaction(
    frame: Frame, results: Results, screened: Screened | None, window: tuple[int, int]
) -> Interaction | None:
    """KL of the window over the sum of the KL of its layers, injected where all of them were, else predicted."""
    together = frame.answer(results, window_injection(frame, window))
    if together is None or together.error or "kl" not in together.metrics or window[0] == window[1]:
        return None
    apart = [frame.answer(results, layer_injection(frame, layer)) for layer in range(window[0], window[1] + 1)]
    known = [answer.mean("kl") for answer in apart if answer is not None and not answer.error]
    if len(known) == len(apart):
        return Interaction(ratio(together.mean("kl"), np.sum(known, axis=0)), "injected")
    if screened is None or screened.error:
        return None
    predicted = screened.predicted_by(window_injection(frame, window))
    return Interaction(ratio(together.mean("kl"), predicted), "predicted")


def _decided(frame: Frame, results: Results, windows: list[WindowEffect], point: PointAvalanche) -> AvalanchePoint:
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
    stands_out = all(_excess(frame, results, row, other, level).above(0.0) for other in beside)
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
        ratio=None if worst is None else _times(frame, results, row, worst),
        common=point.common,
        interaction_index=row.interaction_index,
    )


def _at(windows: list[WindowEffect], start: int, end: int) -> WindowEffect:
    return next(row for row in windows if (row.start_layer, row.end_layer) == (start, end))


def _measured(row: WindowEffect) -> bool:
    return row.injected and row.degradation is not None and row.degradation.value is not None


def _loss(row: WindowEffect) -> float:
    return row.degradation.value or 0.0 if row.degradation is not None else 0.0


def _scores(frame: Frame, results: Results, *rows: WindowEffect) -> tuple[Array, ...]:
    """The clean score of each sample, and its scores [samples, seeds] with noise in each window."""
    clean = frame.answer(results, None)
    assert clean is not None
    found: list[Array] = []
    for row in rows:
        noisy = frame.answer(results, window_injection(frame, (row.start_layer, row.end_layer)))
        assert noisy is not None
        before, after = paired(frame, clean, noisy)
        found = [before, *found[1:], after]
    return tuple(found)


def _excess(frame: Frame, results: Results, row: WindowEffect, other: WindowEffect, level: float) -> stats.Estimate:
    """What a window loses beyond 1.5 times its neighbour's loss."""
    clean, here, there = _scores(frame, results, row, other)
    return stats.degradation_excess(clean, here, there, factor=LIMITS["avalanche_neighbour_factor"], level=level)


def _times(frame: Frame, results: Results, row: WindowEffect, other: WindowEffect) -> stats.Estimate | None:
    """How many times the neighbour's loss; None where that has no interval."""
    found = stats.degradation_ratio(*_scores(frame, results, row, other))
    return found if found.value is not None and found.bounded else None
