"""Injection: aimed, counted, refused in words."""

from __future__ import annotations

import pytest
import torch

import noisescope as ns
from noisescope.errors import InvalidInput, NoiseRoundsAway, NothingInjected
from noisescope.testing import tiny_model

PER_BLOCK = {"linear": 7, "matmul": 2, "softmax": 1, "silu": 1, "norm": 2, "residual": 1}


@pytest.mark.parametrize("operator", PER_BLOCK)
@pytest.mark.parametrize("layer", [0, 2])
def test_noise_falls_on_the_named_operator_and_layer_only(llama, tokens, logits, operator, layer):
    """The tally holds the aimed operator in the aimed block, once per call, and nothing else."""
    clean = logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={operator}, layers={layer})) as tally:
        noisy = logits(llama, tokens)
    assert {p: c.forward for p, c in tally.per_layer.items()} == {layer: PER_BLOCK[operator]}
    assert {o: c.forward for o, c in tally.per_operator.items()} == {operator: PER_BLOCK[operator]}
    assert tally.backward == 0
    assert not torch.equal(clean, noisy)


def test_blocks_before_the_target_are_clean_and_the_target_is_not(llama, tokens):
    """Hidden states are bit-equal up to the aimed block's input and differ at its output."""
    with torch.no_grad():
        clean = llama(tokens, output_hidden_states=True).hidden_states
        with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layers={1})):
            noisy = llama(tokens, output_hidden_states=True).hidden_states
    assert torch.equal(clean[0], noisy[0]) and torch.equal(clean[1], noisy[1])
    assert not torch.equal(clean[2], noisy[2])


def test_lm_head_is_not_the_last_block(llama, tokens, logits):
    """Noise in the head is tallied as lm_head, and all layers do not include it."""
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, places={"lm_head"})) as head:
        logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layers={0, 1, 2})) as blocks:
        logits(llama, tokens)
    assert list(head.per_layer) == ["lm_head"] and head.forward == 1
    assert list(blocks.per_layer) == [0, 1, 2]


def test_groups_and_aliases(llama, tokens, logits):
    """gemm, attention and mlp stand for their operators in their component; aliases for one name."""
    expected = {"gemm": 9, "attention": 3, "mlp": 4, "rms_norm": 2}
    for name, count in expected.items():
        with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={name}, layers={1})) as tally:
            logits(llama, tokens)
        assert tally.forward == count, name


def test_module_patterns(llama, tokens, logits):
    """A glob on dotted names narrows the aim; layers.1 does not match layers.10."""
    deep = tiny_model("llama", layers=11)
    with ns.inject(deep, ns.Injection(ns.Gaussian(0.05), modules=["model.layers.1.mlp.*_proj"])) as tally:
        logits(deep, tokens)
    assert set(tally.per_module) == {f"model.layers.1.mlp.{n}_proj" for n in ("gate", "up", "down")}
    assert list(tally.per_layer) == [1]


def test_channels(llama, tokens):
    """Only the chosen channels change, and they change as they would if all were chosen."""
    name = "model.layers.1.mlp.down_proj"
    runs = []
    for channels in (None, [3, 17]):
        with ns.capture(llama, modules=[name], keep="raw") as seen:  # noqa: SIM117  (outer: sees the clean output)
            with torch.no_grad(), ns.inject(llama, ns.Injection(ns.Gaussian(0.05), modules=[name], channels=channels)):
                with ns.capture(llama, modules=[name], keep="raw") as noisy:
                    llama(tokens)
        ((_, y),) = next(iter(seen.raw.values()))
        ((_, z),) = next(iter(noisy.raw.values()))
        runs.append((y, z))
    (clean, all_noisy), (_, some_noisy) = runs
    chosen = torch.zeros(32, dtype=torch.bool)
    chosen[[3, 17]] = True
    assert torch.equal(some_noisy[..., ~chosen], clean[..., ~chosen])
    assert torch.equal(some_noisy[..., chosen], all_noisy[..., chosen])
    assert not torch.equal(all_noisy[..., ~chosen], clean[..., ~chosen])


