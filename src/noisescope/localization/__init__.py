"""Locators: methods that find where a model computes wrongly."""
