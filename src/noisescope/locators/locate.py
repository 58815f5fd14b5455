"""`locate`: what computes wrongly, by one method or by the cheapest that is sure."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from noisescope.errors import InvalidInput, unknown
from noisescope.locators.verdict import Verdict
from noisescope.model import Subject

METHODS = ("auto", "audit", "srdd", "fingerprint")


def locate(
    subject: Subject | nn.Module,
    *,
    method: str = "auto",
    inputs: Any = None,
    failure: Any = None,
    reference: Any = None,
    seed: int = 0,
) -> Verdict:
    """Where the model computes wrongly on the device it is on.

        verdict = ns.locate(ns.load("demo"))
        verdict.verdict                                   # "healthy", "faulty" or "undecided"
        verdict.suspects[0].site.place, verdict.suspects[0].fault_class, verdict.smallest_visible

    audit (and auto, for now) recomputes every operator on the host from its own inputs; srdd is the original method
    notes' scan; fingerprint compares `failure`, outputs recorded on the suspect system, with simulated faults in this
    model (and `reference`, those of a good one). No data is needed: `inputs` are built-in prompts unless given. The
    model runs in the caller's thread, inside whatever scopes are open.
    """
    if method not in METHODS:
        raise unknown("method", method, METHODS)
    if (method == "fingerprint") != (failure is not None):
        raise InvalidInput(
            "the fingerprint method compares recorded outputs of the suspect system: give them as `failure`, and only "
            f"then; got method={method!r} and {'no ' if failure is None else ''}failure"
        )
    if method == "fingerprint":
        from noisescope.locators.fingerprint import fingerprint

        return fingerprint(subject, failure, reference)
    if method == "srdd":
        from noisescope.locators.scans import scans

        return scans(subject, seed=seed)
    from noisescope.locators.audit import audit

    found = audit(subject, inputs, seed=seed)
    return found if method == "audit" else dataclasses.replace(found, method="auto: audit")
