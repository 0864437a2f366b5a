"""How threads of OpenMP wait for their next share of work."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = 2000
"""Turns of the waiting loop of GCC's OpenMP before a thread sleeps: 10 to 100 microseconds."""


def wait_briefly(environment: MutableMapping[str, str] | None = None) -> None:
    """Let waiting threads sleep, but not at once; what the user has set stays.

    Threads that spin for long take another process's core. Those that sleep at once have to be woken for each
    operation, and a training step has some thousand short ones: an eighth of its time on two threads.
    Read by OpenMP when torch is loaded.

    Args:
        environment: where it is said; this process's own if None.
    """
    where = os.environ if environment is None else environment
    if "OMP_WAIT_POLICY" not in where:
        where.setdefault("GOMP_SPINCOUNT", str(SPINS))
        where["OMP_WAIT_POLICY"] = "PASSIVE"
