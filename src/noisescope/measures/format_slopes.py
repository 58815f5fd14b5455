"""How the KL of a model in a precision plan changes when one of its linears changes its format.

With the plan carried out, D = KL(clean || plan) and its gradient G = dD/dW at a linear that has the weight Wq now,

    D after changing Wq to Wf  =  D + <G, Wf - Wq> + second order.

The first term is exact: it holds how the errors of this linear act together with those of all others, and needs no
random draws. One product g^T x for each linear gives G for all formats. Scores of single linears (format_costs.py) have
the second order, and lack the interactions. Fused experts are left out.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from noisescope.measures.divergence import kl_of_rows, row_blocks, widened
from noisescope.measures.fisher import GradientScreen
from noisescope.measures.format_costs import WeightFormat, is_planned, round_weight, with_inputs
from noisescope.model.anatomy import MODULE, Anatomy, Unit, linear_weight
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import Site


class FormatSlopes(GradientScreen):
    """Reads <G, Wf - Wq> for each linear and format, inside a scope that carries the plan out.

    with inject(model, plan), FormatSlopes(model, formats, current) as slopes, torch.enable_grad():
        kl = slopes.descend(model(tokens).logits.flatten(0, 1), clean_logits_of_scored_rows, scored, weights)
    slopes.sums[site]      # [formats]: change of the sum over rows of weight x KL
    """

    def __init__(
        self,
        model: nn.Module,
        formats: Mapping[str, WeightFormat],
        current: Mapping[str, WeightFormat],
        squares: Mapping[str, Tensor] | None = None,  # mean squares of inputs by module, for calibrated formats
        *,
        anatomy: Anatomy | None = None,
    ) -> None:
        super().__init__(model, anatomy)
        self.formats, self.current, self.squares = dict(formats), dict(current), dict(squares or {})
        self.sums: dict[Site, Tensor] = {}

    def reads(self, unit: Unit, operator: str) -> bool:
        return operator == "linear" and is_planned(unit) and unit.kind == MODULE  # experts get the rounded weight

    def read_gradient(self, call: RecordedCall, y: Tensor) -> None:
        site, now, squares = call.site, self.current.get(call.site.module), self.squares.get(call.site.module)

        def add(gradient: Tensor, x: Tensor, weight: Tensor) -> None:
            used = weight if now is None else round_weight(weight, with_inputs(now, squares))
            of_weight = gradient.flatten(0, -2).float().T @ x.flatten(0, -2).float()
            rounded = (round_weight(weight, with_inputs(fmt, squares)).float() for fmt in self.formats.values())
            found = torch.stack([((one - used.float()) * of_weight).sum() for one in rounded]).double()
            self.sums[site] = self.sums[site] + found if site in self.sums else found

        self.on_gradient(call, y, (call.tensors[0], linear_weight(call.callee)), add)

    def descend(self, logits: Tensor, clean: Tensor, scored: Tensor, weights: Tensor) -> Tensor:
        """Send the gradient of sum_r weights_r KL_r back from the scored rows of logits [R, V]; the KL [N] of each.

        clean [N, V] has the scored rows alone; weights [N].
        """
        gradient = torch.zeros_like(logits)
        divergence = torch.empty(len(scored), device=logits.device)
        for rows in row_blocks(clean):
            before, after = widened(clean[rows], logits.detach().index_select(0, scored[rows]))
            p, q = before.softmax(-1), after.softmax(-1)
            change = (q - p) * weights[rows, None]
            divergence[rows] = kl_of_rows(before, after, p, q)
            gradient.index_copy_(0, scored[rows], change.to(gradient.dtype))
        torch.autograd.grad(logits, self.starts, gradient)
        self.starts = []
        return divergence