@pytest.mark.parametrize("tensor", ["input", "weight"])
def test_input_and_weight_noise(llama, tokens, logits, tensor):
    """Noise on inputs or on the use of a weight changes the output and never the parameter."""
    before = {n: p.clone() for n, p in llama.named_parameters()}
    clean = logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, tensor=tensor, layers={0})) as tally:
        noisy = logits(llama, tokens)
        again = logits(llama, tokens)
    assert tally.forward == 14 and not torch.equal(clean, noisy)
    assert torch.equal(noisy, again) == (tensor == "weight"), "weight noise is static, input noise is per forward"
    assert all(torch.equal(before[n], p) for n, p in llama.named_parameters())


def test_norm_weight_noise(llama, tokens, logits):
    """A norm's weight is reached where its forward uses it (QeRL's AQN falls there)."""
    clean = logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"norm"}, tensor="weight")) as tally:
        noisy = logits(llama, tokens)
    assert tally.forward == 7 and not torch.equal(clean, noisy)


def test_tied_embedding_weight_noise_stays_at_its_use(tokens, logits):
    """With tied weights, weight noise aimed at the head leaves the embedding clean."""
    model = tiny_model("gpt2", tie_word_embeddings=True)
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        clean = model(tokens, output_hidden_states=True)
        with ns.inject(model, ns.Injection(ns.Gaussian(0.05), places={"lm_head"}, tensor="weight")):
            noisy = model(tokens, output_hidden_states=True)
    assert torch.equal(clean.hidden_states[-1], noisy.hidden_states[-1])
    assert not torch.equal(clean.logits, noisy.logits)


def test_multipliers_and_phase_scales():
    """The strength at a site is phase scale x operator multiplier x layer multiplier."""
    injection = ns.Injection(
        ns.Gaussian(0.05),
        phase_scales={"backward": 0.02},
        operator_multipliers={"softmax": 0.2, "gemm": 2},
        layer_multipliers={3: 0.5},
    )
    site = lambda operator, place, phase: ns.Site(operator, place, "m", phase=phase)  # noqa: E731
    assert injection.strength(site("softmax", 3, "forward")) == pytest.approx(0.05 * 0.2 * 0.5)
    assert injection.strength(site("linear", 0, "backward")) == pytest.approx(0.02 * 2)
    assert injection.strength(site("norm", 3, "backward")) == pytest.approx(0.02 * 0.5)


def test_layer_multiplier_acts_on_the_model(llama, tokens, logits):
    """A multiplier of 0 in one layer leaves it clean while others are noisy, with the same draws elsewhere."""
    linear = {"operators": {"linear"}, "seed": 3}
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), layers={1}, **linear)):
        only_one = logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), layers={0, 1}, layer_multipliers={0: 0.0}, **linear)):
        muted = logits(llama, tokens)
    assert torch.equal(only_one, muted)


def test_update_swaps_between_steps(llama, tokens, logits):
    """update() changes scale, seed and aim inside one scope; the tally goes on."""
    first, second = ns.Injection(ns.Gaussian(0.05), layers={0}), ns.Injection(ns.Gaussian(0.1), layers={2}, seed=5)
    probe = ns.inject(llama, first)
    with probe as tally:
        logits(llama, tokens)
        probe.update(second)
        updated = logits(llama, tokens)
    probe = ns.inject(llama, second)
    with probe:
        logits(llama, tokens)
        fresh = logits(llama, tokens)
    assert torch.equal(updated, fresh)
    assert {p: c.forward for p, c in tally.per_layer.items()} == {0: 14, 2: 14}


