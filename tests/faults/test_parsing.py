"""Faults and places in one line of text, and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noisescope.errors import InvalidInput
from noisescope.faults import (
    FAMILIES,
    Accumulation,
    DeadLane,
    DeadZone,
    ExpTable,
    Fault,
    Gain,
    Lanes,
    NonDeterminism,
    Saturation,
    StuckBit,
    Where,
    fault_from_dict,
    fault_text,
    make_fault,
    parse_fault,
    parse_where,
)
from noisescope.sites import OPERATORS


@pytest.mark.parametrize(
    ("text", "fault", "where"),
    [
        ("dead_zone:0.3@10", DeadZone(0.3), Where(10)),
        ("stuck_bit:bit=12,value=1@10/linear", StuckBit(12, 1), Where(10, "linear")),
        ("gain:0.01@lm_head", Gain(0.01), Where("lm_head")),
        ("exp_table@5/softmax", ExpTable(), Where(5, "softmax")),
        ("dead_zone:0.3,channels=0.1@10", DeadZone(0.3, channels=0.1), Where(10)),
        (" saturation : 0.3 , absolute=true @ 3", Saturation(0.3, absolute=True), Where(3)),
        ("dead_lane:channels=every32+5@0/linear/*down_proj", DeadLane(channels=Lanes(32, 5)), None),
        ("dead_lane,channels=every32@0", DeadLane(channels=Lanes(32)), Where(0)),
        ("dead_lane:channels=3+17@0", DeadLane(channels=(3, 17)), Where(0)),
        ("dead_lane:channels=3@0", DeadLane(channels=(3,)), Where(0)),
        ("dead_lane:channels=all@0", DeadLane(channels=None), Where(0)),
        ("accumulation:16,precision=11@*/gemm", Accumulation(16, 11), Where("*", "gemm")),
        ("accumulation:precision=fp16@*/linear", Accumulation(precision="fp16"), Where("*", "linear")),
        ("gain:-0.02,rate=0.5,start=3,duration=2,seed=9@5/matmul#1", None, Where(5, "matmul", occurrence=1)),
        ("non_determinism:1.01,mode=biased@embed", NonDeterminism(1.01, "biased"), Where("embed")),
        ("gain@3/*/o_proj", Gain(), Where(3, module="o_proj")),
        ("gain@3/RMS_Norm", Gain(), Where(3, "norm")),
    ],
)
def test_texts(text, fault, where):
    """What is written is what is meant."""
    got, at = parse_fault(text)
    assert fault is None or got == fault
    assert where is None or at == where
    assert parse_fault(fault_text(got, at)) == (got, at)


def test_the_forms_of_common_fields():
    """Rate, time and seed have their names."""
    fault, _ = parse_fault("gain:-0.02,rate=0.5,start=3,duration=2,seed=9@5/matmul#1")
    assert fault == Gain(-0.02, rate=0.5, start=3, duration=2, seed=9)
    assert fault_text(Gain(), Where(5, "matmul", "model.*", 1)) == "gain:0.01@5/matmul#1/model.*"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dead_zone:0.3", r"does not say where.*family\[:size\]\[,key=value...\]@place"),
        ("dead_zone:0.3@", "does not say where"),
        ("deadzone:0.3@10", "unknown fault family 'deadzone'.*Did you mean 'dead_zone'"),
        ("dead_zone:magnitud=0.3@10", "unknown setting of dead_zone 'magnitud'.*Did you mean 'magnitude'"),
        ("dead_zone:0.3,0.4@10", "magnitude is given twice"),
        ("dead_zone:0.3,magnitude=0.4@10", "magnitude is given twice"),
        ("dead_lane:3@10", "dead_lane takes no size, got '3'"),
        ("dead_zone:lots@10", "must be a finite number, got 'lots'"),
        ("dead_zone:nan@10", "must be a finite number"),
        ("dead_zone@lm_haed", "unknown place 'lm_haed'.*Did you mean 'lm_head'"),
        ("dead_zone@-1", "place -1 is negative"),
        ("dead_zone@3/sofmax", "unknown operator 'sofmax'.*Did you mean 'softmax'"),
        ("dead_zone@3/matmul#x", "must follow #"),
        ("dead_zone@3/linear/a b", "module must be a dotted name or a pattern"),
        ("dead_zone:channels=1.5@3", "a share of channels"),
        ("dead_zone:channels=every4+4@3", "a lane's offset must be below its period"),
        ("dead_zone:relative_to=median@3", "unknown relative_to of dead_zone 'median'. Allowed: max, std"),
    ],
)
def test_mistakes(text, words):
    """Each says what came and what is allowed."""
    with pytest.raises(InvalidInput, match=words):
        parse_fault(text)


@pytest.mark.parametrize(
    ("fault", "where", "operator"),
    [
        (Gain(), Where(3), "residual"),
        (ExpTable(), Where(3), "softmax"),
        (Accumulation(), Where(3), "linear"),
        (Gain(), Where("lm_head"), "linear"),
        (Gain(), Where("embed"), "embedding"),
        (Gain(), Where("final_norm"), "norm"),
        (Gain(), Where("rotary"), "matmul"),
        (Gain(), Where(3, module="*o_proj"), None),
    ],
)
def test_the_operator_meant_where_none_is_named(fault, where, operator):
    """A block's output, or what the family or the place has."""
    assert where.of(fault).operator == operator


