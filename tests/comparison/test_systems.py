"""Values of a comparison of two systems."""

from __future__ import annotations

import dataclasses
import json

from noisescope.comparison.systems import EngineFacts, Sampling, SystemComparison
from noisescope.estimate import Estimate

FACTS = EngineFacts("fake", "1", "m", "A", "float32", "cpu", sampling=Sampling(0.7))
NONE = Estimate(0.0, None, None, 2)
FOUND = SystemComparison(
    schema_version=1, verdict="round-off", words="w", a=FACTS, b=FACTS, prompts=1, tokens=2, total=NONE, token_gap=NONE,
    causes=(), round_off=NONE, round_off_gap=NONE, sources=(), unexplained_gap=NONE, band=None,
    remainder=NONE, order=(), notes=(),
)  # fmt: skip


def test_exit_codes_follow_the_verdict():
    outcomes = {v: dataclasses.replace(FOUND, verdict=v).outcome for v in ("identical", "round-off", "different")}
    assert outcomes == {"identical": "pass", "round-off": "pass", "different": "fail"}
    assert dataclasses.replace(FOUND, verdict="undecided").outcome == "undecided"


def test_json(tmp_path):
    found = json.loads(FOUND.save(tmp_path / "x" / "found.json").read_text())
    assert found["a"]["sampling"]["temperature"] == 0.7 and found["total"]["value"] == 0.0
