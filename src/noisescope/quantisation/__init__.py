"""What number formats cost each module of a model, plans of them carried out, and outliers folded away."""