def test_an_update_is_looked_at_anew(tokens, logits):
    """A scale that rounded away before an update is no error once a valid one has run; a new aim is not "unseen"."""
    half = tiny_model("llama").to(torch.bfloat16)
    probe = ns.inject(half, ns.Injection(ns.Gaussian(0.0001), operators={"linear"}))
    with probe:
        logits(half, tokens)
        probe.update(ns.Injection(ns.Gaussian(0.05), operators={"linear"}))
        logits(half, tokens)
    probe = ns.inject(half, ns.Injection(ns.Gaussian(0.05), operators={"linear"}))
    with pytest.raises(NothingInjected, match="operator 'softmax' never fired"), probe:
        logits(half, tokens)
        probe.update(ns.Injection(ns.Gaussian(0.05), operators={"softmax"}))


def test_an_update_refused_late_leaves_the_old_injection(llama, tokens, logits):
    """Also one that only fails while its aims are built: the old noise stays in force."""
    clean = logits(llama, tokens)
    probe = ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}))
    with probe:
        with pytest.raises(InvalidInput, match="has no scale"):
            probe.update(ns.Injection(ns.Format("int8"), operators={"linear"}, layer_multipliers={0: 2.0}))
        assert not torch.equal(clean, logits(llama, tokens))


def test_padding_and_masks_are_no_zero_injection(tokens, logits):
    """Rows of exact zeros can't change under relative noise; what can be looked at decides."""
    model = tiny_model("llama")
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    ids[0, :20], mask[0, :20] = 0, 0
    with ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"embedding"})) as tally:
        logits(model, ids, attention_mask=mask)
    assert tally.changed > 0.99
    with ns.inject(model, ns.Injection(ns.Gaussian(0.1), operators={"softmax"}, channels=[20])):
        logits(model, ids[1:])


def test_a_named_place_that_never_ran_raises(llama, tokens):
    """Places are checked as layers are."""
    with (
        pytest.raises(NothingInjected, match="lm_head never fired"),
        ns.inject(llama, ns.Injection(ns.Gaussian(0.05), layers={0}, places={"lm_head"})),
        torch.no_grad(),
    ):
        llama.model(tokens)


def test_weight_and_input_noise_on_everything(llama, tokens, logits):
    """Operators without that tensor are left out, and nothing is called unseen."""
    for tensor, count in (("weight", 30), ("input", 44)):
        with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), tensor=tensor)) as tally:
            logits(llama, tokens)
        assert tally.forward >= count


def test_channels_narrow_forward_noise_only(llama, tokens):
    """A gradient has other channels: none is perturbed, and asking for backward alone is refused."""
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, channels=[3])) as tally:
        llama(tokens, labels=tokens).loss.backward()
    assert tally.forward == 22 and tally.backward == 0
    with pytest.raises(InvalidInput, match="can't be used with backward noise"):
        ns.Injection(ns.Gaussian(0.05), channels=[3], phases={"backward"})


def test_masked_probabilities_stay_zero(llama, tokens, logits):
    """Absolute noise on softmax does not let a token see the future."""
    injection = ns.Injection(ns.Gaussian(0.2, relative_to="absolute"), operators={"softmax"})
    other = tokens.clone()
    other[:, -1] = 50
    outs = []
    for ids in (tokens, other):
        with ns.inject(llama, injection):
            outs.append(logits(llama, ids)[:, 0])
    assert torch.equal(*outs)


def test_a_bad_update_leaves_the_old_injection(llama, tokens, logits):
    """A refused update changes nothing."""
    probe = ns.inject(llama, ns.Injection(ns.Gaussian(0.05), layers={0}))
    with probe as tally:
        with pytest.raises(InvalidInput, match="layer 9 is out of range"):
            probe.update(ns.Injection(ns.Gaussian(0.05), layers={9}))
        logits(llama, tokens)
    assert list(tally.per_layer) == [0]


