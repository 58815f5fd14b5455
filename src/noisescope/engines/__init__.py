"""Engines: what executes a model. One file each, one protocol (protocol.py); `open_engine` starts one by name."""
