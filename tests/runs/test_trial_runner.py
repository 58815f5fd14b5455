"""The runner measures what a plain loop would measure, in whatever pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from noisescope import progress
from noisescope.cli.progress_display import ProgressDisplay
from noisescope.data.tokens import Encoded, Sequence, from_batches
from noisescope.errors import InvalidInput, UnsupportedModel
from noisescope.injection import Injection
from noisescope.model.fingerprint import model_fingerprint
from noisescope.model.loading import wrap
from noisescope.probe.inject import inject
from noisescope.probe.noise import Gaussian
from noisescope.runs import trial_runner as bench_module
from noisescope.runs.batches import Material, lay_out
from noisescope.runs.trial_runner import TrialRunner, conditions
from noisescope.testing import tiny_model
from noisescope.trials import Slice, Trial

TOKENS = torch.randint(1, 60, (5, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = (9, 7, 9, 4, 8)
NOISE = Injection(Gaussian(0.1), operators={"linear"}, layers={1, 2}, phases={"forward"}, seed=2)


def material(kind: str = "text", start: int = 1, final: int | None = None) -> Material:
    groups = [(Sequence(i, tuple(TOKENS[i, :n].tolist()), start, final or start),) for i, n in enumerate(LENGTHS)]
    return Material(Encoded(tuple(groups), 0, sum(LENGTHS)), kind)


def trial(
    subject: Any, data: Material, injection: Injection | None = NOISE, measure: str = "score", **more: Any
) -> Trial:
    return Trial(conditions(subject), measure, Slice(data.fingerprint, 0, len(data)), injection, more)


def measured(data: Material, *trials: Any, model: Any = None, **settings: Any) -> list[Any]:
    subject = wrap(model or tiny_model("llama", layers=3))
    with TrialRunner(subject, [data], **settings) as runner:
        return [runner.run(make(subject, data)) for make in trials]


@torch.no_grad()
def plainly(model: Any, injection: Injection) -> dict[str, list[float]]:
    """One sample at a time, no padding, float64: what the words say."""
    found: dict[str, list[float]] = {"kl": [], "agreement": [], "next_token_accuracy": [], "nll": []}
    for i, n in enumerate(LENGTHS):
        ids = TOKENS[i : i + 1, :n]
        clean = model(ids).logits[0, :-1].double().log_softmax(-1)
        probe = inject(model, injection)
        with probe:
            probe.rows([i])
            noisy = model(ids).logits[0, :-1].double().log_softmax(-1)
        target = ids[0, 1:]
        found["kl"].append(float((clean.exp() * (clean - noisy)).sum(-1).mean()))
        found["agreement"].append(float((clean.argmax(-1) == noisy.argmax(-1)).double().mean()))
        found["next_token_accuracy"].append(float((noisy.argmax(-1) == target).double().mean()))
        found["nll"].append(float(-noisy.gather(1, target[:, None]).mean()))
    return found


@pytest.mark.parametrize("target", [{"layers": {1, 2}}, {"places": {"lm_head"}}, {"places": {"embed"}}], ids=str)
def test_scores_are_those_of_a_plain_loop(target: dict[str, Any]) -> None:
    """Padding, batching and clean prefixes change nothing."""
    model = tiny_model("llama", layers=3)
    injection = Injection(Gaussian(0.1), phases={"forward"}, seed=2, **target)
    (result,) = measured(material(), lambda s, d: trial(s, d, injection), model=model)
    assert result.samples == (0, 1, 2, 3, 4) and not result.error and result.facts["injections"] > 0
    for name, values in plainly(model, injection).items():
        assert result.values[name] == pytest.approx(values, rel=1e-3, abs=1e-9), name
    assert result.values["accuracy"] == result.values["next_token_accuracy"]
    assert set(result.values["nonfinite"]) == {0.0} and all(v > 0 for v in result.values["snr_db"])


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits computed a few positions at a time: the same numbers and the same count, at the head's own noise too."""
    for target in ({"layers": {1}}, {"places": {"lm_head", "final_norm"}}, {"operators": {"residual"}}):
        injection = Injection(Gaussian(0.1), phases={"forward"}, **target)  # type: ignore[arg-type]
        monkeypatch.setattr(bench_module, "PIECE", 1 << 30)
        (whole,) = measured(material(), lambda s, d, i=injection: trial(s, d, i))
        monkeypatch.setattr(bench_module, "PIECE", 64 * 5 * 2 * 4)  # float32
        (pieces,) = measured(material(), lambda s, d, i=injection: trial(s, d, i))
        for name, values in whole.values.items():
            assert pieces.values[name] == pytest.approx(values, rel=1e-4, abs=1e-10), (target, name)
        assert pieces.facts == whole.facts


