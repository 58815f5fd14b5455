"""Compares a model's buffers and attributes with those that its class creates from the config.

The model is built again on the meta device, which uses no memory. Buffers that are not in the checkpoint (rotary
frequencies, scales) are then computed on the host by the class's own initialisation. Models without a config are
compared block by block instead.
"""

from __future__ import annotations

import copy
import dis
import functools
import inspect
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from noisescope.localization.state_fault import ADAPTED, Compared, StateFault
from noisescope.localization.weight_difference import same_bits
from noisescope.model.forwards import embeddings_of

_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_CHANGING = ("dynamic", "longrope")  # rotary frequencies that follow the length of the text
# Set by users or while running, and of no effect on what a forward computes.
_FREE = {
    "training", "gradient_checkpointing", "padding_idx", "pad_token_id", "num_labels", "problem_type", "vocab_size",
    "max_seq_len_cached", "name_or_path", "inplace", "in_features", "out_features", "num_embeddings", "embedding_dim",
    "loss_type", "kernel_config", "router_aux_loss_coef", "jitter_noise", "scale_grad_by_freq", "sparse",
}  # fmt: skip
_FREE_IN_CONFIG = _FREE | {
    "dtype", "torch_dtype", "use_cache", "return_dict", "num_hidden_layers", "tie_word_embeddings", "id2label",
    "label2id", "quantization_config", "transformers_version", "is_decoder", "is_encoder_decoder",
}  # fmt: skip
_CLASSES = {
    "scaling": "gain", "scale": "gain", "scale_attn": "gain", "norm_factor": "gain", "inv_norm_factor": "gain",
    "attention_scaling": "gain", "embed_scale": "gain", "sliding_window": "mask", "is_causal": "mask",
    "layer_idx": "stale data", "num_key_value_groups": "swapped channels", "num_heads": "swapped channels",
}  # fmt: skip


def fresh_model(model: Any, *, default: torch.dtype = torch.float32) -> tuple[Any, str]:
    """The model built from its config on the meta device, with real buffers; the second value is the error, if any.

    `default` is torch's default dtype while the buffers are computed.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            with torch.device("meta"):
                fresh = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
        except Exception as error:  # a class may need more than a config
            return None, f"{type(model).__name__} can't be built from its config ({type(error).__name__})"
        for module in fresh.modules():
            module._is_hf_initialized = False
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.full_like(buffer, _unset(buffer), device="cpu")
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(default)
            fresh.initialize_weights()
        except Exception as error:
            return fresh, f"initialisation of {type(model).__name__} failed ({type(error).__name__})"
        finally:
            torch.set_default_dtype(before)
    return fresh, ""


def _unset(buffer: Tensor) -> float:
    """A value that no initialisation leaves in a buffer; booleans have none and are not compared."""
    if buffer.is_floating_point() or buffer.is_complex():
        return math.nan
    return 0 if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).min or torch.iinfo(buffer.dtype).max


# -- the config itself


def compare_with_stored_config(model: Any, folder: str | Path, *, loaded: bool) -> Compared:
    """Compare the config in memory with that of the checkpoint: a forward reads windows, caps and scales from it.

    `load` changes none of these values; whoever wraps a model may have loaded it with others.
    """
    try:
        stored = type(model.config).from_pretrained(folder, local_files_only=True).to_dict()
    except Exception as error:  # no config of this class there
        return Compared(notes=(f"the config was not compared with the checkpoint's ({type(error).__name__})",))
    here, there = (dict(_plain_values(each)) for each in (model.config.to_dict(), stored))
    common = here.keys() & there.keys()
    faults = [
        StateFault(
            "",
            f"the config's {name} is {here[name]!r}; in the checkpoint's config {there[name]!r}",
            _CLASSES.get(name.rpartition(".")[2], "unknown"),
            sure=loaded,
        )
        for name in sorted(common)
        if here[name] != there[name]
    ]
    return Compared(tuple(faults), len(common))


def _plain_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and strings of a config that a forward may read; the model itself shows how many layers it has."""
    for name, value in values.items():
        free = name in _FREE_IN_CONFIG or name.startswith(("_", "output_")) or name.endswith(("_token_id", "dropout"))
        if isinstance(value, Mapping) and not free:
            yield from _plain_values(value, f"{prefix}{name}.")
        elif isinstance(value, _PLAIN) and not free:
            yield f"{prefix}{name}", value


