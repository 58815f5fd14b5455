"""`python -m noisescope` is the command `noisescope`."""

from __future__ import annotations

from noisescope.cli import main

if __name__ == "__main__":
    main()
