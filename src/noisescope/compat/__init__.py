"""The names of the original method notes (docs/method.md), thin over noisescope."""
