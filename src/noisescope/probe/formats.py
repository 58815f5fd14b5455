"""Real number formats as perturbations: quantise, dequantise, give back the dtype and shape of the input.

With a = the largest finite |x| of the values that share one scale s:

==================  ======================================================  =======================================
format              scale                                                   value given back
==================  ======================================================  =======================================
bf16, fp16          none                                                    torch's cast there and back
fp8_e4m3, fp8_e5m2  none, or s = a / M (M = 448, 57344) with a granularity  s * fp8(clamp(x / s, -M, M))
int8, int4, int3    s = a / Q, Q = 2^(b-1) - 1 = 127, 7, 3                  s * clamp(round(x / s), -Q, Q)
asymmetric int      s = (h - l) / R, R = 2^b - 1, l = min(x, 0),            s * (clamp(round(x / s) + z, 0, R) - z)
                    h = max(x, 0), z = round(-l / s)
clipped int         the same of r a, or of r l and r h, with the r of       the same
                    1, 0.95 ... 0.65 whose squared error is least; each
                    error may count by an `importance` of its own
mxfp4               s = 2^(floor(log2 a) - 2) as E8M0, blocks of 32         s * e2m1(x / s)
nvfp4               s = t * e4m3((a / 6) / t), blocks of 16,                s * e2m1(x / s)
                    t = (a of the whole tensor) / (448 * 6)
==================  ======================================================  =======================================

All rounding is to nearest, ties to even. Sources: OCP 8-bit Floating Point Specification (OFP8) v1.0 for E4M3 and
E5M2; OCP Microscaling Formats (MX) Specification v1.0 for E2M1, E8M0 and the MXFP4 scale; NVIDIA's documentation of
NVFP4 for the two-level scale; with granularity "token" t is taken of each row, so that a token's value does not depend
on the others in its batch. An NVFP4 block so small beside the tensor that its E4M3 scale rounds to 0 becomes 0. The
zero point z of asymmetric integers is an integer, as in GPTQ, AWQ and compressed-tensors, so 0 stays 0 (llama.cpp's
Q4_1 keeps l itself instead).

Special values: NaN stays NaN and does not touch its neighbours. In fp8, int, mxfp4 and nvfp4 +-Inf becomes the largest
value of its block, whose scale comes from the finite values alone (so next to none, when no finite value in the block
differs from 0). bf16 and fp16 do not saturate: what overflows them becomes Inf, as in torch, and so does what
overflows the tensor's own dtype on the way back (fp16 65504 -> bf16 65536 -> fp16 Inf).

The maths is in float32 (float64 for a float64 tensor, NVFP4's tensor scale included), on the tensor's device, without
host synchronisation. The result is rounded once more to the tensor's dtype, and is always a new tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from noisescope.errors import InvalidInput, unknown
from noisescope.names_in_trial_ids import registered

__all__ = ["Format", "e2m1", "e8m0_scale", "format_on", "quantise"]

_ALIASES = {
    "bf16": ("bfloat16",),
    "fp16": ("float16", "half", "f16"),
    "fp8_e4m3": ("fp8", "e4m3", "e4m3fn", "fp8_e4m3fn", "float8_e4m3", "float8_e4m3fn"),
    "fp8_e5m2": ("e5m2", "float8_e5m2"),
    "int8": ("i8",),
    "int4": ("i4",),
    "int3": ("i3",),
    "mxfp4": ("mx_fp4", "mxfp4_e2m1"),
    "nvfp4": ("nv_fp4", "nvfp4_e2m1"),
}
_CANONICAL = {alias: name for name, aliases in _ALIASES.items() for alias in (name, *aliases)}
_CAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_INT_MAX = {"int8": 127.0, "int4": 7.0, "int3": 3.0}
_BLOCK = {"mxfp4": 32, "nvfp4": 16}
_ELEMENT_BITS = {"bf16": 16, "fp16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8}
_ELEMENT_BITS |= {"int8": 8, "int4": 4, "int3": 3, "mxfp4": 4, "nvfp4": 4}
_GRANULARITIES = ("tensor", "channel", "token", "group")
WEIGHT_GROUP = 64  # weights that share a scale, in integer formats
_CLIPPED = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)  # shares of the range that clipping tries
_E2M1_MAX = 6.0
_E4M3_MAX = 448.0


@registered("noisescope.Format")
@dataclass(frozen=True)
class Format:
    """A number format with the set of values that share one scale; call it on a tensor to round that tensor to it.

    ``granularity``: "tensor" (one scale), "token" (one per row: all but the last dimension), "group" (one per
    ``group_size`` consecutive values of the last dimension), "channel" (weights: one per row; activations: one per
    index of the last dimension). Once built, the fields hold what is in force: the canonical name and the defaults
    filled in, so that two equal formats compare equal; ``granularity`` None then means that there is no scale.
    ``asymmetric`` integers have a zero point beside each scale. ``clipped`` integers have a range that leaves out the
    largest values where the others gain more.

    >>> import torch, noisescope as ns
    >>> ns.Format("int4", "token")(torch.tensor([[0.0, 1.2, 7.0]]), None)
    tensor([[0., 1., 7.]])
    """

    name: str
    granularity: str | None = None
    group_size: int | None = None
    asymmetric: bool = False
    clipped: bool = False

    def __post_init__(self) -> None:
        key = self.name.strip().lower().replace("-", "_") if isinstance(self.name, str) else ""
        if key not in _CANONICAL:
            raise unknown("format", key or self.name, _ALIASES)  # in lower case, so that the nearest name is found
        name, block, kind, size = _CANONICAL[key], _BLOCK.get(_CANONICAL[key]), self.granularity, self.group_size
        if kind is not None and kind not in _GRANULARITIES:
            raise unknown("granularity", kind, _GRANULARITIES)
        if name in _CAST and kind is not None:
            raise InvalidInput(f"{name} is a plain cast without a scale, so granularity must be None, got {kind!r}")
        own = (None, "group", "token") if name == "nvfp4" else (None, "group")
        if block is not None and (kind not in own or size not in (None, block)):
            raise InvalidInput(
                f"{name} has fixed blocks of {block}; omit granularity and group_size, got {kind!r} and {size!r}"
            )
        if (self.asymmetric or self.clipped) and name not in _INT_MAX:
            why = "has no zero point: asymmetric scaling" if self.asymmetric else "has no range to choose: clipping"
            raise InvalidInput(f"{name} {why} is for {', '.join(_INT_MAX)}")
        if kind is None:
            kind = "group" if block is not None else "tensor" if name in _INT_MAX else None
        if kind == "group" or block is not None:
            size = (block or 128) if size is None else size
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InvalidInput(f"group_size must be an integer of at least 1, got {size!r}")
        elif size is not None:
            raise InvalidInput(f"group_size requires granularity 'group', got {size!r} with {kind!r}")
        for field, value in (("name", name), ("granularity", kind), ("group_size", size)):
            object.__setattr__(self, field, value)

    def __call__(self, tensor: torch.Tensor, draw: Any) -> torch.Tensor:
        """``tensor`` rounded to this format; of ``draw`` only ``draw.tensor`` is read (is it a weight?)."""
        return quantise(tensor, self, weight=getattr(draw, "tensor", "output") == "weight")

    @property
    def element_bits(self) -> int:
        """Bits of one value without its share of a scale: the number in the format's name."""
        return _ELEMENT_BITS[self.name]

    def bits(self) -> float:
        """Stored bits per value, with the scales where their share does not depend on the tensor's shape.

        A scale takes 8 bits in mxfp4 (E8M0) and nvfp4 (E4M3), and 16 in other groups; a zero point as many as a value.
        """
        scale = 0 if self.group_size is None else 8 if self.name in _BLOCK else 16
        scale += self.element_bits if self.asymmetric and self.group_size is not None else 0
        return self.element_bits + scale / (self.group_size or 1)


