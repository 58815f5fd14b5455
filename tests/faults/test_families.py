"""Each family does what its formula says, against plain references, in float32, bfloat16 and float16."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from noisescope.errors import InvalidInput
from noisescope.faults import (
    FAMILIES,
    Bias,
    BitFlip,
    BlockScale,
    DeadLane,
    DeadZone,
    Fault,
    FlushToZero,
    Gain,
    Lanes,
    NanToZero,
    Noise,
    NonDeterminism,
    Saturation,
    Spike,
    StaleTile,
    StuckBit,
    StuckLane,
    SwappedChannels,
    Truncation,
    bit_patterns,
    fault_from_dict,
)
from noisescope.faults.fault_state import Memory, Stream, faulty_output
from noisescope.localization.verdict import CLASSES
from noisescope.model.anatomy import MODULE, Unit
from noisescope.probe.draws import Rows
from noisescope.probe.operator_target import Context
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import OPERATORS

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NO_CALL = RecordedCall(Unit("", MODULE, 0, "", ()), "residual", torch.nn.Identity(), (), {}, None, 0, Context(Rows(1)))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sample(dtype: torch.dtype, shape: tuple[int, ...] = (2, 5, 48), seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x[0, 0, 0] = 20.0  # a massive activation
    return x.to(dtype)


def memory_of(fault: Fault) -> Memory:
    return Memory(Stream(fault))


def result(fault: Fault, y: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
    """One call; the input must stay as it was."""
    before = y.clone()
    new = faulty_output(fault, y, NO_CALL, memory or memory_of(fault))
    assert not bit_patterns.differ(before, y).any() and new.dtype == y.dtype and new.shape == y.shape
    return new


def numbers(seed: int, *kinds: str, shape: tuple[int, ...] = (2, 5, 48)) -> list[torch.Tensor]:
    """What a fault's own stream gives, drawn here again."""
    own = torch.Generator().manual_seed(seed)
    draws = {"normal": torch.randn, "uniform": torch.rand}
    return [draws[kind](shape, generator=own) for kind in kinds]


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within one rounding of the dtype, element by element."""
    eps = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), expected.double(), rtol=eps, atol=1e-6)


@each_dtype
def test_dead_zone(dtype):
    """Values below m max|h| become 0, the others stay as they are."""
    y = sample(dtype)
    limit = 0.05 * max(abs(v) for v in y.flatten().tolist())
    expected = [0.0 if abs(v) < limit else v for v in y.flatten().tolist()]
    assert result(DeadZone(0.05), y).flatten().tolist() == expected
    assert 0 < expected.count(0.0) < len(expected)


@each_dtype
@pytest.mark.parametrize("relative_to", ["max", "std", "mean", "rms", "absolute"])
def test_what_a_magnitude_is_relative_to(dtype, relative_to):
    """max, std (n - 1), mean of sizes and rms are those of the whole tensor."""
    y = sample(dtype)
    values = [float(v) for v in y.double().flatten()]
    mean, n = math.fsum(values) / len(values), len(values)
    size = {
        "max": max(map(abs, values)),
        "std": math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)),
        "mean": math.fsum(map(abs, values)) / n,
        "rms": math.sqrt(math.fsum(v * v for v in values) / n),
        "absolute": 1.0,
    }[relative_to]
    close(result(Bias(0.5, relative_to=relative_to), y), y.double() + 0.5 * size)


@each_dtype
def test_saturation_dynamic_and_absolute(dtype):
    """Cut at (1 - m) max|h| of this call, or of the first call for ever."""
    first, second = sample(dtype), sample(dtype, seed=2) * 4
    for absolute in (False, True):
        fault = Saturation(0.3, absolute=absolute)
        memory = memory_of(fault)
        for y in (first, second):
            limit = 0.7 * float((first if absolute else y).double().abs().max())
            close(result(fault, y, memory), y.double().clamp(-limit, limit))
    close(
        result(Saturation(1.5, relative_to="rms"), first),
        first.double().clamp(*(s * 1.5 * float(first.double().square().mean().sqrt()) for s in (-1, 1))),
    )


@each_dtype
def test_bias_is_one_number_for_all(dtype):
    """h + m std(h), and downwards if asked."""
    y = sample(dtype)
    std = float(y.double().std())
    close(result(Bias(0.3), y), y.double() + 0.3 * std)
    close(result(Bias(0.3, negative=True), y), y.double() - 0.3 * std)


@each_dtype
def test_noise_comes_from_the_faults_own_stream(dtype):
    """h + m mean|h| z with the numbers of a generator of the fault's seed, new ones in each call."""
    y, fault = sample(dtype), Noise(0.3, seed=5)
    memory = memory_of(fault)
    mean = float(y.double().abs().mean())
    for z in numbers(5, "normal", "normal"):
        close(result(fault, y, memory), y.double() + 0.3 * mean * z.double())