def test_a_batch_without_memory_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three samples at once are too many: the trial starts again with fewer and gives the same numbers."""
    (calm,) = measured(material(), trial)
    forward = TrialRunner.forward

    def small(self: TrialRunner, batch: Any, piece: Any = None) -> Tensor:
        if len(batch.ids) > 2:
            raise torch.OutOfMemoryError("too many")
        return forward(self, batch, piece)

    monkeypatch.setattr(TrialRunner, "forward", small)
    subject, data = wrap(tiny_model("llama", layers=3)), material()
    with TrialRunner(subject, [data]) as runner:
        result = runner.run(trial(subject, data))
        assert runner.notes == [f"out of memory: {n} samples at a time from now on" for n in (3, 2)]
    for name, values in calm.values.items():
        assert result.values[name] == pytest.approx(values, rel=1e-4, abs=1e-10), name


def test_a_limit_that_changes_batches_is_noted() -> None:
    """In digits that show it, however small or large."""
    for memory, said in ((1e-6, "1e-06"), (112.25, "112.2")):
        with TrialRunner(wrap(tiny_model("llama")), [material()], memory=memory) as runner:
            runner.fitting(4, 1, "forward")
            assert (
                f"samples per forward at once: 1; {said} GiB of memory are allowed beside the weights" in runner.notes
            )


def test_no_memory_at_all_is_a_failed_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample at a time, no prefix: then the row says so."""

    def never(self: TrialRunner, batch: Any, piece: Any = None) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 1 byte")

    monkeypatch.setattr(TrialRunner, "forward", never)
    (result,) = measured(material(), trial)
    assert result.failed and "out of memory even with one sample" in result.error


def test_other_errors_are_rows_and_interrupts_are_not() -> None:
    """An operator that isn't there, an error inside the model: failed results; Ctrl-C ends the run."""
    gelu = Injection(Gaussian(0.1), operators={"gelu"}, phases={"forward"})
    missing, broken = measured(
        material(),
        lambda s, d: trial(s, d, gelu),
        lambda s, d: trial(s, d, Injection(_Breaks(0.1), phases={"forward"})),
    )
    assert missing.error.startswith("NothingInjected: operator 'gelu' does not exist")
    assert broken.error == "RuntimeError: the perturbation broke"
    with pytest.raises(KeyboardInterrupt):
        measured(material(), lambda s, d: trial(s, d, Injection(_Interrupts(0.1), phases={"forward"})))


@dataclass(frozen=True)
class _Breaks:
    scale: float

    def __call__(self, y: Tensor, draw: Any) -> Tensor:
        raise RuntimeError("the perturbation broke")


@dataclass(frozen=True)
class _Interrupts:
    scale: float

    def __call__(self, y: Tensor, draw: Any) -> Tensor:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class _Explodes:
    scale: float

    def __call__(self, y: Tensor, draw: Any) -> Tensor:
        return y * float("inf")


def test_what_is_not_finite_is_counted() -> None:
    """Infinity under noise: wrong answers, no KL, and a count."""
    (result,) = measured(
        material(), lambda s, d: trial(s, d, Injection(_Explodes(0.1), places={"lm_head"}, phases={"forward"}))
    )
    assert result.values["kl"] == (None,) * 5 and set(result.values["next_token_accuracy"]) == {0.0}
    assert result.values["nonfinite"] == tuple(float(n - 1) for n in LENGTHS)


