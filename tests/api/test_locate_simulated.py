"""A simulated fault is looked for by every method; the original method notes' flags simulate the same fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import noisescope as ns
from noisescope.api.locate_simulated import locate_simulated
from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.faults import DeadZone, Fault, Noise, Spike, Where, parse_fault
from noisescope.localization.verdict import Verdict
from noisescope.model.loading import Subject
from noisescope.options.device_commands import LocateOptions
from noisescope.options.fields import LOCATE_METHODS
from noisescope.testing import tiny_model

PLACE = 3


@pytest.fixture(scope="module")
def subject() -> Subject:
    return ns.wrap(tiny_model("llama", layers=5, initializer_range=0.2))  # blocks that do something


@pytest.mark.parametrize("method", LOCATE_METHODS)
def test_every_method_looks_for_a_simulated_fault(method: str, subject: Subject) -> None:
    """And finds this one in its block; records that a method needs are made, and nothing stays behind.

    The original probes rank all blocks, decide nothing, and need not have the right one first.
    """
    asked = LocateOptions(method=method, simulate=f"dead_zone:0.3@{PLACE}")
    verdict, place, changed = locate_simulated(subject, asked)
    if method == "srdd":
        assert (verdict.verdict, len(verdict.suspects)) == ("undecided", 5)
    else:
        assert (verdict.verdict, verdict.suspects[0].site.place) == ("faulty", PLACE)
    assert place == PLACE
    assert changed > 0
    assert not subject.model.model.layers[PLACE]._forward_hooks


def test_a_given_record_is_used(subject: Subject, tmp_path: Path) -> None:
    """A replay of a record of the user's own sees what that record holds, and no more."""
    ns.record(subject, output=tmp_path / "good.record", full_layers=[0], samples=2, max_tokens=8)
    asked = LocateOptions(method="replay", reference=tmp_path / "good.record", simulate=f"dead_zone:0.3@{PLACE}")
    verdict, _, _ = locate_simulated(subject, asked)
    assert any("only those were checked" in note for note in verdict.notes)


def test_a_faulty_device_is_recorded(tmp_path: Path) -> None:
    """The record says so, and a comparison with that of the healthy model names the block."""
    good, broken = tmp_path / "good.record", tmp_path / "broken.record"
    line = ["record", "demo", "--samples", "4", "--max-tokens", "16", "-o"]
    assert CliRunner().invoke(app, [*line, str(good)]).exit_code == 0
    said = CliRunner().invoke(app, [*line, str(broken), "--simulate", "dead_zone:0.3@10"])
    assert said.exit_code == 0 and "note: recorded with a simulated fault: dead_zone:0.3@10" in said.output
    compared = CliRunner().invoke(app, ["compare", str(good), str(broken)]).output
    assert "The devices diverge at residual at block 10" in " ".join(compared.split())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function: the options that a command line of `locate` ends in, or what it printed."""
    seen: list[LocateOptions] = []

    def take(subject: None, options: LocateOptions) -> tuple[Verdict, int, int]:
        seen.append(options)
        return Verdict("healthy", "audit"), 0, 0

    monkeypatch.setattr("noisescope.api.preparation.load_subject", lambda options: None)
    monkeypatch.setattr("noisescope.api.locate_simulated.locate_simulated", take)

    def call(line: str) -> LocateOptions | str:
        seen.clear()
        output = CliRunner().invoke(app, ["locate", "demo", *line.split()]).output
        return seen[0] if seen else output

    return call


@pytest.mark.parametrize(
    ("flags", "text", "fault", "place"),
    [
        ("--ground_truth_layer 10 --fault_type dead_zone --fault_magnitude 0.3", "dead_zone:0.3@10", DeadZone(0.3), 10),
        ("--ground-truth-layer=4 --fault-type=spike --fault-magnitude=0.25", "spike:0.25@4", Spike(0.25), 4),
        ("--ground_truth_layer 4 --fault_type noise", "noise@4", Noise(0.3), 4),
        ("--ground_truth_layer 4 --fault_magnitude 0.1", "dead_zone:0.1@4", DeadZone(0.1), 4),
        ("--ground_truth_layer 4", "dead_zone:0.3@4", DeadZone(0.3), 4),
        ("--method srdd --ground_truth_layer 4", "dead_zone:0.3@4", DeadZone(0.3), 4),
        ("--method fingerprint --hw_error_scale 0.20", "noise:0.2@10", Noise(0.2), 10),
        ("--method fingerprint --hw-error-scale 0.2 --ground-truth-layer 5", "noise:0.2@5", Noise(0.2), 5),
        ("--method fingerprint --ground_truth_layer 5", "noise:0.05@5", Noise(0.05), 5),
        ("--hw_error_scale 1e-5", "noise:0.00001@10", Noise(1e-5), 10),
    ],
)
def test_the_flags_of_the_notes(flags: str, text: str, fault: Fault, place: int, asked: Any) -> None:
    """Each stands for a text of --simulate: the very same fault in the very same place."""
    method = "--method fingerprint " if "fingerprint" in flags else ""
    simulated = [parse_fault(asked(line).simulated) for line in (flags, f"{method}--simulate {text}")]
    assert simulated[0] == simulated[1] == (fault, Where(place))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--simulate gain@3 --ground_truth_layer 3", "given twice: as --simulate gain@3 and by --ground-truth-layer;"),
        ("--simulate gain@3 --hw_error_scale 0.2", "given twice: as --simulate gain@3 and by --hw-error-scale; keep"),
        ("--simulate gain@3 --fault_magnitude 0.2", "given twice: as --simulate gain@3 and by --fault-magnitude;"),
        ("--fault_type dead_zone", "--fault-type needs --ground-truth-layer, the block"),
        ("--fault_magnitude 0.3", "--fault-magnitude needs --ground-truth-layer"),
        ("--hw_error_scale 0.2 --fault_type spike --ground_truth_layer 3", "--hw-error-scale is noise of that size"),
        ("--ground_truth_layer -1", "--ground-truth-layer must be at least 0, got -1"),
        ("--ground_truth_layer ten", "--ground-truth-layer must be a whole number, got the text 'ten'"),
        ("--method fingerprint", "give them as --failure, or simulate a fault; got neither"),
        ("--method fingerprint --failure . --simulate gain@3", "or simulate a fault; got both"),
        ("--method audit --failure .", "--failure is for the method fingerprint, got method audit"),
    ],
)
def test_what_does_not_go_together(flags: str, words: str, asked: Any) -> None:
    """One line, with the flags as they are typed."""
    said = asked(flags)
    assert words in said and len(said.splitlines()) == 1


def test_in_python_keywords_are_named() -> None:
    with pytest.raises(InvalidInput, match=r"^failure is for the method fingerprint, got method audit$"):
        LocateOptions(method="audit", failure=object())