def test_renormalise(llama, tokens, logits):
    """Noisy softmax rows sum to 1 again only if asked for: with values of 1 attention then returns 1."""
    attention = llama.model.layers[0].self_attn
    with torch.no_grad():
        attention.v_proj.weight.zero_()
    attention.v_proj.bias = torch.nn.Parameter(torch.ones_like(attention.v_proj.weight[:, 0]))
    for renormalise in (False, True):
        injection = ns.Injection(ns.Gaussian(0.2), operators={"softmax"}, layers={0}, renormalise=renormalise)
        with ns.inject(llama, injection), ns.capture(llama, modules=["*.0.self_attn.o_proj"], keep="raw") as seen:
            logits(llama, tokens)
        (((attended,), _),) = next(iter(seen.raw.values()))
        assert torch.allclose(attended, torch.ones(()), atol=1e-5) == renormalise


@pytest.mark.parametrize(
    "perturbation",
    [
        ns.Gaussian(0.05, relative_to="rms"),
        ns.Gaussian(0.05, relative_to="absolute"),
        ns.Uniform(0.05),
        ns.Uniform(0.05, relative_to="rms"),
        ns.Bias(0.05),
        ns.Bias(0.05, relative_to="element"),
        ns.Bias(0.05, relative_to="rms"),
        ns.Shrink(0.05),
        ns.Format("bf16"),
        ns.Format("fp8_e4m3"),
        ns.Format("int4", granularity="group", group_size=16),
        ns.Format("nvfp4"),
    ],
    ids=str,
)
def test_every_perturbation_reaches_the_model(llama, tokens, logits, perturbation):
    """Each perturbation changes the logits, by a finite amount."""
    clean = logits(llama, tokens)
    with ns.inject(llama, ns.Injection(perturbation)) as tally:
        noisy = logits(llama, tokens)
    assert tally.forward == 45 and torch.isfinite(noisy).all() and not torch.equal(clean, noisy)


# -- what is refused


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ns.Injection(ns.Gaussian(0.05), operators={"sofmax"}), "Did you mean 'softmax'"),
        (lambda: ns.Injection(ns.Gaussian(0.05), places={"head"}), "unknown place 'head'"),
        (lambda: ns.Injection(ns.Gaussian(0.05), layers={"lm_head"}), "layers must be block indices"),
        (lambda: ns.Injection(ns.Gaussian(0.05), layers={-1}), "is negative"),
        (lambda: ns.Injection(ns.Gaussian(0.05), layers=3.5), "must be a set or a list"),
        (lambda: ns.Injection(ns.Gaussian(0.05), tensor="bias"), "unknown tensor 'bias'"),
        (lambda: ns.Injection(ns.Gaussian(0.05), phases={"forwards"}), "Did you mean 'forward'"),
        (lambda: ns.Injection(ns.Gaussian(0.05), phases=set()), "phases is empty"),
        (lambda: ns.Injection(ns.Gaussian(0.05), channels=[-1]), "channels must be indices"),
        (lambda: ns.Injection(ns.Gaussian(0.05), seed=1.5), "seed must be an int"),
        (lambda: ns.Injection(ns.Gaussian(0.05), layer_multipliers={0: -1}), "at least 0"),
        (lambda: ns.Injection(ns.Gaussian(0.05), phase_scales={"backward": "x"}), "must be a number"),
        (lambda: ns.Injection(0.05), "must be a perturbation such as Gaussian"),
        (lambda: ns.Injection(ns.Gaussian), "must be a perturbation such as Gaussian"),
        (lambda: ns.Gaussian(-0.1), "finite and at least 0, got -0.1"),
        (lambda: ns.Gaussian(float("nan")), "finite and at least 0, got nan"),
        (lambda: ns.Shrink(float("inf")), "finite and at least 0, got inf"),
        (lambda: ns.Gaussian("5%"), "scale must be a number"),
        (lambda: ns.Gaussian(0.1, relative_to="max"), "unknown relative_to 'max'"),
    ],
)
def test_bad_values_get_one_clear_error(make, words):
    """A value that can't be used is refused when it is made, in words."""
    with pytest.raises(InvalidInput, match=words):
        make()


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"layers": {3}}, InvalidInput, "layer 3 is out of range: the model has 3 blocks, 0 to 2"),
        ({"operators": {"gelu"}}, NothingInjected, "operator 'gelu' does not exist in LlamaForCausalLM"),
        ({"operators": {"silu"}, "places": {"lm_head"}}, NothingInjected, "matches the given layers"),
        ({"modules": ["nowhere.*"]}, NothingInjected, "matches no operator's module"),
        ({"modules": ["*.q_proj", "*.kproj"]}, NothingInjected, r"'\*\.kproj' matches no operator's module"),
        ({"layer_multipliers": {99: 0.5}}, InvalidInput, "layer 99 is out of range"),
        ({"operators": {"softmax"}, "tensor": "weight"}, NothingInjected, "needs an operator with a weight"),
        ({"operators": {"embedding"}, "tensor": "input"}, InvalidInput, "token ids"),
        ({"operators": {"linear"}, "channels": [99999]}, InvalidInput, "channel 99999 is out of range"),
    ],
)
def test_an_aim_that_hits_nothing_is_refused(llama, tokens, logits, fields, error, words):
    """What can't be hit raises before, or on, the first call; never a clean result."""
    with pytest.raises(error, match=words), ns.inject(llama, ns.Injection(ns.Gaussian(0.05), **fields)):
        logits(llama, tokens)


