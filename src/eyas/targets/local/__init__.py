"""The target as a transformers model in this process."""
