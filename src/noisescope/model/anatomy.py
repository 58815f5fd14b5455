"""The anatomy of a model: blocks, operators and where each is computed, by structure and role.

A `Unit` is one module that is an operator (a Linear, an RMSNorm), or one whose forward makes the function calls that
are operators (an attention module calls matmul and softmax; MoE experts call grouped products that are `linear`).
Names of functions don't decide: GPT-2's Conv1D is `addmm`, Falcon's linear is `@`, gelu_new is made of tanh.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.model.anatomy_as_tables import anatomy_sheet
from noisescope.model.forwards import embeddings_of
from noisescope.sites import CACHED, OPERATORS, Place, Site, place_order
from noisescope.tables import Sheet, Tabular

# Kinds of unit: the module is the operator, or it holds function calls that are.
MODULE, ATTENTION, EXPERTS, ROUTER, ROTARY, CALLS = "module", "attention", "experts", "router", "rotary", "calls"

# Roles of projections by the last part of their module's name.
ROLES = {f"{role}_proj": role for role in ("q", "k", "v", "o", "gate", "up", "gate_up", "down")}

_ATTENTION_CLASS = re.compile(r"attention|attn|multihead", re.IGNORECASE)
_PACKED_LINEAR = re.compile(r"linear", re.IGNORECASE)  # QuantLinear, Linear4bit, WQLinear_GEMM ...
_SERVING_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True)
class Unit:
    """A module of the model and the operators it computes."""

    module: str
    kind: str
    place: Place
    component: str
    operators: tuple[str, ...]
    certain: bool = True  # False: a function call that may or may not be made (a block's own gelu)
    packed: str = ""  # class name of a quantised linear whose weight can't be perturbed
    counts: tuple[int, ...] = ()  # how often each operator is computed in one forward; () = once each

    @property
    def role(self) -> str:
        """What a projection does in attention, in a gated MLP or for MoE experts, by its usual name; "" if unknown."""
        return "router" if self.component == "router" else ROLES.get(self.module.rpartition(".")[2], "")

    @property
    def injectable(self) -> tuple[str, ...]:
        """What an injection may fall on: its operators, and of attention the keys and values that it reads."""
        return (*self.operators, *CACHED) if self.kind == ATTENTION else self.operators

    @property
    def left_alone(self) -> bool:
        """Injected only if named: the choice of experts, and the angles of rotary embeddings."""
        return self.component == "router" or self.place == "rotary"

    def site(self, operator: str, **parts: Any) -> Site:
        return Site(operator, self.place, self.module, self.component, **parts)


@dataclass(frozen=True)
class Anatomy(Tabular):
    """Blocks by index, units in module order, and what can't be observed."""

    architecture: str
    blocks: tuple[str, ...]
    units: tuple[Unit, ...]
    notes: tuple[str, ...] = ()

    def operators(self) -> set[str]:
        """The operators this model is certain to compute."""
        return {op for unit in self.units if unit.certain for op in unit.operators}

    def absent(self) -> list[str]:
        """Operators that no unit computes, or may compute."""
        present = {op for unit in self.units for op in unit.operators}
        return [op for op in OPERATORS if op not in present]

    def sheet(self) -> Sheet:
        return anatomy_sheet(self, f"{self.architecture}, {len(self.blocks)} blocks")

    def check_layers(self, places: Iterable[Place]) -> None:
        """Reject a block that the model does not have."""
        blocks = len(self.blocks)
        for place in places:
            if isinstance(place, int) and not 0 <= place < blocks:
                raise InvalidInput(f"layer {place} is out of range: the model has {blocks} blocks, 0 to {blocks - 1}")

    def places(self) -> list[Place]:
        return sorted({unit.place for unit in self.units}, key=place_order)

    def counts(self, *, left_alone: bool = False) -> dict[Place, dict[str, int]]:
        """How often one forward computes each operator, per place: what an injection into everything hits.

        `left_alone=True` counts instead what is hit only when named (routers, rotary angles). Calls that may or may
        not be made are not counted; MoE experts count as grouped products (the eager loop makes them per expert hit).
        """
        totals: dict[Place, dict[str, int]] = {}
        for unit in self.units:
            if not unit.certain or unit.left_alone != left_alone:
                continue
            here = totals.setdefault(unit.place, {})
            for operator, count in zip(unit.operators, unit.counts or (1,) * len(unit.operators), strict=True):
                here[operator] = here.get(operator, 0) + count
        return {place: totals[place] for place in sorted(totals, key=place_order)}


