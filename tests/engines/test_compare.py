"""Two transformers systems: planted causes are named, their nats are those that taking them out removes."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from tests.engines.fake_engine import FakeEngine
from tests.model.test_loading import write_gguf
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import noisescope as ns
from noisescope.api.systems import roundoff_band
from noisescope.comparison.system_comparison import Sampling
from noisescope.engines.compare import compare_systems
from noisescope.engines.protocol import Reported
from noisescope.engines.transformers_engine import TransformersEngine
from noisescope.errors import UnsupportedModel
from noisescope.testing import tiny_model


def kl(a, b, prompts):
    """KL(b || a) per token by plain forwards."""
    found = []
    for ids in prompts:
        rows = [F.log_softmax(one.model(torch.tensor([ids])).logits[0, :-1].double(), -1) for one in (a, b)]
        found.append(F.kl_div(rows[0], rows[1], log_target=True, reduction="none").sum(-1).mean().item())
    return sum(found) / len(found)


def stale(model):
    for parameter in model.model.layers[1].parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))


def swapped(model):
    model.model.layers[0].load_state_dict(copy.deepcopy(model.model.layers[2].state_dict()))


def rope(model):
    rotary = model.model.rotary_emb
    rotary.inv_freq.copy_(500.0 ** -(torch.arange(len(rotary.inv_freq)) / len(rotary.inv_freq)))


def scale(model):
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.3


def cast(model):
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def trained(model):
    for number, parameter in enumerate(model.parameters()):
        parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))


def quantised(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            step = module.weight.abs().amax(1, keepdim=True) / 7
            module.weight.copy_((module.weight / step).round() * step)


def gates(model):
    for layer in model.model.layers:
        for module in (layer.mlp.gate_proj, layer.mlp.up_proj):
            weight = module.weight
            module.forward = lambda x, weight=weight: F.linear(x.bfloat16(), weight.bfloat16()).float()


def activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = lambda x: F.gelu(x)


def stream(model):
    for layer in model.model.layers[:2]:
        inner = layer.forward
        layer.forward = lambda *args, inner=inner, **kwargs: inner(*args, **kwargs).half().float()


def branch(model):
    """A residual add that takes less of the MLP: the layers after it inherit the error and are not named."""
    mlp = model.model.layers[0].mlp
    inner = mlp.forward
    mlp.forward = lambda x: 0.9 * inner(x)


CAUSES = [
    (stale, "state", "stale layer", (1,)),
    (swapped, "state", "another layer's weights", (0,)),
    (rope, "state", "rotary frequencies", ()),
    (scale, "state", "setting scaling", (0, 1, 2)),
    (cast, "state", "cast", (0, 1, 2)),
    (trained, "state", "another checkpoint", (0, 1, 2)),
    (quantised, "state", "quantised checkpoint", (0, 1, 2)),
    (gates, "operators", "linear mlp.gate_proj", (0, 1, 2)),
    (activation, "operators", "between mlp (between its operators)", (0, 1, 2)),
    (stream, "operators", "between block (between its operators)", (0, 1)),
    (branch, "operators", "between block (between its operators)", (0,)),
]


@pytest.mark.parametrize(("change", "stage", "name", "layers"), CAUSES, ids=lambda x: getattr(x, "__name__", ""))
def test_a_planted_cause_is_named(tiny, prompts, change, stage, name, layers):
    a, b = tiny(), tiny()
    with torch.no_grad():
        change(b.model)
    kept = copy.deepcopy(b.model.state_dict())
    found = compare_systems(a, b, (prompts, prompts))
    assert found.verdict == "different"
    assert (found.causes[0].stage, found.causes[0].name, found.causes[0].layers) == (stage, name, layers)
    real = kl(a, b, prompts)
    assert found.total.value == pytest.approx(real, rel=1e-3)
    assert sum(cause.nats.value for cause in found.causes) == pytest.approx(real, rel=1e-3)
    assert found.remainder.value < 1e-9
    assert all(torch.equal(kept[key], value) for key, value in b.model.state_dict().items())


def test_two_causes_have_their_own_shares(tiny, prompts):
    """The first is mended first: its share is what it adds to the second."""
    a, both, second = tiny(), tiny(), tiny()
    with torch.no_grad():
        stale(both.model)
        activation(both.model)
        activation(second.model)
    found = compare_systems(a, both, (prompts, prompts))
    assert [cause.name for cause in found.causes] == ["stale layer", "between mlp (between its operators)"]
    rest = kl(a, second, prompts)
    assert found.causes[1].nats.value == pytest.approx(rest, rel=1e-3)
    assert found.causes[0].nats.value == pytest.approx(kl(a, both, prompts) - rest, rel=1e-3)
    assert found.words.startswith("The largest of 2 causes")


def test_the_same_system_is_identical(tiny, prompts):
    found = compare_systems(tiny(), tiny(), (prompts, prompts))
    assert (found.verdict, found.total.value, found.causes, found.sources) == ("identical", 0.0, (), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_kernels_differ_by_round_off(tiny, prompts, dtype):
    a, b = tiny(attn_implementation="sdpa"), tiny(attn_implementation="eager")
    for one in (a, b):
        one.model.to(dtype)
    found = compare_systems(a, b, (prompts, prompts))
    assert found.verdict in ("round-off", "identical") and not found.causes
    assert found.remainder.value <= 1e-12


def test_a_sliding_window_off_by_one_is_a_setting_or_an_operator(tiny, prompts):
    a, b = tiny("mistral", sliding_window=4), tiny("mistral", sliding_window=5)
    found = compare_systems(a, b, (prompts, prompts))
    assert [cause.name for cause in found.causes] == ["setting sliding_window"]
    b.model.config.sliding_window = 5
    b.settings = dict  # type: ignore[method-assign]
    found = compare_systems(a, b, (prompts, prompts))
    assert found.causes[0].name.startswith("between self_attn") and "only from token 4 on" in found.causes[0].words


def test_the_order_of_casts_in_a_norm_is_the_source_of_round_off(tiny, prompts):
    """In bfloat16 it is no fault, and named as where the round-off comes from."""
    a, b = tiny(), tiny()
    for one in (a, b):
        one.model.bfloat16()
    for name, module in b.model.named_modules():
        if name.endswith("norm"):

            def forward(x, module=module):
                unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + module.variance_epsilon)
                return (module.weight.float() * unit).to(x.dtype)

            module.weight.data *= 1.3
            module.forward = forward
    for name, module in a.model.named_modules():
        if name.endswith("norm"):
            module.weight.data *= 1.3
    found = compare_systems(a, b, (prompts, prompts))
    assert (found.verdict, found.causes) == ("round-off", ())
    assert "norm" in found.sources[0].role and found.sources[0].changed > 0.05


# -- quantised checkpoints, layer by layer


@pytest.mark.parametrize("change", [quantised, trained], ids=lambda change: change.__name__)
def test_weights_are_measured_layer_by_layer(tiny, prompts, change):
    """Each row is the KL of the original with that layer alone replaced, by plain forwards; a is as it was."""
    a, b = tiny(), tiny()
    with torch.no_grad():
        change(b.model)
    before = copy.deepcopy(a.model.state_dict())
    found = compare_systems(a, b, (prompts, prompts))
    assert [row.layer for row in found.weight_costs] == [0, 1, 2, None]
    for row in found.weight_costs:
        changed = tiny()
        inside = f"layers.{row.layer}."
        names = [n for n in before if (inside in n if row.layer is not None else "layers." not in n)]
        changed.model.load_state_dict({**before, **{n: b.model.state_dict()[n] for n in names}})
        assert row.nats.value == pytest.approx(kl(a, changed, prompts), rel=1e-3) and row.nats.n == len(prompts)
        assert row.nats.value > 0 and 0 < row.relative_l2 < 0.5 and row.nats.low is not None
    assert all(torch.equal(before[key], value) for key, value in a.model.state_dict().items())


def test_other_causes_have_no_table_of_layers(tiny, prompts):
    for change in (stale, scale, cast):
        a, b = tiny(), tiny()
        with torch.no_grad():
            change(b.model)
        assert compare_systems(a, b, (prompts, prompts)).weight_costs == ()


@pytest.mark.slow
@pytest.mark.parametrize("activations", [False, True])
def test_compressed_tensors_are_measured_against_their_original(tmp_path, prompts, activations):
    """A packed folder: its dequantised weights are one cause, by layer; rounded activations are operators."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressor = pytest.importorskip("llmcompressor")
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from llmcompressor.modifiers.quantization import QuantizationModifier

        model = tiny_model("llama", layers=3)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 if parameter.dim() == 1 else 8
        model.save_pretrained(tmp_path / "original")
        here = type(model).from_pretrained(tmp_path / "original")
        rounded = {"input_activations": QuantizationArgs(num_bits=8, strategy="token", dynamic=True)}
        weights = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, **(rounded if activations else {}))
        compressor.oneshot(model=here, recipe=QuantizationModifier(config_groups={"all": scheme}, ignore=["lm_head"]))
        here.save_pretrained(tmp_path / "packed", save_compressed=True)
        subjects = [ns.load(tmp_path / name) for name in ("original", "packed")]
    assert any("dequantised on loading (compressed-tensors)" in note for note in subjects[1].anatomy.notes)
    assert not any(unit.packed for unit in subjects[1].anatomy.units)
    if activations:  # a healthy model must not be called faulty for them
        with pytest.raises(UnsupportedModel, match="rounds its activations"):
            ns.locate(subjects[1])
    else:
        assert ns.locate(subjects[1], quick=True).verdict != "faulty"
    found = compare_systems(*map(TransformersEngine, subjects), (prompts, prompts))
    assert found.causes[0].name == "quantised checkpoint" and found.causes[0].layers == (0, 1, 2)
    assert [(row.layer, row.tensors) for row in found.weight_costs] == [(0, 7), (1, 7), (2, 7)]
    assert all(row.nats.value > 0 and 0.05 < row.relative_l2 < 0.2 for row in found.weight_costs)
    assert bool(found.causes[1:]) == activations and all(cause.stage == "operators" for cause in found.causes[1:])
    assert found.remainder.value < 1e-6


