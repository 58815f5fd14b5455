"""What a model is made of: blocks, operators and where each is computed, by structure and role.

A `Unit` is one module that is an operator (a Linear, an RMSNorm), or one whose forward makes the function calls that
are operators (an attention module calls matmul and softmax; MoE experts call grouped products that are `linear`).
Names of functions don't decide: GPT-2's Conv1D is `addmm`, Falcon's linear is `@`, gelu_new is made of tanh.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from noisescope.errors import UnsupportedModel
from noisescope.sites import OPERATORS, Place, Site, place_order

# Kinds of unit: the module is the operator, or it holds function calls that are.
MODULE, ATTENTION, EXPERTS, ROUTER, ROTARY, CALLS = "module", "attention", "experts", "router", "rotary", "calls"

_ATTENTION_CLASS = re.compile(r"attention|attn|multihead", re.IGNORECASE)
_PACKED_LINEAR = re.compile(r"linear", re.IGNORECASE)  # QuantLinear, Linear4bit, WQLinear_GEMM ...
_SERVING_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True)
class Unit:
    """A module of the model and the operators computed by it."""

    module: str
    kind: str
    place: Place
    component: str
    operators: tuple[str, ...]
    certain: bool = True  # False: a function call that may or may not be made (a block's own gelu)
    packed: str = ""  # class name of a quantised linear whose weight can't be perturbed

    def site(self, operator: str, **parts: Any) -> Site:
        return Site(operator, self.place, self.module, self.component, **parts)


@dataclass(frozen=True)
class Anatomy:
    """Blocks by index, units in module order, and what can't be seen."""

    architecture: str
    blocks: tuple[str, ...]
    units: tuple[Unit, ...]
    notes: tuple[str, ...] = ()

    def operators(self) -> set[str]:
        """The operators this model surely computes."""
        return {op for unit in self.units if unit.certain for op in unit.operators}

    def absent(self) -> list[str]:
        """Operators that no unit computes, or may compute."""
        present = {op for unit in self.units for op in unit.operators}
        return [op for op in OPERATORS if op not in present]

    def places(self) -> list[Place]:
        return sorted({unit.place for unit in self.units}, key=place_order)


def dissect(model: nn.Module, *, require_blocks: bool = True) -> Anatomy:
    """The anatomy of a model.

    `require_blocks=False` takes a model without blocks as one block 0 (for the process-wide `noisy_ops`, which must
    work on any module).
    """
    _refuse_serving_engine(model)
    if not isinstance(model, nn.Module):
        raise UnsupportedModel(f"expected a torch.nn.Module, got {type(model).__name__}")
    blocks = [name for stack in _stacks(model, "") for name in stack]
    if not blocks:
        if require_blocks:
            raise UnsupportedModel(
                f"{type(model).__name__} has no transformer blocks: noisescope looks for an nn.ModuleList whose members "
                "each hold an attention module or at least two linears. Pass the model that holds that list."
            )
        blocks = [""]
    place_of = {name: index for index, name in enumerate(blocks)}
    units: list[Unit] = []
    notes: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
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
        if unit is not None:
            units.append(unit)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            notes.append(f"{name}: {type(module).__name__} is no operator of noisescope and is left alone")
    for name, index in place_of.items():
        units.append(Unit(name, MODULE, index, "", ("residual",)))
        units.extend(_loose_calls(name, modules[name], index, units))
    return Anatomy(_architecture(model), tuple(blocks), tuple(units), tuple(notes))


def _unit(name: str, module: nn.Module, place: Place, *, inside_block: bool) -> Unit | None:
    """The unit a module is, if any. Order matters: the first role that fits wins."""
    label = type(module).__name__
    low = label.lower()
    if place == "rotary":
        return Unit(name, ROTARY, place, "", ("matmul",)) if "rotary" in low else None
    component = _component(name, inside_block)
    leaf = not any(True for child in module.children() for _ in child.parameters())
    if inside_block and (_is_router(name, module) or "router" in low):
        if _is_linear(module):
            return Unit(name, MODULE, place, "router", ("linear",))
        return Unit(name, ROUTER, place, "router", ("linear", "softmax"))
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
        return Unit(name, ATTENTION, place, "attention", ("linear", "matmul", "softmax"))
    if inside_block and _is_innermost_attention(module):
        own_weights = ("linear",) if _owns_matrix(module) else ()
        product = "bmm" if _names_in_forward(module) & {"bmm", "baddbmm"} else "matmul"
        return Unit(name, ATTENTION, place, "attention", (*own_weights, product, "softmax"))
    if inside_block and _owns_matrix(module) and not _leaf_role(module):
        return Unit(name, EXPERTS, place, "mlp", ("linear",))
    return None


def _leaf_role(module: nn.Module) -> bool:
    """Whether a module is itself one operator."""
    low = type(module).__name__.lower()
    return _is_linear(module) or isinstance(module, nn.Embedding) or any(k in low for k in ("norm", "silu", "gelu", "conv"))


