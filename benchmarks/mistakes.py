"""Processor time to the error line of ten typical mistakes, for this version and for other checkouts.

    python benchmarks/mistakes.py                    this checkout
    python benchmarks/mistakes.py path/to/other      another checkout first, then this one

Each command runs three times in a process of its own; the median of user and system time is printed, and the last line
of the error. A command that takes more than 60 s of processor time is stopped: it did not notice the mistake.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MISTAKES = {
    "a mistyped choice": "diagnose demo --effort standrad",
    "a mistyped option": "diagnose demo --smaples 8",
    "a mistyped command": "diagnoze demo",
    "no such model": "diagnose path/to/nothing",
    "no such data": "diagnose demo --data nowhere.jsonl",
    "unknown columns": "diagnose demo --data columns.jsonl",
    "a value out of range": "diagnose demo --samples 0",
    "a mistyped key in a config file": "diagnose demo --config run.yaml",
    "an unknown fault": "locate demo --simulate deadzone:0.3@10",
    "no such record": "compare here.record there.record",
}
RUNS, MOST = 3, 60  # of each command; seconds of processor time


def spent(checkout: Path, arguments: str, folder: Path) -> tuple[float, str]:
    """Median seconds of processor time, and the error."""
    times, error = [], ""
    for _ in range(RUNS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = subprocess.run(
            [sys.executable, "-c", "from noisescope.cli import main; main()", *arguments.split()],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
            capture_output=True,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (MOST, MOST)),
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        lines = [line for line in found.stderr.splitlines() if any(letter.isalpha() for letter in line)]
        error = lines[-1].strip(" │") if found.returncode == 2 and lines else f"not refused (exit {found.returncode})"
        if times[-1] > MOST / 2:
            break
    return statistics.median(times), error


def main() -> None:
    checkouts = [*map(Path, sys.argv[1:]), Path(__file__).parents[1]]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, median of {RUNS} runs\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text("windw: 3\n")
        (folder / "columns.jsonl").write_text(json.dumps({"query": "1 + 1", "reply": "2"}) + "\n")
        for mistake, arguments in MISTAKES.items():
            found = [spent(checkout.resolve(), arguments, folder) for checkout in checkouts]
            seconds = " -> ".join(f"{taken:.2f} s" for taken, _ in found)
            print(f"{mistake} (noisescope {arguments}): {seconds}", flush=True)
            for _, error in found:
                print(f"    {error[:160]}", flush=True)


if __name__ == "__main__":
    main()
