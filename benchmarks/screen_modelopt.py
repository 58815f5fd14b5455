"""The Fisher screen beside NVIDIA ModelOpt's `auto_quantize` scores: the same model, text, groups; cost and ranks.

    pip install nvidia-modelopt
    python benchmarks/screen_modelopt.py --model SMOLLM2_FOLDER --data GSM8K.jsonl --json results/screen_modelopt.json

Both see the same tokens in one batch, in float32, on one thread; time is processor time. A group is what ModelOpt
quantises together: q, k, v / o / gate, up / down of each block. The truth of a group is the KL between the clean model
and the model with that group alone quantised by ModelOpt (weights and inputs of its linears), computed from the very
logits that ModelOpt's KL method sees. So ModelOpt's scores know the error they are asked about; the screen does not: it
predicts noise on outputs, and its ranks show how far "what can't stand noise" answers "what can't stand this format".

ModelOpt's gradient score: sum of (gradient of the true labels' loss x output error)^2. Not timed: loading, tokenising,
and computing the truth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from screen_setup import GROUPS, SCALE, Array, cells_of, frame_of, read_material, save

import noisescope as ns
from noisescope import stats
from noisescope.measures.divergence import kl_divergence
from noisescope.runs.batches import Material
from noisescope.runs.trial_runner import TrialRunner
from noisescope.trials import Trial

FORMATS = {"FP8_DEFAULT_CFG": "fp8_e4m3", "INT8_DEFAULT_CFG": "int8"}  # those of ModelOpt's that run without CUDA
DRAWS = 2


@dataclass
class Calls:
    """What a method asks of the model: counted, timed, and its logits compared."""

    forwards: int = 0
    second: float = 0.0  # processor time at which the second call began: the first calibrates
    aside: float = 0.0  # processor time spent on the truth, which is not the method's
    clean: torch.Tensor | None = None
    truth: list[float] = field(default_factory=list)

    def step(self, compares: bool) -> Callable[[Any, torch.Tensor], torch.Tensor]:
        def forward_step(model: Any, tokens: torch.Tensor) -> torch.Tensor:
            self.forwards += 1
            if self.forwards == 2:
                self.second = time.process_time()
            logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
            if compares and self.forwards > 1:
                self._compare(logits[:, :-1].flatten(0, 1))
            return logits

        return forward_step

    def _compare(self, logits: torch.Tensor) -> None:
        """The second call is the clean model, every later one has one group quantised."""
        started = time.process_time()
        if self.clean is None:
            self.clean = logits.clone()
        else:
            self.truth.append(float(kl_divergence(self.clean, logits).double().mean()))
        self.aside += time.process_time() - started


def mean_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def modelopt_scores(folder: str, tokens: torch.Tensor, name: str, method: str) -> tuple[dict[str, float], Calls, Any]:
    """Scores by the first module of each group, what was called, and times."""
    import modelopt.torch.quantization as mtq

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    calls = Calls()
    started = time.process_time()
    _, state = mtq.auto_quantize(
        model,
        constraints={"effective_bits": 15.0},  # what it then chooses is not looked at
        quantization_formats=[getattr(mtq, name)],
        data_loader=[tokens],
        forward_step=calls.step(compares=method == "kl_div"),
        loss_func=mean_loss if method == "gradient" else None,
        num_calib_steps=1,
        num_score_steps=1,
        disabled_layers=["*lm_head*"],
        method=method,
        verbose=False,
    )
    ended = time.process_time()
    times = {
        "seconds": ended - started - calls.aside,
        "scoring_seconds": ended - calls.second - calls.aside,
        "calibration_forwards": 1,
        "scoring_forwards": calls.forwards - 1,
    }
    stats_of_groups = state["candidate_stats"].values()
    scores = {row["module_names"][0]: float(row["scores"][0]) for row in stats_of_groups}
    scores.pop("lm_head", None)  # listed, but left out of the search as asked
    return scores, calls, times


def screen_groups(
    runner: TrialRunner, material: Material, perturbation: Any, modules: list[str]
) -> tuple[Array, float]:
    """Predicted KL per token of each group at the perturbation's own size, and the screen's processor time."""
    context = frame_of(runner.subject, material, 1)
    where = ns.Injection(perturbation, phases=frozenset({"forward"}))
    trial = Trial(context.conditions, "screen", context.test[0], where, {"draws": DRAWS, "seed": 0})
    started = time.process_time()
    result = runner.run(trial)
    seconds = time.process_time() - started
    if result.failed:
        raise SystemExit(f"the screen failed: {result.error}")
    sums = result.arrays["sums"].sum(1) / result.arrays["tokens"].sum()
    half = (getattr(perturbation, "scale", 1.0) if _is_noise(perturbation) else 1.0) ** 2 / 2
    sites = result.facts["sites"]
    predicted = {}
    for cell in cells_of(context, context.blocks):
        if cell.level == "group":
            names = cell.injection.modules or ()
            rows = [i for i, site in enumerate(sites) if site["operator"] == "linear" and site["module"] in names]
            predicted[names[0]] = float(sums[rows].sum()) * half
    return np.array([predicted[module] for module in modules]), seconds


def _is_noise(perturbation: Any) -> bool:
    return isinstance(perturbation, ns.Gaussian)


def clean_seconds(model: Any, tokens: torch.Tensor, repeats: int = 5) -> float:
    times = []
    with torch.no_grad():
        for _ in range(repeats):
            started = time.process_time()
            model(input_ids=tokens, use_cache=False)
            times.append(time.process_time() - started)
    return float(np.median(times))


def rank(one: Array, other: Array) -> dict[str, Any]:
    found = stats.correlation(one, other, permutations=9)  # its p is not used
    return {"spearman": found.value, "low": found.low, "high": found.high, "n": found.n}


def compared(runner: TrialRunner, material: Material, folder: str, tokens: torch.Tensor, name: str) -> dict[str, Any]:
    """One format: every method's scores, cost and rank agreement with the truth."""
    by_kl, calls, kl_times = modelopt_scores(folder, tokens, name, "kl_div")
    by_gradient, _, gradient_times = modelopt_scores(folder, tokens, name, "gradient")
    modules = list(by_kl)
    truth = np.array(calls.truth)
    assert len(truth) == len(modules) == len(by_gradient)
    forward = clean_seconds(runner.model, tokens)
    scores = {
        "ModelOpt, KL method": np.array(list(by_kl.values())),
        "ModelOpt, gradient method": np.array([by_gradient[module] for module in modules]),
    }
    costs = {"ModelOpt, KL method": kl_times, "ModelOpt, gradient method": {**gradient_times, "scoring_backwards": 1}}
    screens = {
        f"screen, Gaussian({SCALE}) relative to each element": ns.Gaussian(SCALE),
        f"screen, Gaussian({SCALE}) relative to the row's rms": ns.Gaussian(SCALE, relative_to="rms"),
        f"screen, {FORMATS[name]} on outputs": ns.Format(FORMATS[name], granularity="tensor"),
    }
    screen_groups(runner, material, ns.Gaussian(SCALE), modules)  # a first call, as the clean forward had
    for label, perturbation in screens.items():
        scores[label], seconds = screen_groups(runner, material, perturbation, modules)
        costs[label] = {"seconds": seconds, "scoring_forwards": 1, "scoring_backwards": DRAWS}
    rows = []
    for label, values in scores.items():
        spent = costs[label]
        over_forward = spent.get("scoring_seconds", spent["seconds"]) / forward
        rows.append({"method": label, **rank(values, truth), **spent, "scoring_over_clean_forward": over_forward})
        print(f"  {label:<52} rank with truth {rows[-1]['spearman']:.3f}; {spent['seconds']:.1f} s, "
              f"scoring {over_forward:.1f} forwards' time")  # fmt: skip
    pairs = [
        {"methods": [a, b], **rank(scores[a], scores[b])}
        for a, b in itertools.combinations(scores, 2)
    ]  # fmt: skip
    columns = {"truth": truth, **scores}
    groups = {"modules": modules, **{label: [_digits(v) for v in column] for label, column in columns.items()}}
    return {"format": name, "clean_forward_seconds": forward, "methods": rows, "between": pairs, "groups": groups}