def test_an_answer_is_right_when_all_of_it_is() -> None:
    """Accuracy looks at the final tokens, the other metrics at every scored one."""
    model = tiny_model("llama", layers=3)
    with torch.no_grad():
        best = model(TOKENS).logits.argmax(-1)
    taught = TOKENS.clone()
    taught[0, -1] = best[0, -2]  # the model's own last token in the first sample only
    groups = [(Sequence(i, tuple(taught[i].tolist()), 6, 8),) for i in range(5)]
    data = Material(Encoded(tuple(groups), 0, 45), "answer")
    (clean,) = measured(data, lambda s, d: trial(s, d, None), model=model)
    expected = [float(taught[i, 8] == best[i, 7]) for i in range(5)]
    assert clean.values["accuracy"] == tuple(expected) and expected[0] == 1.0
    assert clean.values["agreement"] == (1.0,) * 5 and "kl" not in clean.values
    assert clean.values["next_token_accuracy"][0] >= 1 / 3


def test_choices_are_judged_by_likelihood() -> None:
    """Each choice is a sequence; the highest summed log-probability of its scored tokens wins."""
    model = tiny_model("llama", layers=3)
    groups = tuple(
        tuple(Sequence(i, (*TOKENS[i, :5].tolist(), c, c + 1), 5, 5, choice=c - 10) for c in (10, 11, 12))
        for i in range(4)
    )
    with torch.no_grad():
        scores = [
            [
                float(model(torch.tensor([s.ids])).logits[0].log_softmax(-1)[[4, 5], list(s.ids[5:])].sum())
                for s in group
            ]
            for group in groups
        ]
    best = tuple(int(np.argmax(row)) for row in scores)
    labels = (best[0], (best[1] + 1) % 3, best[2], best[3])
    data = Material(Encoded(groups, 0, 84), "choice", labels)
    clean, noisy = measured(data, lambda s, d: trial(s, d, None), trial, model=model)
    assert clean.values["accuracy"] == (1.0, 0.0, 1.0, 1.0)
    assert len(noisy.values["kl"]) == 4 and noisy.samples == (0, 1, 2, 3)
    right = [-scores[i][labels[i]] / 2 for i in range(4)]  # averages are of the right choice's tokens
    assert clean.values["nll"] == pytest.approx(right, rel=1e-4)


def test_a_metric_of_ones_own() -> None:
    """(model, batches) -> one score per sample; noise belongs to the samples there, too; a wrong count is an error."""

    def largest(model: Any, batches: Any) -> list[float]:
        with torch.no_grad():
            return [float(row.max()) for batch in batches for row in model(**batch).logits]

    clean, noisy, again = measured(
        material(),
        lambda s, d: trial(s, d, None, "custom"),
        lambda s, d: trial(s, d, NOISE, "custom"),
        lambda s, d: trial(s, d, NOISE, "custom"),
        metric=largest,
    )
    assert len(clean.values["accuracy"]) == 5 and clean.values != noisy.values and noisy.values == again.values
    (short,) = measured(material(), lambda s, d: trial(s, d, None, "custom"), metric=lambda model, batches: [1.0])
    assert "1 scores for 5 samples" in short.error
    (none,) = measured(material(), lambda s, d: trial(s, d, None, "custom"))
    assert "caller's own metric" in none.error


def test_prefixes_spare_forwards_and_modes_come_back() -> None:
    """Late noise costs little; a model in training mode is measured in eval mode and given back as it was."""
    model = tiny_model("llama", layers=3).train()
    subject, data = wrap(model), material()
    late = Injection(Gaussian(0.1), places={"lm_head"}, phases={"forward"})
    with TrialRunner(subject, [data]) as runner:
        runner.run(trial(subject, data, None))
        before = runner.forwards
        runner.run(trial(subject, data, late))
        assert runner.forwards - before == pytest.approx(5 / 4) and runner.reuse and not model.training
    assert model.training and not [m for m in model.modules() if "forward" in m.__dict__]


