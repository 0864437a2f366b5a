"""Tokens per second of extraction through vLLM beside its own prefill without extraction."""

from __future__ import annotations

import argparse

from benchmarks.serving.extraction import add_arguments, measure

__all__ = ["add_arguments", "run"]

LIMIT = 0.9


def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Both in turn; see `benchmarks.serving.extraction`."""
    return measure("vllm-extract", "vllm", LIMIT, arguments)