def measured_noise(sweep: Path, groups: dict[str, Any]) -> dict[str, Any]:
    """How a sweep of noise on the same groups (from screen.py) ranks with the truth: a perfect screen."""
    cells = [row for row in json.loads(sweep.read_text())["cells"] if row["level"] == "group"]
    measured = {row["cell"]: float(np.mean(row["measured"])) for row in cells}
    first = {names[0]: group for group, names in GROUPS.items()}
    cells_of_modules = []
    for module in groups["modules"]:
        _, _, layer, *rest = module.split(".")
        cells_of_modules.append(f"{layer} {first['.'.join(rest)]}")
    return rank(np.array([measured[cell] for cell in cells_of_modules]), np.array(groups["truth"]))


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M")
    parser.add_argument("--data", required=True, type=Path, help="GSM8K as JSONL with question and answer")
    parser.add_argument("--items", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--sweep", type=Path, help="results of screen.py, to rank measured noise beside")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    import modelopt

    torch.set_num_threads(1)  # so that processor time is one core's
    subject = ns.load(options.model, dtype="float32")
    material = read_material(subject.tokenizer, options.data, options.items, options.length)
    tokens = torch.tensor([group[0].ids for group in material.encoded.sequences])
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, one thread; seconds are processor time",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "modelopt": modelopt.__version__,
        "data": {"name": "GSM8K test", "items": options.items, "tokens": options.length},
        "formats": [],
    }
    print({key: value for key, value in result.items() if key != "formats"})
    with TrialRunner(subject, [material]) as runner:
        for name in options.formats:
            print(name)
            found = compared(runner, material, options.model, tokens, name)
            if options.sweep:
                found["measured_noise"] = measured_noise(options.sweep, found["groups"])
            result["formats"].append(found)
            save(options.json, result)


if __name__ == "__main__":
    main()
