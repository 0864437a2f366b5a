"""Tests of floor 3, targets."""
