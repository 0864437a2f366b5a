"""CPU seconds of one training step beside the better peer's, every row supervised."""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.training.compare import add_arguments, case_of, compare

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One sample of one span, from the first token to the last."""
    return compare("train-step", case_of(arguments), arguments, wanted=1.6)
