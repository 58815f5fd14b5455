"""Tiny models, and their own answers as data, on which their clean accuracy is 1; the page of the notes' names."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import noisescope as ns
from noisescope import diagnostic, noisy_ops
from noisescope.compat.noisy_ops.state import state
from noisescope.model.loading import Subject
from noisescope.testing import tiny_model


@torch.no_grad()
def _answered_by(model: Any, rows: int = 20) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (rows, 6), generator=torch.Generator().manual_seed(0))
    answers = model(ids).logits[:, -1:].argmax(-1)
    return {"input_ids": torch.cat([ids, answers], 1), "labels": torch.cat([torch.full_like(ids, -100), answers], 1)}


@pytest.fixture(scope="session")
def answered_by() -> Callable[..., dict[str, Tensor]]:
    """Random prompts with the model's own answer of one token, which alone is scored."""
    return _answered_by


@pytest.fixture(scope="session")
def subject() -> Subject:
    return ns.load("tiny:llama")


@pytest.fixture(scope="session")
def answered(subject: Subject) -> list[dict[str, Tensor]]:
    return [_answered_by(subject.model)]


@pytest.fixture
def random_batches() -> list[dict[str, Tensor]]:
    """Tokens that no model can predict."""
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, 64, (4, 12), generator=generator)} for _ in range(2)]


@pytest.fixture(scope="session")
def hot_layer() -> tuple[Any, list[dict[str, Tensor]]]:
    """Six blocks of which only block 2 says anything, and what they answer."""
    model = tiny_model("llama", layers=6)
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            for last in (block.self_attn.o_proj, block.mlp.down_proj):
                last.weight *= 10 if index == 2 else 0.02
    return model, [_answered_by(model)]


@pytest.fixture(scope="session")
def outlier() -> Any:
    """A model whose block 1 has one massive channel, 5, in the output of down_proj. The head does not look at it."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[5] *= 500
        model.lm_head.weight[:, 5] = 0
    return model


@dataclass(frozen=True)
class Row:
    section: str
    name: str
    here: str  # without its backticks
    note: str


PREFIXES = {
    "Classes of noisescope.diagnostic": "noisescope.diagnostic.",
    "Functions of noisescope.diagnostic": "noisescope.diagnostic.",
    "noisescope.noisy_ops": "noisescope.noisy_ops.",
}
UNCHANGED = re.compile(r"^Unchanged: (.*?)(?=\n\n|\Z)", re.M | re.S)


def same_name(section: str, name: str) -> str:
    """What a name is called here where it keeps its own."""
    return name.split()[-1] if section == "Values" else PREFIXES.get(section, "") + name


def rows_of(page: str) -> list[Row]:
    """The rows of every section's table, and the names that it lists as unchanged."""
    found = []
    for part in re.split(r"^## ", page, flags=re.M)[1:]:
        section = part.splitlines()[0]
        for line in part.splitlines():
            if line.startswith("| `"):
                name, here, note = (cell.strip() for cell in line.strip().strip("|").split(" | ", 2))
                name, here = name.strip("`"), here.strip("`")
                found.append(Row(section, name, same_name(section, name) if here == "same" else here, note))
        for names in UNCHANGED.findall(part):
            found += [Row(section, name, same_name(section, name), "") for name in re.findall(r"`([^`]+)`", names)]
    return found


@pytest.fixture(scope="session")
def page() -> list[Row]:
    """The rows of docs/compatibility.md."""
    return rows_of((Path(__file__).parents[3] / "docs" / "compatibility.md").read_text(encoding="utf-8"))