def dissect(model: nn.Module, *, require_blocks: bool = True) -> Anatomy:
    """The anatomy of a model; without `require_blocks` a model without blocks is one block 0, as for `noisy_ops`.

    >>> ns.dissect(ns.load("tiny:llama").model).absent()
    ['bmm', 'gelu']
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper; names are those of the model inside
    _refuse_serving_engine(model)
    if not isinstance(model, nn.Module):
        hint = ": pass subject.model" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise UnsupportedModel(f"expected a torch.nn.Module, got {type(model).__name__}{hint}")
    blocks = [name for stack in _stacks(model, "") for name in stack]
    if not blocks:
        if require_blocks:
            raise UnsupportedModel(
                f"{type(model).__name__} has no transformer blocks, an nn.ModuleList whose members each contain an "
                "attention module or at least two linears. Pass the model that contains that list."
            )
        blocks = [""]
    modules = dict(model.named_modules(remove_duplicate=False))
    units: list[Unit] = []
    notes: list[str] = []
    convolutions: list[str] = []
    first: dict[int, str] = {}  # a module listed twice is one block: its calls can't be distinguished
    for name in blocks:
        if first.setdefault(id(modules[name]), name) != name:
            notes.append(f"{name} is the same module as {first[id(modules[name])]}: both names refer to one block")
    index_of = {name: index for index, name in enumerate(first.values())}
    place_of = {name: index_of[first[id(modules[name])]] for name in blocks}
    head = _head_names(model)
    seen: set[tuple[int, Place]] = set()
    for name, module in modules.items():
        if _inside_multihead(name, modules):
            continue
        block = _block_of(name, place_of)
        place: Place = block if block is not None else _outer_place(name, module, head)
        if (id(module), place) in seen:  # one module under two names, as T5's shared embedding
            continue
        seen.add((id(module), place))
        unit = _unit(name, module, place, inside_block=block is not None)
        if unit is not None and _only_holds(name, module, modules):
            notes.append(f"{name}: it only holds the table that the other embeddings share and is never called")
        elif unit is not None:
            units.append(unit)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            convolutions.append(name)
    if convolutions:
        more = f" and {len(convolutions) - 1} more" if len(convolutions) > 1 else ""
        notes.append(f"{convolutions[0]}{more}: convolutions are not noisescope operators and are left unchanged")
    for name, index in index_of.items():
        units.append(Unit(name, MODULE, index, "", ("residual",)))
        units.extend(_loose_calls(name, modules[name], index, units))
    return Anatomy(_architecture(model), tuple(index_of), tuple(units), tuple(notes))


def _unit(name: str, module: nn.Module, place: Place, *, inside_block: bool) -> Unit | None:
    """The unit for a module, if any. Order matters: the first matching role wins."""
    label = type(module).__name__
    low = label.lower()
    if place == "rotary":
        kinds = len(set(getattr(module, "layer_types", ()))) or 1  # Gemma 3: sliding and full layers turn differently
        return Unit(name, ROTARY, place, "", ("matmul",), counts=(kinds,)) if "rotary" in low else None
    component = _component(name, inside_block)
    leaf = not any(True for child in module.children() for _ in child.parameters())
    if inside_block and (_is_router(name, module) or "router" in low):
        if _is_linear(module):
            return Unit(name, MODULE, place, "router", ("linear",))
        mentioned = _names_in_forward(module)
        sigmoid = "sigmoid" in mentioned and "softmax" not in mentioned  # as DeepSeek's
        operators = (*(("linear",) if _own_matrices(module) else ()), *(() if sigmoid else ("softmax",)))
        return Unit(name, ROUTER, place, "router", operators) if operators else None
    if leaf and _is_linear(module):
        packed = label if not _float_weight(module) else ""
        return Unit(name, MODULE, place, component or ("mlp" if inside_block else ""), ("linear",), packed=packed)
    if isinstance(module, nn.Embedding):
        return Unit(name, MODULE, place, "", ("embedding",))
    if leaf and "norm" in low and not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return Unit(name, MODULE, place, component, ("norm",))
    if leaf and ("silu" in low or "swish" in low):
        return Unit(name, MODULE, place, "mlp" if inside_block else "", ("silu",))
    if leaf and "gelu" in low:
        return Unit(name, MODULE, place, "mlp" if inside_block else "", ("gelu",))
    if isinstance(module, nn.MultiheadAttention):
        packed_qkv = module.in_proj_weight is not None and not name.endswith("multihead_attn")  # (cross attention)
        return Unit(
            name, ATTENTION, place, "attention", ("linear", "matmul", "softmax"), counts=(2 if packed_qkv else 4, 2, 1)
        )
    if inside_block and _is_innermost_attention(module):
        matrices = _own_matrices(module)
        own_weights = ("linear",) if matrices else ()
        product = "bmm" if _names_in_forward(module) & {"bmm", "baddbmm"} else "matmul"
        counts = (*((matrices,) if matrices else ()), 2, 1)  # QK^T and PV
        return Unit(name, ATTENTION, place, "attention", (*own_weights, product, "softmax"), counts=counts)
    if inside_block and _own_matrices(module) and not _leaf_role(module):
        return Unit(name, EXPERTS, place, "mlp", ("linear",), counts=(_own_matrices(module),))
    return None


def _leaf_role(module: nn.Module) -> bool:
    """Whether a module is itself one operator."""
    low = type(module).__name__.lower()
    return (
        _is_linear(module)
        or isinstance(module, nn.Embedding)
        or any(k in low for k in ("norm", "silu", "gelu", "conv"))
    )


def _loose_calls(name: str, block: nn.Module, index: int, units: list[Unit]) -> Iterator[Unit]:
    """A block with no activation module may call F.silu or F.gelu itself; one with no attention class, softmax."""
    here = [unit for unit in units if unit.place == index]
    present = {op for unit in here for op in unit.operators}
    held = _held_functions(block)
    operators: tuple[str, ...] = ()
    if not present & {"silu", "gelu"}:
        known = tuple(op for op in ("silu", "gelu") if op in held)
        if known:
            yield Unit(name, CALLS, index, "mlp", known)
        elif "relu" not in held:
            operators += ("silu", "gelu")
    if operators:
        yield Unit(name, CALLS, index, "mlp", operators, certain=False)
    if not any(unit.kind == ATTENTION for unit in here):
        yield Unit(name, CALLS, index, "attention", ("matmul", "bmm", "softmax"), certain=False)
    if "norm" not in present:
        yield Unit(name, CALLS, index, "", ("norm",), certain=False)


def _held_functions(block: nn.Module) -> set[str]:
    """Activation functions that a block keeps as attributes (`self.activation = F.gelu`), and any kind of ReLU."""
    functions = {"silu": (F.silu,), "gelu": (F.gelu,), "relu": (F.relu, torch.relu)}
    values = [value for module in block.modules() for value in vars(module).values()]
    held = {name for name, known in functions.items() if any(value is f for value in values for f in known)}
    if any("relu" in type(module).__name__.lower() for module in block.modules()):
        held.add("relu")
    return held


def _stacks(module: nn.Module, prefix: str) -> Iterator[list[str]]:
    """The outermost lists of blocks, in module order (an encoder's, then a decoder's)."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) and all(_is_block(m) for m in module):
        yield [f"{prefix}{index}" for index in range(len(module))]
        return
    for name, child in module.named_children():
        yield from _stacks(child, f"{prefix}{name}.")


