"""The Fisher screen: one forward and a few backwards predict the cost of noise at every site and channel.

For noise d on an activation y, to second order,

    KL(clean || noisy) = 1/2 E[(d . g)^2],   E[g g^T] = F = J^T (diag(p) - p p^T) J,

summed over scored positions, where J is the Jacobian of the logits in y and F the Fisher information. g is J^T v for a
random v at the logits with covariance diag(p) - p p^T (`fisher_factor`): one backward gives it for every activation.
(Labels drawn from p have that covariance, too; but where the model is sure, most draws say nothing and a few say all.)
Noise of independent elements with standard deviation s * w gives s^2/2 * sum_i w_i^2 g_i^2, which splits over channels.
Only activations carry gradients; weights are frozen.

The prediction adds up over sites, so it can't see errors that compound: that is what injection is for.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn

from noisescope import progress
from noisescope.errors import InvalidInput, NothingInjected, UnsupportedModel
from noisescope.injection import Injection, Perturbation
from noisescope.model.anatomy import EXPERTS, Anatomy, Unit
from noisescope.model.forwards import evaluating
from noisescope.probe.draws import mix64, wide_window
from noisescope.probe.forward_patching import unwrap
from noisescope.probe.noise import Gaussian, Uniform
from noisescope.probe.recomputation import Recomputing, kept
from noisescope.probe.watch import RecordedCall, watch
from noisescope.sites import FUSED, Site

_BLOCK = 256  # rows of logits in float32 at once


@dataclass(frozen=True)
class SiteSums:
    """Sums at noise of scale 1 over everything seen at a site, and over all draws."""

    samples: dict[int, float]  # sample -> sum over its elements of w^2 g^2
    channels: Tensor  # the same per channel and token, summed over samples, [C] float64


@dataclass
class _Recorded:
    """Sums of all sites of one device, side by side: an accelerator is slower at starting kernels than at running them.

    widths are the channels of each site; channels [sum of widths] float64.
    """

    sites: tuple[Site, ...]
    widths: list[int]
    channels: Tensor
    samples: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (sample ids [B], sums [sites, B])

    def sums(self) -> dict[Site, SiteSums]:
        """By site; this synchronises with the device."""
        totals: list[dict[int, float]] = [{} for _ in self.sites]
        for owners, table in self.samples:
            for total, row in zip(totals, table.double().tolist(), strict=True):
                for owner, value in zip(owners.tolist(), row, strict=True):
                    total[owner] = total.get(owner, 0.0) + value
        parts = torch.split(self.channels, self.widths)
        return {s: SiteSums(total, part) for s, total, part in zip(self.sites, totals, parts, strict=True)}


class GradientScreen:
    """Sends gradients of random directions at the logits back, and reads them at chosen operators on the way.

    Weights are frozen and the model is in evaluation mode meanwhile. Subclasses say where and how gradients are read.
    """

    def __init__(self, model: nn.Module, anatomy: Anatomy | None = None) -> None:
        self.model = unwrap(model)
        self._scope = watch(model, self._on_call, self._where, recomputed=True, anatomy=anatomy)
        self.samples: Tensor | None = None  # ids [B] of the batch that runs now
        self.tokens: Tensor | None = None  # scored tokens [B] of each
        self.starts: list[Tensor] = []  # where gradients begin: the embeddings
        self.backwards = 1  # in all: batches x draws
        self._awaited = self._read = 0  # gradients of the batch that runs now, and those read in all backwards
        self._scopes = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as entered:
            entered.enter_context(self._scope)
            entered.enter_context(Recomputing(self.model, self._scope.anatomy))
            entered.enter_context(evaluating(self.model))
            entered.enter_context(_frozen(self.model))
            self._scopes = entered.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        self.starts = []
        self._scopes.__exit__(kind, *error)

    def reads(self, unit: Unit, operator: str) -> bool:
        """Whether gradients are read at an operator of a unit."""
        raise NotImplementedError

    def read_gradient(self, call: RecordedCall, y: Tensor) -> None:
        """Register what to do with the gradient of a call's output y, by `on_gradient`; also in a recomputation."""
        raise NotImplementedError

    def on_gradient(self, call: RecordedCall, y: Tensor, needed: tuple[Tensor, ...], act: Callable[..., None]) -> None:
        """In backward, act(gradient of y, *needed); what is needed is not held until then."""
        given = kept(call.unit, *needed)

        def read(gradient: Tensor) -> None:
            act(gradient, *given())
            self._read += 1
            self._report()

        if not call.context.recomputing:  # only the first forward's graph is gone through
            self._awaited += 1
            y.register_hook(read)  # type: ignore[no-untyped-call]

    def take_in(self) -> None:
        """Process the result of one backward."""
        raise NotImplementedError

    def _where(self, unit: Unit, operator: str) -> bool:
        return operator == "embedding" or (operator != FUSED and self.reads(unit, operator))

    def _on_call(self, call: RecordedCall) -> Any:
        y = call.output_tensor
        if y is None or not torch.is_grad_enabled():
            return None
        begins = call.operator == "embedding" and not y.requires_grad
        if begins:
            y = y.detach().requires_grad_(True)
            self.starts.append(y)
        if y.requires_grad and self.reads(call.unit, call.operator):
            self.read_gradient(call, y)
        if not begins:
            return None
        return (y, *call.output[1:]) if isinstance(call.output, tuple) else y

    def score(self, logits: Tensor, scored: Tensor, keys: Tensor, *, draws: int, seed: int) -> None:
        """Send random gradients from the scored rows of logits [R, V] back, `draws` times.

        scored [N] are rows, keys [N] name them by (sample, position), so that a draw does not depend on what else is in
        the batch.
        """
        if not self.starts:
            raise UnsupportedModel(
                "no embedding was called, so there is no tensor to differentiate from: call the model with token ids"
            )
        for draw in range(draws):
            gradient = fisher_factor(logits.detach(), scored, keys, seed * 1_000_003 + draw)
            torch.autograd.grad(logits, self.starts, gradient, retain_graph=draw + 1 < draws)
            del gradient
            self.take_in()
            self._report()  # of an accelerator, hooks run in a thread that nobody listens to
        self.starts, self._awaited = [], 0

    def _report(self) -> None:
        """How far all backwards are, by the gradients that were read."""
        if self._awaited:
            progress.part(self._read / (self._awaited * self.backwards))

    def tokens_of(self, like: Tensor) -> Tensor:
        """Scored tokens [B] of each sample, at least 1, as numbers of the same kind as `like`."""
        assert self.samples is not None
        tokens = torch.ones(self.samples.numel()) if self.tokens is None else self.tokens
        return tokens.to(like.device, like.dtype).clamp_min(1)


