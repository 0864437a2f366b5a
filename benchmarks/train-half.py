"""CPU seconds of one training step beside the better peer's, half of the rows supervised."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from benchmarks.training.compare import add_arguments, case_of, compare

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """One sample: the first half is the prompt, the second half the answer."""
    case = case_of(arguments)
    return compare("train-half", replace(case, start=case.length // 2), arguments, wanted=3.0)