def test_a_family_at_an_operator_that_it_can_not_act_on():
    """The message says where it acts and how to write that."""
    with pytest.raises(InvalidInput, match=r"exp_table acts on softmax, not on linear: write exp_table@3/softmax"):
        Where(3, "linear").of(ExpTable())
    with pytest.raises(InvalidInput, match="rounding_mode acts on linear, matmul, bmm, not on residual"):
        Where(3, "residual").of(make_fault("rounding_mode"))
    assert Where(3, "gemm").of(make_fault("rounding_mode")).operator == "gemm"


CHANNELS = st.one_of(
    st.none(),
    st.floats(1e-6, 1.0),
    st.sets(st.integers(0, 5000), min_size=1, max_size=4).map(lambda c: tuple(sorted(c))),
    st.integers(1, 500).flatmap(lambda p: st.builds(Lanes, st.just(p), st.integers(0, p - 1))),
)
SIZES = {"stuck_bit": st.integers(0, 63), "bit_flip": st.floats(0, 1), "saturation": st.floats(0, 1)}
SIZES |= {
    "truncation": st.integers(1, 52),
    "accumulation": st.integers(1, 5000),
    "input_truncation": st.integers(0, 52),
}


@st.composite
def faults(draw) -> Fault:
    """Any fault of any family."""
    family = FAMILIES[draw(st.sampled_from(sorted(FAMILIES)))]
    fields = {
        "channels": draw(CHANNELS),
        "rate": draw(st.floats(0, 1)),
        "start": draw(st.integers(0, 100)),
        "duration": draw(st.none() | st.integers(1, 100)),
        "seed": draw(st.integers(0, 2**63)),
    }
    if family.sized_by is not None:
        fields[family.sized_by] = draw(SIZES.get(family.name, st.floats(1e-5, 1)))
    if family.name == "bit_flip":
        fields["elements"] = draw(st.none() | st.just((4,)) | st.just((1, 5)))
        fields["bit"] = draw(st.none() | st.integers(0, 63))
    if family.name == "accumulation":
        fields["precision"] = draw(st.sampled_from(["bf16", "fp16", 1, 52]))
    if family.name == "bias":
        fields["negative"] = draw(st.booleans())
    if draw(st.booleans()):
        fields = dict(list(fields.items())[draw(st.integers(0, len(fields))) :])
    return make_fault(family.name, **fields)


PLACES = st.integers(0, 200) | st.sampled_from(["embed", "rotary", "final_norm", "lm_head", "*"])
NAMES = st.text("abc_.*?[]0", min_size=1, max_size=12)
WHERES = st.builds(
    Where,
    PLACES,
    st.none() | st.sampled_from([*OPERATORS, "gemm", "attention", "mlp"]),
    st.none() | NAMES,
    st.none() | st.integers(0, 9),
)


@given(faults(), WHERES)
def test_text_and_json_round_trips(fault, where):
    """Nothing is lost, to the last bit of every number."""
    assert parse_fault(fault_text(fault, where)) == (fault, where)
    assert parse_where(str(where)) == where
    assert fault_from_dict(json.loads(json.dumps(fault.to_dict(), allow_nan=False))) == fault


@given(st.text(max_size=40) | st.from_regex(r"[a-z_]{0,10}:?[a-z0-9=.,+]{0,15}@[a-z0-9/#*]{0,10}"))
def test_any_text_is_read_or_refused(text):
    """No text raises anything but InvalidInput."""
    try:
        fault, where = parse_fault(text)
    except InvalidInput:
        return
    assert parse_fault(fault_text(fault, where)) == (fault, where)
