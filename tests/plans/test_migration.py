"""A migration plan ranks layers by what was found in them."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import typer.main

from noisescope.cli import app
from noisescope.errors import InvalidInput
from noisescope.plans.migration import plan_migration


def layer(number: int, nats: float = 1e-3, loss: float = 0.0, p: float = 1.0) -> dict[str, Any]:
    return {"layer": number, "evidence": "injected", "kl": {"value": nats}, "degradation": {"value": loss},
            "p_corrected": p}  # fmt: skip


def module(
    number: Any, operator: str = "linear", band: str = "NORMAL", ratio: float = 2.0, largest: float = 9.0
) -> Any:
    return {"layer": number, "operator": operator, "band": band, "max_ratio": ratio, "num_outliers": int(ratio > 10),
            "nonfinite_channels": 0, "global_max": largest}  # fmt: skip


def report(**changed: Any) -> dict[str, Any]:
    """Twelve layers, in which 9 to 11 are an avalanche point with 10 at its core, and others stand out by a little."""
    rows = [layer(i) for i in range(12)]
    rows[10] = layer(10, 5e-3, 0.25, 1e-4)
    rows[3] = layer(3, 1e-3, 0.07, 1e-3)
    rows[4] = layer(4, 1e-3, 0.3, 0.4)  # a large loss that is not sure
    rows[6] = layer(6, 2e-3)
    captured = {f"layers.{i}.mlp": module(i) for i in range(12)}
    captured["layers.1.mlp"] = module(1, "linear", "CRITICAL", 80.0, 60000.0)
    captured["layers.2.mlp"] = module(2, "linear", "HIGH", 30.0)
    captured["layers.5 (residual)"] = module(5, "residual", "CRITICAL", 900.0)
    return {
        "run": {
            "model": {"source": "my models/llama"},
            "data": {"source": "gsm8k.jsonl"},
            "conditions": {"dtype": "bfloat16"},
        },
        "executive_summary": {
            "avalanche_points": [
                {"start": 9, "end": 11, "common": [10, 10], "degradation": 0.25, "layer_range": "L9-11"}
            ]
        },
        "layer_analysis": {"layers": rows, "places": {"lm_head": {"evidence": "injected", "kl": {"value": 9e-3}}}},
        "channel_analysis": {"per_layer": captured},
        **changed,
    }


def test_layers_are_ranked_by_evidence():
    """The core of an avalanche point, massive channels and the dearest places come first, whatever their number."""
    first, second, third = plan_migration(report())["priorities"]
    assert first["layers"] == [10, 1] and first["places"] == ["lm_head"]
    assert set(second["layers"]) == {2, 3, 6, 9, 11} and second["layers"][0] == 3
    assert set(third["layers"]) == {0, 4, 5, 7, 8}  # an unsure loss and the residual stream's channels say nothing
    assert "avalanche point L9-11: 25.0 %" in " ".join(first["evidence"][0]["reasons"])


def test_every_place_is_planned_once():
    """No layer is lost between priorities, and each has a precision."""
    plan = plan_migration(report())["priorities"]
    planned = [place for entry in plan for place in (*entry["layers"], *entry["places"])]
    assert sorted(map(str, planned)) == sorted([*map(str, range(12)), "lm_head"])
    assert all(str(place) in entry["precision"] for entry in plan for place in (*entry["layers"], *entry["places"]))
    assert [entry["max_mape"] for entry in plan] == [0.05, 0.10, None]


def test_fp16_only_where_its_range_suffices():
    """A captured maximum near 65504, or none at all, means BF16."""
    precision = plan_migration(report())["priorities"][0]["precision"]
    assert precision == {"10": "FP16", "1": "BF16", "lm_head": "BF16"}
    unseen = plan_migration(report(channel_analysis=None))["priorities"][0]["precision"]
    assert set(unseen.values()) == {"BF16"}


def test_commands_are_commands():
    """Record on both machines, compare each priority's layers, with options that exist and names that hold together."""
    commands = [
        shlex.split(step["command"]) for step in plan_migration(report(), path="my out/report.json")["commands"]
    ]
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
    assert [c[c.index("--layers") + 1] for c in compares[1:]] == ["1,10", "2,3,6,9,11"]
    assert [c[c.index("--max-mape") + 1] for c in compares[1:]] == ["0.05", "0.1"]
    # MAPE needs whole tensors of every layer it is asked for, and one dtype on both machines
    assert all(c[c.index("--full-layers") + 1] == "1,2,3,6,9,10,11" for c in records)
    assert all(c[c.index("--dtype") + 1] == "bfloat16" for c in records)


def test_places_outside_the_layers_are_compared_by_sketch():
    """No option names them: the text says how they are checked, and the comparison of everything keeps their rows."""
    plan = plan_migration(report())
    first, second, _ = plan["priorities"]
    assert first["validation"].endswith("5 %; lm_head, outside the layers: by sketch, no site may part")
    assert second["validation"].endswith("MAPE below 10 %")
    (everything,) = [step for step in plan["commands"] if "--sensitivity" in step["command"]]
    assert everything["command"].endswith("-o comparison.json")
    assert "everything; for lm_head see the rows of that place in comparison.json" in everything["where"]
    without = plan_migration(report(layer_analysis={**report()["layer_analysis"], "places": {}}))
    assert "sketch" not in str(without["priorities"]) and any(
        step["where"].endswith("everything") for step in without["commands"]
    )


def test_predictions_say_what_they_are():
    """A screen alone ranks by predicted nats, with a note; without layers there is no plan."""
    rows = [{"layer": i, "evidence": "predicted", "predicted_kl": {"value": (i == 7) + 0.1}} for i in range(9)]
    found = plan_migration(
        report(
            layer_analysis={"layers": rows, "places": {}},
            executive_summary={"avalanche_points": []},
            channel_analysis={},
        )
    )
    assert found["priorities"][0]["layers"] == [7] and "standard" in found["notes"][0]
    with pytest.raises(InvalidInput, match="--level operator,layer,channel"):
        plan_migration(report(layer_analysis=None))
