"""Checks a loaded model's memory without running it: weights, buffers and attributes.

An audit takes weights as they are and finds what computes wrongly with them. This check compares them with the file
they came from, bit for bit after the loading cast, and compares buffers and attributes with those that the config
gives.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.audit_verdict import in_all_layers
from noisescope.localization.call_tree import with_whole_modules
from noisescope.localization.checkpoint_state import PLAIN, Stored, WeightsCompared, compare_weights, held_tensors
from noisescope.localization.config_state import (
    compare_attributes,
    compare_buffers,
    compare_with_stored_config,
    fresh_model,
    odd_ones_out,
)
from noisescope.localization.inputs import parts_of
from noisescope.localization.state_fault import Compared, StateFault
from noisescope.localization.tensors import bits_of
from noisescope.localization.verdict import Suspect, Verdict, ranked
from noisescope.localization.weight_difference import same_bits
from noisescope.model.anatomy import ATTENTION, Anatomy
from noisescope.model.checkpoint_tensors import stored_tensors
from noisescope.model.loading import Subject
from noisescope.sites import FUSED, WHOLE, Site, place_order

_SHOWN = 3
_FAR, _FEW = 1e6, 8  # times the rms of the others, of at most so many weights: a flipped bit of an exponent
CHECKPOINT = "tensors with the checkpoint"


@dataclass(frozen=True)
class StateReport:
    """Suspects are certain; possible ones may have been changed on purpose; doubtful ones are listed in the notes."""

    suspects: tuple[Suspect, ...] = ()
    possible: tuple[Suspect, ...] = ()  # of a model that was wrapped, not loaded, a few weights are not the file's
    doubtful: tuple[Suspect, ...] = ()
    words: str = ""  # what was compared, and what was not
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    compared: int = 0  # tensors, buffers and attributes
    own_code: tuple[str, ...] = ()  # modules of a class that the config does not give, checked against their own code


def check_state(subject: Subject | nn.Module) -> StateReport:
    """Check a model's weights, buffers and attributes.

        report = check_state(ns.load("path/to/model", device="cuda"))
        report.suspects, report.words

    Weights are compared with the checkpoint that the model was loaded from, if available; buffers and attributes
    with those that the model's class makes from its config, or between blocks where there is none. Weights that are
    all zero, constant or the same in two places are doubtful without a file. Nothing of the model runs or changes.
    """
    start = time.perf_counter()
    model, _, anatomy = parts_of(subject)
    path, root = _pretrained(model)
    weights = WeightsCompared()
    parts: dict[str, Compared] = {}
    if root is not None:
        loaded = isinstance(subject, Subject) and subject.loading is not None
        stored = _checkpoint(subject, root)
        weights = WeightsCompared() if stored is None else compare_weights(root, stored, loaded=loaded)
        parts[CHECKPOINT] = weights.result
        source = _source(subject, root)
        if source is not None and Path(source[0]).expanduser().is_dir():
            parts["values of the config with the checkpoint's"] = compare_with_stored_config(
                root, Path(source[0]).expanduser(), loaded=loaded
            )
        parts |= _compare_with_config(root, as_stored=weights.as_stored)
    parts = {name: _with_prefix(part, path) for name, part in parts.items()}
    if "attributes with the config" not in parts:
        parts["attributes between blocks"] = odd_ones_out(model, anatomy.blocks)
    parts["tensors by themselves"] = suspicious_weights(model, weights)
    return _report(model, anatomy, parts, time.perf_counter() - start)


def _checkpoint(subject: Subject | nn.Module, root: Any) -> Stored | None:
    """A reader for the tensors the model was loaded from; None if unknown."""
    found = _source(subject, root)
    return None if found is None else lambda: stored_tensors(root, *found, held_tensors(root))


def _source(subject: Subject | nn.Module, root: Any) -> tuple[str, str | None] | None:
    """What the model was loaded from, with the revision."""
    source, revision = str(root.name_or_path), vars(root.config).get("_commit_hash")
    if isinstance(subject, Subject) and subject.loading is not None:
        source, revision = subject.source, subject.loading["revision"] or revision
    if not source or source.startswith("tiny:"):
        return None
    if source == "demo" or Path(source).expanduser().exists():  # only a hub id has revisions
        revision = None
    return source, revision


def _compare_with_config(root: Any, *, as_stored: bool) -> dict[str, Compared]:
    fresh, problem = fresh_model(root)
    if fresh is None:
        return {"buffers with the config": Compared(notes=(problem,))}
    cast = {kind: not as_stored and _fits(root, kind) for kind in (torch.bfloat16, torch.float16)}
    buffers = compare_buffers(root, fresh, was_cast=cast)
    if buffers.faults and root.dtype.is_floating_point:  # from_config(..., dtype=...) computes some in that dtype
        other, _ = fresh_model(root, default=root.dtype)
        wrong = {fault.module for fault in compare_buffers(root, other, was_cast=cast).faults}
        faults = tuple(fault for fault in buffers.faults if fault.module in wrong)
        buffers = dataclasses.replace(buffers, faults=faults)
    return {
        "buffers with the config": dataclasses.replace(buffers, notes=(problem,) if problem else ()),
        "attributes with the config": compare_attributes(root, fresh),
    }


def _with_prefix(part: Compared, prefix: str) -> Compared:
    faults = tuple(dataclasses.replace(fault, module=f"{prefix}{fault.module}".rstrip(".")) for fault in part.faults)
    return dataclasses.replace(part, faults=faults)


def with_state(found: Verdict, report: StateReport) -> Verdict:
    """A verdict with the faults found in memory first, because round-off can't explain them."""
    notes = (*report.notes, f"checking weights, buffers and config took {report.seconds:.1f} s")
    doubtful = tuple(f"{suspect.site}: {suspect.evidence}" for suspect in report.doubtful)
    verdict = "undecided" if report.possible and found.verdict == "healthy" else found.verdict
    return dataclasses.replace(
        found,
        verdict="faulty" if report.suspects else verdict,
        suspects=ranked((*report.suspects, *found.suspects, *report.possible)),
        checked=found.checked + report.compared,
        notes=(*found.notes, *notes),
        coverage=dataclasses.replace(found.coverage, state=report.words, own_code=report.own_code, doubtful=doubtful),
    )


