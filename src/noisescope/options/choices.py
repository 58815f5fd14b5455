"""Names that options allow. Whoever needs such a list imports it from here."""

from __future__ import annotations

LEVELS = ("operator", "layer", "channel")
EFFORTS = ("screen", "standard", "full")
GATE_EFFORTS = ("screen", "standard")
LEVEL_ONE = ("linear", "matmul", "bmm", "softmax", "silu", "gelu", "norm")  # the seven of the original method notes
GROUP = "gemm"  # what those notes call "matmul": every product
DEFAULT_OPERATORS = (GROUP, *LEVEL_ONE)
METRICS = ("accuracy", "next_token_accuracy", "agreement")
DTYPES = ("float64", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16")
EXECUTORS = ("local", "ray")
DETAILS = ("sketch", "full")
DEVICES = ("cpu", "cuda", "mps", "xpu", "npu", "hpu", "mtia", "xla", "meta")  # those that people name
TORCH_DEVICES = ("ipu", "mkldnn", "opengl", "opencl", "ideep", "hip", "ve", "fpga", "maia", "lazy", "vulkan",
                 "privateuseone")  # that torch knows besides  # fmt: skip
LOCATE_METHODS = ("auto", "audit", "relations", "replay", "scans", "srdd", "fingerprint")
GRANULARITIES = ("module", "layer")
NARROWEST_BITS, WIDEST_BITS = 3, 16  # of the number formats that are scored: int3 and bf16
TOOLS = ("llm-compressor", "modelopt", "autoround", "torchao", "json")
TARGETS = ("W8A8", "W4A16", "W4A4")
REPORT_FORMATS = ("json", "md", "html", "pdf")
TEMPLATES = ("github", "gitlab")
TRAINING_METHODS = ("supervised", "grpo")
STARTS = ("bundled", "scratch")