def test_a_gguf_file_is_measured_against_its_original(tmp_path, prompts):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_gguf(tmp_path / "original.gguf", tokenizer=False, kind="F32")
    write_gguf(tmp_path / "packed.gguf", tokenizer=False, kind="Q4_0")
    sides = [TransformersEngine(ns.load(tmp_path / f"{name}.gguf")) for name in ("original", "packed")]
    found = compare_systems(*sides, (prompts, prompts))
    assert [cause.name for cause in found.causes] == ["quantised checkpoint"]
    assert [(row.layer, row.tensors) for row in found.weight_costs] == [(0, 7), (1, 7), (None, 2)]
    assert all(row.nats.value > 0 and 0.05 < row.relative_l2 < 0.2 for row in found.weight_costs)


# -- dtypes


def test_two_dtypes_get_no_round_off_verdict(tiny, prompts):
    """b holds a's weights rounded and computes in bfloat16: state, then round-off, and nothing is left."""
    a, b = tiny(), tiny()
    b.model.bfloat16()
    before = copy.deepcopy(a.model.state_dict())
    found = compare_systems(a, b, (prompts, prompts))
    assert found.verdict == "different" and found.a.dtype == "float32" and found.b.dtype == "bfloat16"
    assert [cause.name for cause in found.causes] == ["cast"]
    assert "rounded to bfloat16" in found.causes[0].words
    assert found.remainder.value < 0.05 * found.round_off.value
    assert all(torch.equal(before[key], value) for key, value in a.model.state_dict().items())


