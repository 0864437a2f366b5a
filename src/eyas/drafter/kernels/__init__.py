"""Compiled passes over rows for the CPU; elsewhere, and where they were not built, torch's operations."""
