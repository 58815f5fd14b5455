"""Recognises classes that look up rows of a table, by what their code does with synthetic tables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.formula_recognition import remembered, run_on_host


def looks_up_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a class gives rows of its table for such a call, each times the same number at most.

    It is run with synthetic tables whose rows hold one number each: ones give the factor, and the numbers 1 to 7 must
    come out as themselves times that factor. Positions made inside are its own business.
    """
    if type(module).forward is nn.Embedding.forward:
        return True
    found: bool = remembered("embedding", module, (), lambda: _looks_up_rows(module, args, kwargs))
    return found


def _looks_up_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    table = module._parameters.get("weight")
    if table is None or table.dim() != 2:
        return False
    ones = torch.ones(len(table), 1)
    numbers = (torch.arange(len(table)) % 7 + 1.0)[:, None]
    outputs = []
    for column in (ones, -2 * ones, numbers):
        y = run_on_host(module, args, kwargs, {"weight": column.to(table.dtype).expand(table.shape)})
        if not isinstance(y, Tensor) or not y.is_floating_point() or y.shape[-1:] != table.shape[-1:]:
            return False
        outputs.append(y.double())
    one, two, several = outputs
    factor = one.flatten()[0]
    which = several / factor
    near = which.round()
    same = bool((one == factor).all()) and bool((two == -2 * factor).all()) and float(factor) != 0
    within = 2 * torch.finfo(table.dtype).eps * near
    return same and bool(((which - near).abs() <= within).all()) and bool(((near >= 1) & (near <= 7)).all())
