"""A forward as a tree of calls: what each got and gave when it did, whatever is written to it later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from noisescope.localization.call_tree import (
    CallTree,
    Judged,
    Node,
    can_be_stacked,
    multiply_adds,
    stacked,
    with_whole_modules,
)
from noisescope.localization.host_copies import (
    HostStates,
    each_once,
    host_copy,
    is_state,
    leaves_in,
    mapped,
    tensors_in,
)
from noisescope.model.anatomy import Unit, dissect
from noisescope.testing import tiny_model


@pytest.fixture(scope="module")
def tree(calls_of: Callable[..., CallTree]) -> CallTree:
    return calls_of(tiny_model("llama", layers=2), torch.tensor([[3, 4, 5]]), use_cache=False)


def test_every_call_has_its_place_in_the_tree(tree):
    """Calls begin after their parent and end before it; their children are in the order in which they were made."""
    assert tree.root.module == "" and tree.root is tree.nodes[-1] and tree.root.parent is None
    block = next(node for node in tree.nodes if node.module == "model.layers.1")
    assert [child.module.rpartition(".")[2] for child in block.children] == [
        "input_layernorm",
        "self_attn",
        "post_attention_layernorm",
        "mlp",
    ]
    for node in tree.nodes:
        for child in node.children:
            assert child.parent is node and node.order < child.order < child.ended < node.ended
    called = {node.module for node in tree.nodes if node.is_module}
    assert {"", "model", "model.rotary_emb", "model.layers.0.mlp.act_fn", "lm_head"} <= called
    assert {(node.phase, node.shape) for node in tree.nodes} == {("prefill 1 x 3 tokens", (1, 3))}


class Rooted(nn.Module):
    """A norm whose class's name does not say so, and a product in a module that is no operator."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Rooted(), nn.Identity())
        self.inner.forward = self._mixed  # type: ignore[method-assign]

    def _mixed(self, x: Tensor) -> Tensor:
        return torch.matmul(self.inner[0](x), torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_norms_are_told_by_their_formula_and_functions_named_after_who_calls_them(blocks_around, calls_of):
    made = calls_of(blocks_around(Mixes()), torch.randn(2, 3, 4))
    found = {(node.operator, node.module) for node in made.nodes if node.operator in ("norm", "matmul")}
    assert found == {("norm", "layers.0.inner.inner.0"), ("matmul", "layers.0.inner.inner")}


def test_functions_that_are_operators_are_calls_of_the_module_that_makes_them(tree):
    attention = next(node for node in tree.nodes if node.module == "model.layers.0.self_attn" and node.is_module)
    names = [child.operator for child in attention.children]
    assert names == ["linear", "linear", "linear", "attention", "linear"]
    fused = attention.children[3]
    assert not fused.is_module and fused.callee is F.scaled_dot_product_attention
    assert str(fused.site("input")) == "input of attention at block 0 (model.layers.0.self_attn)"


def test_sites_of_whole_modules(tree):
    """Named by the operator of their kind, where it has one."""
    sites = {node.module: str(node.site("output")) for node in tree.nodes if node.is_module}
    assert sites["model.layers.1"] == "residual at block 1 (model.layers.1)"
    assert sites["model.layers.1.mlp"] == "residual at block 1 (model.layers.1.mlp)"
    assert sites["model.layers.1.self_attn"] == "attention at block 1 (model.layers.1.self_attn)"
    assert sites["model.rotary_emb"] == "matmul at rotary (model.rotary_emb)"
    assert (sites["model"], sites[""]) == ("residual at final_norm (model)", "residual at lm_head ()")


class Writes(nn.Module):
    """Writes to what it was given after it has used it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        x.zero_()
        y += 1.0
        return y


def test_tensors_are_copied_when_a_call_begins_and_when_it_ends(blocks_around, calls_of):
    tree = calls_of(blocks_around(Writes()), torch.ones(1, 3, 4))
    nodes = {node.module: node for node in tree.nodes}
    given = nodes["layers.0.first"].output
    inner, linear = nodes["layers.0.inner"], nodes["layers.0.inner.linear"]
    assert torch.equal(inner.args[0], given) and torch.equal(linear.args[0], given)  # not as it was written later
    assert torch.equal(inner.output, linear.output + 1)
    assert {path: bool((value == 0).all()) for path, value in inner.changed.items()} == {"0.0": True}
    assert all(node.changed == {} for node in tree.nodes if node is not inner)


def test_inference_mode_has_no_versions(blocks_around, calls_of):
    """Nothing is known of what was written then, and nothing breaks."""
    with torch.inference_mode():
        tree = calls_of(blocks_around(Writes()), torch.ones(1, 3, 4))
    assert all(node.changed == {} for node in tree.nodes)


def test_one_tensor_given_twice_is_one_copy():
    x, y = torch.ones(2), torch.ones(2)
    a, b, c = HostStates().on_host((x, x, y))
    assert a is b and a is not c and a is not x and torch.equal(a, x)
    copies = [each_once(Tensor.clone)(x) for _ in range(2)]
    assert copies[0] is not copies[1]


# -- trees of values


class Pair(NamedTuple):
    one: Any
    other: Any


def test_trees_keep_their_kinds():
    x = torch.ones(2)
    value = {"pair": Pair(x, 3), "list": [x, (x, None)], "model": BaseModelOutput(last_hidden_state=x)}
    doubled = mapped(value, lambda x: 2 * x, lambda leaf: leaf)
    assert type(doubled["pair"]) is Pair and doubled["pair"].other == 3 and doubled["list"][1][1] is None
    assert type(doubled["model"]) is BaseModelOutput
    assert torch.equal(doubled["model"].last_hidden_state, 2 * x) and torch.equal(doubled["model"][0], 2 * x)
    assert all(torch.equal(leaf, 2 * x) for _, leaf in tensors_in(doubled))
    assert torch.equal(value["pair"].one, x) and torch.equal(value["model"].last_hidden_state, x)  # as before


def test_paths_name_the_leaves():
    x = torch.ones(2)
    value = ((x, 3), {"cos": [x, None], "flag": True})
    assert [(path, type(leaf).__name__) for path, leaf in leaves_in(value)] == [
        ("0.0", "Tensor"),
        ("0.1", "int"),
        ("1.cos.0", "Tensor"),
        ("1.cos.1", "NoneType"),
        ("1.flag", "bool"),
    ]
    assert [path for path, _ in tensors_in(value)] == ["0.0", "1.cos.0"]
    assert [path for path, _ in tensors_in(x)] == [""]


# -- states


class Cache:
    def __init__(self) -> None:
        self.layers = [torch.zeros(2)]
        self.own = self


def test_a_state_has_one_counterpart_that_only_the_host_changes():
    states, cache = HostStates(), Cache()
    (first,), (second,) = states.on_host((cache,)), states.on_host([cache])
    assert first is second and first is not cache and first.own is first
    cache.layers[0] += 1
    assert torch.equal(states.on_host({"cache": cache})["cache"].layers[0], torch.zeros(2))
    assert states.on_host(Cache()) is not first


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Cache(), True),
        (3, False),
        ("text", False),
        (None, False),
        (torch.float32, False),
        (nn.Linear(2, 2), False),
        (Cache, False),
        (len, False),
        (type("ModelConfig", (), {})(), False),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_what_is_a_state(value, expected):
    assert is_state(value) == expected


def test_copies_of_objects_share_nothing():
    class Holder:
        def __init__(self) -> None:
            self.table = {"keys": (torch.ones(2), {torch.zeros(1)})}

    holder = Holder()
    copied = host_copy(holder)
    assert torch.equal(copied.table["keys"][0], torch.ones(2))
    copied.table["keys"][0].zero_()
    assert torch.equal(holder.table["keys"][0], torch.ones(2))


# -- calls that are judged together


def call(operator: str, x: Any, y: Any, callee: Any = None, kwargs: Any = None, phase: str = "") -> Node:
    unit = Unit("mlp.up", "module", 0, "", (operator,))
    return Node(unit, operator, callee or nn.Linear(4, 3), 0, (x,), kwargs or {}, y, phase=phase)


def test_calls_of_one_module_are_stacked_row_by_row():
    nodes = [call("linear", torch.full((2, t, 4), float(t)), torch.full((2, t, 3), float(t))) for t in (2, 1)]
    assert all(map(can_be_stacked, nodes))
    whole = stacked(nodes)
    assert whole.args[0].shape == (6, 4) and whole.output.shape == (6, 3)
    assert torch.equal(whole.args[0][:, 0], whole.output[:, 0])  # still the same rows
    ids = [call("embedding", torch.tensor([[1, 2]]), torch.zeros(1, 2, 3)) for _ in range(2)]
    assert stacked(ids).args[0].tolist() == [1, 2, 1, 2] and stacked(ids).output.shape == (4, 3)


def test_calls_that_can_not_be_stacked():
    x, y = torch.ones(2, 3, 4), torch.ones(2, 3, 3)
    assert not can_be_stacked(call("softmax", x, x))
    assert not can_be_stacked(call("linear", x, y, F.linear))
    assert not can_be_stacked(call("linear", x, (y, None)))
    assert not can_be_stacked(call("linear", x, y, kwargs={"scale": 2.0}))
    assert not can_be_stacked(call("linear", None, y))
    assert not can_be_stacked(call("linear", x[0, 0], y[0, 0]))
    assert not can_be_stacked(call("linear", x, y.flatten(0, 1)))
    assert not can_be_stacked(call("embedding", torch.ones(2, 3), torch.ones(2, 4, 3)))


def test_every_module_is_a_unit_but_containers():
    model = tiny_model("llama", layers=2)
    units = with_whole_modules(model, dissect(model)).units
    modules = {unit.module for unit in units}
    assert modules == {name for name, module in model.named_modules() if not isinstance(module, nn.ModuleList)}
    places = {unit.module: unit.place for unit in units}
    assert places["model.layers.1.mlp"] == 1 and places["model"] == "final_norm" and places[""] == "lm_head"


# -- what was judged


def test_a_call_without_a_formula_whose_code_was_run_is_judged():
    judged = Judged()
    node = call("norm", torch.ones(2, 4), torch.ones(2, 4), phase="prefill")
    judged.unknown(node, "no formula")
    assert judged.reason("mlp.up") == "no formula"
    judged.add(node)
    assert judged.reason("mlp.up") == "" and judged.calls == {(node.site("output"), "prefill"): True}


def test_what_was_judged_in_some_phases_names_the_other():
    judged = Judged()
    judged.add(call("norm", torch.ones(2, 4), torch.ones(2, 4), phase="prefill"))
    judged.unknown(call("norm", torch.ones(2, 4), torch.ones(2, 4), phase="decode"), "it raised")
    assert judged.reason("mlp.up") == "in decode: it raised"
    assert sorted(judged.calls.values()) == [False, True]
    assert judged.reason("another") == ""


def test_multiply_adds():
    x, y = torch.ones(2, 5, 4), torch.ones(2, 5, 3)
    assert multiply_adds(call("linear", x, y)) == 2 * 5 * 3 * 4
    assert multiply_adds(call("norm", x, x)) == 0
    assert multiply_adds(call("linear", x, (y, None))) == 0
    assert multiply_adds(call("linear", None, y)) == 0
    query = torch.ones(1, 2, 5, 4)
    given = (query, query[:, :, :3], query)
    fused = Node(Unit("a", "attention", 0, "", ()), "attention", F.linear, 0, given, {}, query)
    assert multiply_adds(fused) == 2 * query.numel() * 3
