"""The probe: the one place that alters a model, and the noise it puts there."""
