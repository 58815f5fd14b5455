"""Several processes: whose noise must differ, and whose must agree.

Data-parallel processes see different samples, so each draws its own noise: its number is part of the key. Processes
that are tensor-parallel hold parts of the same samples and must agree, or their copies of an activation drift apart:
they share a number. Which is which is read from the device meshes of the model's parameters; where it can't be read, it
is asked for.

FSDP2 gathers a block's weights before its forward, so noise on a weight falls on the whole weight; the sharded
parameter itself is never touched.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from noisescope.errors import InvalidInput

TENSOR = ("tp", "tensor", "tensor_parallel", "model", "sp", "cp", "ep", "pp")  # dimensions that split one sample's work


def data_rank(model: nn.Module) -> int:
    """This process's number among those that see different samples; 0 where there is only one process."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0
    meshes = [getattr(parameter, "device_mesh", None) for parameter in model.parameters()]
    meshes.append(getattr(model, "_device_mesh", None))  # transformers keeps that of a distributed model here
    split = [mesh for mesh in {id(mesh): mesh for mesh in meshes if mesh is not None}.values() if _splits(mesh, model)]
    if not split:
        return dist.get_rank()
    return rank_beside(max(split, key=lambda mesh: mesh.ndim))


def _splits(mesh: Any, model: nn.Module) -> bool:
    """Whether a dimension of the mesh splits the work on one sample; refused where its dimensions have no names."""
    if mesh.mesh_dim_names is not None:
        return any(name in TENSOR for name in mesh.mesh_dim_names)
    if any(_is_fsdp(module) for module in model.modules()):
        return False  # FSDP2's own mesh: it shards weights, not samples
    raise InvalidInput(
        "the model is spread over a device mesh whose dimensions have no names, so it can't be told which processes "
        "see the same samples: pass rank=, equal in processes that share samples and different in all others"
    )


def _is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def rank_beside(mesh: Any) -> int:
    """The number of the group of processes that share samples: a position in the mesh's other dimensions."""
    names, coordinate = mesh.mesh_dim_names, mesh.get_coordinate()
    others = [(mesh.size(d), coordinate[d]) for d, name in enumerate(names) if name not in TENSOR]
    if not others:  # a slice of a larger mesh: its groups are numbered by their first process
        return int(mesh.mesh.flatten()[0])
    number = 0
    for size, position in others:
        number = number * size + position
    return number
