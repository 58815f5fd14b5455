"""Compares two records: how far apart they are, where they diverge, and what that costs. Does not import torch."""