@each_dtype
def test_spikes(dtype):
    """An element is hit with chance 0.01 m and becomes 10 max|h| z."""
    y, fault = sample(dtype), Spike(3.0, seed=7)
    u, z = numbers(7, "uniform", "normal")
    hit = u < 0.03
    assert 0 < int(hit.sum()) < 40
    close(result(fault, y), torch.where(hit, 10 * y.double().abs().max() * z.double(), y.double()))


@each_dtype
@pytest.mark.parametrize("mode", ["amplified", "suppressed", "inconsistent", "biased", "correlated"])
def test_non_determinism(dtype, mode):
    """The five modes of the original notes, with their numbers."""
    y, fault = sample(dtype), NonDeterminism(5.0, mode, seed=3)
    std = float(y.double().std())
    own = torch.Generator().manual_seed(3)
    if mode == "inconsistent":
        size = 0.1 + 5 * float(torch.rand((), generator=own))
        expected = 0.01 * size * std * torch.randn(y.shape, generator=own)
    elif mode == "correlated":
        expected = 0.01 * std * torch.randn(1, 1, 48, generator=own).expand(2, 5, 48)
    else:
        z = torch.randn(y.shape, generator=own)
        expected = {"amplified": 0.05 * std * z, "suppressed": 0.002 * std * z}.get(mode, 0.01 * std * z + 0.25 * std)
    close(result(fault, y), y.double() + expected.double())


