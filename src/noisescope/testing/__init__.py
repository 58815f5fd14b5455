"""Tiny random models and their inputs, for noisescope's tests and for yours."""

from noisescope.testing.models import MODELS, tiny_inputs, tiny_model

__all__ = ["MODELS", "tiny_inputs", "tiny_model"]
