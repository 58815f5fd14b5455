"""How often the four probes of the original method notes rank a dead zone of 0.3 at layers 10 and 20 first.

python benchmarks/srdd_hit_rate.py                                     # the demo model and a tiny one of 28 blocks
python benchmarks/srdd_hit_rate.py path/to/model --seeds 3
"""

from __future__ import annotations

import argparse
import time

import torch

import noisescope as ns
from noisescope.localization.srdd import srdd
from noisescope.testing import tiny_model

_LAYERS, _FAULT = (10, 20), "dead_zone:0.3"


def subject_of(name: str) -> ns.Subject:
    return ns.wrap(tiny_model("llama", layers=28, initializer_range=0.2)) if name == "tiny" else ns.load(name)


def ranks(subject: ns.Subject, layer: int, seed: int) -> tuple[int, int]:
    """The rank of a layer's score with the fault in it, and without."""
    with ns.faulty(subject.model, f"{_FAULT}@{layer}"):
        faulty = srdd(subject, seed=seed)
    healthy = srdd(subject, seed=seed)
    found = ([suspect.site.place for suspect in verdict.suspects].index(layer) + 1 for verdict in (faulty, healthy))
    return next(found), next(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=["demo", "tiny"])
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    began, hits, total = time.process_time(), 0, 0
    for name in given.models:
        subject = subject_of(name)
        for layer in (layer for layer in _LAYERS if layer < len(subject.anatomy.blocks)):
            for seed in range(given.seeds):
                rank, before = ranks(subject, layer, seed)
                hits, total = hits + (rank == 1), total + 1
                print(f"{name}, layer {layer}, seed {seed}: rank {rank} with the fault, {before} without", flush=True)
    print(f"rank 1 in {hits} of {total} runs; {time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