@dataclass
class Kit:
    """A small model, its own answers as data, and objects that were used once."""

    model: Any
    batches: list[dict[str, Tensor]]
    folder: Path
    _made: dict[type, Any]

    @property
    def tokens(self) -> Tensor:
        return self.batches[0]["input_ids"]

    def once(self, kind: type, make: Callable[[], Any]) -> Any:
        if kind not in self._made:
            self._made[kind] = make()
        return self._made[kind]

    @property
    def diagnosed(self) -> diagnostic.IntegratedDiagnostic:
        def make() -> diagnostic.IntegratedDiagnostic:
            made = diagnostic.IntegratedDiagnostic(self.model, self.batches, self.batches)
            made.run_full_diagnosis(noise_scale=0.2, window_size=1, outlier_threshold=2.0, seeds=1, effort="standard")
            return made

        return self.once(diagnostic.IntegratedDiagnostic, make)  # type: ignore[no-any-return]

    @property
    def capture(self) -> diagnostic.ActivationCapture:
        def make() -> diagnostic.ActivationCapture:
            made = diagnostic.ActivationCapture(self.model)
            made.register_hooks()
            self.model(self.tokens)
            made.remove_hooks()
            return made

        return self.once(diagnostic.ActivationCapture, make)  # type: ignore[no-any-return]

    @property
    def detector(self) -> diagnostic.ChannelOutlierDetector:
        def make() -> diagnostic.ChannelOutlierDetector:
            made = diagnostic.ChannelOutlierDetector(self.model, self.batches, quantile_threshold=2.0)
            made.collect_statistics()
            return made

        return self.once(diagnostic.ChannelOutlierDetector, make)  # type: ignore[no-any-return]

    @property
    def dashboard(self) -> diagnostic.MetricsDashboard:
        def make() -> diagnostic.MetricsDashboard:
            made, gpu = diagnostic.MetricsDashboard(), torch.linspace(1, 2, 16)
            made.compute_all_metrics(self.model, self.batches, gpu, 1.1 * gpu, noise_scale=0.2, seeds=1)
            return made

        return self.once(diagnostic.MetricsDashboard, make)  # type: ignore[no-any-return]

    @property
    def adaptive(self) -> diagnostic.AdaptiveAQN:
        return diagnostic.AdaptiveAQN(self.model, {0: 0.2, 1: 0.01})

    @property
    def monitor(self) -> diagnostic.RobustnessMonitor:
        def make() -> diagnostic.RobustnessMonitor:
            made = diagnostic.RobustnessMonitor({"operator_analysis": {"matmul": {"degradation": 0.0}}})
            made.check_checkpoint(self.model, self.batches, 10, noise_scale=0.5, seeds=1)
            return made

        return self.once(diagnostic.RobustnessMonitor, make)  # type: ignore[no-any-return]

    @property
    def generator(self) -> diagnostic.FaultInjectionTestGenerator:
        points = [{"layer_range": "L0-1", "degradation": 0.3, "severity": "CRITICAL"}]
        channels = {"model.layers.1.mlp.down_proj": {"outlier_indices": [5], "num_outliers": 1, "max_ratio": 40.0}}
        return diagnostic.FaultInjectionTestGenerator(
            {
                "executive_summary": {"critical_operators": ["softmax"], "avalanche_points": points},
                "channel_analysis": {"per_layer": channels},
            }
        )

    @property
    def migration(self) -> dict[str, Any]:
        def make() -> dict[str, Any]:
            few = {"noise_scale": 0.2, "seeds": 1, "samples": 4}
            return diagnostic.plan_hardware_migration(self.model, self.batches, self.batches, **few)

        return self.once(dict, make)  # type: ignore[no-any-return]

    @property
    def windows(self) -> dict[str, dict[str, Any]]:
        losses = {"L0-0": 0.01, "L1-1": 0.02, "L2-2": 0.3, "L3-3": 0.02}
        return {
            label: {"start_layer": n, "end_layer": n, "degradation": loss, "sensitivity_score": loss / 0.05}
            for n, (label, loss) in enumerate(losses.items())
        }

    @property
    def results(self) -> dict[str, Any]:
        per_layer = {f"model.layers.{n}.mlp.down_proj": {"num_outliers": n % 3} for n in range(4)}
        return {
            "layer_results": self.windows,
            "channel_results": {"per_layer": per_layer},
            "hessian_traces": {label: float(n) for n, label in enumerate(self.windows)},
            "sparsity": {label: 1.0 - n / 10 for n, label in enumerate(self.windows)},
        }

    @contextlib.contextmanager
    def noisy(self) -> Iterator[None]:
        noisy_ops.register_layer_hooks(self.model)
        noisy_ops.enable_noisy_ops(error_scale=0.05, all_ops_mode=True)
        self.loss(self.model, self.tokens).backward()
        yield
        noisy_ops.disable_noisy_ops()

    def inside_noise(self, call: Callable[[], Any]) -> Any:
        with self.noisy():
            return call()

    @staticmethod
    def loss(model: Any, tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens, labels=tokens).loss
        return loss


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """Six blocks, of which only block 2 says anything, with one large channel."""
    state.__init__()  # type: ignore[misc]
    model = tiny_model("llama", layers=6)
    with torch.no_grad():
        for index, block in enumerate(model.model.layers):
            for last in (block.self_attn.o_proj, block.mlp.down_proj):
                last.weight *= 10 if index == 2 else 0.02
        model.model.layers[2].mlp.down_proj.weight[5] *= 20
        ids = torch.randint(3, 64, (16, 6), generator=torch.Generator().manual_seed(0))
        answers = model(ids).logits[:, -1:].argmax(-1)
    labels = torch.cat([torch.full_like(ids, -100), answers], 1)
    batches = [{"input_ids": torch.cat([ids, answers], 1), "labels": labels}]
    yield Kit(model, batches, tmp_path_factory.mktemp("notes"), {})
    state.stop(check=False)