@each_dtype
def test_gain(dtype):
    """y (1 + m), rounded once."""
    y = sample(dtype)
    assert torch.equal(result(Gain(0.01), y), (y.float() * 1.01).to(dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_bit_faults_act_on_the_tensors_own_dtype(dtype):
    """The same bit number is another bit of another dtype, and a bit that is not there is refused."""
    y = sample(dtype)
    top = 8 * dtype.itemsize - 1
    stuck = result(StuckBit(top, 1), y)
    assert torch.equal(stuck.float(), -y.float().abs())
    assert torch.equal(result(StuckBit(1, 0), y).view(torch.uint8), bit_patterns.stick_bit(y, 1, 0).view(torch.uint8))
    with pytest.raises(InvalidInput, match=f"bit {top + 1} does not exist"):
        result(StuckBit(top + 1), y)


@each_dtype
def test_bit_flips_hit_the_elements_named(dtype):
    """Given elements lose one bit and nothing else changes; those beyond the tensor are not hit."""
    y = sample(dtype)
    top = 8 * dtype.itemsize - 1
    new = result(BitFlip(bit=top, elements=(0, 7, 10**6)), y).flatten()
    expected = y.flatten().clone()
    expected[[0, 7]] *= -1
    assert torch.equal(new, expected)


@each_dtype
def test_bit_flips_by_chance(dtype):
    """The share of elements hit is that asked for; persistent faults hit the same ones in each call, others do not."""
    y = torch.ones(200, 200, dtype=dtype)
    for persistent in (True, False):
        fault = BitFlip(0.02, bit=3, persistent=persistent)
        memory = memory_of(fault)
        first, second = (bit_patterns.differ(y, result(fault, y, memory)) for _ in range(2))
        assert abs(int(first.sum()) - 800) < 5 * 800**0.5
        assert torch.equal(first, second) == persistent
    anywhere = bit_patterns.to_bits(result(BitFlip(1.0), y)) ^ bit_patterns.to_bits(y)
    assert len(anywhere.unique()) == 8 * dtype.itemsize  # every bit of the dtype, one in each element


@each_dtype
def test_truncation_cuts_toward_zero(dtype):
    """The lowest bits are 0, and no value grows."""
    y = sample(dtype)
    new = result(Truncation(4), y)
    assert torch.equal(new, bit_patterns.cut_mantissa(y, 4)) and (new.abs() <= y.abs()).all()
    assert (bit_patterns.to_bits(new) & 15 == 0).all()


@each_dtype
def test_flush_to_zero(dtype):
    """Subnormals of the dtype itself, or what is below a given size, become 0 with their sign."""
    normal = torch.finfo(dtype).smallest_normal
    y = torch.tensor([normal, normal / 2, -normal / 4, 1.0, 0.5, -0.01], dtype=dtype)
    new = result(FlushToZero(), y)
    assert new.tolist() == [normal, 0.0, 0.0, *y[3:].tolist()]
    assert torch.signbit(new).tolist() == [False, False, True, False, False, True]
    assert result(FlushToZero(0.6), y).tolist() == [0, 0, 0, 1, 0, 0]
    assert result(FlushToZero(0.3, relative_to="max"), y).tolist() == [0, 0, 0, 1, 0.5, 0]


@each_dtype
def test_nan_to_zero(dtype):
    """NaN becomes 0 and Inf the largest number of the dtype."""
    y = torch.tensor([math.nan, math.inf, -math.inf, 3.0], dtype=dtype)
    top = torch.finfo(dtype).max
    assert result(NanToZero(), y).tolist() == [0.0, top, -top, 3.0]


@each_dtype
def test_dead_and_stuck_lanes(dtype):
    """Channels of the lane are 0, or one constant frozen in the first call; the rest is untouched."""
    y, lane = sample(dtype), Lanes(16, 3)
    dead = result(DeadLane(channels=lane), y)
    expected = y.clone()
    expected[..., [3, 19, 35]] = 0
    assert torch.equal(dead, expected)
    fault = StuckLane(2.0, channels=(5,))
    memory = memory_of(fault)
    value = 2 * float(y.double().square().mean().sqrt())
    for now in (y, sample(dtype, seed=9) * 3):
        stuck = result(fault, now, memory)
        close(stuck[..., 5], torch.full((2, 5), value, dtype=torch.float64))
        assert torch.equal(stuck[..., :5], now[..., :5]) and torch.equal(stuck[..., 6:], now[..., 6:])


@each_dtype
def test_swapped_channels(dtype):
    """Chosen channels change places with those a distance on; in a row of pairs each moves once."""
    y = sample(dtype)
    new = result(SwappedChannels(2, channels=(0, 10)), y)
    order = list(range(48))
    order[0], order[2], order[10], order[12] = 2, 0, 12, 10
    assert torch.equal(new, y[..., order])
    pairs = [c + 1 if c % 2 == 0 else c - 1 for c in range(48)]
    assert torch.equal(result(SwappedChannels(channels=None), y), y[..., pairs])


@each_dtype
def test_stale_tile(dtype):
    """From the second call on a tile holds what the call before computed; also when the shapes differ."""
    fault = StaleTile(rows=3, columns=4, row=2, column=8)
    memory = memory_of(fault)
    first, second, third = (sample(dtype, seed=s) for s in (1, 2, 3))
    assert torch.equal(result(fault, first, memory), first)
    expected = second.clone().view(10, 48)
    expected[2:5, 8:12] = first.view(10, 48)[2:5, 8:12]
    assert torch.equal(result(fault, second, memory), expected.view_as(second))
    short = third[:1, :4]  # only four rows: two of the tile's three
    expected = short.clone().view(4, 48)
    expected[2:4, 8:12] = second.view(10, 48)[2:4, 8:12]  # what was computed, not what was given out
    assert torch.equal(result(fault, short, memory), expected.view_as(short))
    assert torch.equal(result(fault, third[:1, :1], memory), third[:1, :1])
    with pytest.raises(InvalidInput, match="starts at column 60, but the output has 48"):
        result(StaleTile(column=60), first)


@each_dtype
def test_block_scale(dtype):
    """One block of channels is scaled, with the block sizes of MX and NVFP4."""
    y = sample(dtype)
    expected = y.clone()
    expected[..., 16:32] *= 2
    assert torch.equal(result(BlockScale(2.0, width=16, block=1), y), expected)
    half = y.clone()
    half[..., 32:] /= 2
    assert torch.equal(result(BlockScale(0.5, block=1), y), half)
    with pytest.raises(InvalidInput, match="block 2 of 32 channels starts beyond the tensor's 48"):
        result(BlockScale(block=2), y)


# -- channels


@pytest.mark.parametrize(
    "family", [f for f, row in FAMILIES.items() if row.at_block_output and f != "swapped_channels"]
)
def test_channels_narrow_every_family(family):
    """Where a fault works on outputs alone, channels left out keep every bit, and sizes are the whole tensor's."""
    y = sample(torch.float32)
    dense = result(FAMILIES[family].make(channels=None, seed=2), y)
    sparse = result(FAMILIES[family].make(channels=(1, 40), seed=2), y)
    expected = y.clone()
    expected[..., [1, 40]] = dense[..., [1, 40]]
    assert torch.equal(sparse.view(torch.int32), expected.view(torch.int32))


def test_a_share_of_channels_is_drawn_once_and_begins_alike_at_every_width():
    """The mask depends on the seed alone: not on calls, and a wider tensor's begins like a narrower one's."""
    fault = DeadLane(channels=0.1, seed=4)
    stream = Stream(fault)
    masks = [stream.mask(width, torch.device("cpu")) for width in (200_000, 70_000, 2000)]
    assert torch.equal(masks[0][:70_000], masks[1]) and torch.equal(masks[0][:2000], masks[2])
    assert abs(masks[0].double().mean() - 0.1) < 5 * (0.09 / 200_000) ** 0.5
    assert not torch.equal(masks[2], Stream(DeadLane(channels=0.1, seed=5)).mask(2000, torch.device("cpu")))
    memory = Memory(stream)
    y = sample(torch.float32) + 100
    dead = [result(fault, y, memory) == 0 for _ in range(3)]
    assert torch.equal(dead[0], dead[1]) and torch.equal(dead[0], dead[2])
    assert torch.equal(dead[0], dead[0][:1, :1].expand_as(y))  # whole channels


def test_sparse_noise_is_dense_noise_on_fewer_channels():
    """A mask takes nothing from the stream that noise is drawn from."""
    y = sample(torch.float32)
    dense, sparse = (result(Noise(0.3, channels=c, seed=1), y) for c in (None, 0.3))
    changed = sparse != y
    assert changed.any() and not changed.all() and torch.equal(sparse[changed], dense[changed])


def test_a_channel_out_of_range_is_refused():
    """The error says how many there are."""
    with pytest.raises(InvalidInput, match="channel 48 is out of range: the tensor has 48 channels"):
        result(DeadLane(channels=(3, 48)), sample(torch.float32))


# -- values


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_of_families(family):
    """Name, class, size and operators are those of the faults made; the default fault survives JSON."""
    row = FAMILIES[family]
    fault = row.make()
    assert (row.name, row.fault_class, row.default) == (family, fault.fault_class, fault.size)
    assert row.fault_class in CLASSES and row.fault_class != "unknown"
    assert row.operators and set(row.operators) <= set(OPERATORS)
    assert row.summary.strip() and row.summary[-1] in ".:"
    assert fault_from_dict(json.loads(json.dumps(fault.to_dict()))) == fault
    if row.sized_by is not None and row.default:
        assert fault.resized(row.default * 1).size == row.default
    with pytest.raises(dataclasses.FrozenInstanceError):
        fault.seed = 3


def test_every_class_that_a_locator_can_name_has_a_family():
    """Else a benchmark could not ask for it; those of rows and of what lies between operators have another one."""
    elsewhere = {"unknown", "tile", "tail", "batch", "rows", "mask", "position"}
    assert {row.fault_class for row in FAMILIES.values()} == set(CLASSES) - elsewhere


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DeadZone(-0.1), "magnitude of dead_zone must be at least 0, got -0.1"),
        (lambda: DeadZone("much"), "must be a finite number, got 'much'"),
        (lambda: DeadZone(math.nan), "must be a finite number"),
        (lambda: DeadZone(True), "must be a finite number, got True"),
        (lambda: DeadZone(relative_to="mx"), "unknown relative_to of dead_zone 'mx'.*Did you mean 'max'"),
        (lambda: Saturation(1.5), "from 0 to 1, got 1.5"),
        (lambda: Saturation(absolute=1), "absolute of saturation must be true or false"),
        (lambda: StuckBit(2.5), "bit of stuck_bit must be a whole number"),
        (lambda: StuckBit(3, 2), "value of stuck_bit must be from 0 to 1"),
        (lambda: NonDeterminism(mode="amplifed"), "Did you mean 'amplified'"),
        (lambda: Gain(rate=1.2), "rate of gain must be from 0 to 1"),
        (lambda: Gain(duration=0), "duration of gain must be at least 1"),
        (lambda: Gain(start=-1), "start of gain must be at least 0"),
        (lambda: Gain(channels=1.5), "a share of channels must be above 0 and at most 1"),
        (lambda: Gain(channels="3"), "must be a list of numbers of at least 0, got '3'"),
        (lambda: Gain(channels=[]), "must be a list of numbers of at least 0"),
        (lambda: Gain(channels=[-1]), "must be a list of numbers of at least 0"),
        (lambda: Gain(channels=True), "a share such as 0.1"),
        (lambda: Gain(channels={"every": 3}), "a lane must look like"),
        (lambda: Lanes(8, 8), "a lane's offset must be below its period 8, got 8"),
        (lambda: DeadLane().resized(3), "dead_lane takes no size"),
        (lambda: fault_from_dict({"magnitude": 3}), 'a JSON object with "family"'),
        (lambda: fault_from_dict({"family": "dead_zne"}), "Did you mean 'dead_zone'"),
        (lambda: fault_from_dict({"family": "gain", "magntude": 3}), "unknown setting of gain 'magntude'"),
    ],
)
def test_mistakes_are_refused_with_the_reason(make, words):
    """Each message says what came and what is allowed."""
    with pytest.raises(InvalidInput, match=words):
        make()