def test_a_scope_without_a_call_raises(llama):
    """Zero injections is an error: the model was not called."""
    with (
        pytest.raises(NothingInjected, match="was not called inside the scope"),
        ns.inject(llama, ns.Injection(ns.Gaussian(0.05))),
    ):
        pass


def test_backward_only_without_a_backward_raises(llama, tokens, logits):
    """{"backward"} without a backward pass raises; the default phases in a no-grad run do not."""
    with (
        pytest.raises(NothingInjected, match="no backward pass ran"),
        ns.inject(llama, ns.Injection(ns.Gaussian(0.05), phases={"backward"})),
    ):
        logits(llama, tokens)
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05))):
        logits(llama, tokens)


def test_a_named_layer_that_never_ran_raises(llama, tokens, logits):
    """A block that a forward skips is reported, not called robust."""
    llama.model.layers[2].forward = lambda hidden_states, **kwargs: hidden_states  # an early-exit model
    with (
        pytest.raises(NothingInjected, match="layer 2 never fired"),
        ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layers={1, 2})),
    ):
        logits(llama, tokens)


def test_the_checks_never_mask_an_exception(llama):
    """An exception inside the scope comes out as it is."""
    with pytest.raises(ZeroDivisionError), ns.inject(llama, ns.Injection(ns.Gaussian(0.05))):
        raise ZeroDivisionError


def test_noise_below_the_dtypes_resolution_raises_and_names_the_smallest(llama, tokens, logits):
    """In bfloat16 a scale of 0.001 rounds away; 0.004 does not; float32 takes both."""
    half = tiny_model("llama").to(torch.bfloat16)
    with (
        pytest.raises(NoiseRoundsAway, match=r"smallest scale that has an effect is 0\.003906"),
        ns.inject(half, ns.Injection(ns.Gaussian(0.001), operators={"linear"})),
    ):
        logits(half, tokens)
    with ns.inject(half, ns.Injection(ns.Gaussian(0.004), operators={"linear"})) as tally:
        logits(half, tokens)
    assert 0.3 < tally.changed < 0.9
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.001), operators={"linear"})) as tally:
        logits(llama, tokens)
    assert tally.changed > 0.99


def test_opened_attention_rounds_like_the_model(tokens, logits):
    """The decomposed path computes in float32, but its result is kept in bfloat16: tiny noise there rounds away too."""
    half = tiny_model("llama").to(torch.bfloat16)
    with (
        pytest.raises(NoiseRoundsAway, match="is lost to rounding in bfloat16"),
        ns.inject(half, ns.Injection(ns.Gaussian(0.001), operators={"attention"})),
    ):
        logits(half, tokens)


