"""Freed memory that stays."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

CHILD = """
import os, sys
from eyas.base.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
for _ in range(3):
    held = [bytearray(b"x" * 20_000_000) for _ in range(6)]
    del held
print(resident() - before)
"""


def test_freed_memory_stays_with_the_process() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library has no mallopt")
    assert still_resident("keep") > 100_000_000
    assert still_resident("leave") < 60_000_000  # twice the largest at most, as glibc does by itself


def still_resident(what: str) -> int:
    """Bytes that a process holds more after it took 120 MB and freed them, three times."""
    words = [sys.executable, "-c", CHILD, what]
    return int(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
