"""Several processes: data-parallel noise differs, tensor-parallel noise agrees, sharded weights work."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from noisescope.testing import tiny_model
from noisescope.training.launch import data_rank, rank_beside

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What both processes found, in all cases."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = str(Path(__file__).with_name("two_processes.py"))
    command = [sys.executable, script, port, "data,sharded,split,whole,tensor,unnamed"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda result: result["process"])


@pytest.mark.parametrize("case", ["data", "sharded"])
def test_data_parallel_processes_draw_different_noise(results: list[dict[str, Any]], case: str) -> None:
    """On the same batch clean losses agree and noisy ones differ, plain and under FSDP2; gradients arrive."""
    first, second = (found[case] for found in results)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert first["clean"] == second["clean"] == first["clean again"]
    for kind in ("operators", "norm"):
        assert len({first[kind], second[kind], first["clean"]}) == 3
        assert first[f"{kind} gradients"] and second[f"{kind} gradients"]


def test_sharded_weights_stay_as_they_were(results: list[dict[str, Any]]) -> None:
    """FSDP2's parameters are still sharded and bit-equal after noise, and the noise is that of the whole model."""
    for found in results:
        assert found["sharded"]["sharded"] and found["sharded"]["bits"]
        for kind in ("clean", "operators", "norm"):
            assert found["sharded"][kind] == pytest.approx(found["data"][kind], rel=1e-5)


def test_tensor_parallel_processes_agree_or_are_refused(results: list[dict[str, Any]]) -> None:
    """A mesh named "tp" gives one number to both processes; a mesh without names is refused with the cure."""
    assert [found["tensor"] for found in results] == [{"rank": 0}, {"rank": 0}]
    assert all("pass rank=" in found["unnamed"]["refused"] for found in results)


def test_a_tensor_parallel_forward_has_one_noise(results: list[dict[str, Any]]) -> None:
    """With MLPs split over both processes the noisy losses agree, and are those of process 0 with a whole model."""
    first, second = (found["split"] for found in results)
    assert first["rank"] == second["rank"] == 0
    for kind in ("clean", "operators", "norm"):
        assert first[kind] == second[kind] == pytest.approx(results[0]["whole"][kind], rel=1e-5)
    assert len({first["clean"], first["operators"], first["norm"]}) == 3


def test_groups_of_a_larger_mesh_are_numbered() -> None:
    """On a mesh of 2 x 3 data x 4 tensor processes, the four that share samples share a number, and no others."""
    sizes, names = (2, 3, 4), ("dp_replicate", "dp_shard", "tp")
    numbers: dict[int, int] = {}
    for place in itertools.product(*map(range, sizes)):
        mesh = SimpleNamespace(mesh_dim_names=names, size=lambda d: sizes[d], get_coordinate=lambda place=place: place)
        numbers[rank_beside(mesh)] = numbers.get(rank_beside(mesh), 0) + 1
    assert numbers == dict.fromkeys(range(6), 4)


def test_one_process_is_rank_zero() -> None:
    """Without torch.distributed there is nothing to ask."""
    assert data_rank(tiny_model("llama")) == 0
