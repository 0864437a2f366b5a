"""Stage regenerate: the target answers every prompt itself."""
