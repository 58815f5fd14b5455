"""After a scope the model is as it was: outputs, hooks, __dict__, random state, memory."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import random
import threading
from collections import Counter
from contextlib import ExitStack
from itertools import combinations, product

import numpy
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import noisescope as ns
from noisescope.errors import InvalidInput, ModelHeld, NoisescopeError, NothingInjected
from noisescope.model.fingerprint import _alteration
from noisescope.probe.forward_wrapper import ForwardWrapper
from noisescope.testing import tiny_model

# Formats that take the same branches as bf16 and fp8_e4m3 (fp16, fp8_e5m2) are left to test_formats.py.
PERTURBATIONS = [
    ns.Gaussian(0.05),
    ns.Gaussian(0.05, relative_to="rms"),
    ns.Gaussian(0.05, relative_to="absolute"),
    ns.Uniform(0.05),
    ns.Bias(0.05),
    ns.Shrink(0.05),
    ns.Format("bf16"),
    ns.Format("fp8_e4m3"),
    ns.Format("int8"),
    ns.Format("int4", granularity="group", group_size=8),
    ns.Format("mxfp4"),
    ns.Format("nvfp4"),
]
OPERATORS = ["linear", "matmul", "softmax", "silu", "norm", "embedding", "residual", "gemm", "attention", "mlp"]
WAYS = ["normal", "exception", "bad argument", "failing perturbation", "nothing ran", "nested", "updated", "training"]
TENSORS = ["output", "input", "weight"]
KINDS = ["llama", "llama eager", "llama registered", "mixtral"]  # ways to attention's operators, and experts
FACTORS = [PERTURBATIONS, OPERATORS, WAYS, KINDS, TENSORS]
Choice = tuple[int, int]  # (factor, level)


def impossible(pair: frozenset[Choice]) -> bool:
    """Whether two levels can't meet: an operator without a weight, an embedding's integer input."""
    levels = [FACTORS[factor][level] for factor, level in sorted(pair)]
    without = {"weight": ("matmul", "softmax", "silu", "residual", "attention"), "input": ("embedding",)}
    return any(tensor in levels and operator in levels for tensor, them in without.items() for operator in them)


def every_pair() -> set[frozenset[Choice]]:
    """All pairs of levels of two factors that can meet."""
    choices = [[(factor, level) for level in range(len(levels))] for factor, levels in enumerate(FACTORS)]
    met = (frozenset(pair) for one, other in combinations(choices, 2) for pair in product(one, other))
    return {pair for pair in met if not impossible(pair)}


def pairwise() -> list[tuple[int, ...]]:
    """Rows of levels in which every possible pair occurs: each row starts at a missing pair, then grows greedily."""
    missing, rows = every_pair(), []
    used: Counter[Choice] = Counter()
    while missing:
        row = dict(min(sorted(pair) for pair in missing))
        for factor in sorted(set(range(len(FACTORS))) - set(row)):
            met = {
                level: [frozenset({(factor, level), choice}) for choice in row.items()]
                for level in range(len(FACTORS[factor]))
            }
            possible = [level for level, pairs in met.items() if not any(map(impossible, pairs))]
            row[factor] = max(
                possible, key=lambda level: (len(missing.intersection(met[level])), -used[factor, level], -level)
            )
        missing -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        used.update(row.items())
        rows.append(tuple(row[factor] for factor in range(len(FACTORS))))
    return rows


DESIGN = pairwise()


def named(row: tuple[int, ...]) -> str:
    return "-".join(str(levels[level]) for levels, level in zip(FACTORS, row, strict=True))


def snapshot(model: torch.nn.Module) -> list:
    """Everything about a model and the process that a scope might leave behind."""
    modules = {
        name: (
            {k: (id(v) if not isinstance(v, dict) else dict(v)) for k, v in module.__dict__.items()},
            type(module),
        )
        for name, module in model.named_modules()
    }
    parameters = [(p.data_ptr(), p._version, p.requires_grad, p.grad is None) for p in model.parameters()]
    random_states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.random.get_rng_state().tolist()
    return [modules, parameters, torch.overrides._get_current_function_mode_stack(), *random_states]


def leave(model, tokens, injection, way: str) -> None:
    """Enter a scope and leave it one way."""
    if way == "normal":
        with ns.inject(model, injection), torch.no_grad():
            model(tokens)
    elif way == "exception":
        with pytest.raises(ZeroDivisionError), ns.inject(model, injection), torch.no_grad():
            model(tokens)
            raise ZeroDivisionError
    elif way == "bad argument":
        with pytest.raises((TypeError, ValueError, NoisescopeError)), ns.inject(model, injection), torch.no_grad():
            model(tokens, no_such_argument_at_all=object(), inputs_embeds=torch.zeros(1, 1, 1))
    elif way == "failing perturbation":

        def failing(y, draw):
            raise ZeroDivisionError(injection.perturbation(y, draw).shape)

        failing_injection = dataclasses.replace(injection, perturbation=failing)
        with pytest.raises(ZeroDivisionError), ns.inject(model, failing_injection), torch.no_grad():
            model(tokens)
    elif way == "nothing ran":
        with pytest.raises(NothingInjected), ns.inject(model, injection):
            pass
    elif way == "nested":
        other = ns.Injection(ns.Gaussian(0.1), operators=injection.operators, seed=1)
        with ns.inject(model, injection), ns.inject(model, other), torch.no_grad():
            model(tokens)
    elif way == "updated":
        probe = ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"norm", "residual"}))
        with probe, torch.no_grad():
            model(tokens)
            probe.update(injection)
            model(tokens)
    else:
        with ns.inject(model, injection):
            model(tokens, labels=tokens).loss.backward()
        model.zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def models():
    AttentionInterface.register("registered", sdpa_attention_forward)  # by another name it is opened by its config
    family_and_attention = {kind: (*kind.split(), "sdpa")[:2] for kind in KINDS}
    built = {kind: tiny_model(name, attn_implementation=how) for kind, (name, how) in family_and_attention.items()}
    for module in (module for model in built.values() for module in model.modules()):
        if "Norm" in type(module).__name__:  # ones survive any format, and a scope that alters nothing raises
            torch.nn.init.uniform_(module.weight, 0.5, 1.5, generator=torch.Generator().manual_seed(0))
    yield built
    del AttentionInterface._global_mapping["registered"]


def test_the_design_covers_every_pair():
    """Every two levels that can meet do, in about as many cases as the two longest factors have pairs."""
    met = {frozenset(pair) for row in DESIGN for pair in combinations(enumerate(row), 2)}
    assert met == every_pair()
    assert len(PERTURBATIONS) * len(OPERATORS) <= len(DESIGN) <= 130
    assert {frozenset({(1, OPERATORS.index("softmax")), (4, TENSORS.index("weight"))})} & met == set()


@pytest.mark.parametrize("row", DESIGN, ids=named)
def test_no_trace(models, row):
    """Perturbation x operator x way of leaving x model x tensor, by pairs: outputs, __dict__ and random state stay."""
    perturbation, operator, way, kind, tensor = (levels[level] for levels, level in zip(FACTORS, row, strict=True))
    model, tokens = models[kind], torch.arange(1, 9).reshape(2, 4)
    with torch.no_grad():
        before = model(tokens).logits
    things = snapshot(model)
    leave(model, tokens, ns.Injection(perturbation, operators={operator}, tensor=tensor), way)
    assert snapshot(model) == things
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)


def test_nested_scopes_compose_each_with_its_own_tally(llama, tokens, logits):
    """Two scopes at once act both, count apart, and the inner one leaves the outer in force."""
    outer = ns.Injection(ns.Gaussian(0.05), operators={"softmax"}, layers={0})
    inner = ns.Injection(ns.Gaussian(0.05), operators={"softmax", "linear"}, layers={0, 1})
    with ns.inject(llama, outer) as first:
        alone = logits(llama, tokens)
        with ns.inject(llama, inner) as second:
            both = logits(llama, tokens)
        logits(llama, tokens)
    assert (first.forward, second.forward) == (3, 16)
    assert not torch.equal(alone, both)


def test_scopes_left_in_the_wrong_order_are_reported_and_undone(llama, tokens, logits):
    """Crossing scopes raise, and once both are left the model is clean."""
    clean = logits(llama, tokens)
    first, second = (ns.inject(llama, ns.Injection(ns.Gaussian(0.05), layers={0})) for _ in range(2))
    first.__enter__()
    second.__enter__()
    logits(llama, tokens)
    with pytest.raises(ModelHeld, match="reverse order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert torch.equal(clean, logits(llama, tokens))
    assert not any("forward" in module.__dict__ for module in llama.modules())


def test_a_scope_opens_once(llama, tokens, logits):
    """Entering an open scope again is refused; a new scope is not."""
    probe = ns.inject(llama, ns.Injection(ns.Gaussian(0.05)))
    with probe:
        with pytest.raises(ModelHeld, match="already open"):
            probe.__enter__()
        logits(llama, tokens)


def test_a_second_thread_on_a_held_model_raises(llama, tokens, logits):
    """Neither a scope nor a call from another thread gets through while a scope is open."""
    said: list[str] = []

    def intrude() -> None:
        for attempt in (
            lambda: ns.inject(llama, ns.Injection(ns.Gaussian(0.05))).__enter__(),
            lambda: logits(llama, tokens),
        ):
            try:
                attempt()
            except ModelHeld as error:
                said.append(str(error))

    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05))):
        logits(llama, tokens)
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()
    assert len(said) == 2 and "another thread or coroutine has a scope open" in said[0] and "own copy" in said[1]


def test_a_second_thread_inside_a_running_forward_raises(llama, tokens, logits):
    """Also while the first is in the middle of the model: neither gets the other's noise."""
    injection = ns.Injection(ns.Gaussian(0.1), operators={"linear"}, seed=3)
    with ns.inject(llama, injection):
        expected = logits(llama, tokens)
    inside, go_on, said = threading.Event(), threading.Event(), []

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(60)

    def intrude() -> None:
        assert inside.wait(60)
        try:
            logits(llama, tokens)
        except ModelHeld as error:
            said.append(str(error))
        go_on.set()

    handle = llama.model.layers[1].register_forward_pre_hook(wait)
    thread = threading.Thread(target=intrude)
    thread.start()
    with ns.inject(llama, injection):
        found = logits(llama, tokens)
    thread.join()
    handle.remove()
    assert len(said) == 1 and "own copy" in said[0] and torch.equal(found, expected)


