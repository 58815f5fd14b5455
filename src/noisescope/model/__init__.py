"""Models under test: loading, anatomy, fingerprints, and forwards."""
