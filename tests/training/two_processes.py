"""What each of two gloo processes does for test_launch_ranks.py: prints one line of JSON. Both are forked from one.

python two_processes.py PORT CASE,CASE
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from noisescope.errors import InvalidInput
from noisescope.testing import tiny_model
from noisescope.training import AQN, Constant, NormNoise, OperatorNoise, noise

TOKENS = torch.arange(1, 13).reshape(2, 6)


def losses(model: Any, operators: str = "gemm") -> dict[str, Any]:
    """Losses of the same batch in every process, clean and under noise."""
    found: dict[str, Any] = {"clean": model(TOKENS, labels=TOKENS).loss.item()}
    for name, kind in (("operators", OperatorNoise(frozenset({operators}))), ("norm", NormNoise())):
        with noise(model, AQN(kind, Constant(0.1))) as scope:
            loss = model(TOKENS, labels=TOKENS).loss
            loss.backward()
            found |= {name: loss.item(), "rank": scope.rank}
        found[f"{name} gradients"] = all(p.grad is not None for p in model.parameters())
        model.zero_grad()
    found["clean again"] = model(TOKENS, labels=TOKENS).loss.item()
    return found


def data_parallel(operators: str = "gemm") -> dict[str, Any]:
    return losses(tiny_model("llama"), operators)


def sharded() -> dict[str, Any]:
    """FSDP2: every block and the rest sharded over both processes."""
    model = tiny_model("llama")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    found = losses(model)
    model.reshard()  # after a forward without a backward the outermost part is still whole
    after = {name: p.full_tensor() for name, p in model.named_parameters()}
    sharded = all(isinstance(p, DTensor) for p in model.parameters())
    return {**found, "sharded": sharded, "bits": all(torch.equal(before[name], after[name]) for name in before)}


def split() -> dict[str, Any]:
    """Tensor parallelism: the weights of each MLP halved over both processes, and noise on what both compute whole."""
    model = tiny_model("llama")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return losses(model, "matmul")


def tensor_parallel(names: tuple[str, ...] | None) -> dict[str, Any]:
    """A parameter on a mesh, as tensor parallelism leaves it."""
    model = tiny_model("llama")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
    weight = model.lm_head.weight
    model.lm_head.weight = torch.nn.Parameter(DTensor.from_local(weight.data, mesh))
    try:
        return {"rank": noise(model, AQN(OperatorNoise(), Constant(0.1))).rank}
    except InvalidInput as error:
        return {"refused": str(error)}


CASES = {
    "data": data_parallel,
    "sharded": sharded,
    "split": split,
    "whole": lambda: data_parallel("matmul"),
    "tensor": lambda: tensor_parallel(("tp",)),
    "unnamed": lambda: tensor_parallel(None),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    tiny_model("llama")  # what it imports is imported once
    child = os.fork()
    dist.init_process_group("gloo", rank=int(child == 0), world_size=2)
    results = {case: CASES[case]() for case in sys.argv[2].split(",")}
    line = json.dumps({"process": int(child == 0), **results})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # at once, since both processes write to one pipe
    dist.destroy_process_group()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