def test_a_model_that_can_not_start_half_way_runs_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a short forward gives other logits, none is used, and the report says so."""
    model = tiny_model("llama", layers=3)
    calls = {"count": 0}
    first = model.model.layers[0].mlp.forward  # type: ignore[union-attr,index]

    def counting(x: Tensor) -> Tensor:
        calls["count"] += 1
        return first(x)  # type: ignore[no-any-return,operator]

    monkeypatch.setattr(model.model.layers[0].mlp, "forward", counting)  # type: ignore[union-attr,index]
    norm = model.model.norm.forward  # type: ignore[union-attr]
    monkeypatch.setattr(model.model.norm, "forward", lambda x: norm(x) + calls["count"])  # type: ignore[union-attr,operator]
    subject, data = wrap(model), material()
    with TrialRunner(subject, [data]) as runner:
        runner.run(trial(subject, data, None))
        assert runner.reuse is False and "can't reuse clean prefixes" in runner.notes[0]


def test_the_fingerprint_is_of_the_numbers() -> None:
    """A copy has the same, one changed bit another, a swap of two numbers another."""
    a, b = tiny_model("llama"), tiny_model("llama")
    assert model_fingerprint(a) == model_fingerprint(b) != model_fingerprint(tiny_model("llama", seed=1))
    weight = b.model.layers[1].mlp.up_proj.weight  # type: ignore[union-attr,index]
    with torch.no_grad():
        weight[0, 0], weight[0, 1] = weight[0, 1].clone(), weight[0, 0].clone()  # type: ignore[index,operator]
    assert model_fingerprint(a) != model_fingerprint(b)
    assert model_fingerprint(tiny_model("llama").bfloat16()) != model_fingerprint(a)


def test_the_config_is_part_of_the_fingerprint() -> None:
    """The same weights with another window, another epsilon or other experts are another model."""
    same = {"seed": 0, "layers": 1}
    for name, change in (
        ("mistral", {"sliding_window": 2}),
        ("llama", {"rms_norm_eps": 0.1}),
        ("mixtral", {"num_experts_per_tok": 1}),
    ):
        assert model_fingerprint(tiny_model(name, **same)) != model_fingerprint(tiny_model(name, **same, **change))
    moved = tiny_model("llama")
    moved.config._name_or_path = "somewhere/else"  # type: ignore[union-attr]
    assert model_fingerprint(moved) == model_fingerprint(tiny_model("llama"))
    with pytest.raises(InvalidInput, match="offloaded"):
        model_fingerprint(tiny_model("llama").to("meta"))


class Dispatched(TorchDispatchMode):
    """Names of the operations that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def test_a_score_is_on_its_way_to_the_host_before_the_next_trial_begins() -> None:
    """Putting it away computes nothing: that would wait for all that the device was given meanwhile."""
    data = material()
    subject = wrap(tiny_model("llama", layers=3))
    with TrialRunner(subject, [data]) as runner:
        for injection in (None, NOISE):
            finish = runner.begin(trial(subject, data, injection))
            with Dispatched() as seen:
                assert not finish().failed
            assert seen.names <= {"aten.unbind", "aten.detach", "aten._local_scalar_dense"}  # the host reads its copies


def test_a_model_that_looks_ahead_is_refused() -> None:
    """Batches have no mask: scoring relies on causality."""
    data = material()
    part = Slice(data.fingerprint, 0, 5)
    with pytest.raises(UnsupportedModel, match="attends to later tokens"):
        TrialRunner(wrap(tiny_model("bert")), [data]).check_causal(part)
    with pytest.raises(UnsupportedModel, match="is an encoder and a decoder"):
        TrialRunner(wrap(tiny_model("t5")), [data]).check_causal(part)
    for name in ("llama", "mistral", "mixtral", "gpt2"):
        TrialRunner(wrap(tiny_model(name)), [data]).check_causal(part)


