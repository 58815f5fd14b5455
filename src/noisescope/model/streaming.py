"""A model larger than its device: weights of blocks stay on the host, and are on the device while their block runs.

On the host they may be in memory, or in the mapped files of a checkpoint, which the system reads when they are used.
When a block has been given to the device, copying the next one begins: on an accelerator both go on at once. Outside
its calls a module has its weights on the host, so whatever reads them (fingerprints, state checks, plans) finds them.

Gradients of activations pass a streamed block where it is computed again in backward (`probe.recomputation`): a graph
that is kept holds the copies of its weights. Gradients of weights arrive on the host.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.errors import InvalidInput, unknown
from noisescope.model.anatomy import dissect
from noisescope.options.fields import STREAMS

_LARGE = 1 << 20  # bytes: smaller weights share pages, and a page can be locked once
_FEW = 0.01  # of the weights may be in memory without a note
_AHEAD = 2  # blocks that the host may be ahead of the device: their weights are allocated


def stream_blocks(model: nn.Module, device: torch.device, *, pin: bool = False) -> nn.Module:
    """The model, its blocks streamed to the device; all else of it is moved there. `pin` locks the host's pages.

    >>> import torch
    >>> from noisescope.testing import tiny_model
    >>> model = stream_blocks(tiny_model("llama"), torch.device("cpu"))
    >>> model(torch.arange(8)[None]).logits.shape
    torch.Size([1, 8, 64])
    """
    blocks = [model.get_submodule(name) for name in dissect(model).blocks]
    inside = {id(p) for block in blocks for p in block.parameters()}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in inside and parameter.device != device:
                parameter.data = parameter.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    if pin and device.type == "cuda":
        _pin(p for block in blocks for p in block.parameters())
    order: deque[Any] = deque()
    streamed = [_Weights(block, device, order) for block in blocks]
    for at, (block, weights) in enumerate(zip(blocks, streamed, strict=True)):
        weights.neighbours = (streamed[at - 1] if at else None, streamed[at + 1] if at + 1 < len(blocks) else None)
        block.__dict__["forward"] = StreamedForward(block, weights)
        for module in block.modules():  # called alone, a module of a block brings its own weights
            if module is not block and any(p is not None for p in module._parameters.values()):
                module.__dict__["forward"] = StreamedForward(module, _Weights(module, device, order, alone=True))
    return model


def check_stream(stream: str | None, device_map: Any) -> None:
    if stream is not None and stream not in STREAMS:
        raise unknown("stream", stream, STREAMS)
    if stream is not None and device_map is not None:
        raise InvalidInput(f"stream={stream!r} can't be combined with a device_map ({device_map}): leave one out")


def placed(model: nn.Module, device: torch.device, stream: str | None) -> nn.Module:
    """The model on its device, or with its blocks streamed there."""
    if stream is None:
        return model.to(device)
    if stream == "host":
        for parameter in model.parameters():  # what was loaded may be a mapped file
            parameter.data = parameter.data.clone()
    return stream_blocks(model, device, pin=stream == "host")


def notes_on_memory(model: nn.Module) -> list[str]:
    """A note where weights that should stay in the checkpoint's files are in memory."""
    weights = [p for name in dissect(model).blocks for p in model.get_submodule(name).parameters()]
    copied = sum(p.nbytes for p in weights if p.untyped_storage().resizable())  # what is mapped has a fixed size
    share = copied / max(sum(p.nbytes for p in weights), 1)
    if share < _FEW:
        return []
    return [
        f"{100 * share:.0f} % of the weights to stream are in the host's memory, not in the checkpoint's files: they "
        "were converted on loading, to another dtype or layout (experts in one tensor)"
    ]


class StreamedForward:
    """The value of `module.__dict__["forward"]` of a module whose weights are streamed."""

    def __init__(self, module: nn.Module, weights: _Weights) -> None:
        self.module = module
        self.weights = weights
        self.original = module.forward
        functools.update_wrapper(self, self.original, updated=())  # keeps the signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.weights.present():
            return self.original(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        """A copy of the model is not streamed: its weights are where the host's are."""
        copied = copy.deepcopy(self.module, memo)  # which is being copied: this is an attribute of it
        return MethodType(type(copied).forward, copied)


class _Weights:
    """The weights of a module, and where they are."""

    def __init__(self, module: nn.Module, device: torch.device, order: deque[Any], *, alone: bool = False) -> None:
        modules = [module] if alone else list(module.modules())
        named = [(one, name, p) for one in modules for name, p in one._parameters.items() if p is not None]
        self._members: list[tuple[nn.Module, str, nn.Parameter]] = named
        self._device = device
        self._alone = alone
        self._order = order  # of all blocks: the last that ran, and what marks the ends of those before it
        self._fetched: tuple[list[Tensor], list[int], Any] | None = None  # copies, versions copied, when they are there
        self.neighbours: tuple[_Weights | None, _Weights | None] = (None, None)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """On the device inside; on the host again afterwards."""
        if any(one._parameters[name] is not host for one, name, host in self._members):
            yield  # the block they are part of has brought them
            return
        copies = self._take()
        try:
            for (one, name, host), there in zip(self._members, copies, strict=True):
                grad = torch.is_grad_enabled() and host.requires_grad
                one._parameters[name] = _Brought.apply(host, there) if grad else nn.Parameter(there, False)  # type: ignore[no-untyped-call]
            yield
        finally:
            for one, name, host in self._members:
                one._parameters[name] = host
        if not self._alone:
            self._prefetch_next()

    def fetch(self) -> None:
        """Begin to copy."""
        hosts = [host.detach() for _, _, host in self._members]
        versions = [host._version for host in hosts]
        if self._fetched is not None and self._fetched[1] == versions:
            return
        if self._device.type != "cuda":
            self._fetched = [host.to(self._device, copy=True) for host in hosts], versions, None
            return
        side = _side_stream(self._device)
        with torch.cuda.stream(side):
            copies = [host.to(self._device, non_blocking=True) for host in hosts]
            self._fetched = copies, versions, side.record_event()

    def _take(self) -> list[Tensor]:
        self.fetch()
        assert self._fetched is not None
        (copies, _, ready), self._fetched = self._fetched, None
        if ready is not None:
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(ready)
            for tensor in copies:
                tensor.record_stream(stream)
        return copies

    def _prefetch_next(self) -> None:
        """Fetch the block that follows in the direction in which blocks run, as far as the device keeps up."""
        last: _Weights | None = self._order.pop() if self._order else None
        before, after = self.neighbours
        coming = before if last is after and last is not None else after
        if self._device.type == "cuda":
            self._order.append(torch.cuda.current_stream(self._device).record_event())
            if len(self._order) > _AHEAD:
                self._order.popleft().synchronize()
        self._order.append(self)
        if coming is not None:
            for other in self.neighbours:
                if other is not coming and other is not None:
                    other._fetched = None  # the direction has changed
            coming.fetch()


class _Brought(torch.autograd.Function):
    """A copy on the device whose gradient goes to the weight on the host."""

    @staticmethod
    def forward(ctx: Any, host: Tensor, there: Tensor) -> Tensor:
        ctx.home = host.device
        return there.view_as(there)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.home), None


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pin(weights: Iterable[nn.Parameter]) -> None:
    """Lock the pages of weights in place, which makes copying several times faster; where that fails, it is slow."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for weight in weights:
        where, size = weight.data_ptr(), weight.untyped_storage().nbytes()
        if size < _LARGE or weight.is_pinned():
            continue
        if int(runtime.cudaHostRegister(where, size, 0)) == 0:
            weakref.finalize(weight, runtime.cudaHostUnregister, where)
