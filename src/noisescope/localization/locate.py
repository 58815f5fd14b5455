"""`locate`: find what computes wrongly, by one method or by the cheapest conclusive one."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from noisescope import progress
from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.localization.coverage import Coverage
from noisescope.localization.verdict import Verdict
from noisescope.model.loading import Subject
from noisescope.model.quantised_checkpoint import rounds_activations
from noisescope.options.base import takes_options
from noisescope.options.device_commands import LocateOptions


@takes_options(LocateOptions)
def locate(subject: Subject | nn.Module, options: LocateOptions) -> Verdict:
    """Find where the model computes wrongly on its device.

    >>> import noisescope as ns
    >>> subject = ns.load("tiny:llama")
    >>> with ns.faulty(subject.model, "gain:0.01@1/linear"):
    ...     verdict = ns.locate(subject, quick=True)
    >>> verdict.verdict, verdict.suspects[0].site.place, verdict.suspects[0].fault_class
    ('faulty', 1, 'gain')

    `verdict.headline` is the verdict with its coverage, in one sentence; `verdict.smallest_visible` has the
    detection limits.

    `method` selects how. "audit" recomputes every operator on the host from its actual inputs. "relations" calls
    modules again and tests laws of healthy arithmetic, without weights or a host. "auto" runs the audit, and relations
    for operators the audit could not check. All three first compare the model's memory with its checkpoint and config,
    unless `state` is False; `backward` also audits the gradients of a loss. "replay" (and "auto" with a `reference`, a
    record made with full detail on a good device) gives each module that device's inputs and compares the outputs.
    "srdd" runs the four probes of the original method notes, which rank layers but decide nothing. "scans" compares
    statistics of each block's input and output. "fingerprint" compares `failure`, outputs recorded on the suspect
    system, with faults simulated in this model (and with `reference`, the outputs of a good system). No data is needed:
    `inputs` defaults to built-in prompts. `verdict.coverage` lists the shapes and phases that ran and what was checked.
    The model runs in the caller's thread, inside any open scopes.
    """
    method, inputs, reference, seed = options.method, options.inputs, options.reference, options.seed
    if options.failure is not None:
        from noisescope.localization.fingerprint_locator import fingerprint

        progress.begin("fingerprints")
        return fingerprint(subject, options.failure, reference)
    if reference is not None:
        from noisescope.localization.replay import replay

        progress.begin("replay")
        found = replay(subject, reference, seed=seed)
        return found if method == "replay" else dataclasses.replace(found, method="auto: replay")
    if method == "srdd":
        from noisescope.localization.srdd import srdd

        progress.begin("probes")
        return srdd(subject, seed=seed)
    if method == "scans":
        from noisescope.localization.block_scans import scans

        progress.begin("scans")
        return scans(subject, seed=seed)
    _refuse_rounded_activations(subject)
    if method == "relations":
        from noisescope.localization.relations import relations

        progress.begin("relations")
        return relations(subject, inputs, seed=seed)
    from noisescope.localization.audit import audit
    from noisescope.localization.state import check_state, with_state

    if options.state:
        progress.begin("weights and config")
    state = check_state(subject) if options.state else None  # before anything runs
    try:
        found = audit(
            subject,
            inputs,
            tokens=options.tokens,
            batch=options.batch,
            decode=options.decode,
            budget=options.budget,
            repeat=options.repeat,
            quick=options.quick,
            seed=seed,
        )
    except (InvalidInput, RuntimeError, IndexError, TypeError, AttributeError) as error:
        wrong_inputs = isinstance(error, InvalidInput) and inputs is not None
        if state is None or not state.suspects or wrong_inputs:
            raise
        reason = f"the model can't run ({type(error).__name__}: {str(error).partition(chr(10))[0][:120]})"
        return with_state(Verdict("undecided", method, coverage=Coverage(not_run=(reason,))), state)
    if method != "audit":
        found = _with_relations(found, subject, inputs, seed)
    if options.backward:
        from noisescope.localization.backward import audit_backward
        from noisescope.localization.backward_verdict import with_backward

        progress.begin("gradients")
        gradients = audit_backward(subject, inputs, tokens=options.tokens, batch=options.batch, seed=seed)
        found = with_backward(found, gradients)
    return found if state is None else with_state(found, state)


def _refuse_rounded_activations(subject: Subject | nn.Module) -> None:
    """The audit and relations expect exact products, which such linears do not compute where they are healthy."""
    model = subject if isinstance(subject, nn.Module) else subject.model
    rounding = [name for name, module in model.named_modules() if rounds_activations(module)]
    if rounding:
        raise UnsupportedModel(
            f"{rounding[0]} rounds its activations (compressed-tensors), and so do {len(rounding) - 1} other modules: "
            "the audit would take that for a fault. Locate with the checkpoint before quantisation, or one whose "
            "weights alone are quantised, or with a --reference record of a good device"
        )


def _with_relations(audited: Verdict, subject: Subject | nn.Module, inputs: Any, seed: int) -> Verdict:
    """The audit's verdict; if it is undecided, with the suspects that laws find in what it could not check.

    Laws have blind spots, and cover neither code between modules nor weights that change: what they leave open stays
    open.
    """
    places = {site.place for site in audited.unseen} | {
        cell.place for cell in audited.coverage.cells if cell.judged < cell.total
    }
    if audited.verdict != "undecided" or not places:
        return dataclasses.replace(audited, method="auto: audit")
    from noisescope.localization.relations import relations

    progress.begin("relations")
    more = relations(subject, inputs, places=places, seed=seed)
    open_sites = {(site.place, site.module) for site in audited.unseen if site.tensor == "input"}
    suspects = tuple(s for s in more.suspects if (s.site.place, s.site.module) not in open_sites)
    visible = {f"{operator}, by relations": seen for operator, seen in more.smallest_visible.items()}
    return dataclasses.replace(
        audited,
        verdict="faulty" if suspects else "undecided",
        suspects=suspects,
        method="auto: audit, relations",
        smallest_visible={**audited.smallest_visible, **visible},
        forwards=audited.forwards + more.forwards,
        checked=audited.checked + more.checked,
        notes=(*audited.notes, *more.notes),
    )
