"""What noise costs: time of a noisy forward over a clean one, in interleaved pairs, with a clean/clean arm.

    python benchmarks/overhead.py                      # CPU: SmolLM2-135M's shape, a small model, peers if installed
    python benchmarks/overhead.py --device cuda        # CUDA-graph replay: Qwen2.5-1.5B's shape in bfloat16

Weights are random (only time is measured). Timed: the model's forward, or forward and backward. Not timed: entering the
scope, the first calls, capturing graphs. A ratio is the median over pairs; its interval is a bootstrap of that median.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers

import noisescope as ns

Run = Callable[[], Any]


def interval(values: list[float], *, repeats: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(repeats))
    return medians[int(0.025 * repeats)], medians[int(0.975 * repeats)]


def compare(arms: dict[str, Run], clean: Run, pairs: int, seconds: Callable[[Run], float]) -> list[dict[str, Any]]:
    """Each arm against the clean run next to it, all arms in turn, order shuffled in every round."""
    arms = {"clean / clean": clean, **arms}
    for run in [clean, *arms.values()]:
        for _ in range(3):
            run()
    ratios: dict[str, list[float]] = {name: [] for name in arms}
    order = random.Random(1)
    for _ in range(pairs):
        for name in order.sample(list(arms), len(arms)):
            if order.random() < 0.5:
                base, arm = seconds(clean), seconds(arms[name])
            else:
                arm, base = seconds(arms[name]), seconds(clean)
            ratios[name].append(arm / base)
    rows = []
    for name, values in ratios.items():
        low, high = interval(values)
        rows.append({"arm": name, "ratio": statistics.median(values), "low": low, "high": high, "n": len(values)})
    return rows


def show(title: str, rows: list[dict[str, Any]], targets: dict[str, float]) -> None:
    print(f"\n{title}")
    for row in rows:
        target = targets.get(row["arm"])
        verdict = "" if target is None else f"  target {target:.2f}: {'met' if row['low'] <= target else 'NOT met'}"
        print(f"  {row['arm']:<44} {row['ratio']:.3f}  [{row['low']:.3f}, {row['high']:.3f}]  n={row['n']}{verdict}")
        if target is not None:
            row["target"], row["met"] = target, row["low"] <= target


def llama(layers: int, width: int, inner: int, heads: int, kv: int, vocab: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, vocab_size=vocab, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def host_seconds(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def under(model: torch.nn.Module, injection: ns.Injection, run: Run) -> Run:
    """A run inside a scope of its own for each measurement."""
    return _Scoped(model, injection, run)


class _Scoped:
    """Calls the model inside a scope; entering and leaving happen around the clock, not inside it."""

    def __init__(self, model: torch.nn.Module, injection: ns.Injection, run: Run) -> None:
        self.model, self.injection, self.run = model, injection, run

    def __call__(self) -> None:
        self.seconds()

    def seconds(self) -> float:
        with ns.inject(self.model, self.injection):
            self.run()  # a scope's first call also looks at what changed
            return host_seconds(self.run)


def cpu_seconds(run: Run) -> float:
    if isinstance(run, _Scoped):
        return run.seconds()
    run()  # as a scope's first call is not timed, so that both sides find the same caches
    return host_seconds(run)


def cpu(pairs: int) -> list[dict[str, Any]]:
    noise = ns.Gaussian(0.05)
    tables = []
    with torch.no_grad():
        model = llama(30, 576, 1536, 9, 3, 49152)
        tokens = torch.randint(0, 49152, (4, 128))
        run = lambda: model(tokens)  # noqa: E731
        arms = {
            "one layer, linears": under(model, ns.Injection(noise, operators={"linear"}, layers={15}), run),
            "all linears": under(model, ns.Injection(noise, operators={"linear"}), run),
            "every operator": under(model, ns.Injection(noise), run),
        }
        rows = compare(arms, run, pairs, cpu_seconds)
        title = "SmolLM2-135M's shape, 4 x 128 tokens, float32"
        show(title, rows, {"one layer, linears": 1.02, "all linears": 1.10, "every operator": 1.6})
        tables.append({"case": title, "rows": rows})

        for batch, length, target in ((2, 128, 1.02), (1, 1, 1.05)):
            small = llama(12, 256, 704, 4, 4, 1024)
            ids = torch.randint(0, 1024, (batch, length))
            run_small = lambda small=small, ids=ids: small(ids)  # noqa: E731
            name = "model.layers.6.mlp.down_proj"
            arms = {
                "one linear (down_proj of layer 6)": under(small, ns.Injection(noise, modules=(name,)), run_small),
                "one layer, linears": under(small, ns.Injection(noise, operators={"linear"}, layers={6}), run_small),
            }
            arms |= peers(small, name, ids)
            rows = compare(arms, run_small, pairs * 4, cpu_seconds)
            title = f"12 layers, d = 256, {batch} x {length} tokens, float32"
            show(title, rows, {key: target for key in arms if key.startswith("one ")})
            tables.append({"case": title, "rows": rows})
    return tables


def peers(model: torch.nn.Module, name: str, ids: torch.Tensor) -> dict[str, Run]:
    """Other injectors on the same linear, where they are installed (`pip install --no-deps mrfi pytorchfi`)."""
    arms: dict[str, Run] = {}
    try:
        from mrfi import MRFI, EasyConfig

        config = EasyConfig.load_string(
            "faultinject:\n  - type: activation_out\n    error_mode:\n      method: NormalDisturb\n      std: 0.05\n"
            f"    module_fullname: ['{name}']\n"
        )
        mrfi = MRFI(copy.deepcopy(model), config)
        arms["MRFI on that linear"] = lambda: mrfi(ids)
    except ImportError:
        print("  (MRFI is not installed: its arm is left out)")
    try:
        from pytorchfi.core import fault_injection

        corrupted, embedded = _pytorchfi(fault_injection, copy.deepcopy(model), name, ids)
        arms["PyTorchFI, with a wrapper and counter of our own"] = lambda: corrupted(embedded)
    except ImportError:
        print("  (PyTorchFI is not installed: its arm is left out)")
    return arms


def _pytorchfi(injector: Any, model: Any, name: str, ids: torch.Tensor) -> tuple[Run, torch.Tensor]:
    """PyTorchFI profiles with float inputs, so it gets embeddings; and its layer counter is never reset, so ours is."""
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    target, state = linears.index(name), {"at": 0}

    class Embedded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: torch.Tensor) -> Any:
            state["at"] = 0
            return self.inner(inputs_embeds=x)

    def noise(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        at, state["at"] = state["at"], state["at"] + 1
        return output + 0.05 * output * torch.randn_like(output) if at == target else None

    embedded = model.get_input_embeddings()(ids).detach()
    fi = injector(Embedded(), ids.shape[0], input_shape=list(embedded.shape[1:]), layer_types=[torch.nn.Linear])
    return fi.declare_neuron_fi(function=noise), embedded


def replayed(run: Run) -> Run:
    """A run captured as a CUDA graph: what is timed is the device's work, not Python's."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def device_seconds(run: Run) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def cuda(pairs: int) -> list[dict[str, Any]]:
    config = transformers.Qwen2Config(
        hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, vocab_size=151936, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.Qwen2Model(config).to(torch.bfloat16).eval()
        states = torch.randn(8, 512, 1536, dtype=torch.bfloat16)
    noise = ns.Gaussian(0.05)
    linears = ns.Injection(noise, operators={"linear"})
    three = ns.Injection(noise, operators={"linear"}, layers={12, 13, 14})
    tables = []

    def forward() -> Any:
        with torch.no_grad():
            return model(inputs_embeds=states, use_cache=False).last_hidden_state

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(inputs_embeds=states, use_cache=False).last_hidden_state.float().square().mean().backward()

    for title, run, cases, targets in (
        (
            "Qwen2.5-1.5B's shape (body), bfloat16, 8 x 512, forward, CUDA-graph replay",
            forward,
            {"all linears": linears, "three layers, linears": three, "every operator": ns.Injection(noise)},
            {"all linears": 1.15, "three layers, linears": 1.02},
        ),
        (
            "the same, a training step (forward and backward noise on linears)",
            step,
            {"all linears, both ways": linears},
            {"all linears, both ways": 1.3},
        ),
    ):
        with ExitStack() as graphs:
            clean = replayed(run)
            arms = {}
            for name, injection in cases.items():
                scope = ns.inject(model, injection)
                graphs.enter_context(scope)
                arms[name] = replayed(run)
                graphs.pop_all().close()
            rows = compare(arms, clean, pairs, device_seconds)
        show(title, rows, targets)
        tables.append({"case": title, "rows": rows})
    eager = {}
    with torch.no_grad():
        for name, injection in {"all linears": linears, "three layers, linears": three}.items():
            eager[name] = _SyncScoped(model, injection, forward)
        rows = compare(
            eager,
            forward,
            pairs,
            lambda run: run.seconds() if isinstance(run, _SyncScoped) else _sync(run),
        )
    show("the same forward, eager (host overhead included; no target)", rows, {})
    tables.append({"case": "eager", "rows": rows})
    return tables


def _sync(run: Run) -> float:
    run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - start


class _SyncScoped(_Scoped):
    def seconds(self) -> float:
        with ns.inject(self.model, self.injection):
            return _sync(self.run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = (
        torch.cuda.get_device_name()
        if options.device == "cuda"
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {machine}")
    tables = cuda(options.pairs) if options.device == "cuda" else cpu(options.pairs)
    if options.json:
        result = {
            "machine": machine,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tables": tables,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
