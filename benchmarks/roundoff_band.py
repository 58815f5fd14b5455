"""The round-off band against healthy pairs: does a gap between two real kernel paths lie where the band says?

    python benchmarks/roundoff_band.py [--models demo,path] [--dtypes bfloat16,float16,float32] [--samples 12]

Each model's band is measured with `ns.Rounding`, in float32 by the distance to float64. The other side of each pair is
made without noisescope: plain in place of fused attention, decoding token by token with a cache, a batch of 8 in place
of one sequence, and linears whose sums run in another order or in another width. Printed per pair: the measured gap,
gap / expected, and whether it would be called more than round-off (a false alarm). Pairs that share nearly all kernels
lie far below the band and count as covered from above only.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisescope as ns
from noisescope.api.preparation import encode_data
from noisescope.api.roundoff import measure_band
from noisescope.comparison.roundoff import gap_between
from noisescope.model.forwards import stepwise_logits

Logprobs = list[np.ndarray]


def logprob(logits: Tensor, ids: Tensor) -> np.ndarray:
    """Log-probabilities of ids[1:] from logits [T, V]."""
    rows = logits[: len(ids) - 1].double().log_softmax(-1)
    return rows.gather(1, ids[1:, None])[:, 0].double().cpu().numpy()


def one_by_one(model: nn.Module, prompts: list[Tensor]) -> Logprobs:
    return [logprob(model(ids[None]).logits[0], ids) for ids in prompts]


def eager(model: nn.Module, prompts: list[Tensor]) -> Logprobs:
    model.set_attn_implementation("eager")
    try:
        return one_by_one(model, prompts)
    finally:
        model.set_attn_implementation("sdpa")


def batched(model: nn.Module, prompts: list[Tensor]) -> Logprobs:
    """Padded on the left with a mask, as generation does."""
    found = []
    for at in range(0, len(prompts), 8):
        part = prompts[at : at + 8]
        length = max(map(len, part))
        ids = torch.stack([F.pad(one, (length - len(one), 0)) for one in part])
        mask = torch.stack([F.pad(torch.ones_like(one), (length - len(one), 0)) for one in part])
        logits = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        found += [logprob(logits[row, length - len(one) :], one) for row, one in enumerate(part)]
    return found


def decoded(model: nn.Module, prompts: list[Tensor]) -> Logprobs:
    return [logprob(torch.cat([stepwise_logits(model, ids.tolist(), 1)]), ids) for ids in prompts]


@contextmanager
def linears(compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Iterator[None]:
    """nn.Linear computed otherwise, in every model."""
    original = nn.Linear.forward
    nn.Linear.forward = lambda self, x: compute(x, self.weight, self.bias)
    try:
        yield
    finally:
        nn.Linear.forward = original


def split(parts: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Sums in `parts` pieces along the inputs, added in float32 and rounded once: a split-K kernel."""

    def compute(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        pieces = zip(x.float().chunk(parts, -1), weight.float().chunk(parts, -1), strict=True)
        y = sum(a @ b.T for a, b in pieces)
        return (y if bias is None else y + bias.float()).to(x.dtype)

    return compute


def reversed_order(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.flip(-1), weight.flip(-1), bias)


def with_linears(compute: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Callable[..., Logprobs]:
    def run(model: nn.Module, prompts: list[Tensor]) -> Logprobs:
        with linears(compute):
            return one_by_one(model, prompts)

    return run


PATHS: dict[str, Callable[[nn.Module, list[Tensor]], Logprobs]] = {
    "eager attention": eager,
    "batch of 8": batched,
    "token by token": decoded,
    "split-K 2": with_linears(split(2)),
    "split-K 8": with_linears(split(8)),
    "sums reversed": with_linears(reversed_order),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="demo")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--data")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    print(f"{'model':<20} {'dtype':<9} {'pair':<16} {'gap':>10} {'expected':>10} {'ratio':>6}  called")
    logs: dict[str, list[float]] = {}
    alarms = pairs = 0
    for name in options.models.split(","):
        for dtype in options.dtypes.split(","):
            subject = ns.load(name, dtype=dtype, device=options.device)
            subject.model.eval()
            material, _ = encode_data(subject, options.data, options.samples, options.max_tokens, which="test")
            sequences = [group[0] for group in material.encoded.sequences]
            band = measure_band(subject, [one.ids for one in sequences], seeds=2, reported=False)
            prompts = [torch.tensor(one.ids, device=options.device) for one in sequences]
            clean = one_by_one(subject.model, prompts)
            for path, run in PATHS.items():
                gap = gap_between(clean, run(subject.model, prompts))
                verdict = band.judge(gap)
                ratio = (gap.value or 0.0) / (band.expected.value or 1.0)
                pairs, alarms = pairs + 1, alarms + (verdict == "more than round-off")
                if ratio > 0.3:
                    logs.setdefault(dtype, []).append(math.log(ratio))
                short = name.rstrip("/").rpartition("/")[2]
                line = f"{short:<20} {dtype:<9} {path:<16} {gap.value:>10.3g} {band.expected.value:>10.3g}"
                print(f"{line} {ratio:>6.2f}  {verdict}", flush=True)
    print(f"\n{alarms} of {pairs} healthy pairs called more than round-off")
    for dtype, values in logs.items():
        print(f"{dtype}: log ratio {np.mean(values):+.2f} +- {np.std(values):.2f} over {len(values)} pairs above 0.3")


if __name__ == "__main__":
    main()
