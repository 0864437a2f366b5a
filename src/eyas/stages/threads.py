"""CPU threads of arithmetic."""

from __future__ import annotations

import os

import torch

from eyas.stages.project import Project


def set_threads(project: Project) -> None:
    """Give arithmetic the threads that the configuration says (or OMP_NUM_THREADS, or all cores)."""
    if project.config.threads:
        torch.set_num_threads(project.config.threads)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