def test_two_threads_on_two_models_do_not_meet(tokens, logits):
    """Each thread gets the noise and the tally it would get alone."""
    models = [tiny_model("llama", seed=seed) for seed in (0, 1)]

    def work(index: int, results: dict) -> None:
        with ns.inject(models[index], ns.Injection(ns.Gaussian(0.05), seed=index)) as tally:
            outputs = [logits(models[index], tokens) for _ in range(10)]
        results[index] = (outputs, tally.forward)

    alone: dict = {}
    together: dict = {}
    for index in (0, 1):
        work(index, alone)
    threads = [threading.Thread(target=work, args=(index, together)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in (0, 1):
        assert alone[index][1] == together[index][1] == 310
        assert all(torch.equal(a, b) for a, b in zip(alone[index][0], together[index][0], strict=True))


@pytest.mark.parametrize("nested", [1, 3])
def test_copies_and_files_made_inside_a_scope_are_clean(llama, tokens, logits, tmp_path, nested):
    """State dicts, pickles, deep copies and checkpoints: the weights, and forwards of their own without noise."""
    clean, before = logits(llama, tokens), {k: v.clone() for k, v in llama.state_dict().items()}
    with ExitStack() as scopes:
        for seed in range(nested):
            scopes.enter_context(ns.inject(llama, ns.Injection(ns.Gaussian(0.05), seed=seed)))
        noisy = logits(llama, tokens)
        states = [llama.state_dict(), copy.deepcopy(llama).state_dict()]
        pickled, twins = pickle.dumps(llama), [copy.deepcopy(llama)]
        llama.save_pretrained(tmp_path)
    assert b"noisescope" not in pickled
    twins += [pickle.loads(pickled), copy.deepcopy(twins[0]), type(llama).from_pretrained(tmp_path).eval()]
    states += [twin.state_dict() for twin in twins]
    assert all(state.keys() == before.keys() for state in states)
    assert all(torch.equal(before[k], v) for state in states for k, v in state.items())
    for twin in twins:
        assert torch.equal(logits(twin, tokens), clean) and not torch.equal(noisy, clean)
        assert not any(isinstance(m.__dict__.get("forward"), ForwardWrapper) for m in twin.modules())
        with ns.inject(twin, ns.Injection(ns.Gaussian(0.05), seed=0)):
            assert not torch.equal(logits(twin, tokens), clean)
    assert not _alteration(twins[0])


def test_a_forward_that_stood_in_the_dict_before_is_put_back(llama, tokens, logits):
    """accelerate keeps its own forward in module.__dict__: it is called, and it is there afterwards."""
    linear, calls = llama.model.layers[0].mlp.up_proj, []
    original = linear.forward

    def own(x):
        calls.append(1)
        return original(x)

    linear.forward = own
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), layers={0})):
        logits(llama, tokens)
    assert linear.__dict__["forward"] is own and calls == [1]


