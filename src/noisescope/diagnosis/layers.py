"""Level 2: which layers can't stand noise, where errors compound, and a map of layer x operator."""

from __future__ import annotations

import numpy as np

from noisescope.diagnosis.effects import SURE, Row, correct_looks, effect, ratio
from noisescope.diagnosis.frame import Array, Frame, present_operators
from noisescope.diagnosis.screen import Screened
from noisescope.findings import Window, avalanche_points
from noisescope.injection import Injection
from noisescope.sites import GROUPS, OUTER_PLACES, Place, matches_operator
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


def outer_places(frame: Frame) -> list[str]:
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
    divergence = float(np.nanmean(noisy.mean("kl"))) if "kl" in noisy.metrics else 0.0
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


def conclude(frame: Frame, results: Results, screened: Screened | None) -> Row:
    """Windows, single layers, places outside the blocks, the map, and avalanche points by both rules."""
    looks = len(frame.windows)
    windows = []
    for window in frame.windows:
        start, end = window
        row = effect(frame, results, window_injection(frame, window), screened, looks=looks, bands="window")
        row = {"layer_range": f"L{start}-{end}", "start_layer": start, "end_layer": end, **row}
        row["interaction_index"] = interaction(frame, results, screened, window)
        windows.append(row)
    layers = [
        {"layer": layer, **effect(frame, results, layer_injection(frame, layer), screened, looks=frame.blocks)}
        for layer in range(frame.blocks)
    ]
    places = {place: effect(frame, results, place_injection(frame, place), screened) for place in outer_places(frame)}
    table = [
        {
            "layer": place,
            "operator": operator,
            **effect(frame, results, cell_injection(frame, place, operator), screened),
        }
        for place, operator in cells(frame)
    ]
    for rows in (windows, layers, list(places.values()), table):
        correct_looks(rows)
    return {
        "operators": list(frame.settings.layer_operators),
        "window": min(frame.settings.window, frame.blocks),
        "step": frame.settings.step,
        "windows": windows,
        "layers": layers,
        "places": places,
        "map": table,
        "avalanche_points": _avalanches(windows),
        "compounding": [row["layer_range"] for row in windows if _compounds(row["interaction_index"])],
    }


def interaction(frame: Frame, results: Results, screened: Screened | None, window: tuple[int, int]) -> Row | None:
    """KL of the window over the sum of the KL of its layers: 1 is additive, above 1 errors compound.

    The layers' KL is injected where all of them were, else predicted by the screen (`of` says which).
    """
    together = frame.answer(results, window_injection(frame, window))
    if together is None or together.error or "kl" not in together.metrics or window[0] == window[1]:
        return None
    apart = [frame.answer(results, layer_injection(frame, layer)) for layer in range(window[0], window[1] + 1)]
    if all(answer is not None and not answer.error for answer in apart):
        total = sum(answer.mean("kl") for answer in apart if answer is not None)
        return {**ratio(together.mean("kl"), np.asarray(total)), "of": "injected"}
    if screened is None or screened.error:
        return None
    return {**ratio(together.mean("kl"), screened.predicted_by(window_injection(frame, window))), "of": "predicted"}


def _compounds(index: Row | None) -> bool:
    """Whether a window surely costs more than its layers apart; a prediction is too rough to say so by itself."""
    return index is not None and index["of"] == "injected" and index["low"] is not None and index["low"] > 1.0


def _avalanches(windows: list[Row]) -> list[Row]:
    """Avalanche points by the rule of the original method notes, with the interaction index beside each.

    A point whose loss is not sure (corrected p) is `sure: False`: it is listed and counts for nothing.
    """
    measured = [
        Window(row["start_layer"], row["end_layer"], row["degradation"]["value"])
        for row in windows
        if row["evidence"] == "injected"
    ]
    by_range = {(row["start_layer"], row["end_layer"]): row for row in windows}
    points = []
    for point in avalanche_points(measured):
        row = by_range[point.start, point.end]
        points.append(
            {
                **point.to_dict(),
                "layer_range": row["layer_range"],
                "interval": row["degradation"],
                "interaction_index": row["interaction_index"],
                "sure": row.get("p_corrected", 1.0) < SURE,
            }
        )
    return points
