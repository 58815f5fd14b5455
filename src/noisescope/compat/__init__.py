"""The names of the original method notes (docs/method.md), as a thin layer over noisescope."""
