"""Values of a comparison of two systems."""

from __future__ import annotations

import dataclasses
import json

from noisescope.comparison.system_comparison import Cause, EngineFacts, Sampling, SystemComparison
from noisescope.estimate import Estimate

FACTS = EngineFacts("fake", "1", "m", "A", "float32", "cpu", sampling=Sampling(0.7))
NONE = Estimate(0.0, None, None, 2)
FOUND = SystemComparison(
    schema_version=1, verdict="round-off", words="w", a=FACTS, b=FACTS, prompts=1, tokens=2, total=NONE, token_gap=NONE,
    causes=(), weight_costs=(), round_off=NONE, round_off_gap=NONE, sources=(), unexplained_gap=NONE, band=None,
    remainder=NONE, order=(), notes=(),
)  # fmt: skip


def test_exit_codes_follow_the_verdict():
    outcomes = {v: dataclasses.replace(FOUND, verdict=v).outcome for v in ("identical", "round-off", "different")}
    assert outcomes == {"identical": "pass", "round-off": "pass", "different": "fail"}
    assert dataclasses.replace(FOUND, verdict="undecided").outcome == "undecided"


def test_json(tmp_path):
    found = json.loads(FOUND.save(tmp_path / "x" / "found.json").read_text())
    assert found["a"]["sampling"]["temperature"] == 0.7 and found["total"]["value"] == 0.0


def test_a_notebook_shows_the_causes():
    """The verdict, both systems, and what each cause takes off."""
    cause = Cause("state", "weights", "layer 3 <b>differs</b>", Estimate(0.5, 0.4, 0.6, 2), NONE, layers=(3,))
    found = dataclasses.replace(FOUND, verdict="different", causes=(cause,))
    shown = found._repr_html_()
    assert "different" in shown and "0.5 [0.4, 0.6]" in shown and "a: m, fake 1" in shown and "<b>" not in shown
    assert found.to_csv().splitlines()[0].startswith("stage,name,words,nats,nats_low,nats_high,nats_n")
