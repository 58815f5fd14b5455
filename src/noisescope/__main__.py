"""The command `noisescope`, and `python -m noisescope`: the command line, and Ctrl-C from the first moment on."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run a command; interrupted, it ends with 130 even where Python would end itself by the signal."""
    try:
        from noisescope.cli import main as run

        run()
    except KeyboardInterrupt:  # before a command began, or while it was ending
        print("\ninterrupted. Nothing was kept: run the same command again", file=sys.stderr)
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
    else:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
