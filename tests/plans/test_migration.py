"""A migration plan follows from the findings of a diagnosis."""

from __future__ import annotations

import shlex
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from noisescope.cli import app
from noisescope.diagnosis.report import Diagnosis, GivenCommand
from noisescope.diagnosis.rows import LayerEffect
from noisescope.errors import InvalidInput
from noisescope.findings import Target
from noisescope.jsonform import from_json, to_json
from noisescope.plans import migration
from noisescope.plans.migration import MigrationPlan, MigrationSteps, plan_migration, rank_places


def window(first: int, last: int) -> Target:
    return Target("window", ("gemm",), tuple(range(first, last + 1)))


def layer(number: int) -> Target:
    return Target("layer", ("gemm",), (number,))


@pytest.fixture
def found(made: Any) -> Diagnosis:
    """Twelve layers, in which 9 to 11 are an avalanche point with 10 at its core, and others stand out by a little."""
    rows = [made.layer(i) for i in range(12)]
    rows[10] = made.layer(10, 5e-3, 0.25, 1e-4)
    rows[3] = made.layer(3, 1e-3, 0.07, 1e-3)
    rows[4] = made.layer(4, 1e-3, 0.3, 0.4)  # a large loss that is not significant
    rows[6] = made.layer(6, 2e-3)
    captured = {i: made.channels(i) for i in range(12)}
    captured[1] = made.channels(1, 80.0, largest=60000.0)
    captured[2] = made.channels(2, 30.0)
    massive = made.channels(5, 900.0, "residual", module="layers.5")
    return made.diagnosis(
        layer_analysis=made.layers(
            *rows, places={"lm_head": made.effect(9e-3, None, None)}, points=[made.point(9, 11, (10, 10))]
        ),
        channel_analysis=made.captured(*captured.values(), massive),
        findings=(made.finding("CRITICAL", window(9, 11)), made.finding("CRITICAL", layer(10))),
    )


def test_places_are_ranked_by_evidence(found: Diagnosis) -> None:
    """The core of an avalanche point comes first, as in the findings, then the costliest places, channels later."""
    first, second, third = plan_migration(found).priorities
    assert [one.place for one in first.evidence] == [10, "lm_head"]
    assert first.layers == (10,) and first.places == ("lm_head",)
    assert set(second.layers) == {1, 2, 3, 6, 9, 11} and set(second.layers[:2]) == {9, 11}  # named by a finding
    assert set(third.layers) == {0, 4, 5, 7, 8}  # a loss without significance and the residual stream say nothing
    assert "avalanche point L9-11: 25.0 % of the accuracy lost" in first.evidence[0].reasons
    assert any("next to the core" in reason for reason in second.evidence[0].reasons)


def test_a_certain_loss_comes_first(made: Any) -> None:
    """p = 0.0 is as certain as can be: such a layer is at priority 1, by its own row alone."""
    rows = [made.layer(i) for i in range(6)]
    rows[4] = made.layer(4, 1e-3, 0.25, 0.0, metric="next_token_accuracy")
    first, second, _ = rank_places(made.diagnosis(layer_analysis=made.layers(*rows))).priorities
    assert first.layers == (4,) and first.evidence[0].loss == 0.25 and second.layers == ()
    assert first.evidence[0].reasons == ("noise in it alone costs 25.0 % of the next-token accuracy",)


def test_the_interval_decides(made: Any) -> None:
    """A loss of 12 % whose interval reaches below a tenth is significant, and no more than priority 2."""
    rows = [made.layer(0), made.layer(1, 1e-3, 0.12, 0.01), made.layer(2, 1e-3, 0.13, 0.01)]
    first, second, _ = rank_places(made.diagnosis(layer_analysis=made.layers(*rows))).priorities
    assert first.layers == (2,) and second.layers == (1,)  # intervals from 0.104 and from 0.096 on
    borderline = made.layers(*(made.layer(i) for i in range(4)), points=[made.point(1, 2, (1, 2), state="borderline")])
    first, second, _ = rank_places(made.diagnosis(layer_analysis=borderline)).priorities
    assert first.layers == () and set(second.layers) == {1, 2}
    assert all(one.reasons[0].startswith("borderline avalanche point L1-2") for one in second.evidence)


