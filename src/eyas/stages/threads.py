"""CPU threads of arithmetic."""

from __future__ import annotations

import os

import torch

from eyas.stages.project import Project


def threads_of(project: Project, num_processes: int = 1) -> int | None:
    """Threads of each of several processes that share what the configuration says, or all cores.

    None: OMP_NUM_THREADS says it already.
    """
    if project.config.threads:
        return max(1, project.config.threads // num_processes)
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def set_threads(project: Project, num_processes: int = 1) -> None:
    """Give arithmetic the threads that the configuration says (or OMP_NUM_THREADS, or all cores)."""
    threads = threads_of(project, num_processes)
    if threads is not None:
        torch.set_num_threads(threads)
