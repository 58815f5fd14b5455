"""Small models: the demo with few blocks, and blocks around one module, with the calls of one forward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import noisescope as ns
from noisescope.localization.call_tree import CallTree, with_whole_modules
from noisescope.localization.host_copies import HostStates
from noisescope.model.anatomy import dissect
from noisescope.probe.watch import watch


@pytest.fixture(scope="session")
def shallow_demo() -> Callable[..., ns.Subject]:
    """The first blocks of the demo model and its outer parts; every operator is there, and text is tokenised."""

    def load(blocks: int, dtype: str = "float32") -> ns.Subject:
        subject = ns.load("demo", dtype=dtype)
        subject.model.model.layers = subject.model.model.layers[:blocks]
        subject.model.config.num_hidden_layers = blocks
        return ns.wrap(subject.model, subject.tokenizer)

    return load


class _Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(self.first(x))
        return x + self.last(y[0] if isinstance(y, tuple) else y)


class _Blocks(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Block(inner), _Block(nn.Identity())])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="session")
def blocks_around() -> Callable[[nn.Module], nn.Module]:
    """A model of two blocks, the first of which calls a module ("layers.0.inner") between two linears."""

    def make(inner: nn.Module) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            return _Blocks(inner).eval()

    return make


@pytest.fixture(scope="session")
def calls_of() -> Callable[..., CallTree]:
    """The calls of one forward, recorded."""

    def record(model: nn.Module, *args: object, **kwargs: object) -> CallTree:
        tree = CallTree(HostStates(), "prefill 1 x 3 tokens")
        anatomy = with_whole_modules(model, dissect(model))
        with torch.no_grad(), watch(model, tree.end, lambda unit, operator: True, before=tree.begin, anatomy=anatomy):
            model(*args, **kwargs)
        return tree

    return record
