"""AQN in a training loop: on where gradient mode is on, gone afterwards, never in what is saved."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch

from noisescope.errors import InvalidInput, NoiseRoundsAway, NothingInjected
from noisescope.probe.inject import Probe
from noisescope.testing import tiny_model
from noisescope.training import AQN, Constant, Linear, NormNoise, OperatorNoise, noise

KINDS = {
    "operators": OperatorNoise(),
    "forward": OperatorNoise(phases=frozenset({"forward"})),
    "backward": OperatorNoise(phases=frozenset({"backward"})),
    "norm": NormNoise(),
    "norm, additive": NormNoise(additive=True),
}


def train(
    model: Any, tokens: torch.Tensor, aqn: AQN | None, steps: range, rate: float = 0.1, optimizer: Any = None
) -> list[float]:
    """Losses of a few steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=rate)
    losses = []
    with contextlib.nullcontext() if aqn is None else noise(model, aqn) as scope:
        for step in steps:
            if scope is not None:
                scope.at(step)
            loss = model(tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", KINDS)
def test_noise_alone_changes_no_weight(llama: Any, tokens: torch.Tensor, kind: str) -> None:
    """Forwards and backwards under noise, saved in the midst of it, leave parameters and checkpoints bit-equal."""
    before, names = bits(llama), [set(module.__dict__) for module in llama.modules()]
    with noise(llama, AQN(KINDS[kind], Constant(0.05))) as scope:
        for step in range(3):
            scope.at(step)
            llama(tokens, labels=tokens).loss.backward()
            assert same(bits(llama), before)
    assert same(bits(llama), before)
    assert [set(module.__dict__) for module in llama.modules()] == names


@pytest.mark.parametrize("kind", ["operators", "norm, additive"])
def test_optimizer_states_hold_no_noise(tokens: torch.Tensor, kind: str) -> None:
    """Forwards and backwards under noise between two clean steps leave weights and momenta those of a clean run."""
    ends = []
    for noisy in (False, True):
        model = tiny_model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        train(model, tokens, None, range(2), optimizer=optimizer)
        if noisy:
            with noise(model, AQN(KINDS[kind], Constant(0.2))):
                model(tokens, labels=tokens).loss.backward()
                optimizer.zero_grad()
                during = copy.deepcopy(optimizer.state_dict()["state"])
            assert all(same(during[i], kept) for i, kept in optimizer.state_dict()["state"].items())
        train(model, tokens, None, range(1), optimizer=optimizer)
        ends.append((bits(model), optimizer.state_dict()["state"]))
    (weights, momenta), (weights_after, momenta_after) = ends
    assert same(weights, weights_after)
    assert len(momenta) == len(weights) == len(momenta_after)
    assert all(same(momenta[i], momenta_after[i]) for i in momenta)


def test_noise_is_felt_and_counted(tokens: torch.Tensor) -> None:
    """Each kind changes the losses in its own way, and its tally says where."""
    losses, tallies = {}, {}
    for kind, what in {"none": None, **KINDS}.items():
        model = tiny_model("llama", layers=3)
        aqn = None if what is None else AQN(what, Constant(0.05))
        losses[kind] = tuple(train(model, tokens, aqn, range(3)))
    assert len(set(losses.values())) == len(losses)
    assert losses["backward"][0] == pytest.approx(losses["none"][0], rel=1e-5)  # the first forward has no noise
    for kind, what in KINDS.items():
        model = tiny_model("llama", layers=3)
        with noise(model, AQN(what, Constant(0.05))) as scope:
            model(tokens, labels=tokens).loss.backward()
        tallies[kind] = (scope.tally.forward, scope.tally.backward, set(scope.tally.per_operator))
    assert tallies["norm"] == (7, 0, {"norm"})
    assert tallies["forward"][1] == tallies["backward"][0] == 0
    assert tallies["operators"] == (28, 28, {"linear", "matmul"})


def test_the_same_seed_and_step_give_the_same_noise(tokens: torch.Tensor) -> None:
    """Noise is a function of seed, rank and step: not of how often the scope was entered or which steps ran before."""
    model = tiny_model("llama", layers=3)

    def loss(step: int, seed: int = 0, rank: int = 0, kind: str = "operators", before: int = 0) -> float:
        with noise(model, AQN(KINDS[kind], Constant(0.05), seed), rank=rank) as scope:
            for earlier in range(before):
                scope.at(earlier)
                model(tokens, labels=tokens)
            scope.at(step)
            return float(model(tokens, labels=tokens).loss.detach())

    for kind in ("operators", "norm"):
        first = loss(7, kind=kind)
        assert first == loss(7, kind=kind, before=3)
        assert len({first, loss(8, kind=kind), loss(7, seed=1, kind=kind), loss(7, rank=1, kind=kind)}) == 4


def one_block() -> Any:
    """A block of two linears, the second the identity, and a norm."""
    parts = {"a": torch.nn.Linear(1, 4), "b": torch.nn.Linear(4, 4, bias=False), "norm": torch.nn.RMSNorm(4, eps=0.0)}
    block = torch.nn.ModuleDict(parts)
    torch.nn.init.eye_(parts["b"].weight)
    block.forward = lambda x: parts["norm"](parts["b"](x))
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([block])
    model.forward = lambda x: model.layers[0](x)
    return model


def test_the_numbers_of_a_step_never_change() -> None:
    """What seed 3, rank 1 and step 7 drew in stored experiments: new in each forward for operators, not for norms."""
    model, ones = one_block(), torch.ones(1, 1, 4)
    forward_linear = OperatorNoise(frozenset({"linear"}), frozenset({"forward"}))
    drawn: list[torch.Tensor] = []
    model.layers[0]["b"].register_forward_hook(lambda module, args, y: drawn.append(y.detach().flatten()))
    with noise(model, AQN(forward_linear, Constant(0.5), 3), rank=1) as scope:
        scope.at(7)
        model(ones)
        with scope.off():
            model(ones)
        model(ones)
    assert drawn[0].tolist() == pytest.approx([1.116957, 0.3571154, 0.8333141, 1.490919], rel=1e-5)
    assert drawn[1].tolist() == [1.0] * 4
    assert drawn[2].tolist() == pytest.approx([1.415799, 0.5805159, 0.5099266, 0.7573211], rel=1e-5)
    with noise(model, AQN(NormNoise(), Constant(0.5), 3), rank=1) as scope:
        for step in (6, 7):  # to 7 by a new seed alone
            scope.at(step)
            outputs = [model(ones).flatten().tolist() for _ in range(2)]
    assert outputs == [pytest.approx([1.261158, 1.251716, 1.378143, 0.8986394], rel=1e-5)] * 2


def test_a_step_of_the_same_scale_aims_nothing_anew(tokens: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant noise on norm weights gets a new seed at each step, and the model is not gone through for that."""
    model, updates = tiny_model("llama"), []
    monkeypatch.setattr(Probe, "update", lambda probe, injection: updates.append(injection))
    losses = set()
    with noise(model, AQN(NormNoise(), Constant(0.1))) as scope:
        for step in range(4):
            scope.at(step)
            losses.add(float(model(tokens, labels=tokens).loss.detach()))
    assert len(losses) == 4 and not updates


def test_noise_of_norm_weights_is_one_number_a_channel() -> None:
    """All tokens share a channel's noise, and it has the size asked for."""
    block = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1), "norm": torch.nn.RMSNorm(4096)}
    )
    block.forward = lambda x: block["norm"](x)
    model, norm = torch.nn.Module(), block["norm"]
    model.layers = torch.nn.ModuleList([block])
    model.forward = lambda x: model.layers[0](x)
    torch.nn.init.uniform_(norm.weight, 0.5, 2.0)
    x = torch.randn(3, 5, 4096, generator=torch.Generator().manual_seed(0))
    clean = norm(x).detach()
    with noise(model, AQN(NormNoise(), Constant(0.02))):
        factors = model(x).detach() / clean
    torch.testing.assert_close(factors, factors[:1, :1].expand_as(factors), rtol=1e-3, atol=1e-4)
    assert (factors[0, 0] - 1).std() == pytest.approx(0.02, rel=0.05)
    with noise(model, AQN(NormNoise(additive=True), Constant(0.02))):
        shift = (model(x).detach() - clean)[0, 0] * norm.weight.detach() / clean[0, 0]
    assert shift.std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("kind", ["operators", "norm"])