class Screen(GradientScreen):
    """Sums the predicted cost of noise at each site.

    with Screen(model, injection) as screen, torch.enable_grad():
        screen.samples = ids_of_the_batch
        screen.score(model(tokens).logits.flatten(0, 1), scored, keys, draws=2, seed=0)
    screen.sums[site]
    """

    def __init__(self, model: nn.Module, where: Injection, *, anatomy: Anatomy | None = None) -> None:
        super().__init__(model, anatomy)
        if where.tensor != "output":
            raise InvalidInput(f"the screen predicts the effect of noise on outputs, not on {where.tensor!r}")
        self.where = where
        self.sums: dict[Site, SiteSums] = {}  # after the scope
        self.recorded: list[tuple[Site, Tensor]] = []  # squares [B, C] of each site in the backward that runs now
        self._sums: dict[tuple[torch.device, tuple[Site, ...]], _Recorded] = {}
        self.lost: set[Site] = set()  # sites whose value was changed in place before its gradient came

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        super().__exit__(kind, *error)
        for recorded in self._sums.values():
            for site, found in recorded.sums().items():
                self.sums[site] = found if site not in self.sums else _added(self.sums[site], found)
        if kind is None and not self.sums:
            raise NothingInjected("the screen found no operator: `noisescope inspect` shows what is visible")

    def reads(self, unit: Unit, operator: str) -> bool:
        return self.where.selects(unit.site(operator))

    def read_gradient(self, call: RecordedCall, y: Tensor) -> None:
        site, version = call.site, y._version
        unit, by_head = call.unit, call.by_head  # not the call: it holds y, and y would hold itself through the hook

        def add(gradient: Tensor, value: Tensor) -> None:
            if value._version != version:  # its square would be that of another number
                self.lost.add(site)
            else:
                squares = _squares(self.where.perturbation_at(site), value, gradient)
                self.recorded.append((site, self._by_sample(squares, unit, by_head=by_head)))

        self.on_gradient(call, y, (y,), add)

    def _by_sample(self, squares: Tensor, unit: Unit, *, by_head: bool) -> Tensor:
        """Squares summed over the tokens of each sample, [B, C]."""
        assert self.samples is not None
        batch = self.samples.numel()
        if unit.kind == EXPERTS or squares.shape[0] % batch:  # rows sorted by expert: whose they are is not known
            tokens = self.tokens_of(squares)
            return squares.sum(tuple(range(squares.dim() - 1))) * (tokens / tokens.sum())[:, None]
        if by_head:  # [B, H, T, S] or [B * H, T, S]; inside attention a channel is a head
            return squares.view(batch, -1, *squares.shape[-2:]).sum((2, 3))
        return squares.reshape(batch, -1, squares.shape[-1]).sum(1)  # [B, T, C] or [B * T, C]

    def take_in(self) -> None:
        """Add the result of one backward, all sites of a device at once."""
        assert self.samples is not None
        recorded, self.recorded = self.recorded, []
        for device in dict.fromkeys(squares.device for _, squares in recorded):
            mine = [(site, squares) for site, squares in recorded if squares.device == device]
            sites, widths = tuple(site for site, _ in mine), [squares.shape[1] for _, squares in mine]
            squares = torch.cat([part for _, part in mine], 1)  # [B, sum of widths]
            tokens = self.tokens_of(squares)
            known = squares.isfinite().all(1, keepdim=True)  # a broken sample stays so in `samples`
            channels = torch.where(known, squares / tokens[:, None], 0).sum(0).double()
            lengths = torch.tensor(widths, device=device)
            table = torch.segment_reduce(squares.T.contiguous(), "sum", lengths=lengths, unsafe=True)  # [sites, B]
            sums = self._sums.get((device, sites))
            if sums is None:
                sums = self._sums[device, sites] = _Recorded(sites, widths, channels)
            else:
                sums.channels += channels
            sums.samples.append((self.samples, table))


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient inside; the previous state is restored afterwards."""
    frozen: list[nn.Parameter] = []
    try:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                frozen.append(parameter)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


def fisher_factor(logits: Tensor, scored: Tensor, keys: Tensor, seed: int) -> Tensor:
    """A random gradient v [R, V] at the scored rows of logits with E[v v^T] = diag(p) - p p^T, 0 at all others.

    With xi = +-1 for each token, v = sqrt(p) xi - p (sqrt(p) . xi). Block by block, so that no float32 copy of all is
    made.
    """
    gradient = torch.zeros_like(logits)
    rows = mix64(keys)
    multiplier = int.from_bytes(hashlib.blake2b(f"fisher {seed}".encode(), digest_size=7).digest(), "little") | 1
    for start in range(0, len(scored), _BLOCK):
        part = slice(start, start + _BLOCK)
        p = logits.index_select(0, scored[part]).float().softmax(-1)
        xi = wide_window("normal", rows[part], multiplier, p.shape[1], torch.float32).sign()
        v = p.sqrt().mul_(xi)
        v -= p * v.sum(-1, keepdim=True)
        gradient.index_copy_(0, scored[part], v.to(gradient.dtype))
    return gradient


def _squares(perturbation: Perturbation, y: Tensor, g: Tensor) -> Tensor:
    """The squared product of noise size and gradient."""
    g32 = g.float()
    if isinstance(perturbation, (Gaussian, Uniform)):
        if perturbation.relative_to == "element":
            return g32.mul_(y).square_() if g32 is not g else (g32 * y).square_()
        if perturbation.relative_to == "rms":
            return (g32 * y.float().square().mean(-1, keepdim=True).sqrt()).square_()
        return g32.square()
    # A deterministic error: what counts is its projection on the gradient, token by token. It is spread over the
    # channels by their own squares, so that the channels of a site still add up to it.
    product: Tensor = (perturbation(y, None).float() - y.float()) * g32
    squares = product.square()
    whole = product.sum(-1, keepdim=True).square()
    return squares * (whole / squares.sum(-1, keepdim=True).clamp_min(1e-30))


def _added(a: SiteSums, b: SiteSums) -> SiteSums:
    """A site found in several backwards that reach different sites."""
    samples = {
        name: a.samples.get(name, 0.0) + b.samples.get(name, 0.0) for name in a.samples.keys() | b.samples.keys()
    }
    return SiteSums(samples, a.channels + b.channels)