def _pretrained(model: nn.Module) -> tuple[str, Any]:
    """The outermost transformers model, inside adapters and wrappers, with the prefix of its module names."""
    from transformers import PreTrainedModel

    found = ((name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel))
    name, module = next(found, ("", None))
    return f"{name}." if name else "", module


def _fits(model: nn.Module, kind: torch.dtype) -> bool:
    """Whether all float32 matrices hold only numbers of a shorter dtype, as after a cast there and back."""
    matrices = [p for p in model.parameters() if p.dtype == torch.float32 and p.dim() > 1 and type(p) in PLAIN]
    return bool(matrices) and all(p.device.type == "meta" or torch.equal(p, p.to(kind).float()) for p in matrices)


# -- weights by themselves


def suspicious_weights(model: nn.Module, judged: WeightsCompared) -> Compared:
    """Parameters that are not finite, all zero, constant in rows, or identical in two places; biases may be anything.

    What the checkpoint also has is the model's own, except for non-finite numbers. The device looks first, and the host
    checks again if it finds something.
    """
    faults: list[StateFault] = []
    seen: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    compared = 0
    for path, tensor in model.named_parameters():
        plain = type(tensor) in PLAIN and tensor.device.type != "meta" and tensor.numel() > 0
        if not plain or id(tensor) in judged.wrong or not tensor.is_floating_point() or tensor.itemsize < 2:
            continue
        if id(tensor) in judged.same and bool(tensor.detach().isfinite().all()):  # the numbers were copied once already
            continue
        module, _, name = path.rpartition(".")
        x, alike, owner = tensor.detach(), None, None
        if x.dim() > 1 and "lora_" not in path and "bias" not in name:
            owner = model.get_submodule(module)
            key = (x.shape, x.dtype, x.device, int(bits_of(x).sum(dtype=torch.int64)), float(x.reshape(-1)[0]))
            earlier = seen.setdefault(key, (path, tensor))
            alike = None if earlier[1] is tensor else earlier
        found = list(_oddities(x, owner, alike))
        if found and x.device.type != "cpu":
            found = list(_oddities(x.cpu(), owner, alike))
        faults += [StateFault(module, f"{name} {words}", kind, sure=sure) for words, kind, sure in found]
        compared += not any(sure for _, _, sure in found)
    return Compared(tuple(faults), compared)


