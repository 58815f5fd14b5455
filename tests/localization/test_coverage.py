"""What a verdict looked at, in numbers and in words."""

from __future__ import annotations

import pytest

from noisescope.localization.coverage import Coverage, NotJudged, Phase, Share


def test_a_share_is_rounded_down() -> None:
    """Only all of it is 100 %, and 94.9 % is no 95 %."""
    assert [str(Share(n, 1000)) for n in (1000, 999, 949, 4, 0)] == ["100 %", "99 %", "94 %", "0 %", "0 %"]


def test_enough_is_asked_of_each_share() -> None:
    assert Coverage(modules=Share(95, 100), parameters=Share(1, 1), multiply_adds=Share(1, 1)).enough
    assert not Coverage(modules=Share(1, 1), parameters=Share(94, 100), multiply_adds=Share(1, 1)).enough
    assert not Coverage(modules=Share(1, 1), parameters=Share(1, 1), multiply_adds=Share(0, 7)).enough
    assert not Coverage().measured


def test_what_ran_in_a_few_words() -> None:
    prefill = [Phase("prefill", 2, 32), Phase("prefill", 8, 15, padding="left")]
    assert Coverage(tuple(prefill)).ran == "prefill (2 x 32, 8 x 15 with left padding)"
    many = (*prefill, Phase("decode", 8, 15, 2), *(Phase("prefill", 1, n) for n in (1, 17, 65)))
    assert Coverage(many).ran == "prefill (2 x 32, 8 x 15 with left padding, 1 x 1 and 2 more shapes) and decode"
    assert Coverage((Phase("images", 8, 1),)).ran == "batches of images (8)"


@pytest.mark.parametrize(("steps", "repeated", "rate"), [(1, 1, 0.95), (4, 1, 0.527), (4, 96, 0.0298)])
def test_the_rate_of_a_rare_fault(steps: int, repeated: int, rate: float) -> None:
    """n forwards without a fault exclude a rate p with (1 - p)^n = 0.05."""
    found = Coverage((Phase("decode", 1, 8, steps),), repeated=repeated).excluded_rate
    assert found == pytest.approx(rate, abs=5e-4)


def test_a_class_that_was_not_judged_is_named() -> None:
    assert str(NotJudged("Scan", ("", "a"), "unknown")) == "Scan (the model itself and 1 more): unknown"


def test_the_headline_names_what_was_not_judged_and_doubts():
    """Also where enough was judged for "healthy"."""
    left = NotJudged("Router", ("a.gate", "b.gate"), "rounding may explain 7 % of its output")
    found = Coverage(not_judged=(left,), own_code=("Own at c",), doubtful=("weight of norm at d: eps is 1", "e"))
    assert found.exceptions == (
        "; not judged: Router (a.gate and 1 more): rounding may explain 7 % of its output"
        "; not of the config's class, checked against its own code only: Own at c"
        "; on purpose, or damaged: weight of norm at d: eps is 1 and 1 more"
    )
    assert Coverage().exceptions == ""


def test_every_decode_that_an_error_ended():
    """One that ran, or a model that has no decode, is another matter."""
    prefill, problem = Phase("prefill", 2, 32), "prefill 1 x 1 tokens + decode 1 x 2 tokens after 1: RuntimeError: no"
    assert Coverage((prefill,), in_part=(problem,)).never_decoded
    assert not Coverage((prefill, Phase("decode", 1, 8, 2)), in_part=(problem,)).never_decoded
    assert not Coverage((prefill,), not_run=("decode: BertModel has no cache",)).never_decoded