def test_weights_that_fit_the_other_dtype_leave_its_arithmetic(tiny, prompts):
    a, b = tiny(), tiny()
    with torch.no_grad():
        cast(a.model)
    b.model.bfloat16()
    found = compare_systems(a, b, (prompts, prompts))
    assert (found.verdict, found.causes) == ("different", ())
    assert "a computes in float32 and b in bfloat16" in found.words


# -- semantics


def test_a_temperature_is_told_from_a_scaled_head(tiny, prompts):
    """The same distribution, once made by the report and once by the weights."""
    a, b, scaled = tiny(), tiny(sampling=Sampling(0.8, processed=True)), tiny()
    with torch.no_grad():
        scaled.model.lm_head.weight /= 0.8
    report, weights = (compare_systems(a, one, (prompts, prompts)) for one in (b, scaled))
    assert [cause.name for cause in report.causes] == ["temperature"]
    assert [cause.stage for cause in weights.causes] == ["state"]
    assert report.total.value == pytest.approx(weights.total.value, rel=1e-3)
    assert "b's values are after the sampling temperature" in report.words


@pytest.mark.parametrize(
    ("mine", "its", "names", "words"),
    [
        (Sampling(), Sampling(top_p=0.8, processed=True), ["truncation"], "a share of 0.8"),
        (Sampling(), Sampling(top_k=7, processed=True), ["truncation"], "b the 7 likeliest tokens, renormalised"),
        (Sampling(0.7, processed=True), Sampling(0.49, processed=True), ["temperature"], "b applies it twice"),
        (Sampling(0.7, processed=True), Sampling(0.6, processed=True), ["temperature"], "at temperature 0.7, b at 0.6"),
        (Sampling(0.5, 0.9, processed=True), Sampling(0.5, 0.9, processed=True), [], ""),
        (Sampling(), Sampling(0.9, 0.8, processed=True), ["truncation", "temperature"], "a share of 0.8"),
    ],
)
def test_processing_of_reports_is_found(tiny, prompts, mine, its, names, words):
    found = compare_systems(tiny(sampling=mine), tiny(sampling=its), (prompts, prompts))
    assert [cause.name for cause in found.causes] == names
    assert words in found.words
    assert found.round_off.value == 0 and found.remainder.value == 0
    if names:
        assert sum(cause.nats.value for cause in found.causes) == pytest.approx(found.total.value)


