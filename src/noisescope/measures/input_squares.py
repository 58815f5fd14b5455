"""How large the inputs of each linear are: what rounding to a clipped range counts errors by.

Rounding W to Wq puts (Wq - W) x on an output. With E the errors of a row, the mean square of that is

    mean (E . x)^2 = sum_j E_j^2 mean x_j^2 + cross terms,

so the squared error of a weight counts by the mean square of the input that it multiplies. What many weights of a group
lose together by a narrower range then shows beside what one massive channel loses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noisescope.measures.format_costs import is_planned
from noisescope.model.anatomy import MODULE, Anatomy, Unit
from noisescope.probe.recorded_call import RecordedCall
from noisescope.probe.watch import watch


class InputSquares:
    """Mean squares of the inputs of planned linears, over the tokens of all batches.

    with InputSquares(model) as squares:
        squares.lengths = tokens_before_the_padding     # [B] of the batch that runs now
        model(tokens)
    squares.means()["model.layers.0.mlp.up_proj"]       # [in]
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None) -> None:
        self.lengths: Tensor | None = None
        self._sums: dict[str, Tensor] = {}
        self._tokens: dict[str, int] = {}
        self._scope = watch(model, self._on_call, self._where, anatomy=anatomy)

    def __enter__(self) -> InputSquares:
        self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._scope.__exit__(kind, *error)

    def means(self) -> Mapping[str, Tensor]:
        return {name: total / self._tokens[name] for name, total in self._sums.items()}

    @staticmethod
    def _where(unit: Unit, operator: str) -> bool:
        return operator == "linear" and unit.kind == MODULE and is_planned(unit)

    def _on_call(self, call: RecordedCall) -> None:
        x, lengths = call.first_input, self.lengths
        if x is None or x.numel() == 0:  # an expert without tokens
            return
        x = x.detach()
        if lengths is not None and x.dim() == 3 and len(x) == len(lengths):
            x = x[torch.arange(x.shape[1], device=x.device) < lengths.to(x.device)[:, None]]
        x, name = x.flatten(0, -2), call.site.module
        total = x.float().square().sum(0)
        self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._tokens[name] = self._tokens.get(name, 0) + len(x)
