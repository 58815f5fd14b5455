"""`faulty`: a model with a fault, seen by everyone who looks, counted, timed, replayed, and gone without a trace."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import noisescope as ns
from noisescope.errors import InvalidInput, ModelHeld, NothingInjected
from noisescope.faults import (
    FAMILIES,
    Accumulation,
    DeadKLane,
    DeadLane,
    DeadZone,
    ExpTable,
    Gain,
    Noise,
    Saturation,
    StaleTile,
    StuckBit,
    Where,
    faulty,
    parse_fault,
)
from noisescope.testing import tiny_model

ATTENTION = ["sdpa", "eager"]
# operator -> place; all but the last two are in block 1
OPERATORS = dict.fromkeys(("softmax", "matmul", "linear", "norm", "silu", "residual"), 1)
OPERATORS |= {"embedding": "embed", "lm_head": "lm_head"}
TOKENS = torch.arange(1, 13).reshape(2, 6)


def run(model, tokens=TOKENS, **kwargs) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, **kwargs).logits


def clean_output(model, site: ns.Site, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """What a healthy operator gives for these inputs, by plain torch."""
    module = model.get_submodule(site.module)
    if site.operator == "softmax":
        return F.softmax(inputs[0], -1, dtype=torch.float32)
    if site.operator == "matmul":
        return inputs[0] @ inputs[1]
    if site.operator == "linear":
        return F.linear(inputs[0], module.weight, module.bias)
    return F.silu(inputs[0]) if site.operator == "silu" else type(module).forward(module, inputs[0])


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("name", OPERATORS)
def test_scopes_opened_later_see_the_faulty_values(attention, name):
    """A capture inside the fault's scope records each operator's output half as large again, functions included."""
    model = tiny_model("llama", layers=3, attn_implementation=attention)
    place, operator = OPERATORS[name], "linear" if name == "lm_head" else name
    narrow = {"layers": {place}} if isinstance(place, int) else {"places": {place}}
    looking = {"operators": {operator}, "keep": "raw", **narrow}
    with ns.capture(model, **looking) as clean:
        run(model)
    with faulty(model, Gain(0.5), place, operator=operator) as scope, ns.capture(model, **looking) as seen:
        run(model)
    assert seen.raw.keys() == clean.raw.keys() and scope.calls == len(seen.raw) > 0
    elements = 0
    for site, [(inputs, output)] in seen.raw.items():
        if operator in ("residual", "embedding"):  # their inputs are clean, so the clean run tells
            ((_, right),) = clean.raw[site]
        else:
            right = clean_output(model, site, inputs)
        torch.testing.assert_close(output, 1.5 * right, rtol=1e-5, atol=1e-6)
        elements += int((output != 0).sum())
    assert scope.changed == elements


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("operator", ["softmax", "matmul"])
def test_a_fused_attention_call_watched_as_a_whole_is_faulty(attention, operator):
    """An audit that sees scaled_dot_product_attention as one call gets the faulty result from it."""
    model = tiny_model("llama", layers=3, attn_implementation=attention)
    seen = []

    def where(unit, operator):
        return operator == "attention" and unit.place == 1

    with faulty(model, Gain(1.0), 1, operator=operator), ns.watch(model, seen.append, where):
        run(model)
    if attention == "eager":
        assert not seen
        return
    (call,) = seen
    q, k, v = call.attention.query, call.attention.key, call.attention.value
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * call.attention.scale * (2 if operator == "matmul" else 1)
    shut = torch.ones(6, 6, dtype=torch.bool).triu(1)
    right = F.softmax(scores.masked_fill(shut, -torch.inf), -1) @ v
    torch.testing.assert_close(call.output, 2 * right)


def test_hooks_and_noise_come_after_the_fault(llama):
    """A user's forward hook and an injection opened later work on the faulty values."""
    down = llama.model.layers[1].mlp.down_proj
    inputs, outputs = [], []

    def hook(module, args, y):
        inputs.append(args[0])
        outputs.append(y)

    handle = down.register_forward_hook(hook)
    with faulty(llama, Gain(0.5), 1, operator="linear", module="down_proj") as scope:
        with ns.inject(llama, ns.Injection(ns.Bias(0.1, "element"), modules=["*layers.1.mlp.down_proj"])):
            run(llama)
        run(llama)
    handle.remove()
    torch.testing.assert_close(outputs[0], F.linear(inputs[0], down.weight) * 1.5 * 1.1)
    torch.testing.assert_close(outputs[1], F.linear(inputs[1], down.weight) * 1.5)
    assert scope.calls == 2