def test_experts_and_mixed_lengths_are_screened_alike_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows sorted by expert belong to nobody: their mean per token is the same whatever the batch."""
    sums = []
    for parts in (1, 5):
        monkeypatch.setattr("noisescope.runs.measures.SCREEN_PARTS", parts)
        where = Injection(Gaussian(1.0), phases={"forward"})
        (result,) = measured(
            material(),
            lambda s, d, w=where: trial(s, d, w, "screen", draws=1, seed=0),
            model=tiny_model("mixtral", layers=2),
        )
        sums.append((result.arrays["sums"].sum(1), result.arrays["channels"]))
    assert np.allclose(sums[0][0], sums[1][0], rtol=2e-3)


def test_material_is_known_by_its_tokens() -> None:
    """Another scored range is another material; the layout of a batch pads on the right."""
    assert material().fingerprint != material(start=2).fingerprint != material(start=2, final=3).fingerprint
    assert from_batches([TOKENS]).sequences[1][0].ids == tuple(TOKENS[1].tolist())
    batch = lay_out(material().encoded.sequences, 0, "cpu")
    assert batch.ids[3, 4:].tolist() == [0] * 5 and len(batch.whole.scored) == sum(LENGTHS) - 5


@pytest.mark.parametrize("measure", ["screen", "capture", "curvature", "gradients"])
def test_the_other_measures_answer(measure: str) -> None:
    """Fisher sums, channel statistics, Hessian traces and gradient norms, one result each."""
    settings = {"screen": {"draws": 1, "seed": 0}, "curvature": {"probes": 2, "seed": 0}}.get(measure, {})
    where = {"screen": Injection(Gaussian(1.0), phases={"forward"}), "curvature": None}.get(measure, NOISE)
    (result,) = measured(material(), lambda s, d: trial(s, d, where, measure, **settings))
    assert not result.error
    facts = result.facts
    if measure == "screen":
        assert result.arrays["sums"].shape == (len(facts["sites"]), 5) and (result.arrays["sums"] >= 0).all()
        assert len(result.arrays["channels"]) == sum(site["channels"] for site in facts["sites"])
        assert result.arrays["tokens"].tolist() == [n - 1 for n in LENGTHS]
    elif measure == "capture":
        assert {site["place"] for site in facts["sites"]} == {1, 2} and facts["sites"][0]["count"] == sum(LENGTHS)
        assert (result.arrays["max"] >= result.arrays["q99"] * 0.8).all()
    elif measure == "curvature":
        assert set(facts["traces"]) == {"0", "1", "2"} and facts["traces"]["0"]["probes"] == 2
    else:
        assert set(facts["norms"]) == {"0", "1", "2"} and min(facts["norms"].values()) > 0


@pytest.mark.parametrize(
    ("measure", "settings", "least"),
    [
        ("screen", {"draws": 2, "seed": 0}, 50),
        ("formats", {"draws": 1, "seed": 0, "formats": ["int4"]}, 21),
        ("curvature", {"probes": 4, "seed": 0}, 4),
        ("capture", {"batch": 2}, 3),
    ],
)
def test_long_measures_report_how_far_they_are(measure: str, settings: dict[str, Any], least: int) -> None:
    """In parts that grow to the whole, for each of them may take minutes on a CPU."""
    shares: list[float] = []

    class Listener(ProgressDisplay):
        def advanced(self, share: float) -> None:
            shares.append(share)

    where = {"screen": Injection(Gaussian(1.0), phases={"forward"}), "capture": NOISE}.get(measure)
    with progress.shown_by(Listener()):
        (result,) = measured(material(), lambda s, d: trial(s, d, where, measure, **settings))
    assert not result.failed
    assert shares == sorted(shares) and len(shares) >= least and shares[-1] == pytest.approx(1.0)