def _is_block(module: nn.Module) -> bool:
    """A member of a stack: it has children, and an attention module or at least two linears among them."""
    if not any(True for _ in module.children()):
        return False
    inner = [m for m in module.modules() if m is not module]
    attention = any(isinstance(m, nn.MultiheadAttention) or _ATTENTION_CLASS.search(type(m).__name__) for m in inner)
    return attention or sum(_is_linear(m) for m in inner) >= 2


def _is_linear(module: nn.Module) -> bool:
    """nn.Linear and similar: transformers' Conv1D (an addmm), packed linears of quantisers."""
    label = type(module).__name__
    if isinstance(module, nn.Linear) or (keeps_weight_transposed(module) and hasattr(module, "nf")):
        return True
    return bool(_PACKED_LINEAR.search(label)) and not any(True for _ in module.children()) and _holds_a_matrix(module)


def _holds_a_matrix(module: nn.Module) -> bool:
    """A matrix or packed numbers: the norms and experts of a model that is called Kimi Linear have neither."""
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    sized = any(hasattr(module, name) for name in ("in_features", "infeatures", "input_size"))
    return sized or any(t.dim() == 2 or not t.is_floating_point() or t.dtype.itemsize < 2 for t in own)


def keeps_weight_transposed(module: nn.Module) -> bool:
    """transformers' Conv1D (GPT-2) keeps its weight as [in, out], unlike a Linear's [out, in]."""
    return type(module).__name__ == "Conv1D"


