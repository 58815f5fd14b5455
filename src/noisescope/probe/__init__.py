"""The probe: the only code that modifies a model, and the noise it injects."""
