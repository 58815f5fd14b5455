"""Runs: trials executed on a model, here or on a cluster, and kept in a store."""