def test_failing_to_enter_leaves_nothing(llama, tokens, logits):
    """An aim refused half-way through entering takes back what it had set."""
    things = snapshot(llama)
    injection = ns.Injection(ns.Format("int8"), operator_multipliers={"norm": 0.5})
    with pytest.raises(InvalidInput, match="has no scale"):
        ns.inject(llama, injection).__enter__()
    assert snapshot(llama) == things


def test_user_hooks_still_run_and_see_the_noise(llama, tokens, logits):
    """A forward hook of the user's own is called as ever, with the noisy output."""
    seen = []
    handle = llama.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, a, out: seen.append(out.clone()))
    clean = logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), modules=["model.layers.0.mlp.down_proj"])):
        logits(llama, tokens)
    handle.remove()
    assert len(seen) == 2 and not torch.equal(*seen) and torch.equal(clean, logits(llama, tokens))


def alive_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_two_hundred_scopes_leave_memory_flat(tokens, logits):
    """Entering, capturing and leaving two hundred times allocates nothing that stays."""
    model = tiny_model("llama", layers=1)
    injection, anatomy = ns.Injection(ns.Gaussian(0.05)), ns.dissect(model)

    def cycle(times: int) -> None:
        for _ in range(times):
            with ExitStack() as stack:
                stack.enter_context(ns.inject(model, injection, anatomy=anatomy))
                stack.enter_context(ns.capture(model, operators={"linear"}, keep="both", anatomy=anatomy))
                logits(model, tokens)

    cycle(20)
    gc.collect()
    tensors, things = alive_tensors(), len(gc.get_objects())
    cycle(200)
    gc.collect()
    assert alive_tensors() == tensors
    assert len(gc.get_objects()) - things < 20, "a tenth of an object per cycle would be a leak"
