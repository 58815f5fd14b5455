"""Mean squares of what linears read, against hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from noisescope.measures.format_costs import is_planned
from noisescope.measures.input_squares import InputSquares
from noisescope.model.anatomy import MODULE, dissect
from noisescope.testing import tiny_model

TOKENS = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "qwen3_moe"])
@torch.no_grad()
def test_squares_are_those_of_the_inputs(name: str) -> None:
    """Over two batches; of every planned linear, routers and fused experts left out."""
    model = tiny_model(name)
    anatomy = dissect(model)
    wanted = {unit.module for unit in anatomy.units if is_planned(unit) and unit.kind == MODULE}
    seen: dict[str, list[torch.Tensor]] = {module: [] for module in wanted}
    modules = dict(model.named_modules())
    hooks = [
        modules[module].register_forward_pre_hook(lambda _, args, held=held: held.append(args[0].flatten(0, -2)))
        for module, held in seen.items()
    ]
    for batch in (TOKENS, TOKENS[:1, :4]):
        model(batch)
    for hook in hooks:
        hook.remove()
    with InputSquares(model, anatomy) as squares:
        for batch in (TOKENS, TOKENS[:1, :4]):
            model(batch)
    found = squares.means()
    assert found.keys() == wanted
    for module, inputs in seen.items():
        torch.testing.assert_close(found[module], torch.cat(inputs).square().mean(0), rtol=1e-4, atol=1e-9)


@torch.no_grad()
def test_padding_does_not_count() -> None:
    model: Any = tiny_model("llama")
    padded = TOKENS.clone()
    padded[1, 5:] = 0
    with InputSquares(model) as squares:
        squares.lengths = torch.tensor([9, 5, 9])
        model(padded)
    with InputSquares(model) as apart:
        for row, length in zip(padded, (9, 5, 9), strict=True):
            model(row[None, :length])
    for module, expected in apart.means().items():
        torch.testing.assert_close(squares.means()[module], expected, rtol=1e-4, atol=1e-9)
