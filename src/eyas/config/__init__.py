"""Floor 1: the schema of eyas.toml, loading it, and the values derived from it; no torch."""