def _oddities(x: Tensor, owner: nn.Module | None, alike: tuple[str, Tensor] | None) -> Iterator[tuple[str, str, bool]]:
    """What is wrong with a weight as text, with its class, and whether it never occurs in a healthy model.

    `owner` is None for biases; `alike` is an earlier weight of the same shape and sum.
    """
    ends = torch.aminmax(x.reshape(len(x) if x.dim() > 1 else 1, -1), dim=1)  # NaN, if a row has one
    largest = max(float(ends.max.max()), -float(ends.min.min()))
    if not math.isfinite(largest):
        bad = ~x.isfinite()
        if isinstance(owner, nn.Embedding) and torch.equal(bad, bad.all(-1, keepdim=True).expand_as(bad)):
            rows = int(bad.all(-1).sum())  # of ids that no text has, which nothing ever set
            yield f"has {rows} of {len(x)} rows of NaN or infinity alone", "unknown", rows == len(x)
        else:
            yield f"holds {int(bad.sum())} of {x.numel()} elements that are NaN or infinite", "unknown", True
        return
    odd = []
    if owner is not None:
        has_rows = x.dim() == 2 and x.shape[1] > 1 and not isinstance(owner, nn.Embedding)
        odd = list(_odd_matrix(x, largest, int((ends.min == ends.max).sum()) if has_rows else 0))
    if not odd and alike is not None and same_bits(x, alike[1].detach().to(x.device)):
        odd = [(f"holds the same numbers as {alike[0]}", "stale data")]
    yield from ((words, kind, False) for words, kind in odd)


def _odd_matrix(x: Tensor, largest: float, constant_rows: int) -> Iterator[tuple[str, str]]:
    far = x.abs() * _FAR > largest
    many = int(far.sum())
    if not largest:
        yield "is all zero", "dead lane"
    elif many <= _FEW and 0 < _FAR * float(x[~far].double().square().mean().sqrt()) < largest:
        yield f"has {many} element{'s' * (many > 1)} of up to {largest:.3g}, over {_FAR:g} times the others", "spike"
    elif constant_rows:
        yield f"has {constant_rows} of {len(x)} rows in which all elements are equal", "dead lane"


# -- the report


def _report(model: nn.Module, anatomy: Anatomy, parts: dict[str, Compared], seconds: float) -> StateReport:
    sites = _sites(model, anatomy)
    faults = [(fault, _site(sites, fault)) for part in parts.values() for fault in part.faults]
    faults.sort(key=lambda entry: place_order(entry[1].place))
    found = [(fault, _suspect(site, fault, rank)) for rank, (fault, site) in enumerate(faults)]
    suspects = ranked(in_all_layers([suspect for fault, suspect in found if fault.sure], sites.values(), anatomy))
    of_file = parts[CHECKPOINT].faults if CHECKPOINT in parts else ()
    possible = tuple(suspect for fault, suspect in found if not fault.sure and fault in of_file)
    doubtful = tuple(suspect for fault, suspect in found if not fault.sure and fault not in of_file)
    notes = [note for part in parts.values() for note in part.notes]
    notes += [f"doubtful: {suspect.site}: {suspect.evidence}" for suspect in doubtful[:_SHOWN]]
    notes += [f"doubtful: {len(doubtful) - _SHOWN} more places"] * (len(doubtful) > _SHOWN)
    words = ", ".join(f"{part.compared} {name}" for name, part in parts.items() if part.compared)
    reasons = Counter(reason for part in parts.values() for _, reason in part.not_compared)
    left = ", ".join(f"{count} ({reason})" for reason, count in reasons.items())
    words = f"compared: {words or 'nothing'}" + (f"; not compared: {left}" if left else "")
    compared = sum(part.compared for part in parts.values())
    own_code = tuple(module for part in parts.values() for module in part.own_code)
    return StateReport(suspects, possible, doubtful, words, tuple(notes), seconds, compared, own_code)


def _sites(model: nn.Module, anatomy: Anatomy) -> dict[str, Site]:
    found: dict[str, Site] = {}
    for unit in with_whole_modules(model, anatomy).units:
        operator = FUSED if unit.kind == ATTENTION else unit.operators[0]
        if unit.module not in found or unit.operators == ("residual",):
            found[unit.module] = unit.site(operator, tensor="weight")
    return found


def _site(sites: dict[str, Site], fault: StateFault) -> Site:
    """The site of the module, or of the nearest one that contains it."""
    name = fault.module
    while name not in sites and name:
        name = name.rpartition(".")[0]
    return dataclasses.replace(sites.get(name, Site(WHOLE, "lm_head", "", tensor="weight")), module=fault.module)


def _suspect(site: Site, fault: StateFault, rank: int) -> Suspect:
    sure = 0.99 if fault.sure else 0.5
    known = 0.9 if fault.fault_class != "unknown" else 0.0
    score = (3.0 if fault.sure else 0.5) + 1 / (2 + rank)
    return Suspect(site, fault.fault_class, sure, fault.words, score, fault.channels, class_confidence=known)
