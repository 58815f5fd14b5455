"""Noise in every module this process calls: the functional interface of the original method notes.

    from noisescope import noisy_ops

    noisy_ops.set_selective_operators(["softmax"])
    noisy_ops.enable_noisy_ops(error_scale=0.05)
    model(tokens)
    noisy_ops.disable_noisy_ops()  # the counts; NothingInjected where nothing was hit

`enable_noisy_ops` takes no model: the outermost module called is opened as `noisescope.inject` would open it, and stays
open until `disable_noisy_ops`, so that backward passes and recomputations find it open. Raw tensor calls outside
modules are not noised; `NoisyMatMul(a, b)` and the other six of its kind are. Settings act from the next call on
and outlive disable; so do counts, until the next enable or reset.

Here "matmul" means all matrix products (linear, matmul, bmm). `None` selects everything (the products, and with
`all_ops_mode` softmax, silu, gelu and norm too), `[]` switches noise off on purpose.

All global state of noisescope is in `state.py` beside this file.

Threads: settings are the process's, and a model is noised in whatever thread calls it. Each thread may have its own
model. One model is one thread's at a time: a second thread that calls it meanwhile gets ModelHeld. A backward pass and
its recomputations belong to the forward that made them, in whatever thread autograd runs them.

Environment (read when this package is imported, never by `import noisescope`): NOISESCOPE_ENABLED, _SCALE, _TYPE,
_ALL_OPS, _FORWARD_ONLY, _BACKWARD_ONLY (both = both phases), _TRAINING_ONLY, _LAYERS ("0,5,9-11", of the first model
with blocks that is called), _OPERATORS, _SEED; the first seven also as VERL_NOISY_OPS_...
`python -m noisescope.noisy_ops script.py ARGS` runs a script with noise on and prints the counts to stderr.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from noisescope.compat.noisy_ops.state import state
from noisescope.errors import InvalidInput
from noisescope.injection import Injection
from noisescope.model.anatomy import dissect
from noisescope.probe.forward_patching import unwrap
from noisescope.probe.noise import Gaussian
from noisescope.sites import GROUPS, PHASES, canonical_operator


def enable_noisy_ops(
    error_scale: float = 0.05,
    error_type: str = "relative_gaussian",
    all_ops_mode: bool = False,
    seed: int | None = None,
) -> None:
    """Turn noise on in every module this process calls from now on.

    error_type: "relative_gaussian" (y + s |y| z), "rms_gaussian" (s times the token's rms), "absolute_gaussian" (s z),
    "uniform" (relative, bounded by 1.73 s), "systematic_bias" (y + s sign(y)). Without a seed it is
    `torch.initial_seed()`, which is only read.
    """
    with state.lock:
        chosen = torch.initial_seed() if seed is None else seed
        state.check_layers(state.settings)
        state.change(scale=error_scale, kind=error_type, all_ops=bool(all_ops_mode), seed=chosen)
        reset_injection_stats()
        if state.call is None:
            state.watch()


def disable_noisy_ops() -> dict[str, int]:
    """Turn noise off and restore every module; returns the counts. Raises NothingInjected if a target was never hit."""
    with state.lock:
        state.stop(check=True)
        return get_injection_stats()


def is_enabled() -> bool:
    return state.call is not None


@contextlib.contextmanager
def noisy_ops_context(
    error_scale: float = 0.05,
    error_type: str = "relative_gaussian",
    all_ops_mode: bool = False,
    seed: int | None = None,
) -> Iterator[None]:
    """`enable_noisy_ops` for the duration of a `with` block."""
    if state.call is not None:
        raise InvalidInput("noisy ops are already enabled, and this context would disable them: disable them first")
    enable_noisy_ops(error_scale, error_type, all_ops_mode, seed)
    try:
        yield
    except BaseException:  # more telling than a count of zero
        with state.lock:
            state.stop(check=False)
        raise
    disable_noisy_ops()


def set_noise_phases(forward: bool = True, backward: bool = True) -> None:
    """Select noise in forward passes, in backward passes, or both."""
    with state.lock:
        state.change(phases=frozenset(p for p, on in (("forward", forward), ("backward", backward)) if on))


def get_noise_phases() -> dict[str, bool]:
    return {phase: phase in state.settings.phases for phase in PHASES}


def set_phase_scales(forward: float | None = None, backward: float | None = None) -> None:
    """Absolute error scales of forward and of backward noise; None for error_scale, 0 for no noise in that phase.

    Where a layer has a scale of its own (`set_per_layer_scales`), it is multiplied by the phase's scale / error_scale.
    """
    given = {"forward": forward, "backward": backward}
    with state.lock:
        state.change(phase_scales={phase: scale for phase, scale in given.items() if scale is not None})


def get_phase_scales() -> dict[str, float]:
    return {phase: state.settings.scale_of(phase) for phase in PHASES}


def set_training_only(on: bool = True) -> None:
    """Inject noise only where gradients are recorded: evaluation and generation under `torch.no_grad()` stay clean."""
    with state.lock:
        state.change(training_only=bool(on))


def register_layer_hooks(model: nn.Module) -> int:
    """Define layer numbers as the blocks of this model, counted from 0. Returns how many there are."""
    with state.lock:
        anatomy = dissect(model)
        state.registered = (weakref.ref(unwrap(model)), anatomy)
        return len(anatomy.blocks)


def set_selective_layers(layers: Iterable[int] | int | None = None) -> None:
    """Noise in these blocks only; None for everywhere, [] for nowhere. Needs register_layer_hooks(model)."""
    chosen = None if layers is None else Injection(Gaussian(0.0), layers=layers).layers  # type: ignore[arg-type]
    with state.lock:
        state.change(layers=chosen)


def get_selective_layers() -> list[int] | None:
    layers = state.settings.layers
    return None if layers is None else sorted(layers)


def should_inject_for_layer(layer: int | None = None) -> bool:
    """Whether the selection includes this block; without one, the block that this thread is inside."""
    layers = state.settings.layers
    return layers is None or (state.layer() if layer is None else layer) in layers


def set_selective_operators(operators: Iterable[str] | str | None = None) -> None:
    """Noise in these operators or groups only, whatever all_ops_mode says; None for all, [] for none."""
    names = [operators] if isinstance(operators, str) else operators
    chosen = None if names is None else frozenset(_operator(name) for name in names)
    with state.lock:
        state.change(operators=chosen)


set_selective_ops = set_selective_operators


def get_selective_operators() -> list[str] | None:
    operators = state.settings.operators
    return None if operators is None else sorted(operators)


def should_inject_for_operator(name: str) -> bool:
    """Whether the selection includes this operator, or part of this group."""
    parts = _parts(_operator(name))
    operators = state.settings.operators
    return operators is None or any(parts & _parts(chosen) for chosen in operators)


def set_operator_noise_scales(scales: Mapping[str, float] | None) -> None:
    """Multipliers on the error scale, {"softmax": 0.2}; operators not named keep theirs. None: 1.0 for all again."""
    with state.lock:
        known = {} if scales is None else dict(state.settings.operator_scales)
        state.change(operator_scales=known | {_operator(name): scale for name, scale in (scales or {}).items()})


def set_per_layer_scales(scales: Mapping[int, float] | None) -> None:
    """Absolute error scales of blocks, {9: 0.02}; all others have error_scale. None or {}: error_scale everywhere."""
    Injection(Gaussian(0.0), layers=frozenset(scales or {0}))  # refuses what is no block number
    with state.lock:
        state.change(layer_scales=dict(scales or {}))


def get_injection_stats() -> dict[str, int]:
    """The number of injections since the last reset."""
    total = state.counts("total").get("", {})
    return {f"total_{phase}": total.get(phase, 0) for phase in PHASES}


def get_layer_injection_stats() -> dict[int, dict[str, int]]:
    """{layer: {"forward": n, "backward": m}}."""
    return state.counts("layer")


def get_operator_injection_stats() -> dict[str, dict[str, int]]:
    """{operator: {"forward": n, "backward": m}}; "gemm" sums linear, matmul and bmm."""
    return state.counts("operator")


def reset_injection_stats() -> None:
    """Reset all counts to zero."""
    state.reset("total", "layer", "operator")


def reset_layer_injection_stats() -> None:
    state.reset("layer")


def reset_operator_injection_stats() -> None:
    state.reset("operator")


def print_injection_summary(file: TextIO | None = None) -> None:
    """Print the counts as a table, to stdout if no file is given."""
    rows = {"injections": state.counts("total").get("", dict.fromkeys(PHASES, 0)), **get_operator_injection_stats()}
    rows |= {f"layer {layer}": counts for layer, counts in get_layer_injection_stats().items()}
    for name, counts in rows.items():
        print(f"noisescope: {name:<12} forward {counts['forward']:>8} backward {counts['backward']:>8}", file=file)


@dataclass(frozen=True)
class NoisyOperator:
    """A function of torch to call on tensors, noised where the process-wide settings say so: `NoisyMatMul(a, b)`.

    While noise is on it does what a module's own call would get: forward noise on the result, backward noise on the
    gradient of each input, by the selections, scales and phases that are set, and counted. Inside a model that noise is
    on it has the layer of the block that calls it, and is noised once: where the model's own calls are noised already,
    it only passes them on.
    """

    name: str
    operator: str
    function: Callable[..., Tensor]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = state.operator_call(self.name, self.operator, self.function, list(args), kwargs)
        return result

    def apply(self, *args: Any, **kwargs: Any) -> Tensor:
        """The same call, as autograd functions spell it."""
        return self(*args, **kwargs)


def _softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(input, dim, dtype=dtype)


NoisyMatMul = NoisyOperator("NoisyMatMul", "matmul", torch.matmul)
NoisyBMM = NoisyOperator("NoisyBMM", "bmm", torch.bmm)
NoisyLinear = NoisyOperator("NoisyLinear", "linear", F.linear)
NoisySoftmax = NoisyOperator("NoisySoftmax", "softmax", _softmax)
NoisySiLU = NoisyOperator("NoisySiLU", "silu", F.silu)
NoisyGeLU = NoisyOperator("NoisyGeLU", "gelu", F.gelu)
NoisyLayerNorm = NoisyOperator("NoisyLayerNorm", "norm", F.layer_norm)


def __getattr__(name: str) -> Any:
    """The notes' module variables, to read: `noisy_ops._ERROR_SCALE`. Setting one has no effect; the functions do."""
    if name not in _VARIABLES:
        raise AttributeError(f"module 'noisescope.compat.noisy_ops' has no attribute {name!r}")
    return _VARIABLES[name]()


_VARIABLES: dict[str, Callable[[], Any]] = {
    "_NOISY_OPS_ENABLED": is_enabled,
    "_ERROR_SCALE": lambda: state.settings.scale,
    "_ERROR_TYPE": lambda: state.settings.kind,
    "_NOISY_OPS_FORWARD_ENABLED": lambda: "forward" in state.settings.phases,
    "_NOISY_OPS_BACKWARD_ENABLED": lambda: "backward" in state.settings.phases,
    "_NOISY_OPS_FORWARD_SCALE": lambda: state.settings.scale_of("forward"),
    "_NOISY_OPS_BACKWARD_SCALE": lambda: state.settings.scale_of("backward"),
    "_SELECTIVE_OPERATORS": lambda: None if state.settings.operators is None else set(state.settings.operators),
    "_OPERATOR_NOISE_SCALES": lambda: dict(state.settings.operator_scales),
    "_OPERATOR_INJECTION_STATS": get_operator_injection_stats,
}


def _operator(name: str) -> str:
    """The canonical name, where "matmul" means all products."""
    canonical = canonical_operator(name)
    return "gemm" if canonical == "matmul" else canonical


def _parts(name: str) -> frozenset[str]:
    return GROUPS[name][0] if name in GROUPS else frozenset({name})


from noisescope.compat.noisy_ops.environment import read_environment, report_at_exit  # noqa: E402  (they use the functions above)

read_environment()
if state.call is not None:
    atexit.register(report_at_exit)