def test_no_noise_without_gradients(llama: Any, tokens: torch.Tensor, kind: str, logits: Any) -> None:
    """Evaluation and generation inside the scope are bit-equal to the bare model; asked for, they are not."""
    clean, written = logits(llama, tokens), llama.generate(tokens, max_new_tokens=4, do_sample=False)
    with noise(llama, AQN(KINDS[kind], Constant(0.2))) as scope:
        llama(tokens, labels=tokens).loss.backward()
        fired = scope.tally.forward
        assert torch.equal(logits(llama, tokens), clean)
        assert torch.equal(llama.generate(tokens, max_new_tokens=4, do_sample=False), written)
        assert scope.tally.forward == fired
    with noise(llama, AQN(KINDS[kind], Constant(0.2)), without_gradients=True):
        assert not torch.equal(logits(llama, tokens), clean)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_meets_the_same_noise(tokens: torch.Tensor, reentrant: bool) -> None:
    """Checkpointed and plain training have the same gradients under noise, also where blocks first run without them."""
    gradients = []
    for checkpointed in (False, True):
        model = tiny_model("llama", layers=3)
        model.train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        with noise(model, AQN(OperatorNoise(), Constant(0.05))) as scope:
            model(tokens, labels=tokens, use_cache=False).loss.backward()
            counts = (scope.tally.forward, scope.tally.backward)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        assert counts == (28, 28)
    assert same(*gradients)


