"""`ns.plan`, and what every result shows in a notebook."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput
from noisescope.tables import Tabular

BATCHES = list(torch.randint(1, 60, (6, 10), generator=torch.Generator().manual_seed(4)).split(1))
FAULT = "gain:0.01@1/linear/*down_proj"


@pytest.fixture(scope="module")
def subject() -> ns.Subject:
    return ns.load("tiny:llama")


@pytest.fixture(scope="module")
def report(subject: ns.Subject) -> ns.Report:
    return ns.diagnose(subject, BATCHES, seeds=1, window=2, metric="agreement", operators=("linear",))


@pytest.fixture(scope="module")
def results(subject: ns.Subject, report: ns.Report, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tabular]:
    """One of each kind."""
    folder, measured = tmp_path_factory.mktemp("results"), {"subject": subject, "data": BATCHES}
    with ns.inject(subject.model, ns.Injection(ns.Gaussian(0.05), operators={"norm"})) as tally, torch.no_grad():
        subject.model(BATCHES[0])
    with ns.faulty(subject.model, FAULT):
        verdict = ns.locate(subject, quick=True, state=False)
    good, bad = (
        ns.record(subject, output=folder / name, simulate=fault) for name, fault in (("a", None), ("b", FAULT))
    )
    return {
        "subject": subject,
        "anatomy": subject.anatomy,
        "tally": tally,
        "report": report,
        "verdict": verdict,
        "comparison": ns.compare(good, bad),
        "identical": ns.compare(good, good),
        "precision": ns.plan.precision(report, average_bits=6, formats="int4,int8"),
        "verified": ns.plan.precision(report, average_bits=6, formats="int4,int8", verify=True, random=2, **measured),
        "smoothquant": ns.plan.smoothquant(report, alpha=0.5, **measured),
        "migration": ns.plan.migration(report),
        "fault tests": ns.plan.fault_tests(report),
        "carried out": ns.plan.fault_tests(report, run=True, limit=1, **measured),
        "gate": ns.gate(subject, report, BATCHES),
    }


SAYS = {
    "subject": ("tiny:llama", "parameters in float32", "0-1"),
    "anatomy": ("LlamaForCausalLM", "Absent: bmm, gelu"),
    "tally": ("5 forward and 0 backward injections", "norm"),
    "report": ("Risk:", "Next:"),
    "verdict": ("faulty: linear at block 1", "down_proj", "gain", "Not run:"),
    "comparison": ("diverged", "model.layers.1.mlp.down_proj"),
    "identical": ("identical", "a: a"),
    "precision": ("bits per weight", "Predicted mean KL", "int8"),
    "verified": ("typical KL", "uniform int4"),
    "smoothquant": ("W8A8", "smoothing"),
    "migration": ("Places to validate", "lm_head"),
    "fault tests": ("not carried out", "OP_LINEAR"),
    "carried out": ("1 fault test", "OP_LINEAR"),
    "gate": ("against", "checks"),
}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_a_result_shows_itself(name: str, results: dict[str, Tabular]) -> None:
    """A short card with what matters, and every table as CSV and as a frame of the same rows."""
    pytest.importorskip("pandas")
    shown = results[name]._repr_html_()
    assert len(shown) < 10_000 and all(words in shown for words in SAYS[name]), shown
    for table in results[name].sheet().tables:
        frame = results[name].to_frame(table)
        assert len(frame) == len(results[name].table(table).rows) and results[name].to_csv(table)


def test_names_from_outside_are_escaped(subject: ns.Subject) -> None:
    hostile = replace(subject, source="<img src=x onerror=alert(1)>")
    assert "<img" not in hostile._repr_html_() and "&lt;img" in hostile._repr_html_()


def test_a_plan_that_is_measured_needs_the_model(report: ns.Report) -> None:
    """It is loaded where a function is given, and only once the plan is made."""
    for ask in (
        lambda **model: ns.plan.precision(report, average_bits=6, verify=True, **model),
        lambda **model: ns.plan.smoothquant(report, **model),
        lambda **model: ns.plan.fault_tests(report, run=True, **model),
    ):
        with pytest.raises(InvalidInput, match=r"give it as subject=ns\.load"):
            ask()

    def load() -> Any:
        raise LookupError

    with pytest.raises(LookupError):
        ns.plan.precision(report, average_bits=6, verify=True, subject=load)
    with pytest.raises(InvalidInput, match="these formats allow"):
        ns.plan.precision(report, average_bits=3, formats="int8,bf16", verify=True, subject=load)


def test_reports_in_any_form(report: ns.Report, tmp_path: Path) -> None:
    """A value, its JSON form, a file or a folder; a path is named in the commands."""
    report.save(tmp_path / "run", formats=["json"])
    forms = (report, report.diagnosis, dict(report), tmp_path / "run", str(tmp_path / "run" / "report.json"))
    plans = [ns.plan.migration(form, device="npu") for form in forms]
    assert all(plan.priorities == plans[0].priorities for plan in plans)
    assert all("npu" in " ".join(step.command for step in plan.commands) for plan in plans)


def test_a_plan_is_exported(report: ns.Report, tmp_path: Path) -> None:
    target = tmp_path / "new" / "plan.json"
    ns.plan.precision(report, average_bits=6, formats="int4,int8", export="json", output=target)
    assert '"assignment"' in target.read_text()
    with pytest.raises(InvalidInput, match="export and output belong together"):
        ns.plan.precision(report, average_bits=6, export="json")