# -- buffers


def compare_buffers(model: nn.Module, fresh: nn.Module, *, was_cast: Mapping[torch.dtype, bool]) -> Compared:
    """Compare buffers that are not in the checkpoint with those computed on the host.

    `was_cast` lists dtypes that the whole model may have been cast to and back, so rounded buffers are not faults.
    """
    others = dict(fresh.named_modules())
    faults: list[StateFault] = []
    skipped: list[tuple[str, str]] = []
    compared = 0
    for path, module in model.named_modules():
        other = others.get(path.replace(ADAPTED, ""))
        for name in sorted(module._non_persistent_buffers_set):
            found = module._buffers.get(name)
            if found is None:
                continue
            expected = None if other is None or type(other) is not type(module) else other._buffers.get(name)
            reason = _no_comparison(module, found, expected)
            if reason or expected is None:
                skipped.append((f"{path}.{name}", reason))
                continue
            compared += 1
            if not any(fault.module == path for fault in faults):  # one is enough: inv_freq has a copy beside it
                faults += _buffer_faults(path, name, found.detach().cpu(), expected, was_cast)
    return Compared(tuple(faults), compared, tuple(skipped))


def _no_comparison(module: nn.Module, found: Tensor, expected: Tensor | None) -> str:
    if expected is None:
        return "the model built from the config has no such buffer"
    kinds: Any = vars(module).get("rope_type", "")
    if any(kind in _CHANGING for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
        return "depends on the sequence length"
    if found.shape != expected.shape or found.device.type == "meta":
        return "different shape, or offloaded"
    unset = expected.isnan() if expected.is_floating_point() or expected.is_complex() else expected == _unset(expected)
    return "the class has no code that recomputes it" if expected.dtype == torch.bool or bool(unset.any()) else ""


def _buffer_faults(
    path: str, name: str, found: Tensor, expected: Tensor, was_cast: Mapping[torch.dtype, bool]
) -> Iterator[StateFault]:
    wanted = expected.to(found.dtype)
    if same_bits(found, wanted):
        return
    kind = "position" if "inv_freq" in name or "rotary" in path.lower() else "unknown"
    if not found.is_floating_point():
        yield StateFault(path, f"the buffer {name} differs from the one built from the config", kind)
        return
    # Devices compute powers and quotients to an ulp or two, and a cast to 16 bits may then go either way. A float64
    # model may have computed them in float32, before it was cast.
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)
    gap = (found.double() - wanted.double()).abs()
    if bool((gap <= (8 if eps < 1e-5 else 1) * eps * wanted.double().abs()).all()):
        return
    rounded = {kind: wanted.to(kind).to(found.dtype) for kind in was_cast if eps < 1e-5}
    short = [kind for kind, value in rounded.items() if torch.allclose(found, value, rtol=8 * eps, atol=0)]
    if short:
        words = f"the buffer {name} is {found.dtype} but its values are rounded to {short[0]}".replace("torch.", "")
        yield StateFault(path, words, "truncation", sure=not any(was_cast[kind] for kind in short))
        return
    worst = float((gap / wanted.double().abs().clamp_min(1e-30)).nan_to_num(torch.inf).max())
    yield StateFault(path, f"the buffer {name} differs from the one built from the config by up to {worst:.2g}", kind)


# -- attributes