class Altered(TransformersEngine):
    """Reports that were altered on their way to the user."""

    def __init__(self, engine, change):
        super().__init__(engine.subject)
        self.change = change

    def reported(self, ids):
        return self.change(super().reported(ids))


def test_misplaced_and_missing_values_are_found(tiny, prompts):
    def zeros(found):
        return Reported(torch.where(torch.arange(len(found.tokens)) % 4 == 1, 0.0, found.tokens), found.rows)

    def shifted(found):
        return Reported(found.tokens.roll(1), found.rows)

    def missing(found):
        return Reported(torch.where(torch.arange(len(found.tokens)) % 4 == 1, torch.nan, found.tokens), found.rows)

    a = tiny()
    for change, name, words in (
        (zeros, "missing values", "12 token log-probabilities of b are given as 0"),
        (missing, "missing values", "12 token log-probabilities of b are not given"),
        (shifted, "alignment", "belong to tokens 1 earlier"),
    ):
        found = compare_systems(a, Altered(tiny(), change), (prompts, prompts))
        assert [cause.name for cause in found.causes] == [name]
        assert words in found.causes[0].words
        assert found.total.value == 0  # the distributions are the same: the tokens' values are not
        if change is not missing:
            assert found.causes[0].token_gap.value == pytest.approx(found.token_gap.value)


def test_logits_and_penalties_in_reports_are_found(tiny, prompts):
    a = tiny()

    def raw(found):
        return Reported(found.tokens + 3, found.rows + 3)

    def penalised(found):
        rows = found.rows - 0.5 * (torch.arange(64) % 3 == 0)
        return Reported(found.tokens, rows.log_softmax(-1))

    logits = compare_systems(a, Altered(tiny(), raw), (prompts, prompts))
    assert logits.causes[0].name == "other processing" and "reports logits" in logits.words
    assert logits.total.value is None and logits.total.note == "not measurable"
    found = compare_systems(a, Altered(tiny(), penalised), (prompts, prompts))
    assert found.causes[0].name == "other processing" and "a penalty, bias" in found.words


