"""The whole diagnosis as one pair: every trial that is wanted now, and the report's sections from what is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from noisescope.diagnosis import channels, dashboard, formats, gauge, layers, operators, screen
from noisescope.diagnosis.frame import Frame
from noisescope.diagnosis.summary import could_not_see, executive_summary, findings, recommendations
from noisescope.trials import Results, Trial

SCHEMA_VERSION = 1


def propose(frame: Frame, results: Results) -> list[Trial]:
    """Clean first, then the screen, then what they make worth injecting."""
    trials = frame.ask(None)
    if frame.measure != "custom":
        trials += screen.propose(frame, results)
    if any(trial.id not in results for trial in trials):
        return trials
    screened = screen.conclude(frame, results) if frame.measure != "custom" else None
    levels = frame.settings.levels
    if "operator" in levels:
        trials += operators.propose(frame, results) + gauge.propose(frame, results)
    if "layer" in levels:
        trials += layers.propose(frame, results, screened)
    if "channel" in levels:
        trials += channels.propose(frame, results, screened)
    trials += dashboard.propose(frame, results, screened)
    return trials + formats.propose(frame)


def conclude(frame: Frame, results: Results, notes: Sequence[str] = ()) -> dict[str, Any]:
    """The report without its `run` part: the same results give the same sections, byte for byte."""
    screened = screen.conclude(frame, results) if frame.measure != "custom" else None
    levels = frame.settings.levels
    sections: dict[str, Any] = {
        "operator_analysis": operators.conclude(frame, results, screened) if "operator" in levels else None,
        "layer_analysis": layers.conclude(frame, results, screened) if "layer" in levels else None,
        "channel_analysis": channels.conclude(frame, results, screened) if "channel" in levels else None,
    }
    sections["metrics"] = dashboard.conclude(frame, results, screened, sections["channel_analysis"])
    sections["correlations"] = dashboard.correlations(
        frame, sections["layer_analysis"], sections["metrics"], sections["channel_analysis"]
    )
    sections["format_scores"] = formats.conclude(frame, results)
    sections["gate"] = gauge.conclude(frame, results) if "operator" in levels else None
    found = findings(frame, sections)
    wanted = recommendations(frame, sections)
    limits = could_not_see(frame, sections, list(notes))
    if screened is not None and screened.error:
        limits.insert(0, f"the screen failed, so nothing was predicted: {screened.error}")
    if screened is not None and screened.lost:
        limits.append(f"{len(screened.lost)} sites changed in place have no prediction, such as {screened.lost[0]}")
    return {
        "schema_version": SCHEMA_VERSION,
        "executive_summary": executive_summary(frame, sections, found, wanted),
        **sections,
        "findings": [finding.to_dict() for finding in found],
        "recommendations": [recommendation.to_dict() for recommendation in wanted],
        "could_not_see": limits,
    }
