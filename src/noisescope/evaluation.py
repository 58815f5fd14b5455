"""Evaluation mode as a scope: every measurement runs in it, and every module gets its own mode back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards each module has the mode it had, also where entering fails half-way.

    A model may be in mixed modes (a frozen backbone in eval mode, a head in train mode), so each module's flag is
    kept: `model.train()` would put all of them into one mode. The flags are set directly, because models override
    `train` and `eval` to do more than that, which could not be undone here. Gradient mode is left to the caller.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, training in modes:
            if module.training != training:  # a module that refused to change is not asked again
                module.training = training
