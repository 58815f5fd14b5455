"""watch: every call of the chosen operators is reported once, in order, and may be answered with another output."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import noisescope as ns
from noisescope.errors import InvalidInput, ModelHeld
from noisescope.model.anatomy import ROLES, linear_weight
from noisescope.probe.watch import RecordedCall
from noisescope.testing import tiny_model


@pytest.fixture
def calls() -> list[RecordedCall]:
    return []


def names(calls: list[RecordedCall]) -> list[str]:
    return [f"{call.unit.module.rpartition('.')[2]} {call.operator}" for call in calls]


def test_calls_come_in_the_order_they_are_made(llama, tokens, calls):
    """One block: norm, projections, attention as a whole, MLP, and the block itself last."""
    with ns.watch(llama, calls.append, layers={1}), torch.no_grad():
        llama(tokens)
    assert names(calls) == [
        "input_layernorm norm",
        "q_proj linear",
        "k_proj linear",
        "v_proj linear",
        "self_attn attention",
        "o_proj linear",
        "post_attention_layernorm norm",
        "gate_proj linear",
        "act_fn silu",
        "up_proj linear",
        "down_proj linear",
        "1 residual",
    ]
    assert all(call.site.place == 1 and call.occurrence == 0 for call in calls)


def test_a_call_says_what_was_given_and_what_came_back(llama, tokens, calls):
    """Input, weight and output of a linear; its output is what the next module is given."""
    with ns.watch(llama, calls.append, operators={"linear", "silu"}, layers={0}), torch.no_grad():
        llama(tokens)
    for call in (call for call in calls if call.operator == "linear"):
        assert call.callee is llama.get_submodule(call.unit.module)
        assert torch.equal(F.linear(call.first_input, call.weight), call.output_tensor)
        assert torch.equal(call.again(call.first_input), call.output) and call.inputs == (call.first_input,)
        assert call.unit.role == ROLES[call.unit.module.rpartition(".")[2]]
    gate, silu = calls[names(calls).index("gate_proj linear")], calls[names(calls).index("act_fn silu")]
    assert silu.first_input is gate.output and silu.weight is None


def test_the_weight_of_gpt2_is_turned_to_rows_of_outputs(calls):
    """transformers' Conv1D stores [in, out]; a call gives [out, in], and calls of a function do as well."""
    model = tiny_model("gpt2")
    with ns.watch(model, calls.append, operators={"linear"}, layers={0}), torch.no_grad():
        model(torch.arange(1, 5)[None])
    assert names(calls)[:2] == ["c_attn linear", "c_proj linear"]
    for call in calls:
        x, y = call.tensors
        assert call.weight.shape == (y.shape[-1], x.shape[-1])
        assert torch.equal(call.weight, linear_weight(call.callee))
        assert call.weight.data_ptr() == call.callee.weight.data_ptr()


def test_function_calls_have_inputs_and_a_weight(calls):
    """MoE experts call grouped products: the first argument is the input, the second the weight."""
    model = tiny_model("mixtral")
    with ns.watch(model, calls.append, operators={"linear"}, modules=["*.0.mlp.experts"]), torch.no_grad():
        model(torch.arange(1, 5)[None])
    assert calls and [call.occurrence for call in calls] == list(range(len(calls)))
    for call in calls:
        assert call.inputs == (call.first_input,) and call.weight.shape[-1] == call.first_input.shape[-1]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fused_attention_is_one_call_unless_its_operators_are_named(attention, tokens, calls):
    """By default nothing is opened; naming softmax opens the layer, with heads in the second dimension."""
    model = tiny_model("llama", layers=2, attn_implementation=attention)
    with torch.no_grad():
        clean = model(tokens).logits
        with ns.watch(model, calls.append, layers={0}):
            assert torch.equal(model(tokens).logits, clean)
        inside = [call for call in calls if call.unit.kind == "attention"]
        fused = [call for call in inside if call.operator == "attention"]
        assert [call.operator for call in inside] == (["attention"] if fused else ["matmul", "softmax", "matmul"])
        assert bool(fused) == (attention == "sdpa")
        for call in fused:
            given = call.attention
            assert given.query.shape[-2:] == given.value.shape[-2:] and given.effective_scale > 0
            again = F.scaled_dot_product_attention(*call.args, **call.kwargs)
            assert torch.equal(again, call.output) and call.first_input is given.query
        calls.clear()
        with ns.watch(model, calls.append, operators={"softmax"}):
            model(tokens)
    assert [(call.operator, call.unit.place, call.by_head) for call in calls] == [
        ("softmax", 0, True),
        ("softmax", 1, True),
    ]
    assert calls[0].output.shape[:2] == (2, model.config.num_attention_heads)