@pytest.mark.parametrize("base", [2, 10])
def test_logarithms_to_another_base_are_found(tiny, prompts, base):
    def rebased(found):
        return Reported(found.tokens / math.log(base), found.rows / math.log(base))

    found = compare_systems(tiny(), Altered(tiny(), rebased), (prompts, prompts))
    assert [cause.name for cause in found.causes] == ["logarithm base"] and f"b to base {base}" in found.words
    assert found.causes[0].token_gap.value == pytest.approx(found.token_gap.value)
    both = compare_systems(Altered(tiny(), rebased), Altered(tiny(), rebased), (prompts, prompts))
    assert not both.causes


def test_other_token_ids_are_a_cause(tiny, prompts):
    found = compare_systems(tiny(), tiny(), (prompts, tuple(ids[1:] for ids in prompts)))
    assert [cause.name for cause in found.causes] == ["special tokens"]
    assert found.causes[0].nats.value == pytest.approx(found.total.value) and found.total.value > 0.01


def test_a_reference_that_truncates_has_no_finite_divergence(tiny, prompts):
    """It has as impossible what b has not; mending makes it finite."""
    found = compare_systems(tiny(sampling=Sampling(top_k=5, processed=True)), tiny(), (prompts, prompts))
    assert found.total.value is None and found.total.note == "unbounded"
    assert [cause.name for cause in found.causes] == ["truncation"] and found.remainder.value == 0


def blurred(model):
    """Every linear is off by 1.5e-6 of each element: within what float32's round-off may be."""
    draw = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, x, y: y * (1 + 1.5e-6 * torch.randn(y.shape, generator=draw)))


def test_the_band_decides_what_operators_do_not_show(tiny, prompts):
    a, b = tiny(attn_implementation="sdpa"), tiny(attn_implementation="eager")
    band = roundoff_band(a, prompts)
    found = compare_systems(a, b, (prompts, prompts), band=band)
    assert found.verdict == "round-off" and "within the " in found.words and "99 % of healthy pairs" in found.words
    assert 0 < found.unexplained_gap.value <= found.band.high
    blurred(b.model)
    found = compare_systems(a, b, (prompts, prompts), band=band)
    assert found.verdict == "different" and not found.causes and "above the " in found.words
    found = compare_systems(a, b, (prompts, prompts))
    assert found.verdict == "round-off" and "no round-off band was measured" in found.words


def reversed_sums(module, query, key, value, mask, **settings):
    """The same attention, its scores summed in the opposite order."""
    return sdpa_attention_forward(module, query.flip(-1), key.flip(-1), value, mask, **settings)


@pytest.fixture
def large_scores(tiny, monkeypatch):
    """As the first layer of Qwen2.5-1.5B has them: large biases in the slowest rotary channels, common to all keys."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "reversed", reversed_sums)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "reversed", sdpa_mask)

    def make(attention):
        engine = tiny("qwen2", attn_implementation=attention)
        attn = engine.model.model.layers[0].self_attn
        with torch.no_grad():
            for projection, size in ((attn.q_proj, 10.0), (attn.k_proj, 1000.0)):
                heads = projection.bias.view(-1, attn.head_dim)
                heads[:, attn.head_dim // 2 - 1] = heads[:, -1] = size
        return engine

    return make


def test_an_operator_that_loses_digits_in_the_reference_too_is_no_fault(large_scores, prompts):
    """Relative L2 1e-4, and 1e-4 nats: another order of summation gives that, and the comparison says so."""
    a, b = large_scores("sdpa"), large_scores("reversed")
    band = roundoff_band(a, prompts)
    found = compare_systems(a, b, (prompts, prompts), band=band)
    assert (found.verdict, found.causes) == ("round-off", ()) and "its result in float64" in found.words
    assert found.unexplained_gap.value > 3e-5 and 0.4 < found.unexplained_gap.value / band.expected.value < 2.5
    (note,) = [note for note in found.notes if "allowed for" in note]
    assert "self_attn (between its operators) of layer 0" in note and "from its own result in float64 there" in note


def test_a_fault_beside_an_operator_that_loses_digits_is_named(large_scores, prompts):
    a, b = large_scores("sdpa"), large_scores("reversed")
    gates(b.model)
    found = compare_systems(a, b, (prompts, prompts), band=roundoff_band(a, prompts))
    assert [cause.name for cause in found.causes] == ["linear mlp.gate_proj", "linear mlp.up_proj"]
    assert all(cause.layers == (0, 1, 2) and "in bfloat16" in cause.words for cause in found.causes)


def test_a_band_needs_tokens_and_transformers(tiny, prompts):
    a, b = tiny(attn_implementation="sdpa"), tiny(attn_implementation="eager")
    few = prompts[:2]
    found = compare_systems(a, b, (few, few), band=roundoff_band(a, few))
    assert found.verdict == "undecided" and "22 tokens are too few" in found.words
    assert roundoff_band(a, ((5,),)) is None and roundoff_band(FakeEngine(a.model), prompts) is None


def test_a_gap_is_judged_at_temperature_1(tiny, prompts):
    """The band is that of the model's own distribution, whatever both engines report."""
    cold = Sampling(temperature=0.25, processed=True)
    a, b = (tiny(attn_implementation=name, sampling=cold) for name in ("sdpa", "eager"))
    found = compare_systems(a, b, (prompts, prompts), band=roundoff_band(a, prompts))
    assert found.verdict == "round-off" and found.token_gap.value > 2 * found.unexplained_gap.value


