"""How much too small is fused float32 attention on this GPU? What `locate` allows there is chosen from these figures.

    python benchmarks/attention_lean.py

Random queries, keys and values against float64 on the same device. Columns: the mean error along the sign of the
output, in units of round-off u = 2^-24 of sum p |v| (`sums`), and the share by which all scores are too small, from a
regression of the error on what such a share does, in u (`scores`). Both are negative where sums are truncated.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

U = 2.0**-24


def main() -> None:
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__, torch.get_float32_matmul_precision())
    print(f"{'keys':>5} {'width':>5} {'queries':>7} {'size':>5} {'sums':>7} {'scores':>7}")
    for keys in (3, 9, 62, 200, 1000, 4000):
        for width in (8, 64, 128):
            for queries, size in ((2, 1.0), (2, 4.0), (33, 1.0), (33, 4.0)):
                shape = (max(8, 4096 // keys), 4)
                q = torch.randn(*shape, queries, width, device="cuda") * size
                k, v = (torch.randn(*shape, keys, width, device="cuda") for _ in range(2))
                v = v + 0.3
                y = F.scaled_dot_product_attention(q, k, v).double()
                q, k, v = q.double(), k.double(), v.double()
                scores = q @ k.transpose(-1, -2) / math.sqrt(width)
                p = scores.softmax(-1)
                exact = p @ v
                error = y - exact
                sums = float((error * exact.sign() / (p @ v.abs())).mean()) / U
                shrunk = (p * (scores - (p * scores).sum(-1, keepdim=True))) @ v
                share = float((error * shrunk).sum() / shrunk.square().sum()) / U
                print(f"{keys:5} {width:5} {queries:7} {size:5} {sums:7.2f} {share:7.2f}", flush=True)


if __name__ == "__main__":
    main()