def format_on(name: str, on: str, *, group_size: int | None = None, asymmetric: bool = False) -> Format:
    """The format of weights, activations or a KV cache, with the scales that inference engines usually give it.

    Weights: integers in groups of 64, fp8 with a scale per output channel. Activations: a scale per token, found as the
    token comes. KV cache: integers with a scale per token and head, fp8 with none (vLLM's scale of 1). No scale is
    shared by several tokens, so a value does not depend on what else is in the batch.
    """
    fmt = Format(name)
    if fmt.name in _CAST or fmt.name == "mxfp4":
        return fmt
    if group_size is not None:
        return Format(name, "group", group_size, asymmetric)
    if on == "weights":
        per_channel = {"fp8_e4m3": "channel", "fp8_e5m2": "channel"}
        kind = per_channel.get(fmt.name, "group")
        return Format(name, kind, WEIGHT_GROUP if fmt.name in _INT_MAX else fmt.group_size, asymmetric)
    unscaled = on == "kv-cache" and fmt.name in _FP8
    return Format(name, None if unscaled else "token", asymmetric=asymmetric)


def quantise(
    tensor: torch.Tensor, fmt: Format | str, *, weight: bool = False, importance: torch.Tensor | None = None
) -> torch.Tensor:
    """A new tensor: ``tensor`` rounded to ``fmt`` (see the module's table). ``weight`` only matters for "channel".

    ``importance`` [last dimension] is how much a squared error counts where a clipped range is chosen.
    """
    fmt = fmt if isinstance(fmt, Format) else Format(fmt)
    if not tensor.is_floating_point():
        raise InvalidInput(f"a number format needs a floating-point tensor, got dtype {tensor.dtype}")
    if fmt.name in _CAST:
        return tensor.to(_CAST[fmt.name], copy=True).to(tensor.dtype)
    if tensor.numel() == 0:  # amax over nothing is an error
        return tensor.clone()
    x = tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
    if fmt.granularity is None:
        return _fp8(x, _FP8[fmt.name]).to(tensor.dtype)

    # Two dimensions are enough for every granularity: [blocks, values of a block], or its transpose for channels.
    last = x.shape[-1] if x.ndim else 1
    width, dim, pad = last, -1, 0
    if fmt.granularity == "tensor":
        width = x.numel()
    elif fmt.granularity == "channel" and not weight:
        dim = 0
    elif fmt.group_size is not None:
        width = min(fmt.group_size, last)  # a group that is wider than a row is the row
        pad = -last % width
        x = torch.nn.functional.pad(x.reshape(-1, last), (0, pad))  # zeros never raise a block's amax
    x = x.reshape(-1, width)
    finite = x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low, high = finite.amin(dim, keepdim=True), finite.amax(dim, keepdim=True)  # [blocks, 1] or [1, channels]
    amax = torch.maximum(-low, high)
    blocks = (last + pad) // width if fmt.granularity == "token" else None  # nvfp4: those of a token

    def rounded(part: float) -> torch.Tensor:
        if fmt.asymmetric:
            return _asymmetric(x, part * low, part * high, fmt.element_bits)
        return _scaled(x, part * amax, fmt.name, blocks=blocks)

    y = rounded(1.0)
    if fmt.clipped:
        counts = x.new_ones(())
        if importance is not None:
            counts = torch.nn.functional.pad(importance.to(x), (0, pad))
            counts = counts.repeat(x.numel() // len(counts)).reshape(x.shape)
        least = ((y - finite).square() * counts).sum(dim, keepdim=True)
        for part in _CLIPPED:
            other = rounded(part)
            error = ((other - finite).square() * counts).sum(dim, keepdim=True)
            y, least = torch.where(error < least, other, y), torch.minimum(error, least)
    if pad:
        y = y.reshape(-1, last + pad)[:, :last]
    # s * Q can exceed a by one rounding, which at the very top of the dtype would be Inf.
    top = torch.finfo(tensor.dtype).max
    return y.clamp(-top, top).reshape(tensor.shape).to(tensor.dtype)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """The nearest of +-{0, .5, 1, 1.5, 2, 3, 4, 6}, ties to the even mantissa, saturating."""
    x = x.clamp(-_E2M1_MAX, _E2M1_MAX)
    # One mantissa bit: the step is half the power of two below |x|; under 1 (subnormals) it stays 0.5. In units of
    # the step an odd number is a set mantissa bit, so rounding half to even there is the format's own tie rule.
    step = _pow2_floor(x.abs().clamp_min(1.0)) / 2
    return (x / step).round() * step


def e8m0_scale(amax: torch.Tensor) -> torch.Tensor:
    """MXFP4's shared scale, 2^(floor(log2 amax) - 2) with the exponent clamped to [-127, 127]; amax 0 gives 2^-127."""
    # Clamped below before the division by 4, so that float32 never leaves the range where it is exact.
    return (_pow2_floor(amax.clamp_min(2.0**-125)) / 4).clamp_max(2.0**127)


def _asymmetric(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, bits: int) -> torch.Tensor:
    """x rounded to 2^bits levels between ``low`` and ``high``, 0 among them."""
    low, high, top = low.clamp_max(0.0), high.clamp_min(0.0), float(2**bits - 1)
    # halves, for a range may be twice the largest number of the dtype
    scale = ((high / 2 - low / 2) / top * 2).clamp_min(torch.finfo(x.dtype).tiny)
    zero = (-low / scale).round()
    return ((x / scale).round() + zero).clamp(0.0, top).sub(zero) * scale


def _scaled(x: torch.Tensor, amax: torch.Tensor, name: str, blocks: int | None = None) -> torch.Tensor:
    """x rounded with one scale per entry of ``amax``, which broadcasts against x.

    ``blocks`` is for nvfp4: so many neighbouring ones share the larger scale; None means all of them.
    """
    tiny = torch.finfo(x.dtype).tiny  # a floor for scales: a block of zeros divides by it and stays zero
    if name in _FP8:
        scale = (amax / torch.finfo(_FP8[name]).max).clamp_min(tiny)
        return _fp8(x / scale, _FP8[name]) * scale
    if name in _INT_MAX:
        scale = (amax / _INT_MAX[name]).clamp_min(tiny)
        return (x / scale).round().clamp(-_INT_MAX[name], _INT_MAX[name]) * scale
    if name == "mxfp4":
        scale = e8m0_scale(amax)
        return e2m1(x / scale) * scale
    largest = amax.amax()  # 0-dim
    if blocks is not None:
        largest = amax.view(-1, blocks).amax(1).repeat_interleave(blocks)[:, None]
    tensor_scale = (largest / (_E4M3_MAX * _E2M1_MAX)).clamp_min(tiny)
    scale = _fp8(amax / _E2M1_MAX / tensor_scale, torch.float8_e4m3fn) * tensor_scale
    return e2m1(x / torch.where(scale > 0, scale, 1.0)) * scale  # E4M3 may round a block's scale to 0: no 0 / 0


def _fp8(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Saturating cast to fp8 and back; clamped first because torch's own cast may give NaN or Inf above the top."""
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype).to(x.dtype)


def _pow2_floor(x: torch.Tensor) -> torch.Tensor:
    """2^floor(log2 x) for x > 0, exactly: x = m * 2^e with m in [0.5, 1), and x / 2m is a power of two, so exact."""
    return x / (2 * torch.frexp(x).mantissa)