def test_off_and_schedules_that_say_zero(llama: Any, tokens: torch.Tensor) -> None:
    """Inside off(), and at steps of scale 0, the model is bit-equal to the bare one; afterwards noise is back."""

    def loss() -> float:
        return float(llama(tokens, labels=tokens).loss.detach())

    bare = loss()
    with noise(llama, AQN(OperatorNoise(), Linear(0.2, 0.0, 3))) as scope:
        first = loss()
        with scope.off():
            assert loss() == bare
        scope.at(0)
        assert loss() == first != bare
        scope.at(2)
        assert scope.scale == 0 and loss() == bare
        scope.at(1)
        assert scope.scale == pytest.approx(0.1) and loss() != bare
    assert loss() == bare


def test_off_inside_off_and_between_micro_batches(llama: Any, tokens: torch.Tensor) -> None:
    """Noise comes back behind the outer off() alone, and the second micro-batch has the draws it had without off()."""

    def loss() -> float:
        return float(llama(tokens, labels=tokens).loss.detach())

    bare = loss()
    for kind in ("operators", "norm"):
        with noise(llama, AQN(KINDS[kind], Constant(0.2))) as scope:
            plain = [loss(), loss()]
            assert (plain[0] == plain[1]) == (kind == "norm")  # operators draw anew in each forward
            scope.at(0)
            first = loss()
            with scope.off():
                with scope.off():
                    assert loss() == bare
                assert loss() == bare
                copy.deepcopy(llama)
                with pytest.raises(InvalidInput, match=r"leave off\(\) first"):
                    scope.at(1)
            assert [first, loss()] == plain


@pytest.mark.parametrize("falling", [Linear(0.2, 0.0, 3), Linear(0.0, 0.2, 3)], ids=["to 0", "from 0"])
def test_a_schedule_at_zero_inside_and_outside_of_another_scope(
    llama: Any, tokens: torch.Tensor, falling: Linear
) -> None:
    """Two scopes on a model: each follows its schedule through 0, is silent there, and is left in either order."""

    def loss() -> float:
        return float(llama(tokens, labels=tokens).loss.detach())

    bare = loss()
    outer, inner = AQN(OperatorNoise(), falling), AQN(NormNoise(), falling)
    with noise(llama, outer) as first, noise(llama, inner) as second:
        for step in (0, 1, 2, 1):
            first.at(step)
            second.at(step)
            assert (loss() == bare) == (falling(step) == 0)
        with first.off():  # lies below the other, so it can't be taken off, and sleeps
            fired = first.tally.forward
            assert loss() != bare and first.tally.forward == fired
        with second.off(), first.off():
            assert loss() == bare
    assert loss() == bare
    first, second = noise(llama, outer, step=1), noise(llama, inner, step=1)
    for scope in (first, second):
        scope.__enter__()
        llama(tokens)
    for scope in (first, second):  # as trainers end callbacks
        scope.__exit__(None, None, None)
    assert loss() == bare and not any("forward" in module.__dict__ for module in llama.modules())


@pytest.mark.parametrize("kind", ["norm", "norm, additive", "operators"])
def test_two_hundred_times_on_and_off_in_bfloat16(kind: str, tokens: torch.Tensor) -> None:
    """Entering and leaving two hundred times leaves every bfloat16 weight bit-equal, and so the logits."""
    model = tiny_model("llama", layers=1).to(torch.bfloat16)
    before, clean = bits(model), model(tokens).logits
    aqn = AQN(KINDS[kind], Constant(0.05))
    for time in range(200):
        with noise(model, aqn, step=time):
            if time % 20 == 0:
                model(tokens, labels=tokens).loss.backward()
            else:
                model.model.norm(torch.ones(1, 1, 32, dtype=torch.bfloat16))
                model.lm_head(torch.ones(1, 1, 32, dtype=torch.bfloat16))
    assert same(bits(model), before)
    assert torch.equal(model(tokens).logits, clean)


