"""Runs trials of the experiment in this process, in several, or on Ray; results are returned as they finish.

A model as small as the bundled one keeps a GPU waiting for its next operation most of the time, so several processes
share one: `workers` is a number of processes, not of devices. Each computes with one thread, as this process does when
it works alone, so that the numbers on a CPU do not depend on how many there are.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import torch

from noisescope.errors import InvalidInput, NoisescopeError
from noisescope.runs.ray_executor import first_line, import_ray, ray_cluster
from noisescope.training.phases_experiment import Job, run, seconds_before
from noisescope.trials import Result

Ended = tuple[Job, Result | None, float]  # None: the time was up; seconds


def attempt(job: Job) -> tuple[Result | None, float]:
    """A job's result, its error as a row, or None if time ran out; seconds include earlier parts."""
    started = time.perf_counter() - seconds_before(job)
    try:
        result = run(job)
    except Exception as error:  # a failed training is a row of the experiment, too
        result = Result(error=f"{type(error).__name__}: {first_line(error)}")
    return result, time.perf_counter() - started


def run_all(
    jobs: Sequence[Job], *, workers: int, executor: str = "local", address: str | None = None
) -> Iterator[Ended]:
    """Every job as it finishes."""
    if executor == "ray":
        return _on_ray(jobs, workers, address)
    return _in_this_process(jobs) if workers == 1 or len(jobs) < 2 else _in_processes(jobs, workers)


def check_device(device: str) -> None:
    """Reject a device that this machine does not have."""
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise InvalidInput(
            f"can't train on device {device!r}: {first_line(error)}. Choose a device this machine has: cpu, cuda, "
            f"cuda:1 ..."
        ) from error


def _in_this_process(jobs: Sequence[Job]) -> Iterator[Ended]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in jobs:
            yield (job, *attempt(job))
    finally:
        torch.set_num_threads(threads)


def _in_processes(jobs: Sequence[Job], workers: int) -> Iterator[Ended]:
    """Fresh processes: a forked one can't use a GPU that its parent has used."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(jobs)), fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        running = {pool.submit(attempt, job): job for job in jobs}
        try:
            for done in as_completed(running):
                yield (running[done], *done.result())
        except BrokenProcessPool as error:
            raise NoisescopeError(
                "a worker process died: it ran out of memory, or the script starts several processes without `if "
                "__name__ == '__main__':`, so each of them would run the script again. The same call continues from "
                "there"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _on_ray(jobs: Sequence[Job], workers: int, address: str | None) -> Iterator[Ended]:
    ray = import_ray("--executor ray needs Ray")
    with ray_cluster(ray, address, workers):
        devices = {"num_gpus": 1 / workers} if jobs and jobs[0].design.device.startswith("cuda") else {}
        remote: Callable[..., object] = ray.remote(num_cpus=1, max_retries=1, **devices)(_attempt_in_one_thread).remote
        running = {remote(job): job for job in jobs}
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            yield (running.pop(done), *ray.get(done))


def _attempt_in_one_thread(job: Job) -> tuple[Result | None, float]:
    torch.set_num_threads(1)
    return attempt(job)
