"""Combines the verdicts of a forward and a backward audit: suspects, coverage and limits by phase."""

from __future__ import annotations

import dataclasses

from noisescope.localization.audit_verdict import cells_of, in_all_layers, judged_sites, not_judged, suspects_of
from noisescope.localization.backward import BackwardAudit
from noisescope.localization.coverage import BACKWARD, BackwardCoverage, Coverage, Share
from noisescope.localization.verdict import Verdict, ranked

_FORWARDS = 3  # that a forward with its backward costs


def with_backward(forward: Verdict, found: BackwardAudit) -> Verdict:
    """Forward suspects come first, because they may be the cause of a wrong gradient."""
    coverage = forward.coverage
    if found.reason:
        not_run = (*coverage.not_run, f"backward: {found.reason}")
        return dataclasses.replace(forward, coverage=dataclasses.replace(coverage, not_run=not_run))
    log = found.log
    suspects = ranked(in_all_layers(tuple(suspects_of(log, backward=True)), judged_sites(log), log.anatomy))
    coverage = _coverage(coverage, found)
    verdict = "faulty" if suspects else forward.verdict
    if verdict == "healthy" and not coverage.enough:
        verdict = "undecided"
    limits = {f"{operator}, {BACKWARD}": limit.to_dict() for operator, limit in log.limits.items()}
    return dataclasses.replace(
        forward,
        verdict=verdict,
        method=f"{forward.method}, {BACKWARD}",
        suspects=(*forward.suspects, *suspects),
        smallest_visible={**forward.smallest_visible, **limits},
        forwards=forward.forwards + _FORWARDS * found.passes,
        checked=forward.checked + log.tests,
        notes=(*forward.notes, *found.notes),
        coverage=coverage,
    )


def _coverage(forward: Coverage, found: BackwardAudit) -> Coverage:
    judged = found.log.judged
    names = judged.modules | judged.reasons.keys()
    open_ones = {name: reason for name in sorted(names) if (reason := judged.reason(name))}
    parameters = found.parameters.values()
    gradients = BackwardCoverage(
        modules=Share(len(names) - len(open_ones), len(names)),
        parameters=Share(sum(each.judged for each in parameters), sum(each.total for each in parameters)),
        not_judged=not_judged(open_ones, dict(found.model.named_modules())),
    )
    cells = [dataclasses.replace(cell, operator=f"{cell.operator}, {BACKWARD}") for cell in cells_of(found.log)]
    shapes = "backward: other shapes, padding and dropout (the model runs in evaluation mode)"
    return dataclasses.replace(
        forward,
        phases=(*forward.phases, *found.phases),
        not_run=(*forward.not_run, shapes),
        cells=(*forward.cells, *cells),
        backward=gradients,
    )