def test_both_products_of_attention_are_told_apart(llama, tokens, calls):
    with ns.watch(llama, calls.append, operators={"matmul"}, layers={2}), torch.no_grad():
        llama(tokens)
    assert [call.occurrence for call in calls] == [0, 1]
    assert all(len(call.inputs) == 2 for call in calls)


def test_an_answer_replaces_the_output(llama, tokens):
    """A tensor, or a tuple where the module gives one; the model goes on with it."""
    down = llama.model.layers[1].mlp.down_proj
    with torch.no_grad():
        with ns.watch(llama, lambda call: 2 * call.output, modules=["*.1.mlp.down_proj"]):
            doubled = llama(tokens).logits
        down.weight.mul_(2)
        assert torch.equal(llama(tokens).logits, doubled)


def test_what_goes_in_may_be_replaced_too(llama, tokens, calls):
    """`before` is asked before the call is made, and the call is then made with its tensor."""
    asked = []

    def before(call: RecordedCall) -> torch.Tensor:
        asked.append(call)
        return torch.zeros_like(call.first_input)

    with ns.watch(llama, calls.append, operators={"linear"}, places={"lm_head"}, before=before), torch.no_grad():
        logits = llama(tokens).logits
    assert asked[0].output is None and not bool(logits.any())
    assert torch.equal(calls[0].first_input, torch.zeros_like(asked[0].first_input))


def test_where_is_a_predicate_on_units_and_operators(llama, tokens, calls):
    """Alone it decides; beside sets it narrows them."""
    with ns.watch(llama, calls.append, lambda unit, operator: unit.role == "down"), torch.no_grad():
        llama(tokens)
    assert names(calls) == ["down_proj linear"] * 3
    calls.clear()
    with ns.watch(llama, calls.append, lambda unit, operator: unit.role in ("q", "k"), layers={0}), torch.no_grad():
        llama(tokens)
    assert names(calls) == ["q_proj linear", "k_proj linear"]
    with pytest.raises(InvalidInput, match="operator"):
        ns.watch(llama, calls.append, operators={"convolution"})


@pytest.mark.parametrize(
    "operators", [None, {"softmax"}, {"linear", "residual"}], ids=["all", "softmax", "linear and residual"]
)
def test_nothing_is_left_behind(llama, tokens, operators):
    """After the block and after an exception of the listener, modules and outputs are as before."""

    def state() -> list[Any]:
        return [(name, set(module.__dict__)) for name, module in llama.named_modules()]

    def fail(call: RecordedCall) -> None:
        raise ZeroDivisionError

    before, random = state(), torch.get_rng_state()
    with torch.no_grad():
        clean = llama(tokens).logits
        with ns.watch(llama, lambda call: None, operators=operators):
            llama(tokens)
        assert state() == before
        with pytest.raises(ZeroDivisionError), ns.watch(llama, fail, operators=operators):
            llama(tokens)
        assert state() == before and torch.equal(llama(tokens).logits, clean)
    assert torch.equal(torch.get_rng_state(), random)


def test_it_nests_with_noise(llama, tokens):
    """Opened inside an injection it sees noisy outputs, outside it the clean ones; the noise is the same without it."""
    clean, noisy = [], []
    noise = ns.Injection(ns.Gaussian(0.1), modules=["*.1.mlp.down_proj"])

    def output(into: list[Any]) -> Any:
        return lambda call: into.append(call.output.clone())  # noise may be added in place

    with torch.no_grad():
        with ns.inject(llama, noise):
            alone = llama(tokens).logits
        with (
            ns.watch(llama, output(clean), modules=["*.1.mlp.down_proj"]),
            ns.inject(llama, noise) as tally,
            ns.watch(llama, output(noisy), modules=["*.1.mlp.down_proj"]),
        ):
            assert torch.equal(llama(tokens).logits, alone)
        with ns.watch(llama, output(clean), modules=["*.1.mlp.down_proj"]):
            llama(tokens)
    assert tally.forward == 1 and len(clean) == 2 and len(noisy) == 1
    assert torch.equal(clean[0], clean[1]) and not torch.equal(clean[0], noisy[0])


