"""What a checkpoint's config says about its quantiser, and which quantisers unpack their weights on loading."""

from __future__ import annotations

from typing import Any

UNPACKED = "compressed-tensors"


def quantiser_of(config: Any) -> str:
    """The method a checkpoint is quantised with ("gptq", "fp8" ...), or ""."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "unnamed method")


def asks_to_dequantise(config: Any) -> bool:
    """Whether loading by this config is to unpack the weights; the config then says so.

    compressed-tensors would unpack them in the first forward otherwise, and that fails while a scope is open. Rounding
    of activations stays part of the forward.
    """
    if quantiser_of(config) != UNPACKED:
        return False
    config.quantization_config["dequantize"] = True
    return True


def rounds_activations(module: Any) -> bool:
    """Whether a linear of compressed-tensors rounds its input or output in its forward: no product of two matrices."""
    scheme = getattr(module, "quantization_scheme", None)
    return bool(getattr(scheme, "input_activations", None) or getattr(scheme, "output_activations", None))
