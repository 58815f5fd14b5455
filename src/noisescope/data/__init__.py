"""Data: files, data sets of four kinds, their tokens, and generated answers."""