def compare_attributes(model: nn.Module, fresh: nn.Module) -> Compared:
    """Compare plain attributes and activation classes of each module with those that the config gives."""
    others = dict(fresh.named_modules())
    in_order = _layers_in_order(model)  # as they still are where layers were taken out
    classes = {base for module in fresh.modules() for base in type(module).__mro__}
    running = {name for each in classes for name in _set_while_running(each)}
    faults: list[StateFault] = []
    own: Counter[str] = Counter()  # classes that the config does not give
    own_code: list[str] = []
    compared = 0
    for path, module in model.named_modules():
        other = others.get(path.replace(ADAPTED, ""))
        if other is None:
            continue
        faults += _functions_for_modules(path, module, other)
        if type(module) is not type(other):
            faults += _activation_fault(path, module, other)
            own[f"{_distinct_name(type(module), type(other))} in place of {type(other).__name__}"] += 1
            own_code.append(f"{type(module).__name__} at {path}")
            continue
        here, there = plain_attributes(module), plain_attributes(other)
        common = (here.keys() & there.keys()) - running
        compared += len(common)
        for name in sorted(common):
            if here[name] != there[name] and not _both_nan(here[name], there[name]):
                sure = not _is_dropout(module, name) and not (name == "layer_idx" and in_order)
                words = f"the attribute {name} is {here[name]!r}; the config gives {there[name]!r}"
                faults.append(StateFault(path, words, _CLASSES.get(name, "unknown"), sure=sure))
    scales = _adapter_scales(model)
    faults += scales.faults
    compared += scales.compared
    notes = [
        f"{words} in {count} module{'s' * (count > 1)}: checked against its own code, not the config's"
        for words, count in own.items()
    ]
    return Compared((*faults, *_untied(model, fresh)), compared, notes=tuple(notes), own_code=tuple(own_code))


def _distinct_name(kind: type, other: type) -> str:
    """With its package where both classes have one name, as PEFT's Linear and torch's."""
    alike = kind.__name__ == other.__name__
    return f"{kind.__module__.partition('.')[0]}'s {kind.__name__}" if alike else kind.__name__


def _adapter_scales(model: nn.Module) -> Compared:
    """LoRA's factors against alpha and rank. Those of all modules together may be scaled on purpose: that is noted."""
    found: list[tuple[str, str, float, float]] = []
    for path, module in model.named_modules():
        held = vars(module)
        factors, ranks, alphas = (held.get(name) for name in ("scaling", "r", "lora_alpha"))
        if isinstance(factors, dict) and isinstance(ranks, dict) and isinstance(alphas, dict):
            for name in factors.keys() & ranks.keys() & alphas.keys():
                root = math.sqrt if held.get("use_rslora", {}).get(name) else float
                found.append((path, name, float(factors[name]), alphas[name] / root(ranks[name])))
    alike = len({round(factor / expected, 6) for _, _, factor, expected in found if expected}) == 1
    faults = [
        StateFault(
            path, f"the scaling of {name} is {factor:.6g}; alpha and rank give {expected:.6g}", "gain", sure=not alike
        )
        for path, name, factor, expected in found
        if not math.isclose(factor, expected, rel_tol=1e-6)
    ]
    return Compared(tuple(faults), len(found))


def _functions_for_modules(path: str, module: nn.Module, other: nn.Module) -> Iterator[StateFault]:
    """Submodules that were replaced by plain functions, which noisescope can't observe."""
    for name in other._modules:
        if name in vars(module) and callable(vars(module)[name]):
            words = f"{name} is a plain {type(vars(module)[name]).__name__}; the config gives a module"
            yield StateFault(path, words, "unknown")


def _untied(model: Any, fresh: Any) -> Iterator[StateFault]:
    """An output embedding that the class ties to the input embedding but that holds different numbers."""
    made = [getattr(each, "weight", None) for each in embeddings_of(fresh)]
    if made[0] is None or made[0] is not made[1]:
        return
    weights = [getattr(each, "weight", None) for each in embeddings_of(model)]
    plain = [w for w in weights if type(w) is nn.Parameter and w.device.type != "meta"]
    if len(plain) < 2 or plain[0] is plain[1] or plain[0].shape != plain[1].shape or plain[0].dtype != plain[1].dtype:
        return
    first, last = (w.detach().cpu() for w in plain)
    if not same_bits(first, last):
        path = next(name for name, module in model.named_modules() if module is embeddings_of(model)[1])
        rows = tuple((first != last).any(-1).nonzero().flatten().tolist())
        words = f"the config ties its weight to the input embedding, but {len(rows)} of its {len(first)} rows differ"
        yield StateFault(path, words, "stale data", channels=rows[:64])


