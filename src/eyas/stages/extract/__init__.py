"""Stage extract: capture aux and last states of every sample into the store."""
