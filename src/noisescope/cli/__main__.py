"""`python -m noisescope.cli` is `noisescope`."""

from noisescope.cli import main

if __name__ == "__main__":
    main()
