"""Importing and exporting captured states in older layouts; loaded by name, since it needs torch."""
