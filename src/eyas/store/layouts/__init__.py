"""Older layouts of captured states: one file a sample, named by number or by id."""