def test_scopes_are_left_in_reverse_order(llama):
    outer, inner = ns.watch(llama, print), ns.watch(llama, print)
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(ModelHeld, match="reverse order"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert not any("forward" in module.__dict__ for module in llama.modules())


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_recomputation_is_reported_where_it_is_asked_for(llama, tokens, calls, recomputed):
    """Gradient checkpointing computes blocks again in the backward pass: one report, or both, told apart."""
    llama.gradient_checkpointing_enable()
    llama.train()
    with ns.watch(llama, calls.append, operators={"linear"}, layers={1}, recomputed=recomputed):
        llama(tokens, labels=tokens).loss.backward()
    again = [call for call in calls if call.context.recomputing]
    assert len(calls) - len(again) == 7
    assert len(again) in ((6, 7) if recomputed else (0,))  # torch stops once it has all that the backward needs


def test_gradients_pass_an_output_that_was_replaced(llama, tokens):
    """With `recomputed` an answer acts in both forwards of a checkpointed block, so that gradients are exact."""
    names = ["*.1.mlp.down_proj"]

    def gradient(*, checkpointed: bool) -> torch.Tensor:
        (llama.gradient_checkpointing_enable if checkpointed else llama.gradient_checkpointing_disable)()
        llama.train()
        llama.zero_grad()
        with ns.watch(llama, lambda call: call.output.square(), modules=names, recomputed=True):
            llama(tokens, labels=tokens).loss.backward()
        return llama.model.layers[0].mlp.up_proj.weight.grad.clone()

    torch.testing.assert_close(gradient(checkpointed=True), gradient(checkpointed=False))


def test_a_call_made_again_is_not_reported() -> None:
    """`call.again` inside on_call gives the module's answer and does not call on_call once more."""
    model = tiny_model("llama", layers=1)
    seen = []

    def on_call(call: ns.RecordedCall) -> None:
        seen.append(torch.equal(call.again(call.first_input), call.output_tensor))

    with torch.no_grad(), ns.watch(model, on_call, operators={"linear", "norm", "silu"}):
        model(torch.arange(1, 9)[None])
    assert len(seen) == 12 and all(seen)  # 7 linears of the block, the head, 3 norms, silu
    with pytest.raises(InvalidInput, match="must be functions"):
        ns.watch(model, None)  # type: ignore[arg-type]


WRONG_SETS: list[tuple[dict[str, Any], str]] = [
    ({"layers": {99}}, "layer 99 is out of range: the model has 3 blocks, 0 to 2"),
    ({"places": {3}}, "layer 3 is out of range: the model has 3 blocks, 0 to 2"),
    ({"layers": 3.5}, "layers must be a set or a list, got 3.5"),
    ({"layers": {"lm_head"}}, "layers must be block indices"),
    ({"operators": 3.5}, "operators must be a set or a list, got 3.5"),
    ({"operators": {"sofmax"}}, "Did you mean 'softmax'"),
    ({"modules": 3.5}, "modules must be a set or a list, got 3.5"),
    ({"modules": [3]}, r"modules must be dotted names or patterns \(strings\), got 3"),
]


@pytest.mark.parametrize(("sets", "words"), WRONG_SETS, ids=str)
def test_what_inject_refuses_is_refused_in_the_same_words(llama, calls, sets, words):
    """A layer that the model lacks, a wrong name or type: one line from watch, capture and inject, before any call."""
    with pytest.raises(InvalidInput, match=words):
        ns.watch(llama, calls.append, **sets)
    with pytest.raises(InvalidInput, match=words):
        ns.watch(llama, calls.append, lambda unit, operator: True, **sets)
    with pytest.raises(InvalidInput, match=words):
        ns.capture(llama, **sets)
    with pytest.raises(InvalidInput, match=words):
        ns.inject(llama, ns.Injection(ns.Gaussian(0.05), **sets)).__enter__()
    assert not [module for module in llama.modules() if "forward" in module.__dict__]