def test_two_faults_at_once(llama):
    """Each acts, counts for itself, and the inner one sees what the outer one did."""
    with (
        faulty(llama, Gain(1.0), 1) as first,
        faulty(llama, DeadLane(channels=(3,)), 1) as second,
        ns.capture(llama, operators={"residual"}, layers={1}, keep="raw") as seen,
    ):
        run(llama)
    ((_, y),) = next(iter(seen.raw.values()))
    with ns.capture(llama, operators={"residual"}, layers={1}, keep="raw") as clean:
        run(llama)
    ((_, right),) = next(iter(clean.raw.values()))
    expected = right * 2
    expected[..., 3] = 0
    assert torch.equal(y, expected) and (first.changed, second.changed) == (right.numel(), 12)


def test_the_faults_own_arithmetic_is_hidden(llama):
    """A recomputed product inside attention is no operator of the model: nobody counts it."""
    looking = {"operators": {"matmul", "linear", "softmax"}, "keep": "statistics"}
    with ns.capture(llama, **looking) as clean:
        run(llama)
    with faulty(llama, Accumulation(), 1, operator="matmul"), ns.capture(llama, **looking) as seen:
        run(llama)
    counts = [{site: s.count for site, s in c.statistics.items()} for c in (clean, seen)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("where", ["1/linear", "1/matmul"])
def test_a_users_function_mode_sees_the_model_only(where):
    """Products computed again for a fault don't pass through modes that are on."""
    model = tiny_model("llama", attn_implementation="eager")

    class Products(TorchFunctionMode):
        count = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.count += func in (F.linear, torch.matmul)
            return func(*args, **(kwargs or {}))

    with Products() as clean:
        run(model)
    with faulty(model, DeadKLane(), where), Products() as seen:
        run(model)
    assert seen.count == clean.count > 0


# -- where


def test_ways_to_say_where(llama):
    """Index, text, keyword, a suspect's site: all hit the same operators."""
    anatomy = ns.dissect(llama)
    module = "model.layers.1.mlp.up_proj"
    ways = [
        faulty(llama, "gain:0.5@1/linear/up_proj"),
        faulty(llama, "gain:0.5", "1/linear/*up_proj"),
        faulty(llama, Gain(0.5), "1/linear", module=module),
        faulty(llama, Gain(0.5), 1, operator="fc", module="*.up_proj"),
        faulty(llama, Gain(0.5), place=1, operator="linear", module="up_proj"),
        faulty(llama, Gain(0.5), Where(1, "linear", module)),
        faulty(llama, Gain(0.5), ns.Site("linear", 1, module)),
        faulty(llama, Gain(0.5), Where("*", "linear", module), anatomy=anatomy),
        faulty(llama, Gain(0.5), Where(1, module="up_proj")),
        faulty(llama, *parse_fault("gain:0.5@1/linear/up_proj")),
    ]
    results = []
    for scope in ways:
        with scope:
            results.append(run(llama))
        assert [site.module for site in scope.tally.sites if site.forward] == [module]
    assert all(torch.equal(results[0], other) for other in results[1:])
    assert not torch.equal(results[0], run(llama))


def test_one_of_the_products_of_attention(llama):
    """#0 are the scores, #1 the weighted values; both without a number."""
    changed = []
    for where in ("1/matmul#0", "1/matmul#1", "1/matmul"):
        with faulty(llama, Gain(0.5), where) as scope:
            run(llama)
        changed.append(scope.changed)
    scores, values = 2 * 4 * 6 * 6, 2 * 4 * 6 * 8
    assert changed == [scores, values, scores + values]


def test_the_whole_model(llama):
    """Place * is every linear there is, the head included; a group is what the family acts on in it."""
    with faulty(llama, Gain(0.5), "*/linear") as scope:
        run(llama)
    assert scope.calls == 3 * 7 + 1
    with faulty(llama, Accumulation(), "1/attention") as scope:
        run(llama)
    assert scope.tally.per_operator.keys() == {"matmul", "softmax"} and scope.calls == 3


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((Gain(), 3), InvalidInput, "layer 3 is out of range: the model has 3 blocks, 0 to 2"),
        ((Gain(), "1/gelu"), NothingInjected, "operator 'gelu' does not exist"),
        ((Gain(), "1/linear/nothing"), NothingInjected, "matches no operator's module"),
        ((ExpTable(), "1/linear"), InvalidInput, "exp_table acts on softmax, not on linear"),
        ((Gain(),), InvalidInput, "give the place of the fault exactly once"),
        (("gain@1", 1), InvalidInput, "the place is given twice"),
        (("gain",), InvalidInput, "give the place of the fault"),
        ((0.3, 1), InvalidInput, "a fault must be a value such as DeadZone"),
        ((Gain(), "middle"), InvalidInput, "unknown place 'middle'"),
    ],
)
def test_a_wrong_aim_is_refused_before_the_run(llama, arguments, error, words):
    """The message says what there is."""
    with pytest.raises(error, match=words):
        faulty(llama, *arguments)


