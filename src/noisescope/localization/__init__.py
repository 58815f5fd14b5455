"""Locators: where a model computes wrongly, each with its own way of knowing."""
