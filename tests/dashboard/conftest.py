"""The projects of the report's tests."""

from tests.report.conftest import copy, finished, fresh, target

__all__ = ["copy", "finished", "fresh", "target"]
