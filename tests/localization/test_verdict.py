"""The one sentence that people act on: it never says more than what was judged."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from noisescope.localization.coverage import Coverage, NotJudged, Phase, Share
from noisescope.localization.verdict import Suspect, Verdict
from noisescope.sites import Site

PHASES = (Phase("prefill", 2, 32), Phase("decode", 2, 32, 4))
SITE = Site("linear", 7, "model.layers.7.mlp.down_proj")


def coverage(share: float = 1.0) -> Coverage:
    return Coverage(PHASES, modules=Share(100 * share, 100), parameters=Share(1, 1), multiply_adds=Share(1, 1))


def suspect(**facts: object) -> Suspect:
    return Suspect(SITE, "gain", 0.99, "off by 1 %", 2.0, **facts)  # type: ignore[arg-type]


def test_healthy_names_phases_and_shares() -> None:
    assert Verdict("healthy", "audit", coverage=coverage(0.993)).headline == (
        "healthy: no fault in prefill (2 x 32) and decode; 99 % of modules, 100 % of parameters and 100 % of "
        "multiply-adds judged"
    )


@pytest.mark.parametrize("verdict", ["healthy", "undecided"])
def test_below_95_percent_nothing_is_called_healthy(verdict: str) -> None:
    said = Verdict(verdict, "audit", coverage=coverage(0.81)).headline
    assert said.startswith("no fault in the 81 % that was judged (81 % of modules") and "healthy" not in said


def test_a_method_without_coverage_says_so() -> None:
    said = Verdict("healthy", "relations", checked=55).headline
    assert said == "healthy: no fault in 55 checks (relations); this method does not measure coverage"


def test_faulty_names_the_first_suspect() -> None:
    again = replace(SITE, occurrence=1)  # the same function once more in this module
    others = (again, Site("linear", 8, "b"), Site("linear", 9, "c"))
    found = Verdict("faulty", "audit", (suspect(also=others), suspect()))
    assert found.headline == (
        "faulty: linear at block 7 (model.layers.7.mlp.down_proj) and 2 more places: gain; 1 more suspect"
    )
    assert Verdict("faulty", "fingerprint").headline == (
        "faulty: something computes wrongly, but no single place stands out"
    )


def test_undecided_says_why() -> None:
    unseen = Verdict("undecided", "audit", unseen=(SITE, SITE), coverage=coverage(0.0))
    assert unseen.headline == f"undecided: {SITE} and 1 more could not be judged"
    assert Verdict("undecided", "audit", notes=("all is NaN",)).headline == "undecided: all is NaN"
    several = Verdict("undecided", "scans", (suspect(), suspect(), suspect())).headline
    assert several.startswith("undecided: possible, but not certain: linear at") and several.endswith("2 more suspects")
    assert Verdict("undecided", "audit").headline == "undecided: the evidence is not sufficient"


def test_the_machine_form_has_the_sentence_and_the_coverage() -> None:
    found = Verdict("healthy", "audit", coverage=coverage()).to_dict()
    assert found["headline"].startswith("healthy: ") and found["coverage"]["modules"] == 1.0
    assert found["coverage"]["phases"] == ["prefill 2 x 32 tokens", "decode 2 x 4 tokens after 32"]


def test_the_printed_form_names_what_was_not_judged() -> None:
    left = NotJudged("Own", ("model.own", "model.other"), "its code draws random numbers")
    found = dataclasses.replace(coverage(0.5), not_judged=(left,), in_part=("decode: up to 80 % is NaN",))
    line = "Not judged: Own (model.own and 1 more): its code draws random numbers; decode: up to 80 % is NaN"
    assert line in str(Verdict("undecided", "audit", coverage=found))
    assert line not in str(Verdict("healthy", "audit", coverage=found))