def test_layer_multipliers_reach_their_layers(tokens: torch.Tensor) -> None:
    """A factor of 0 mutes a layer: its share of the noise is gone, that of others is as before."""
    model = tiny_model("llama", layers=2)

    def outputs(factors: dict[Any, float]) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        hooks = [layer.register_forward_hook(lambda m, i, o: found.append(o.detach())) for layer in model.model.layers]
        with noise(model, AQN(OperatorNoise(), Constant(0.1), layer_multipliers=factors)):
            model(tokens)
        for hook in hooks:
            hook.remove()
        return found

    plain, muted = outputs({}), outputs({1: 0.0})
    assert torch.equal(plain[0], muted[0]) and not torch.equal(plain[1], muted[1])


def test_resuming_gives_the_same_weights(tokens: torch.Tensor) -> None:
    """Three steps and, from their state, three more end as six steps do, under a falling schedule."""
    for kind in KINDS.values():
        aqn = AQN(kind, Linear(0.1, 0.02, 6), seed=3)
        whole, broken = tiny_model("llama"), tiny_model("llama")
        train(whole, tokens, aqn, range(6))
        optimizer = torch.optim.AdamW(broken.parameters(), lr=0.1)
        train(broken, tokens, aqn, range(3), optimizer=optimizer)
        fresh = tiny_model("llama", seed=9)
        fresh.load_state_dict(broken.state_dict())
        again = torch.optim.AdamW(fresh.parameters(), lr=0.1)
        again.load_state_dict(optimizer.state_dict())
        train(fresh, tokens, aqn, range(3, 6), optimizer=again)
        assert same(bits(whole), bits(fresh))


def test_what_is_refused(llama: Any, tokens: torch.Tensor) -> None:
    """A scope in which all ran under torch.no_grad, entering twice, and steps outside a scope, are errors."""
    aqn = AQN(OperatorNoise(), Constant(0.05))
    with pytest.raises(NothingInjected, match=r"under torch\.no_grad"), noise(llama, aqn), torch.no_grad():
        llama(tokens)
    with pytest.raises(InvalidInput, match="at\\(\\) needs an open scope"):
        noise(llama, aqn).at(3)
    with pytest.raises(InvalidInput, match="schedule must be a function"):
        AQN(OperatorNoise(), 0.05)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"noise must be training\.OperatorNoise"):
        AQN(0.05, Constant(0.05))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="seed must be an int, got 'a'"):
        AQN(OperatorNoise(), Constant(0.05), seed="a")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="already open"), noise(llama, aqn) as scope, scope:
        pass
    with noise(llama, AQN(OperatorNoise(), Constant(0.0))):  # no noise on purpose
        llama(tokens)


def test_noise_below_the_dtype_is_told(tokens: torch.Tensor) -> None:
    """QeRL's last stages round away in bfloat16: one warning, when it happens."""
    model = tiny_model("llama").to(torch.bfloat16)
    with (
        pytest.warns(UserWarning, match="is lost to rounding in bfloat16") as warned,
        noise(model, AQN(NormNoise(), Linear(0.02, 0.0001, 4))) as scope,
    ):
        for step in range(8):
            scope.at(step)
            model(tokens, labels=tokens).loss.backward()
    assert len(warned) == 1


@pytest.mark.parametrize("schedule", [Constant(1e-4), Linear(2e-4, 1e-4, 3)], ids=["constant", "falling"])
@pytest.mark.filterwarnings("ignore:at step . noise of scale")
def test_noise_that_changed_nothing_is_an_error(tokens: torch.Tensor, schedule: Any) -> None:
    """Noise that rounds away in every step of a scope is no noise, though it was counted."""
    model = tiny_model("llama").to(torch.bfloat16)
    with (
        pytest.raises(NoiseRoundsAway, match=r"training ran without noise: .*is lost to rounding in bfloat16"),
        noise(model, AQN(NormNoise(), schedule)) as scope,
    ):
        for step in range(3):
            scope.at(step)
            model(tokens, labels=tokens).loss.backward()
    assert scope.tally.forward == 3 * 5


def test_entering_that_fails_leaves_no_noise_behind(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe is open when the first step's noise is set up: where that fails, the model is shut again."""
    scope = noise(llama, AQN(OperatorNoise(), Constant(0.05)))

    def fail(seed: int) -> None:
        raise ValueError(f"no seed {seed}")

    monkeypatch.setattr(scope._probe, "reseed", fail)
    with pytest.raises(ValueError, match="no seed"), scope:
        raise AssertionError("never reached")
    assert not [m for m in llama.modules() if "forward" in m.__dict__]
    with pytest.raises(InvalidInput, match=r"at\(\) needs an open scope"):
        scope.at(0)
