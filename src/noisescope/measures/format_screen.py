"""A number format screened: what rounding weights, inputs of linears, or keys and values would cost, site by site.

The error d_t that rounding puts on a token t is known exactly, so it is projected on the gradient of that token:
a_t = g_t . d_t, and the predicted KL is the sum over tokens of sqrt(1 + a_t^2) - 1. Why, and how well that ranks, is in
format_costs.py. A site's errors are

    weights       (Wq - W) x_t      on the output of a linear, or the table row read by an embedding
    activations   W (q(x_t) - x_t)  on the output of a linear
    keys, values  q(k_t) - k_t      on what attention reads of token t, all heads together

Predictions add up over sites, so they can't see errors that compound, and rounding is no small error everywhere: trust
the order more than the size.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from noisescope.injection import Injection
from noisescope.measures.format_costs import SampleCosts
from noisescope.model.anatomy import ATTENTION, EXPERTS, MODULE, Anatomy, Unit
from noisescope.probe.formats import Format, quantise
from noisescope.probe.function_mode import WeightUse
from noisescope.probe.recorded_call import RecordedCall
from noisescope.sites import CACHED, FUSED, Site

PRODUCTS = ("matmul", "bmm")


class QuestionScreen(SampleCosts):
    """Projects a format's errors on gradients.

    with QuestionScreen(model, injection) as screen, torch.enable_grad():
        screen.samples = ids_of_the_batch
        screen.score(model(tokens).logits.flatten(0, 1), scored, keys, draws=2, seed=0)
    screen.sums[site][sample]
    """

    nothing_seen = "nothing that could be rounded was seen: `noisescope inspect` shows what is visible"

    def __init__(self, model: nn.Module, where: Injection, *, anatomy: Anatomy | None = None) -> None:
        super().__init__(model, anatomy)
        assert isinstance(where.perturbation, Format)
        self.where, self.format = where, where.perturbation
        self.of_cache = bool({"kv_cache", *CACHED} & (where.operators or frozenset()))

    def unpredicted(self, anatomy: Anatomy) -> list[str]:
        """Sites that the injection falls on and that have no prediction, such as experts of an unknown kernel."""
        sites = [(unit, op) for unit in anatomy.units for op in unit.injectable if self.where.selects(unit.site(op))]
        seen = {(site.module, site.operator) for site in self.sums}
        return sorted(
            str(unit.site(op))
            for unit, op in sites
            if not self._predicts(unit, op) or (unit.kind == EXPERTS and (unit.module, op) not in seen)
        )

    def _predicts(self, unit: Unit, operator: str) -> bool:
        if self.of_cache:
            return unit.kind == ATTENTION
        if operator == "embedding":
            return self.where.tensor == "weight"
        packed = unit.packed and self.where.tensor == "weight"
        return unit.kind in (MODULE, EXPERTS) and operator == "linear" and not packed

    def reads(self, unit: Unit, operator: str) -> bool:
        if self.of_cache:
            chosen = any(self.where.selects(unit.site(name)) for name in CACHED)
            return unit.kind == ATTENTION and chosen and operator in (FUSED, *PRODUCTS)
        return self._predicts(unit, operator) and self.where.selects(unit.site(operator))

    def _where(self, unit: Unit, operator: str) -> bool:
        return operator == "embedding" or self.reads(unit, operator)

    def read_gradient(self, call: RecordedCall, y: Tensor) -> None:
        if self.of_cache:
            self._read_cached(call)
            return
        if call.operator == "embedding":
            self._project(call, call.site, y, (self._table_error(call),), lambda error: error)
            return
        found, on_weights = self.product(call), self.where.tensor == "weight"
        if found is None:
            return
        weight, multiply = found

        def linear_error(x: Tensor, weight: Tensor) -> Tensor:
            if on_weights:
                return multiply(x.float(), quantise(weight, self.format, weight=True).float() - weight.float())
            return multiply(quantise(x, self.format).float() - x.float(), weight.float())

        self._project(call, call.unit.site("linear"), y, (call.tensors[0], weight), linear_error)

    def _table_error(self, call: RecordedCall) -> Tensor:
        """What an embedding gives from its rounded table, less what it gives: some scale their rows."""
        with WeightUse(call.callee, lambda weight: quantise(weight.detach(), self.format, weight=True)):
            rounded: Tensor = type(call.callee).forward(call.callee, *call.args, **call.kwargs)
        clean = call.output_tensor
        assert clean is not None
        return rounded.detach().float() - clean.detach().float()

    def _read_cached(self, call: RecordedCall) -> None:
        if call.operator == FUSED:
            found = dict(zip(CACHED, (call.attention.key, call.attention.value), strict=True))
        elif call.occurrence < len(CACHED):  # q k^T, then P v; keys come transposed
            found = {CACHED[call.occurrence]: call.inputs[-1]}
        else:
            return
        for name, tensor in found.items():
            site = call.unit.site(name)
            if not self.where.selects(site) or not tensor.requires_grad:
                continue
            turned = name == "keys" and call.operator != FUSED

            def cached_error(tensor: Tensor, turned: bool = turned) -> Tensor:
                stored = tensor.transpose(-1, -2) if turned else tensor
                return quantise(stored, self.format).float() - stored.float()

            self._project(call, site, tensor, (tensor,), cached_error, turned=turned, by_head=True)

    def _project(
        self,
        call: RecordedCall,
        site: Site,
        y: Tensor,
        needed: tuple[Tensor, ...],
        error: Callable[..., Tensor],
        *,
        turned: bool = False,
        by_head: bool = False,
    ) -> None:
        """In backward, project error(*needed) on the gradient of y."""
        unit = call.unit

        def add(gradient: Tensor, *given: Tensor) -> None:
            g = gradient.transpose(-1, -2) if turned else gradient
            products = (error(*given) * g.float()).sum(-1)  # [B, T], [B * T], or by head [B, H, S] or [B * H, S]
            if by_head:
                assert self.samples is not None
                products = products.view(self.samples.numel(), -1, products.shape[-1]).sum(1)
            self.recorded.append((site, self.costs(products, unit)))

        self.on_gradient(call, y, needed, add)
