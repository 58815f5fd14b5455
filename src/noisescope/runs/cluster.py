"""Being in a Ray cluster: which one, what an actor reserves there, and what is sent to it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from noisescope.errors import InvalidInput

_RESOURCES = {"npu": "NPU", "hpu": "HPU"}  # Ray's name of a torch device; all others are GPU
_OBJECT_STORE = 256 << 20  # bytes: tokens and results are small, and Ray would take 30 % of the memory


@contextlib.contextmanager
def joined(ray: Any, address: str | None, workers: int) -> Iterator[None]:
    """Inside, this process is in a cluster: the one it is in, `address`, RAY_ADDRESS, or a new local one.

    What was joined or started here is left or stopped at the end.
    """
    if ray.is_initialized():
        yield
        return
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    settings: dict[str, Any] = {}
    if address == "local":
        cores = max(os.cpu_count() or 1, workers)
        settings = {"num_cpus": cores, "include_dashboard": False, "object_store_memory": _OBJECT_STORE}
    try:
        _knock(address)
        with _no_usage_statistics():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **settings)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidInput(f"no Ray cluster can be used at {address!r}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """An error where nobody listens at host:port: Ray itself would go on trying for more than six minutes."""
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


@contextlib.contextmanager
def _no_usage_statistics() -> Iterator[None]:
    """A cluster started here reports to nobody, unless the environment says otherwise."""
    name = "RAY_USAGE_STATS_ENABLED"
    if name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]


def reservation(ray: Any, workers: int, devices: list[torch.device]) -> dict[str, Any]:
    """What one actor reserves, as Ray's options: its share of the cores, and an accelerator for each of `devices`."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    need = {"CPU": max(1, int(sum(node.get("CPU", 0) for node in nodes)) // workers)}
    if devices:
        need[_RESOURCES.get(devices[0].type, "GPU")] = len(devices)

    def room() -> int:
        return sum(min(int(node.get(name, 0) // count) for name, count in need.items()) for node in nodes)

    while room() < workers and need["CPU"] > 1:  # shares are whole, and none spans two machines
        need["CPU"] -= 1
    if room() < workers:
        one = " and ".join(f"{count} {name}" for name, count in need.items())
        raise InvalidInput(
            f"the Ray cluster has room for {room()} workers of {one} each, and {workers} are asked for: lower "
            "--workers, or give the address of a larger cluster"
        )
    return {"num_cpus": need.pop("CPU"), "num_gpus": need.pop("GPU", 0), "resources": need}


def packed(value: Any, own: str) -> bytes:
    """The value in cloudpickle's bytes; `own` names the part of it that is the caller's own code."""
    from ray import cloudpickle

    class WithoutModels(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, item: Any) -> Any:
            if isinstance(item, nn.Module) and any(True for _ in item.parameters()):
                raise InvalidInput(
                    f"{own} holds a model ({type(item).__name__}), and models are not sent to Ray's workers: use the "
                    "model that it is called with"
                )
            return super().reducer_override(item)

    buffer = io.BytesIO()
    try:
        WithoutModels(buffer).dump(value)
    except InvalidInput:
        raise
    except Exception as error:  # whatever the caller's own objects raise
        raise InvalidInput(
            f"{own} can't be sent to Ray's workers ({type(error).__name__}: {first_line(error)}): keep open files, "
            "locks and connections out of it, or use --executor local"
        ) from error
    return buffer.getvalue()


def first_line(error: BaseException) -> str:
    """Ray's messages are paragraphs."""
    lines = str(error).strip().splitlines()
    return lines[0].strip()[:300] if lines else type(error).__name__
