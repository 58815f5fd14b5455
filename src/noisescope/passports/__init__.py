"""Passports: the arithmetic of a device, measured and compared."""