def _loose_calls(name: str, block: nn.Module, index: int, units: list[Unit]) -> Iterator[Unit]:
    """A block with no activation module may call F.silu or F.gelu itself; one with no attention class, softmax."""
    here = [unit for unit in units if unit.place == index]
    present = {op for unit in here for op in unit.operators}
    relu = any(isinstance(module, (nn.ReLU, nn.ReLU6)) for module in block.modules())
    operators: tuple[str, ...] = ()
    if not present & {"silu", "gelu"} and not relu:
        operators += ("silu", "gelu")
    if not any(unit.kind == ATTENTION for unit in here):
        operators += ("matmul", "bmm", "softmax")
    if operators or isinstance(block, nn.TransformerEncoderLayer):
        yield Unit(name, CALLS, index, "mlp", operators, certain=False)


def _stacks(module: nn.Module, prefix: str) -> Iterator[list[str]]:
    """The outermost lists of blocks, in module order (an encoder's, then a decoder's)."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) and all(_is_block(m) for m in child):
            yield [f"{path}.{index}" for index in range(len(child))]
        else:
            yield from _stacks(child, path)


def _is_block(module: nn.Module) -> bool:
    """A member of a stack: it has children, and an attention module or at least two linears among them."""
    if not any(True for _ in module.children()):
        return False
    inner = [m for m in module.modules() if m is not module]
    attention = any(isinstance(m, nn.MultiheadAttention) or _ATTENTION_CLASS.search(type(m).__name__) for m in inner)
    return attention or sum(_is_linear(m) for m in inner) >= 2


def _is_linear(module: nn.Module) -> bool:
    """nn.Linear and its kin, transformers' Conv1D (an addmm), packed linears of quantisers."""
    label = type(module).__name__
    if isinstance(module, nn.Linear) or (label == "Conv1D" and hasattr(module, "nf")):
        return True
    return bool(_PACKED_LINEAR.search(label)) and not any(True for _ in module.children())


def _float_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and getattr(weight, "is_floating_point", lambda: False)() and weight.dim() == 2


def _is_router(name: str, module: nn.Module) -> bool:
    """The small projection that chooses experts, by its usual names."""
    return name.rsplit(".", 1)[-1] in ("gate", "router", "shared_expert_gate") and (
        _is_linear(module) or "router" in type(module).__name__.lower() or "gate" in type(module).__name__.lower()
    )


def _is_innermost_attention(module: nn.Module) -> bool:
    def named(m: nn.Module) -> bool:
        return bool(_ATTENTION_CLASS.search(type(m).__name__)) and any(True for _ in m.parameters())

    return named(module) and not any(named(m) for m in module.modules() if m is not module)


def _names_in_forward(module: nn.Module) -> set[str]:
    """Names that the module's own forward mentions (BLOOM's attention says baddbmm, Llama's says no product at all)."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set(code.co_names) if code is not None else set()


def _owns_matrix(module: nn.Module) -> bool:
    """Weights held directly, as MoE experts do: a float parameter of two or more dimensions."""
    return any(p is not None and p.dim() >= 2 and p.is_floating_point() for p in module._parameters.values())


def _inside_multihead(name: str, modules: dict[str, nn.Module]) -> bool:
    """nn.MultiheadAttention never calls its out_proj module: it reads the weight."""
    parent = name.rpartition(".")[0]
    return bool(parent) and isinstance(modules.get(parent), nn.MultiheadAttention)


def _component(name: str, inside_block: bool) -> str:
    if not inside_block:
        return ""
    return "attention" if re.search(r"(attn|attention)($|[.])", name, re.IGNORECASE) else ""


def _block_of(name: str, place_of: dict[str, int]) -> int | None:
    """The block that holds a module, by whole path parts ("layers.1" does not hold "layers.10")."""
    if "" in place_of:
        return place_of[""]
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        prefix = ".".join(parts[:length])
        if prefix in place_of:
            return place_of[prefix]
    return None


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
    try:
        output = model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        output = None
    names = {name for name, module in model.named_modules() if output is not None and module is output}
    prefix = getattr(model, "base_model_prefix", "")
    body = f"{prefix}." if isinstance(prefix, str) and prefix and hasattr(model, prefix) else ""
    return names, body


def _architecture(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    return f"{type(model).__name__} ({kind})" if kind else type(model).__name__


def _refuse_serving_engine(model: object) -> None:
    package = type(model).__module__.partition(".")[0]
    if package in _SERVING_ENGINES:
        raise UnsupportedModel(
            f"{type(model).__name__} is a {_SERVING_ENGINES[package]} object: its fused kernels run in other processes "
            "where nothing can be injected. Load the same checkpoint with transformers (noisescope.load) instead."
        )