def test_a_part_of_the_place_given_twice(llama):
    """Not silently one of them."""
    with pytest.raises(InvalidInput, match="the operator is given twice: 'norm', and in '1/linear'"):
        faulty(llama, Gain(), "1/linear", operator="norm")


def test_nothing_injected_is_an_error(llama):
    """No call, a time that never came, a call that the module does not make: all say so."""
    uncalled = faulty(llama, Gain(), 1).__enter__()
    with pytest.raises(NothingInjected, match="was not called"):
        uncalled.__exit__(None, None, None)
    never_due = pytest.raises(NothingInjected, match=r"start at forward 2 \(counted from 0\), but only 2 ran")
    with never_due, faulty(llama, Gain(start=2), 1):
        run(llama)
        run(llama)
    too_few = pytest.raises(NothingInjected, match="call 5 of matmul within its module, but no module made that many")
    with too_few, faulty(llama, Gain(), "1/matmul#5"):
        run(llama)
    llama.model.layers[2].forward = lambda hidden_states, **kwargs: hidden_states
    with pytest.raises(NothingInjected, match="nothing fired in 1"), faulty(llama, Gain(), "2/silu"):
        run(llama)


def test_a_token_embedding_has_no_faulty_input(llama):
    """An output that is no tensor of numbers is refused by name."""
    llama.model.embed_tokens.forward = lambda ids: ids
    refused = pytest.raises(
        InvalidInput,
        match=r"returned torch\.int64, but faults apply only to floating-point "
        r"tensors",
    )
    with refused, faulty(llama, Gain(), "embed"):
        run(llama)


# -- when


def changes(scope, model, times: int) -> list[int]:
    """Elements changed in each of some forwards."""
    seen = [0]
    with scope:
        for _ in range(times):
            run(model)
            seen.append(scope.changed)
    return [b - a for a, b in itertools.pairwise(seen)]


def test_a_fault_is_persistent_unless_given_a_time(llama):
    """It acts in every forward, or from `start` on for `duration` of them."""
    every = 2 * 6 * 32
    assert changes(faulty(llama, Gain(0.5), 1), llama, 4) == [every] * 4
    assert changes(faulty(llama, Gain(0.5, start=1, duration=2), 1), llama, 5) == [0, every, every, 0, 0]
    assert changes(faulty(llama, Gain(0.5, duration=1), 1), llama, 3) == [every, 0, 0]


def test_the_rate_is_the_chance_of_each_call(llama):
    """Calls are hit by chance, each by itself; the same seed hits the same ones, whatever else is drawn."""
    fault = Noise(0.5, rate=0.3, seed=3)
    first, second = (changes(faulty(llama, fault, 1), llama, 60) for _ in range(2))
    assert first == second and 8 <= sum(map(bool, first)) <= 30
    gain = changes(faulty(llama, Gain(0.5, rate=0.3, seed=3), 1), llama, 60)
    assert [bool(n) for n in gain] == [bool(n) for n in first]
    assert not any(changes(faulty(llama, Gain(rate=0.0), 1), llama, 5))
    scope = faulty(llama, fault, 1)
    changes(scope, llama, 60)
    assert scope.calls == 60 and scope.acted == sum(map(bool, first))


def test_a_stale_tile_is_of_the_call_before_also_when_it_was_right(llama):
    """Memory goes on while the fault does not act."""
    with (
        faulty(llama, StaleTile(start=2), 1) as scope,
        ns.capture(llama, layers={1}, operators={"residual"}, keep="raw") as c,
    ):
        for i in range(3):
            run(llama, TOKENS + i)
    outputs = [y for _, y in next(iter(c.raw.values()))]
    assert scope.acted == 1
    assert torch.equal(outputs[2].view(12, 32), outputs[1].view(12, 32))  # 16 x 32 covers all twelve rows


def test_absolute_saturation_and_occurrences_are_frozen_apart(llama):
    """Scores and weighted values each keep the limit of their own first call."""
    fault = Saturation(0.5, absolute=True)
    with faulty(llama, fault, "1/matmul"), ns.capture(llama, operators={"matmul"}, layers={1}, keep="raw") as seen:
        run(llama)
        run(llama, TOKENS + 20)
    limits = [[float(y.abs().max()) for _, y in calls] for calls in seen.raw.values()]
    assert all(first == second for first, second in limits) and limits[0] != limits[1]


# -- random numbers