def test_the_order_is_that_of_the_findings(made: Any) -> None:
    """Whatever the nats: top findings and first places are the same. Residual outliers name no layer."""
    rows = [made.layer(i, 1e-3 * (i + 1)) for i in range(8)]
    findings = (
        made.finding("CRITICAL", Target("channels", layers=(7,), module="layers.7 (residual)")),
        made.finding("CRITICAL", Target("operator", ("softmax",))),
        made.finding("CRITICAL", Target("cell", ("matmul",), (3,)), statement="noise costs 30 % of the accuracy"),
        made.finding("HIGH", window(0, 1)),
        made.finding("HIGH", Target("place", place="embed")),
        made.finding("MODERATE", layer(5)),
        made.finding("BORDERLINE", layer(6)),
        made.finding("not rated", Target("cell", ("softmax",), (2,)), 0.02, unit="nats"),
        made.finding("not rated", Target("cell", ("softmax",), (4,)), 0.008, unit="nats"),
    )
    plan = rank_places(
        made.diagnosis(
            layer_analysis=made.layers(*rows, places={"embed": made.effect(1e-5)}),
            channel_analysis=made.captured(made.channels(7, 900.0, "residual", module="layers.7")),
            findings=findings,
        )
    )
    first, second, third = plan.priorities
    assert [one.place for one in first.evidence] == [3, 1, 0, "embed", 2]  # 2: softmax there, 4.4 x the median layer
    assert first.evidence[0].reasons[0] == "layer 3, matmul: noise costs 30 % of the accuracy"
    assert second.layers == (5, 6, 4, 7)  # 7 by its nats alone: 1.8 x the median layer
    assert not any("outlier" in reason for one in second.evidence for reason in one.reasons) and third.layers == ()


def test_every_place_is_planned_once(found: Diagnosis) -> None:
    """No layer is lost between priorities, and each has a precision."""
    plan = plan_migration(found).priorities
    planned = [place for entry in plan for place in (*entry.layers, *entry.places)]
    assert sorted(map(str, planned)) == sorted([*map(str, range(12)), "lm_head"])
    assert all(str(place) in entry.precision for entry in plan for place in (*entry.layers, *entry.places))
    assert [entry.max_mape for entry in plan] == [0.05, 0.10, None]


def test_it_is_json_and_back(found: Diagnosis) -> None:
    """Every field is written, and read back to the same value."""
    plan, steps = rank_places(found), plan_migration(found)
    assert from_json(MigrationPlan, to_json(plan)) == plan and from_json(MigrationSteps, to_json(steps)) == steps
    assert to_json(steps)["priorities"][0]["evidence"][0]["place"] == 10


def test_fp16_only_where_its_range_suffices(found: Diagnosis, made: Any) -> None:
    """A captured maximum near 65504, or none at all, means BF16."""
    assert plan_migration(found).priorities[0].precision == {"10": "FP16", "lm_head": "BF16"}
    unseen = plan_migration(made.diagnosis(layer_analysis=found.layer_analysis))
    assert set(unseen.priorities[0].precision.values()) == {"BF16"}


def test_commands_are_commands(found: Diagnosis) -> None:
    """Record on both machines, compare each priority's layers, with options that exist and names that hold together."""
    commands = [shlex.split(step.command) for step in plan_migration(found, path="my out/report.json").commands]
    known: Any = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for program, name, *words in commands:
        assert program == "noisescope"
        command = known[name].commands[words.pop(0)] if name == "plan" else known[name]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("-")} <= options
    records, compares = ([c for c in commands if c[1] == name] for name in ("record", "compare"))
    assert [c[2] for c in records] == ["my models/llama"] * 2 and all("gsm8k.jsonl" in c for c in records)
    assert {c[c.index("-o") + 1] for c in records} == set(compares[0][2:4])
    assert "my out/report.json" in compares[0] and "--layers" not in compares[0]
    assert [c[c.index("--layers") + 1] for c in compares[1:]] == ["10", "1,2,3,6,9,11"]
    assert [c[c.index("--max-mape") + 1] for c in compares[1:]] == ["0.05", "0.1"]
    # MAPE needs whole tensors of every layer it is asked for, and one dtype on both machines
    assert all(c[c.index("--full-layers") + 1] == "1,2,3,6,9,10,11" for c in records)
    assert all(c[c.index("--dtype") + 1] == "bfloat16" for c in records)


