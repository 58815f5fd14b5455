"""QeRL's noise: one number for each channel of a norm's weight, the same for all tokens, drawn anew at each step.

QeRL adds it to the parameter in place, where it stays: later steps add to it, and checkpoints and LoRA merges hold it.
Here the norm computes with a noisy copy of its weight, made where the forward uses it, and the parameter never changes.
The gradient reaches the parameter as if the copy were the parameter itself (straight through).
"""

from __future__ import annotations

from dataclasses import dataclass

from noisescope.identity import registered
from noisescope.injection import Injection
from noisescope.probe.noise import Gaussian
from noisescope.sites import Place


@registered("noisescope.training.NormNoise")
@dataclass(frozen=True)
class NormNoise:
    """w (1 + s z) for each channel, z ~ N(0, 1); `additive` gives QeRL's w + s z.

    modules narrows to some norms by glob patterns on dotted names, such as ("*.post_attention_layernorm",).
    """

    additive: bool = False
    modules: tuple[str, ...] | None = None

    renewed = True  # a weight's noise is the same in every forward of a seed, so each step has a seed of its own

    def injection(self, scale: float, seed: int, layer_multipliers: dict[Place, float]) -> Injection:
        """The injection of one step."""
        return Injection(
            Gaussian(scale, "absolute" if self.additive else "element"),
            operators=frozenset({"norm"}),
            modules=self.modules,
            tensor="weight",
            phases=frozenset({"forward"}),
            layer_multipliers=layer_multipliers,
            seed=seed,
        )