def linear_weight(module: Any) -> Tensor:
    """A linear's own weight as [out, in], detached: a view of the parameter, so that it can be changed in place."""
    weight: Tensor = module.weight.detach()
    return weight.T if keeps_weight_transposed(module) else weight


def _float_weight(module: nn.Module) -> bool:
    """Whether the weight is a matrix of plain numbers (an 8-bit float needs its scale to mean anything)."""
    weight = getattr(module, "weight", None)
    plain = getattr(weight, "dtype", None) in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    return weight is not None and plain and weight.dim() == 2


def _is_router(name: str, module: nn.Module) -> bool:
    """The small projection that chooses experts, by its usual names."""
    return name.rsplit(".", 1)[-1] in ("gate", "router", "shared_expert_gate") and (
        _is_linear(module) or "router" in type(module).__name__.lower() or "gate" in type(module).__name__.lower()
    )


def _is_innermost_attention(module: nn.Module) -> bool:
    def named(m: nn.Module) -> bool:  # quantised weights are buffers
        return bool(_ATTENTION_CLASS.search(type(m).__name__) and (*m.parameters(), *m.buffers()))

    return named(module) and not any(named(m) for m in module.modules() if m is not module)


def _names_in_forward(module: nn.Module) -> set[str]:
    """Names that the module's own forward mentions (BLOOM's attention has baddbmm, Llama's has no product at all)."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _own_matrices(module: nn.Module) -> int:
    """Weights held directly, as MoE experts do ([experts, out, in]); a bias there is [experts, out]."""
    held = [p.dim() for p in module._parameters.values() if p is not None and p.dim() >= 2 and p.is_floating_point()]
    return sum(dim == max(held) for dim in held)


def _only_holds(name: str, module: nn.Module, modules: dict[str, nn.Module]) -> bool:
    """T5's `shared` is never called: the encoder's and the decoder's own embeddings use its table."""
    if name.rpartition(".")[2] != "shared" or not isinstance(module, nn.Embedding):
        return False
    others = (m for m in modules.values() if m is not module and isinstance(m, nn.Embedding))
    return any(other.weight is module.weight for other in others)


def _inside_multihead(name: str, modules: dict[str, nn.Module]) -> bool:
    """nn.MultiheadAttention never calls its out_proj module: it reads the weight."""
    parent = name.rpartition(".")[0]
    return bool(parent) and isinstance(modules.get(parent), nn.MultiheadAttention)


def _component(name: str, inside_block: bool) -> str:
    if not inside_block:
        return ""
    if ".router." in name:
        return "router"
    return "attention" if re.search(r"(attn|attention)($|[.])", name, re.IGNORECASE) else ""


def _block_of(name: str, place_of: dict[str, int]) -> int | None:
    """The block that holds a module, by whole path parts ("layers.1" does not hold "layers.10")."""
    if "" in place_of:
        return place_of[""]
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((place_of[prefix] for prefix in prefixes if prefix in place_of), None)


def _outer_place(name: str, module: nn.Module, head: tuple[set[str], str]) -> Place:
    """The named place of a module outside the blocks."""
    output_modules, body = head
    low = name.lower()
    if "rotary" in low or "rotary" in type(module).__name__.lower():
        return "rotary"
    if name in output_modules:
        return "lm_head"
    if isinstance(module, nn.Embedding) or re.search(r"embed|project_in|\bwte\b|\bwpe\b", low):
        return "embed"
    if "norm" in type(module).__name__.lower() and (not body or low.startswith(body)):
        return "final_norm"
    return "lm_head"


def _head_names(model: nn.Module) -> tuple[set[str], str]:
    """Names of the output embedding, and the prefix of the body in a Hugging Face model."""
    output = embeddings_of(model)[1]
    names = {name for name, module in model.named_modules() if module is output}
    prefix = getattr(model, "base_model_prefix", "")
    body = f"{prefix}." if isinstance(prefix, str) and prefix and hasattr(model, prefix) else ""
    return names, body


def _architecture(model: nn.Module) -> str:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return f"{type(model).__name__} ({kind})" if kind else type(model).__name__


def _refuse_serving_engine(model: object) -> None:
    package = type(model).__module__.partition(".")[0]
    if package in _SERVING_ENGINES:
        raise UnsupportedModel(
            f"{type(model).__name__} is a {_SERVING_ENGINES[package]} object: its fused kernels run in other "
            "processes, where noisescope can't inject anything. Load the same checkpoint with transformers "
            "(noisescope.load); `noisescope compare transformers:MODEL vllm:MODEL` shows how vLLM differs from it."
        )
