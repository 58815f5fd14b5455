"""Healthy models: nothing in them computes wrongly, so every alarm is a false one. Most come in two dtypes."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import field_architectures
import field_attention as a
import field_kernels as k
import torch
from field_cases import half_of, order_of
from field_models import build
from field_own import OwnLayerNorm, OwnModel, OwnRMSNorm
from field_scopes import both, forward_kernel, forward_output, intercepted, output_hook
from torch import Tensor, nn
from torch.nn import functional as F

from noisescope.testing import tiny_model

_B, _F, _H = "bfloat16", "float32", "float16"


@dataclass(frozen=True)
class HealthyModel:
    """A model to build; `scope` is open while it runs (autocast, another right kernel)."""

    name: str
    kind: str
    build: Callable[[], nn.Module] = field(compare=False)
    scope: Callable[[nn.Module], AbstractContextManager[None]] | None = field(default=None, compare=False)

    @property
    def half(self) -> str:
        return half_of(self.name)


def architectures() -> Iterator[HealthyModel]:
    for kind in field_architectures.names():
        for dtype in (_F, _B):
            attention = ("eager", "sdpa")[int(order_of(kind + dtype)[0], 16) % 2]
            make = functools.partial(field_architectures.architecture, kind, dtype, attention)
            yield HealthyModel(f"architecture/{kind}.{dtype}.{attention}", "architecture", make)
    for model in ("llama", "gpt2", "qwen3", "opt", "mistral-eager", "bloom"):
        yield HealthyModel(f"architecture/{model}.{_H}", "architecture", functools.partial(build, model, _H))
    for dtype in (_F, _B, _H):
        yield HealthyModel(f"architecture/demo.{dtype}", "architecture", functools.partial(build, "demo", dtype))


def adapters() -> Iterator[HealthyModel]:
    def adapted(model: str, dtype: str, targets: list[str], **settings: Any) -> nn.Module:
        import peft

        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(4)
            config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False, **settings)
            return peft.get_peft_model(build(model, dtype), config).eval()  # type: ignore[no-any-return]

    table: tuple[tuple[str, str, str, list[str], dict[str, Any]], ...] = (
        ("lora", "llama", _F, ["q_proj", "v_proj"], {}),
        ("lora", "qwen2", _B, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], {}),
        ("lora", "gpt2", _F, ["c_attn"], {"fan_in_fan_out": True}),
        ("lora-scaled", "opt", _B, ["fc1", "fc2"], {"lora_alpha": 32, "use_rslora": True}),
        ("dora", "llama", _F, ["q_proj"], {"use_dora": True}),
        ("dora", "mistral", _B, ["down_proj"], {"use_dora": True}),
    )
    for name, model, dtype, targets, settings in table:
        make = functools.partial(adapted, model, dtype, targets, **settings)
        yield HealthyModel(f"adapter/{name}.{model}.{dtype}", "adapter", make)


def quantised() -> Iterator[HealthyModel]:
    def torchao(model: str, config: str) -> nn.Module:
        import torchao.quantization as quantization  # type: ignore[import-untyped,unused-ignore]

        made = build(model, _B if config == "Int8WeightOnlyConfig" else _F)
        quantization.quantize_(made, getattr(quantization, config)())
        return made

    def float8() -> nn.Module:
        import torchao.float8 as ao  # type: ignore[import-untyped,unused-ignore]

        made = tiny_model("llama", layers=3, hidden_size=64, intermediate_size=128).bfloat16()
        return ao.convert_to_float8_training(made)  # type: ignore[no-any-return]

    def dynamic() -> nn.Module:
        quantise: Any = torch.ao.quantization.quantize_dynamic
        return quantise(build("llama", _F), {nn.Linear})  # type: ignore[no-any-return]

    for model in ("llama", "gpt_neox", "qwen2"):
        for config in ("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig"):
            make = functools.partial(torchao, model, config)
            yield HealthyModel(f"quantised/{config}.{model}", "quantised", make)
    yield HealthyModel("quantised/float8-training.llama", "quantised", float8)
    yield HealthyModel("quantised/dynamic-int8.llama", "quantised", dynamic)


def compiled() -> Iterator[HealthyModel]:
    def make(model: str, dtype: str, backend: str) -> nn.Module:
        compiled: Any = torch.compile(build(model, dtype), backend=backend)
        return compiled  # type: ignore[no-any-return]

    for model, dtype, backend in (("llama", _F, "eager"), ("gpt2", _B, "aot_eager"), ("own-gpt", _F, "aot_eager")):
        yield HealthyModel(
            f"compiled/{model}.{dtype}.{backend}", "compiled", functools.partial(make, model, dtype, backend)
        )


def autocast() -> Iterator[HealthyModel]:
    @contextlib.contextmanager
    def cast(dtype: torch.dtype) -> Iterator[None]:
        with torch.autocast("cpu", dtype=dtype):
            yield

    for model in ("llama", "gpt2", "mixtral", "own-gpt", "qwen2-eager"):
        scope = functools.partial(lambda _, dtype: cast(dtype), dtype=torch.bfloat16)
        yield HealthyModel(f"autocast/{model}.bfloat16", "autocast", functools.partial(build, model, _F), scope)


# -- hand-written parts


class LoraLinear(nn.Linear):
    """Adds its low-rank product in a forward of its own."""

    a: Tensor
    b: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + (x @ self.a.T) @ self.b.T * 0.5


class TernaryLinear(nn.Linear):
    """Weights of three values and inputs of 8 bits, rounded in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        unit = 127 / x.abs().amax(-1, keepdim=True).clamp_min(1e-5)
        size = 1 / self.weight.abs().mean().clamp_min(1e-5)
        weight = (self.weight * size).round().clamp(-1, 1) / size
        return F.linear((x * unit).round().clamp(-128, 127) / unit, weight, self.bias)


class CosineHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.normalize(x, dim=-1), F.normalize(self.weight, dim=-1), self.bias) * 10


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 8.0


def hand_written() -> Iterator[HealthyModel]:
    variants: dict[str, dict[str, Any]] = {
        "layer-norm": {"norm": OwnLayerNorm},
        "rms-norm-alibi": {"norm": OwnRMSNorm, "alibi": True},
        "parallel-tied-scaled": {"norm": OwnLayerNorm, "parallel": True, "tied": True, "scale": 7.0},
        "parallel-alibi": {"norm": OwnRMSNorm, "parallel": True, "alibi": True},
        "torch-norm-tied": {"norm": nn.LayerNorm, "tied": True},
        "torch-rms-norm": {"norm": nn.RMSNorm, "scale": 2.5},
    }

    def own(settings: dict[str, Any], dtype: str) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(5)
            return OwnModel(**settings).to(getattr(torch, dtype)).eval()

    for name, settings in variants.items():
        for dtype in (_F, _B):
            yield HealthyModel(f"own/{name}.{dtype}", "own", functools.partial(own, settings, dtype))

    def changed(cls: type[nn.Module], path: str, dtype: str) -> nn.Module:
        model = build("llama", dtype)
        module = model.get_submodule(path)
        module.__class__ = cls
        if isinstance(module, LoraLinear):
            draw = torch.Generator().manual_seed(6)
            module.a = nn.Parameter(torch.randn(4, module.in_features, generator=draw).to(module.weight.dtype) * 0.1)
            module.b = nn.Parameter(torch.randn(module.out_features, 4, generator=draw).to(module.weight.dtype) * 0.1)
        return model

    places: tuple[tuple[type[nn.Module], str], ...] = (
        (LoraLinear, "model.layers.1.self_attn.q_proj"),
        (TernaryLinear, "model.layers.1.mlp.up_proj"),
        (CosineHead, "lm_head"),
        (ScaledEmbedding, "model.embed_tokens"),
    )
    for cls, path in places:
        for dtype in (_F, _B):
            yield HealthyModel(f"own/{cls.__name__}.{dtype}", "own", functools.partial(changed, cls, path, dtype))


def other_kernels() -> Iterator[HealthyModel]:
    """Right results by other means: sums in another order, tiles, hooks and wrappers that change nothing."""

    def tiled(model: nn.Module) -> AbstractContextManager[None]:
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        return both(*(forward_kernel(m, k.tiled(16)) for m in linears))

    def flash(model: nn.Module) -> AbstractContextManager[None]:
        return intercepted([], (F.scaled_dot_product_attention,), a.kernel(a.Flash(8)))

    def wrapped(model: nn.Module) -> AbstractContextManager[None]:
        return both(*(forward_output(m, lambda: lambda y: y) for m in list(model.modules())[1:]))

    def hooked(model: nn.Module) -> AbstractContextManager[None]:
        return both(*(output_hook(m, lambda: lambda y: y) for m in model.modules() if isinstance(m, nn.Linear)))

    def cut(t: Tensor) -> Tensor:
        return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)

    def tf32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].dtype != torch.float32:
            return func(*args, **kwargs)
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        y = cut(args[0]) @ cut(args[1]).T
        return y if bias is None else y + bias

    @contextlib.contextmanager
    def short_products(model: nn.Module) -> Iterator[None]:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            with intercepted([], (F.linear,), tf32):
                yield
        finally:
            torch.set_float32_matmul_precision(before)

    scopes: tuple[tuple[str, Callable[[nn.Module], AbstractContextManager[None]], tuple[tuple[str, str], ...]], ...] = (
        ("tiled-linears", tiled, (("llama", _F), ("qwen2", _B), ("opt", _F))),
        ("tiled-attention", flash, (("llama", _F), ("mistral", _B), ("gpt2", _B))),
        ("wrapped-forwards", wrapped, (("llama", _B), ("own-gpt", _F))),
        ("idle-hooks", hooked, (("qwen3", _B), ("own-alibi", _F))),
        ("tf32-allowed", short_products, (("llama", _F), ("granite", _F))),
    )
    for name, scope, models in scopes:
        for model, dtype in models:
            make = functools.partial(build, model, dtype)
            yield HealthyModel(f"kernel/{name}.{model}.{dtype}", "kernel", make, scope)


def healthy_models() -> tuple[HealthyModel, ...]:
    """All that the installed packages allow, in a fixed pseudo-random order."""
    found = [*architectures(), *compiled(), *autocast(), *hand_written(), *other_kernels()]
    found += list(adapters()) if importlib.util.find_spec("peft") else []
    found += list(quantised()) if importlib.util.find_spec("torchao") else []
    assert len({model.name for model in found}) == len(found)
    return tuple(sorted(found, key=lambda model: order_of(model.name)))
