"""Fuzz every reader: `make fuzz FUZZ_SECONDS=600`. Prints a line per reader; exit code 1 where anything went wrong.

Every reader gets an equal share of the time, but at least FUZZ_LEAST inputs; other seeds every day, or FUZZ_SEED.
"""

from __future__ import annotations

import datetime
import faulthandler
import logging
import os
import sys
import time
from pathlib import Path

ROUND = 100  # inputs between two looks at the clock


def main() -> int:
    sys.dont_write_bytecode = True
    logging.disable(logging.WARNING)  # transformers' advice on configs
    from tests.fuzz.harness import Fuzzer, Tally
    from tests.fuzz.readers import all_readers

    seconds, least = float(os.environ.get("FUZZ_SECONDS", "600")), int(os.environ.get("FUZZ_LEAST", "0"))
    number = int(os.environ.get("FUZZ_SEED") or datetime.datetime.now(datetime.UTC).toordinal())
    wanted = os.environ.get("FUZZ_READER", "")
    readers = [reader for reader in all_readers() if wanted in reader.name]
    fuzzer = Fuzzer(keep=Path("fuzz-failures"))
    print(f"seed {number}, {seconds:g} s\n{'reader':20} inputs mutated read refused slowest_s longest_message failures")
    total = failed = 0
    for reader in readers:
        fuzzer.warm_up(reader)
        tally, started = Tally(reader.name), time.monotonic()
        for turn in range(10**6):
            faulthandler.dump_traceback_later(120, exit=True)  # what hangs in C code can't be stopped otherwise
            fuzzer.run(reader, ROUND, 1_000_003 * number + turn, tally)
            if time.monotonic() - started > seconds / len(readers) and tally.total >= least:
                break
        faulthandler.cancel_dump_traceback_later()
        total, failed = total + tally.total, failed + len(tally.failures)
        print(
            f"{reader.name:20} {tally.total} {tally.kinds['mutated']} {tally.read} {tally.refused} "
            f"{tally.slowest:.2f} {tally.longest} {len(tally.failures)}",
            flush=True,
        )
        for failure in tally.failures[:3]:
            print(failure, file=sys.stderr)
    print(f"{total} inputs, {failed} failures")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
