"""Tests of the drafter floor."""