def test_noise_that_rounds_away_in_one_layer_only_warns(tokens, logits):
    """A per-layer multiplier may go under the resolution: that is said, and the run goes on."""
    half = tiny_model("llama").to(torch.bfloat16)
    injection = ns.Injection(ns.Gaussian(0.05), operators={"linear"}, layer_multipliers={0: 0.001})
    with pytest.warns(UserWarning, match="is lost to rounding in bfloat16"), ns.inject(half, injection):
        logits(half, tokens)


def test_a_format_that_changes_nothing_raises(tokens, logits):
    """Rounding bfloat16 numbers to bfloat16 is zero injection too."""
    half = tiny_model("llama").to(torch.bfloat16)
    with (
        pytest.raises(NoiseRoundsAway, match="changed none of the sampled elements"),
        ns.inject(half, ns.Injection(ns.Format("bf16"), operators={"linear"})),
    ):
        logits(half, tokens)


@pytest.mark.parametrize("exact", ["layers.1.", "q_proj"])
def test_a_format_that_some_weights_have_already_is_no_error(exact, tokens, logits):
    """Another layer's weights change, or those of another linear."""
    model = tiny_model("llama")
    with torch.no_grad():
        for name, module in model.named_modules():
            if exact in name and isinstance(module, torch.nn.Linear):
                module.weight.copy_(ns.Format("int4", "group", 64)(module.weight, None))
    with ns.inject(model, ns.Injection(ns.Format("int4", "group", 64), {"linear"}, {0, 1}, tensor="weight")) as tally:
        logits(model, tokens)
    assert tally.forward == 14


def test_a_format_in_all_blocks_falls_on_those_that_run(tokens, logits):
    """As in a model whose image tower no text runs; of blocks that were named one by one, each has to run."""
    model = tiny_model("llama", layers=3)
    model.config.num_hidden_layers = 2
    where = {"operators": {"linear"}, "tensor": "weight"}
    with ns.inject(model, ns.Injection(ns.Format("int4"), layers={0, 1, 2}, **where)) as tally:
        logits(model, tokens)
    assert tally.forward == 14
    for perturbation, layers in ((ns.Format("int4"), {1, 2}), (ns.Gaussian(0.1), {0, 1, 2})):
        with (
            pytest.raises(NothingInjected, match="layer 2 never fired"),
            ns.inject(model, ns.Injection(perturbation, layers=layers, **where)),
        ):
            logits(model, tokens)


def test_scale_zero_is_a_control_on_purpose(llama, tokens, logits):
    """Gaussian(0) fires everywhere and is not an error: it is the clean decomposed path."""
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.0))) as tally:
        control = logits(llama, tokens)
    assert tally.forward == 45 and tally.changed == 0
    assert torch.allclose(control, logits(llama, tokens), atol=1e-6)


def test_non_float_outputs_are_refused(tokens, logits):
    """An operator that returns integers gets a clear error."""
    model = tiny_model("llama")
    model.model.layers[0].mlp.down_proj.forward = lambda x: torch.zeros(2, 6, 32, dtype=torch.int64)
    with (
        pytest.raises(InvalidInput, match=r"is torch\.int64; noise applies only to floating-point"),
        ns.inject(model, ns.Injection(ns.Gaussian(0.05), modules=["model.layers.0.mlp.down_proj"])),
    ):
        logits(model, tokens)


def test_formats_take_no_multipliers(llama):
    """A number format has no scale to multiply."""
    with (
        pytest.raises(InvalidInput, match="has no scale"),
        ns.inject(llama, ns.Injection(ns.Format("int8"), layer_multipliers={0: 0.5})),
    ):
        pass


def test_the_tally_prints_itself(llama, tokens, logits):
    """str(tally) names counts and the share of changed elements."""
    with ns.inject(llama, ns.Injection(ns.Gaussian(0.05), operators={"softmax"})) as tally:
        logits(llama, tokens)
    text = str(tally)
    assert "3 forward and 0 backward injections" in text and "softmax" in text and "%" in text
