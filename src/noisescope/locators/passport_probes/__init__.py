"""Probes of the passport: each gives one fact about a device's arithmetic from chosen inputs, by calling one operation.

The operation under test is always an argument, so that the same probe runs on a device and on an emulation of one.
"""
