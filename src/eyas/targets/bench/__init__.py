"""Measuring a running server: speed, acceptance by its own counts, and its texts beside plain serving."""
