"""Fault tests carried out with the simulator: loss, outputs that are not finite, recovery, detection."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from noisescope import progress, stats
from noisescope.api.plan_trials import check_sizes, find_data
from noisescope.api.preparation import Prepared, prepare_run
from noisescope.data.tokens import Sequence
from noisescope.diagnosis.context import Array, Settings
from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.faults.parsing import parse_fault
from noisescope.faults.simulator import FaultScope, faulty
from noisescope.findings import LIMITS
from noisescope.localization.locate import locate
from noisescope.model.forwards import stepwise_logits
from noisescope.model.loading import Subject
from noisescope.options.base import takes_options
from noisescope.options.plans import FaultTestOptions
from noisescope.options.shared import ScoringOptions
from noisescope.plans.fault_tests import FaultMeasurement, FaultTest, FaultTestResult, Hits, could_not_run, judge
from noisescope.probe.noise import Gaussian
from noisescope.reports.saved_report import Report
from noisescope.runs.trial_runner import TrialRunner

AFTER = 8  # steps that are watched after a fault of one step, where the sample is long enough
# Tokens: one before the fault, one with it, its prediction, and the fewest steps after it that show recovery.
SHORTEST = 3 + int(LIMITS["fault_recovery_steps"])


@takes_options(FaultTestOptions, "data")
def run_fault_tests(
    subject: Subject,
    tests: Iterable[FaultTest],
    options: FaultTestOptions,
    *,
    on_result: Callable[[FaultTestResult], None] = lambda result: None,
) -> list[FaultTestResult]:
    """A result for each test: its verdict, every criterion with its number, what the fault hit.

    `on_result` is called with each as soon as it is known. Every sample is a request of its own: a forward, or for
    faults that last one step, a generation token by token in which the fault hits one token. The score is the task's,
    with and without the fault on the same samples.
    """
    tests = tuple(tests)
    settings = Settings(Gaussian(0.05), levels=("operator",))  # the noise is not used: only the clean model is asked
    scoring = ScoringOptions(data=options.source(), samples=options.samples, max_tokens=options.max_tokens, slice=1)
    prepared = prepare_run(subject, scoring, settings)
    results = []
    runner = _Runner(subject, prepared)
    with progress.plan(progress.Phase("fault tests", len(tests))):
        for test in progress.track("fault tests", tests):
            started = time.perf_counter()
            try:
                result = judge(test, runner.measured(test))
            except NoisescopeError as error:  # a fused operator, a place that this model lacks: the other tests go on
                result = could_not_run(test, str(error))
            results.append(replace(result, seconds=time.perf_counter() - started))
            on_result(results[-1])
    return results


def run_report_tests(
    subject: Subject,
    report: Report,
    tests: Iterable[FaultTest],
    options: FaultTestOptions,
    *,
    on_result: Callable[[FaultTestResult], None],
) -> list[FaultTestResult]:
    """The tests of a report on its model, and on its data unless others are given."""
    check_sizes(report, subject)
    data = options.source(find_data(report) if options.data is None else None)
    options = replace(options, data=data, prompt_field=None, answer_field=None)
    return run_fault_tests(subject, tests, options=options, on_result=on_result)


class _Runner:
    """The model with and without faults; clean answers are computed once."""

    def __init__(self, subject: Subject, prepared: Prepared) -> None:
        self.subject = subject
        self.prepared = prepared
        self.context = prepared.context
        material = prepared.materials[0]
        labels = material.labels or (0,) * len(material)
        chosen = [group[label] for group, label in zip(material.encoded.sequences, labels, strict=True)]
        self.sequences = [sequence for sequence in chosen if len(sequence.ids) >= SHORTEST]
        self.whole_answers = material.kind in ("answer", "chat")
        self._clean: Array | None = None
        self._clean_steps: dict[int, Tensor] = {}

    def measured(self, test: FaultTest) -> FaultMeasurement:
        """What the test's criteria ask for."""
        faults, wanted = test.parameters.faults, test.acceptance_criteria
        found = self._stepped(faults) if wanted.recovery_time is not None else self._answered(faults)
        return self._located(faults, found) if wanted.detection_required else found

    @contextlib.contextmanager
    def _broken(self, faults: tuple[str, ...]) -> Iterator[list[FaultScope]]:
        with contextlib.ExitStack() as stack:
            anatomy = self.subject.anatomy
            yield [stack.enter_context(faulty(self.subject.model, fault, anatomy=anatomy)) for fault in faults]

    def _answered(self, faults: tuple[str, ...]) -> FaultMeasurement:
        if self._clean is None:
            self._clean, _ = self._answers()
        with self._broken(faults) as scopes:
            scores, broken = self._answers()
        tokens = self.prepared.facts.data.scored_tokens
        loss = stats.degradation(self._clean, scores, chance=self.context.chance)
        return FaultMeasurement(_hits(scopes), self.context.metric_name, loss, broken / tokens)

    def _answers(self) -> tuple[Array, int]:
        """The metric of each sample, 0 for a broken one, and how many tokens were not finite."""
        scores, broken = [], 0
        with TrialRunner(self.subject, self.prepared.materials) as runner:
            runner.reuse = False  # a fault may sit in any block
            for trial in self.context.ask(None):
                result = runner.run(trial)
                if result.failed:
                    raise NoisescopeError(result.error)
                scores.append(result.values[self.context.metric][0] or 0.0)
                broken += int(result.values["nonfinite"][0] or 0)
        return np.array(scores), broken

    def _stepped(self, faults: tuple[str, ...]) -> FaultMeasurement:
        """The fault hits one token; answers and recovery are of what follows it. Shorter samples are left out."""
        if not self.sequences:
            raise InvalidInput(f"recovery needs samples of at least {SHORTEST} tokens")
        clean, faulted, recovered = [], [], []
        broken, tokens, hits = 0, 0, Hits(0, 0, 0)
        for number, sequence in enumerate(self.sequences):
            first = max(1, len(sequence.ids) - AFTER - 2)
            if number not in self._clean_steps:
                self._clean_steps[number] = self._predicted(sequence, first)
            before = self._clean_steps[number]
            with self._broken(faults) as scopes:
                after = self._predicted(sequence, first)
            hits += _hits(scopes)
            clean.append(self._right(sequence, before, first))
            faulted.append(self._right(sequence, after, first))
            recovered.append(_recovered(before, after))
            broken, tokens = broken + int((after < 0).sum()), tokens + len(after)
        loss = stats.degradation(clean, faulted, chance=self.context.chance)
        return FaultMeasurement(hits, self.context.metric_name, loss, broken / tokens, tuple(recovered))

    def _predicted(self, sequence: Sequence, first: int) -> Tensor:
        """The likeliest token at each step [steps]; -1 where the output is not finite."""
        logits = stepwise_logits(self.subject.model, sequence.ids, first)
        return torch.where(logits.isfinite().all(-1), logits.argmax(-1), -1).cpu()

    def _right(self, sequence: Sequence, predicted: Tensor, first: int) -> float:
        """Of the tokens that decide accuracy and come after the fault: whether all are right, or the share that is."""
        begin = max(sequence.final, first + 2)  # forward 1 has the fault, and predicts ids[first + 1]
        right = (predicted[begin - first :] == torch.tensor(sequence.ids[begin:])).double()
        return float(right.min() if self.whole_answers else right.mean())

    def _located(self, faults: tuple[str, ...], found: FaultMeasurement) -> FaultMeasurement:
        with self._broken(faults):
            verdict = locate(self.subject, quick=True)
        places = {parse_fault(fault)[1].place for fault in faults}
        suspect = verdict.suspects[0] if verdict.suspects else None
        right = verdict.verdict == "faulty" and suspect is not None and suspect.site.place in places
        words = verdict.verdict if suspect is None else f"{verdict.verdict}: {suspect.site}, {suspect.fault_class}"
        return replace(found, detected=right, located=f"says {words}")


def _hits(scopes: Iterable[FaultScope]) -> Hits:
    """Of all faults of a test together."""
    return sum((Hits(scope.calls, scope.acted, scope.changed) for scope in scopes), Hits(0, 0, 0))


def _recovered(clean: Tensor, faulted: Tensor) -> int | None:
    """The step after the faulty one at which the likeliest token is the clean one again, and stays it.

    0 where it was never another; None where it still is at the last step watched.
    """
    wrong = (clean[2:] != faulted[2:]).tolist()  # step 1 after the fault first
    if wrong[-1]:
        return None
    return max((step + 1 for step, is_wrong in enumerate(wrong, 1) if is_wrong), default=0)