def test_subjects_are_systems_too(tiny, prompts, tmp_path):
    """ns.compare takes engines and subjects."""
    a, b = ns.load("demo"), ns.load("demo")
    with torch.no_grad():
        b.model.model.layers[3].mlp.down_proj.weight *= 1.1
    found = ns.compare(a, b, samples=4, max_tokens=24)
    assert found.causes[0].where == ("model.layers.3.mlp.down_proj.weight",)
    assert "times 1.1" in found.words
    assert found.save(tmp_path / "new" / "found.json").read_text().startswith("{")


def test_channels_in_another_order_cancel_out(tiny, prompts):
    """The hidden channels of an MLP may have any order; one matrix alone in that order is a fault."""
    a, b = tiny(), tiny()
    mlp = b.model.model.layers[1].mlp
    order = torch.randperm(len(mlp.gate_proj.weight), generator=torch.Generator().manual_seed(0))
    band = roundoff_band(a, prompts)
    with torch.no_grad():
        for module in (mlp.gate_proj, mlp.up_proj):
            module.weight.copy_(module.weight[order])
        wrong = compare_systems(a, b, (prompts, prompts), band=band)
        mlp.down_proj.weight.copy_(mlp.down_proj.weight[:, order])
    assert [cause.name for cause in wrong.causes] == ["damaged weight"] and "2 tensors have" in wrong.causes[0].words
    found = compare_systems(a, b, (prompts, prompts), band=band)
    assert found.verdict in ("identical", "round-off") and not found.causes
    assert any("no effect here beyond round-off" in note for note in found.notes)


def test_config_values_explain_operators(tiny, prompts):
    """What a model reads when it is built: the operator that differs is named with it."""
    found = compare_systems(tiny(), tiny(hidden_act="gelu"), (prompts, prompts))
    (cause,) = found.causes
    assert cause.stage == "operators" and "the configs differ: hidden_act is 'gelu' in b, 'silu' in a" in cause.words
    assert any("no effect once a model is loaded" in note for note in found.notes)


def test_settings_that_b_can_not_run_with_are_left(tiny, prompts):
    """Another split into heads fits the same weights; a's head size alone does not fit b's rotary table."""
    a = tiny()
    heads = a.model.config.num_attention_heads, a.model.config.num_key_value_heads
    size = a.model.model.layers[0].self_attn.head_dim
    b = tiny(num_attention_heads=2 * heads[0], num_key_value_heads=2 * heads[1], head_dim=size // 2)
    b.model.load_state_dict(a.model.state_dict())
    found = compare_systems(a, b, (prompts, prompts))
    assert found.verdict == "different" and any("b can't run with a's values" in note for note in found.notes)
    assert b.model.model.layers[0].self_attn.head_dim == size // 2


def test_a_missing_layer_is_named(tiny, prompts):
    model = tiny().model
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    found = compare_systems(tiny(), TransformersEngine(ns.wrap(model)), (prompts, prompts))
    assert found.causes[0].name == "missing layers" and "it lacks 1 (2)" in found.causes[0].words
    assert found.remainder.value > 0