def test_commands_repeat_what_the_user_gave(made: Any, found: Diagnosis) -> None:
    """The length limit and fields of the report's run, and paths, which a report cuts."""
    asked = {"max_tokens": 64, "prompt_field": "query", "samples": 4, "revision": "v2"}
    run = replace(found.run, command=GivenCommand("diagnose", asked, ("llama",)))
    plan = plan_migration(replace(found, run=run), path="/there/report.json", model="/models/llama", data="/data/x.csv")
    here, there, *compares, wrong, tests = (shlex.split(step.command) for step in plan.commands)
    for record in (here, there, tests):
        given = dict(pairwise(record))
        assert given["--max-tokens"] == "64" and given["--prompt-field"] == "query" and given["--revision"] == "v2"
        assert given["--data"] == "/data/x.csv" and "/models/llama" in record and "--samples" not in record
    assert compares[0][-3] == "/there/report.json" and wrong[2] == "/models/llama" and "--max-tokens" not in wrong
    assert tests[3] == "/there/report.json"


def test_places_outside_the_layers_are_compared_by_sketch(found: Diagnosis, made: Any) -> None:
    """No option names them: the text says how they are checked, and the comparison of everything keeps their rows."""
    plan = plan_migration(found)
    first, second, _ = plan.priorities
    assert first.validation.endswith("5 %; compare lm_head by sketch: no operator may diverge beyond round-off")
    assert second.validation.endswith("MAPE below 10 %")
    (everything,) = [step for step in plan.commands if "--sensitivity" in step.command]
    assert everything.command.endswith("-o comparison.json")
    assert "everything; for lm_head see the rows of that place in comparison.json" in everything.where
    section = found.layer_analysis
    assert section is not None
    without = plan_migration(made.diagnosis(layer_analysis=made.layers(*section.layers)))
    assert not any("sketch" in entry.validation for entry in without.priorities)
    assert any(step.where.endswith("everything") for step in without.commands)


def test_predictions_say_what_they_are(made: Any) -> None:
    """A screen alone ranks by predicted nats, with a note; without layers there is no plan."""
    rows = [LayerEffect(layer=i, evidence="predicted", nats=(i == 7) + 0.1) for i in range(9)]
    plan = plan_migration(made.diagnosis(layer_analysis=made.layers(*rows)))
    assert plan.priorities[0].layers == (7,) and "standard" in plan.notes[0]
    with pytest.raises(InvalidInput, match="--level operator,layer,channel"):
        plan_migration(made.diagnosis())


def test_the_layers_own_figure_comes_before_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among reasons of one priority: a rated loss, then the layer's nats, then those of one operator in it."""
    monkeypatch.setattr(migration, "_by_findings", lambda *_: [])
    monkeypatch.setattr(migration, "_by_avalanches", lambda *_: [])
    monkeypatch.setattr(migration, "_by_cells", lambda *_: [(2, "one operator")])
    monkeypatch.setattr(migration, "_by_effect", lambda *_: [(2, "the layer")])
    monkeypatch.setattr(migration, "_by_channels", lambda *_: [(1, "channels")])
    view = SimpleNamespace(captured=lambda place: [])
    _, evidence = migration._judged(view, 0, SimpleNamespace(nats=1.0, loss=None))  # type: ignore[arg-type]
    assert evidence.reasons == ("channels", "the layer", "one operator")