def _layers_in_order(model: nn.Module) -> bool:
    """Whether each block has one layer index and the indices increase from block to block of a stack."""
    stacks: dict[str, dict[str, set[int]]] = {}
    for path, module in model.named_modules():
        index = vars(module).get("layer_idx")
        if isinstance(index, int):
            stack, block = (*re.split(r"\.([0-9]+)", path, maxsplit=1), "")[:2]
            stacks.setdefault(stack, {}).setdefault(block, set()).add(index)
    blocks = [list(indices.values()) for indices in stacks.values()]
    return all(len(each) == 1 for stack in blocks for each in stack) and all(
        one < other for stack in blocks for (one,), (other,) in pairwise(stack)
    )


@functools.cache
def _set_while_running(kind: type) -> frozenset[str]:
    """Attributes set by methods other than the constructor, whose values depend on what ran."""
    if kind.__module__.partition(".")[0] in ("torch", "builtins") or kind.__name__ == "PreTrainedModel":
        return frozenset()
    methods = [inspect.unwrap(each) for name, each in vars(kind).items() if callable(each) and name != "__init__"]
    steps = (step for each in methods if isinstance(each, FunctionType) for step in dis.get_instructions(each))
    return frozenset(step.argval for step in steps if step.opname == "STORE_ATTR")


def plain_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers, strings, dtypes, lists of them and names of functions, except those without effect."""
    found = {name: value for name, value in vars(module).items() if name[:1] != "_" and name not in _FREE}
    plain = {name: value for name, value in found.items() if isinstance(value, _PLAIN)}
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, (tuple, list))}
    functions = {
        name: f.__qualname__ for name, f in found.items() if isinstance(f, (FunctionType, BuiltinFunctionType))
    }
    return plain | functions | {name: each for name, each in lists.items() if all(isinstance(x, _PLAIN) for x in each)}


def _both_nan(one: Any, other: Any) -> bool:
    return isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)


def _is_dropout(module: nn.Module, name: str) -> bool:
    """Whether the module is dropout, which is off in evaluation."""
    return "drop" in name.lower() or "dropout" in type(module).__name__.lower()


def _activation_fault(path: str, module: nn.Module, other: nn.Module) -> Iterator[StateFault]:
    """An activation function other than the config's; other classes are replaced on purpose (adapters, quantisers)."""
    known = ("torch.nn.modules.activation", "transformers.activations")
    if type(module).__module__ in known and type(other).__module__ in known:
        words = f"the activation is {type(module).__name__}; the config gives {type(other).__name__}"
        yield StateFault(path, words, "function table")


def odd_ones_out(model: nn.Module, blocks: tuple[str, ...]) -> Compared:
    """Attributes in which a single block differs from all other blocks, of which there must be at least 2."""
    faults: list[StateFault] = []
    compared = 0
    modules = dict(model.named_modules())
    groups: dict[tuple[str, type[nn.Module]], list[tuple[str, dict[str, Any]]]] = {}
    for block in blocks:
        for path, module in modules[block].named_modules(prefix=block):
            groups.setdefault((path.removeprefix(block), type(module)), []).append((path, plain_attributes(module)))
    for group in groups.values():
        for name in group[0][1]:
            having = [(path, held[name]) for path, held in group if name in held]
            usual, count = Counter(value for _, value in having).most_common(1)[0]
            compared += len(having)
            if len(having) >= 3 and count == len(having) - 1:
                path, value = next((path, value) for path, value in having if value != usual)
                words = f"the attribute {name} is {value!r}; in the other {count} blocks {usual!r}"
                faults.append(StateFault(path, words, _CLASSES.get(name, "unknown"), sure=False))
    return Compared(tuple(faults), compared)
