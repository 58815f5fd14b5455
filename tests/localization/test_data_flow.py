"""A tensor between modules that is not what it should be: judged by its limit, named, and with a class of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.localization import data_flow
from noisescope.localization.call_tree import Node
from noisescope.localization.data_flow import About, about_difference, as_recomputed, same_difference
from noisescope.localization.error_pattern import Pattern
from noisescope.localization.judge import Judgement, judge_elements
from noisescope.localization.twin_comparison import Difference
from noisescope.model.anatomy import ATTENTION, MODULE, Unit

DRAW = torch.Generator().manual_seed(0)
QUERY, KEYS = (torch.randn(1, 2, tokens, 4, generator=DRAW) for tokens in (3, 5))


class Attention(nn.Module):
    pass


def difference(
    got: Tensor,
    expected: Tensor,
    *,
    operator: str = "linear",
    path: str = "0.0",
    kind: str = MODULE,
    occurrence: int = 0,
    args: Any = (),
    tensor: str = "input",
    limit: Tensor | None = None,
    source: bool = False,
) -> Difference:
    unit = Unit("layers.1.attn", kind, 1, "", (operator,))
    node = Node(unit, operator, F.linear, 4, args, {}, occurrence=occurrence)
    inside = Node(Unit("layers.1", MODULE, 1, "", ()), "module", Attention(), 0, (), {})
    before = Node(Unit("layers.1.v_proj", MODULE, 1, "", ("linear",)), "linear", nn.Linear(2, 2), 2, (), {})
    return Difference(node, tensor, path, got, expected, limit, inside, before, before if source else None)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (False, "input of layers.1.attn as Attention computes it after layers.1.v_proj"),
        (True, "input of layers.1.attn as Attention computes it, which is the output of layers.1.v_proj"),
    ],
)
def test_how_a_tensor_should_be_made(source, words):
    found = about_difference(difference(QUERY, QUERY + 1, source=source))
    assert found.made == words and found.hint is None


@pytest.mark.parametrize(
    ("operator", "occurrence", "path", "words"),
    [
        ("attention", 0, "0.0", "queries"),
        ("attention", 0, "0.1", "keys"),
        ("attention", 0, "0.2", "values"),
        ("attention", 0, "0.3", "mask"),
        ("attention", 0, "1.attn_mask", "mask"),
        ("matmul", 0, "0.0", "queries"),
        ("matmul", 0, "0.1", "keys"),
        ("matmul", 1, "0.0", "probabilities"),
        ("matmul", 1, "0.1", "values"),
        ("matmul", 2, "0.1", "input"),
        ("module", 0, "1.attention_mask", "mask"),
        ("linear", 0, "0.0", "input"),
    ],
)
def test_what_attention_is_given_has_a_name(operator, occurrence, path, words):
    found = difference(
        KEYS, 2 * KEYS, operator=operator, occurrence=occurrence, path=path, kind=ATTENTION, args=(QUERY, KEYS)
    )
    assert about_difference(found).made.startswith(f"{words} of layers.1.attn")


def turned(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1], x[..., 0], -x[..., 3], x[..., 2]], -1)


@pytest.mark.parametrize(("operator", "flip"), [("attention", False), ("matmul", True)])
def test_keys_that_keep_their_length_were_turned(operator, flip):
    """A product gets them turned over: then their channels are the last dimension but one."""
    keys = KEYS[:, :, :3]
    shown = [x.transpose(-1, -2) if flip else x for x in (turned(keys), keys)]
    found = difference(*shown, operator=operator, path="0.1", kind=ATTENTION, args=(QUERY, shown[1]))
    hint = about_difference(found).hint
    assert hint is not None and hint.fault_class == "position"
    recomputed = as_recomputed(found)
    assert recomputed.lead == (1, 2, 3) and torch.equal(recomputed.y, turned(keys).reshape(-1, 4))
    assert torch.equal(recomputed.reference.values, keys.reshape(-1, 4).double())
    values = difference(turned(keys), keys, operator="attention", path="0.2", kind=ATTENTION, args=(QUERY, keys))
    assert about_difference(values).hint is None


@pytest.mark.parametrize(("path", "words"), [("0.1", "cached keys"), ("0.2", "cached values")])
def test_more_keys_than_queries_come_from_a_cache(path, words):
    found = difference(3 * KEYS, KEYS, operator="attention", path=path, kind=ATTENTION, args=(QUERY, KEYS))
    hint = about_difference(found).hint
    assert hint is not None and (hint.fault_class, words in hint.text) == ("stale data", True)


def test_indices_and_masks():
    chosen = torch.tensor([[1, 0], [2, 3]])
    hint = about_difference(difference(chosen, chosen.flip(-1), tensor="output", path="2")).hint
    assert hint is not None and "indices differ" in hint.text
    mask = torch.ones(1, 1, 3, 3).tril().bool()
    hint = about_difference(difference(mask, ~mask, operator="attention", path="1.attn_mask")).hint
    assert hint is not None and hint.fault_class == "mask"


def test_scores_that_differ_where_one_is_shut_out():
    """A softmax is given the mask with the scores."""
    scores = torch.randn(1, 2, 3, 3, generator=DRAW)
    shut = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), torch.finfo(torch.float32).min)
    for got, expected in ((scores, shut), (shut, scores), (scores, shut.masked_fill(shut < -1e4, -torch.inf))):
        hint = about_difference(difference(got, expected, operator="softmax", kind=ATTENTION)).hint
        assert hint is not None and hint.fault_class == "mask"
    assert about_difference(difference(scores + 1, scores, operator="softmax", kind=ATTENTION)).hint is None


def test_a_hint_counts_where_the_pattern_says_less():
    hint = Pattern("position", 0.8, "rotary angles")
    for kind, confidence, expected, text in (
        ("unknown", 0.3, "position", "rotary angles"),
        ("rows", 0.9, "position", "rotary angles; three rows"),
        ("gain", 0.9, "gain", "three rows"),
        ("gain", 0.5, "position", "rotary angles"),
    ):
        found = About("keys", hint).refine(Pattern(kind, confidence, "three rows"))
        assert (found.fault_class, found.text, found.details["made_as"]) == (expected, text, "keys")
    plain = About("keys").refine(Pattern("unknown", 0.3, "nothing"))
    assert (plain.fault_class, plain.text) == ("unknown", "nothing")


def test_one_tensor_that_enters_several_calls_is_one_difference():
    one = difference(QUERY, QUERY + 1)
    assert same_difference(one, difference(QUERY.clone(), QUERY + 1))
    assert not same_difference(one, difference(QUERY, QUERY + 2))
    assert not same_difference(one, difference(QUERY + 1, QUERY + 1))
    assert not same_difference(one, difference(QUERY, QUERY + 1, tensor="output"))
    assert not same_difference(one, difference(QUERY[0], QUERY[0] + 1))


@pytest.mark.parametrize("value", [torch.tensor(3.5), torch.tensor(True), torch.arange(3), torch.ones(2, 3).bool()])
def test_any_tensor_can_be_judged(value):
    """Numbers alone, indices and flags, as rows and channels."""
    recomputed = as_recomputed(difference(value, torch.zeros_like(value)))
    assert recomputed.y.dim() == 2 and recomputed.y.is_floating_point()
    assert recomputed.reference.exact and recomputed.y.numel() == value.numel()


def judged_within(found: Difference) -> Judgement:
    recomputed = as_recomputed(found)
    return judge_elements(recomputed.y, recomputed.reference)


def test_limits_are_those_of_the_code():
    got, expected = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[1.0, 2.5, 3.0]])
    for size, bad in ((0.4, 1), (0.6, 0)):
        judged = judged_within(difference(got, expected, limit=torch.full((1, 3), size).double()))
        assert (judged.bad, judged.alarm, judged.channels) == (bad, bool(bad), {1} if bad else set())
        assert judged.worst == 0.5 and judged.elements == 3
    spoiled = torch.tensor([[1.0, 2.0, torch.inf]])
    judged = judged_within(difference(spoiled, got, limit=torch.full((1, 3), 9.0).double()))
    assert (judged.nonfinite, judged.alarm) == (1, True)


def test_sizes_are_told_where_nothing_belongs():
    """An index of 2 in place of 0 is no number of ulps beyond all sense."""
    judged = judged_within(difference(torch.tensor([2]), torch.tensor([0]), limit=torch.zeros(1).double()))
    assert judged.worst == 2 and judged.worst_ulp < 2**25


def test_large_tensors_are_thinned_out_but_not_where_they_differ(monkeypatch):
    monkeypatch.setattr(data_flow, "_MOST_ELEMENTS", 40)
    expected = torch.zeros(1, 50, 4)
    got = expected.clone()
    got[0, 17, 2] = 1.0
    limit = torch.full_like(expected, 0.5, dtype=torch.float64)
    for given in (None, limit):
        recomputed = as_recomputed(difference(got, expected, limit=given))
        assert recomputed.rows is not None and 17 in recomputed.rows.tolist() and len(recomputed.rows) < 20
        assert recomputed.lead == (1, 50) and int((recomputed.y != 0).sum()) == 1
