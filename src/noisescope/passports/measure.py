"""The passport: a device's arithmetic in one JSON, measured with synthetic operations only.

No settings are changed and no global random state is used: the same device, library and flags give the same passport,
except for the part under "run".
"""

from __future__ import annotations

import datetime
import platform
import time
from pathlib import Path
from typing import Any

import torch

from noisescope import __version__, progress
from noisescope.errors import InvalidInput
from noisescope.passports.diff import KIND, SCHEMA_VERSION
from noisescope.passports.probe_functions import attention, elementwise, functions
from noisescope.passports.probe_invariance import batched, invariance, linear_laws
from noisescope.passports.probe_products import INNER_SIZES, QUICK_INNER_SIZES, products
from noisescope.passports.probe_specials import product_specials
from noisescope.passports.shared_tools import REFUSALS, Operation, Operations, Product, reason

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHORT_DTYPES = {"exact": "float8_e4m3fn", "fast": "float8_e4m3fn, fast accumulation"}


def take_passport(device: str | torch.device = "cpu", *, quick: bool = False) -> dict[str, Any]:
    """Measure a device: accumulator bits, rounding, subnormals, overflow, errors of functions, invariances.

    `quick` takes fewer points, inner sizes and repeats. The answer is plain data, ready for JSON.
    """
    place = _usable(device)
    started = time.perf_counter()
    passport = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "quick": quick,
        "facts": _facts(place),
        "dtypes": examine(Operations(place), quick=quick),
    }
    passport["run"] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.perf_counter() - started, 1),
        "noisescope": __version__,
    }
    return passport


@torch.no_grad()
def examine(operations: Operations, *, quick: bool = False) -> dict[str, Any]:
    """Run every probe on every dtype; a dtype that the device lacks has only `skipped`, the reason."""
    found: dict[str, Any] = {}
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    steps = len(operations.products) + 3  # of a dtype: its products, element by element, functions, attention
    short = [SHORT_DTYPES[mode] for mode in operations.scaled]
    with progress.plan(*(progress.Phase(name, steps) for name in names), *map(progress.Phase, short)):
        for name, dtype in zip(names, DTYPES, strict=True):
            lacking = _lacking(dtype, operations.device)
            progress.begin(name, steps)
            found[name] = {"skipped": lacking} if lacking else _examine_dtype(operations, dtype, quick)
        for name, call in zip(short, operations.scaled.values(), strict=True):
            progress.begin(name)
            found[name] = _examine_short(call, operations.device, quick)
    return found


def _examine_dtype(operations: Operations, dtype: torch.dtype, quick: bool) -> dict[str, Any]:
    device, phase = operations.device, str(dtype).removeprefix("torch.")
    found: dict[str, Any] = {"products": {}}
    for name, call in operations.products.items():
        product = Product(call, dtype, device)
        lines = _examine_product(product, quick)
        if name == "matmul" and "skipped" not in lines:
            lines |= batched(product)
        found["products"][name] = lines
        progress.step(phase)
    found["elementwise"] = elementwise(operations.elementwise, dtype, device)
    progress.step(phase)
    found["functions"] = functions(operations.functions, dtype, device, quick=quick)
    progress.step(phase)
    found["attention"] = attention(operations.attention, dtype, device)
    return found


def _examine_product(product: Product, quick: bool) -> dict[str, Any]:
    try:
        lines, widths = products(product, QUICK_INNER_SIZES if quick else INNER_SIZES)
    except REFUSALS as error:
        return {"skipped": reason(error)}
    return {
        **lines,
        **product_specials(product),
        **invariance(product, widths, quick=quick),
        **linear_laws(product, widths),
    }


def _examine_short(call: Operation, device: torch.device, quick: bool) -> dict[str, Any]:
    """8-bit products: only the product itself exists in these formats."""
    lines = _examine_product(Product(call, torch.float8_e4m3fn, device, torch.bfloat16), quick)
    return lines if "skipped" in lines else {"products": {"scaled_mm": lines}}


def _usable(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
        if place.type == "meta":
            raise InvalidInput("device 'meta' does not compute; choose a real device: cpu, cuda, cuda:1, mps ...")
        if float((torch.ones(1, dtype=torch.float32, device="cpu").to(place) + 1).cpu()) != 2.0:
            raise InvalidInput(f"device {str(device)!r} fails to add 1 and 1, so no passport can be made")
    except (RuntimeError, AssertionError, TypeError) as error:
        cure = "Choose a device this machine has: cpu, cuda, cuda:1, mps ..."
        raise InvalidInput(f"can't compute on device {str(device)!r}: {reason(error)}. {cure}") from error
    return place


def _lacking(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a device can't compute in a dtype, or None."""
    try:
        one = torch.ones(16, 16, dtype=dtype, device="cpu").to(device)
        (one @ one).cpu()
    except REFUSALS as error:
        return reason(error)
    return None


def _facts(device: torch.device) -> dict[str, Any]:
    """What the arithmetic may depend on besides the chip: library, build, flags, threads."""
    facts: dict[str, Any] = {
        "device": str(device.type),
        "name": _device_name(device),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "flags": _flags(device),
    }
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
        facts["vector_unit"] = torch.backends.cpu.get_cpu_capability()
        facts["blas"] = "mkl" if torch.backends.mkl.is_available() else "other"  # type: ignore[no-untyped-call]
        facts["onednn"] = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    if device.type == "cuda":
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(device)))
        facts["cuda"] = torch.version.cuda or torch.version.hip
    return facts


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        try:
            lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        except (OSError, StopIteration):
            return platform.processor() or platform.machine()
    return str(device.type)


def _flags(device: torch.device) -> dict[str, Any]:
    """torch settings that affect products. A setting that can't be read (old and new names mixed) is left out."""
    readers: dict[str, Any] = {
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    }
    if device.type == "cuda":
        matmul = torch.backends.cuda.matmul
        for name in (
            "allow_tf32",
            "allow_fp16_reduced_precision_reduction",
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_accumulation",
        ):
            readers[f"cuda.matmul.{name}"] = lambda name=name: getattr(matmul, name)
        readers["cuda.preferred_blas_library"] = lambda: str(torch.backends.cuda.preferred_blas_library())
    if device.type == "cpu":
        readers["mkldnn.enabled"] = lambda: torch.backends.mkldnn.enabled
    flags = {}
    for name, read in readers.items():
        try:
            flags[name] = read()
        except (RuntimeError, AttributeError):
            continue
    return flags
