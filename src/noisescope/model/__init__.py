"""Models under test: loaded, taken apart, fingerprinted, and run."""