def test_noise_differs_from_call_to_call_and_is_replayed(llama):
    """Two forwards differ, two scopes of one seed agree, another seed does not."""

    def outputs(seed: int) -> list[torch.Tensor]:
        with faulty(llama, Noise(0.3, seed=seed), 1):
            return [run(llama) for _ in range(3)]

    first, again, other = outputs(1), outputs(1), outputs(2)
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_touches_the_global_random_state(llama, family):
    """Neither reads nor moves it, so a dropout after it draws what it would have drawn."""
    operator = "silu" if "silu" in FAMILIES[family].operators else FAMILIES[family].operators[0]
    fault = FAMILIES[family].make(rate=0.9, seed=1)
    states, results = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        with faulty(llama, fault, 1, operator=operator):
            results.append(run(llama))
        states.append(torch.equal(before, torch.random.get_rng_state()))
    assert all(states) and torch.equal(torch.nan_to_num(results[0]), torch.nan_to_num(results[1]))


# -- counting


def test_changed_counts_elements_that_differ(llama):
    """A lane in each row, nothing for a fault that finds nothing to do."""
    with faulty(llama, DeadLane(channels=(3, 9)), 1) as scope:
        run(llama)
        assert scope.changed == 12 * 2
        run(llama)
    assert scope.changed == 2 * 12 * 2
    with faulty(llama, "nan_to_zero@1") as scope:
        result = run(llama)
    assert (scope.acted, scope.changed) == (1, 0) and torch.equal(result, run(llama))


def test_sparse_saturation_is_mostly_a_no_op(llama):
    """The channel of the maximum is rarely among a tenth of them, and then nothing changes: `changed` tells."""
    counts = []
    for seed in range(20):
        with faulty(llama, Saturation(0.3, channels=0.1, seed=seed), 1) as scope:
            same = torch.equal(run(llama), run(llama))
        assert same
        counts.append(scope.changed)
    assert counts.count(0) >= 8


# -- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bit_models(dtype):
    """A stuck bit is one of the dtype's own, and every family runs."""
    model = tiny_model("llama").to(dtype)
    with (
        faulty(model, StuckBit(15), "1/linear/o_proj"),
        ns.capture(model, modules=["*1.self_attn.o_proj"], keep="raw") as seen,
    ):
        run(model)
    ((_, y),) = next(iter(seen.raw.values()))
    assert y.dtype == dtype and (torch.signbit(y)).all()
    for family in FAMILIES.values():
        for operator in {"linear", "softmax", "silu", "norm"} & set(family.operators):
            with faulty(model, family.make(), 1, operator=operator) as scope:
                run(model)
            assert scope.acted


# -- no trace


def snapshot(model: torch.nn.Module) -> dict:
    return {
        name: {k: (id(v) if not isinstance(v, dict) else dict(v)) for k, v in module.__dict__.items()}
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("way", ["normal", "exception", "nested", "training"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_trace(llama, family, way):
    """Every family x way of leaving: bit-equal outputs, nothing in __dict__, no function mode, the same RNG."""
    operator = FAMILIES[family].operators[0]
    before, things, state = run(llama), snapshot(llama), torch.random.get_rng_state()
    fault = FAMILIES[family].make()
    if way == "exception":
        with pytest.raises(ZeroDivisionError), faulty(llama, fault, 1, operator=operator):
            run(llama)
            raise ZeroDivisionError
    elif way == "nested":
        noise = ns.inject(llama, ns.Injection(ns.Gaussian(0.1)))
        with noise, faulty(llama, fault, 1, operator=operator), ns.capture(llama):
            run(llama)
    elif way == "training":
        with faulty(llama, fault, 1, operator=operator):
            llama(TOKENS, labels=TOKENS).loss.backward()
        assert all(p.grad is not None for p in llama.parameters())
        llama.zero_grad(set_to_none=True)
    else:
        with faulty(llama, fault, 1, operator=operator):
            run(llama)
    assert not torch.overrides._get_current_function_mode_stack()
    assert snapshot(llama) == things and torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(run(llama), before)


def test_gradients_pass_a_fault_unchanged():
    """dL/dx of a faulty block's output is that of the output itself: straight through."""
    model = tiny_model("llama", layers=1)
    head = model.lm_head
    with faulty(model, Gain(1.0), "lm_head"):
        out = model(TOKENS).logits
    out.sum().backward()
    with_fault = head.weight.grad.clone()
    model.zero_grad(set_to_none=True)
    model(TOKENS).logits.sum().backward()
    torch.testing.assert_close(with_fault, head.weight.grad)


def test_a_scope_opens_once_and_not_twice_at_a_time(llama):
    """As every scope."""
    scope = faulty(llama, DeadZone(0.3), 1)
    with scope:
        with pytest.raises(ModelHeld, match="already open"):
            scope.__enter__()
        run(llama)
