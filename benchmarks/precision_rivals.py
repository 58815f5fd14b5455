"""How others choose precisions: scores, rules and searches that precision.py measures beside noisescope's plans.

Each score gives a cost for every linear and format, from the same samples, and the same solver makes a plan of them.

=================  ===================================================================================================
HAWQ-like          mean diagonal of the Fisher matrix of a linear (for its Hessian) x squared rounding error of its
                   weight, as HAWQ-V2 does; labels are drawn from the model
diagonal Fisher    sum over weights of squared gradient x squared rounding error; labels are those of the text
ModelOpt's score   sum over tokens and outputs of squared gradient x squared error of the output, as `auto_quantize`
                   scores by gradients; linears are free, where the tool keeps q, k, v together, and gate, up
one at a time      the KL measured with one linear in a 4-bit format; 8 bits count as free (precision.py)
=================  ===================================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from noisescope.measures.format_costs import WEIGHT_FORMATS
from noisescope.plans.precision import Module, Plan, plan_of
from noisescope.probe.formats import quantise

Scores = dict[str, dict[str, float]]  # cost by linear and format


def with_scores(modules: Sequence[Module], scores: Mapping[str, Mapping[str, float]]) -> list[Module]:
    """The same modules at other costs."""
    return [
        replace(m, choices={f: replace(c, predicted_kl=scores[m.name][f]) for f, c in m.choices.items()})
        for m in modules
    ]


@contextlib.contextmanager
def calls_of(linears: Mapping[str, Any]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """Input and output of the last call of each linear."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
            found[name] = (args[0].detach(), output)

        return hook

    hooks = [linear.register_forward_hook(keep(name)) for name, linear in linears.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def gradient_scores(
    model: Any,
    names: Sequence[str],
    formats: Sequence[str],
    tokens: Sequence[Tensor],
    squares: Mapping[str, Tensor],
    *,
    seed: int = 0,
) -> dict[str, Scores]:
    """The three scores that need gradients alone; a sample [1, T] at a time, for squares of its own gradient."""
    modules = dict(model.named_modules())
    linears = {name: modules[name] for name in names}
    errors = {name: [rounding_error(linears[name], fmt, squares[name]) for fmt in formats] for name in names}
    kinds = ("HAWQ-like", "diagonal Fisher", "ModelOpt's score")
    sums = {name: torch.zeros(len(kinds), len(formats), device=tokens[0].device) for name in names}
    draw = torch.Generator(tokens[0].device).manual_seed(seed)
    with torch.enable_grad(), calls_of(linears) as calls:
        for ids in tokens:
            inputs = model.get_input_embeddings()(ids).detach().requires_grad_(True)
            logits = model(inputs_embeds=inputs, use_cache=False).logits[:, :-1].flatten(0, 1).float()
            drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=draw).flatten()
            outputs = [calls[name][1] for name in names]
            text = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            model_own = torch.nn.functional.cross_entropy(logits, drawn, reduction="sum")
            by_text = torch.autograd.grad(text, outputs, retain_graph=True)
            by_own = torch.autograd.grad(model_own, outputs)
            for name, of_text, of_own in zip(names, by_text, by_own, strict=True):
                x = calls[name][0][0].float()
                squares, trace = (of_text[0].float().T @ x).square(), (of_own[0].float().T @ x).square().mean()
                for at, error in enumerate(errors[name]):
                    sums[name][0, at] += trace * error.square().sum()
                    sums[name][1, at] += (squares * error.square()).sum()
                    sums[name][2, at] += (of_text[0].float().square() * (x @ error.T).square()).sum()
            calls.clear()
    tables = {name: found.tolist() for name, found in sums.items()}
    return {
        kind: {name: dict(zip(formats, tables[name][row], strict=True)) for name in names}
        for row, kind in enumerate(kinds)
    }


def rounding_error(linear: Any, fmt: str, squares: Tensor) -> Tensor:
    """Of the rounding that plans are carried out with: clipped ranges fit the linear's inputs."""
    weight = linear.weight.detach().float()
    return quantise(weight, WEIGHT_FORMATS[fmt], weight=True, importance=squares) - weight


# -- rules: linears get 8 bits in a fixed order, as long as the budget allows


def filled(modules: Sequence[Module], order: Sequence[Module], bits: float, low: str, high: str, name: str) -> Plan:
    """All linears in the low format; in this order as many as fit in the high one."""
    chosen = {module.name: low for module in modules}
    weights = sum(module.parameters for module in modules)
    room = (bits - modules[0].choices[low].bits) * weights
    for module in order:
        more = (module.choices[high].bits - module.choices[low].bits) * module.parameters
        if more <= room:
            chosen[module.name], room = high, room - more
    return plan_of(modules, chosen, name)


def first_and_last(modules: Sequence[Module]) -> list[Module]:
    """Blocks from both ends inwards."""
    last = max(module.place for module in modules)
    return sorted(modules, key=lambda module: (min(module.place, last - module.place), module.place))


def llama_cpp(modules: Sequence[Module]) -> list[Module]:
    """The order of llama.cpp's Q4_K_M: v and down of the first and last eighth of the blocks and of every third
    between, then v and down of the others, then the attention's output, then all else."""
    count = max(module.place for module in modules) + 1

    def more_bits(place: int) -> bool:
        return place < count // 8 or place >= 7 * count // 8 or (place - count // 8) % 3 == 2

    def rank(module: Module) -> tuple[int, int]:
        kind = module.name.rpartition(".")[2]
        if kind in ("v_proj", "down_proj"):
            return (0 if more_bits(module.place) else 1, module.place)
        return (2 if kind == "o_proj" else 3, module.place)

    return sorted(modules, key=rank)
