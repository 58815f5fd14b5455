"""Reports: one value, drawn in several ways. Nothing here computes a number."""
