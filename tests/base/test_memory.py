"""Freed memory that stays."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import resource, sys
from eyas.base.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit("not glibc")
pages = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def step():
    return len([bytes(12_000_000), bytes(20_000_000)])
step(); step()
before = pages()
for _ in range(10):
    step()
print(pages() - before)
"""


def test_steps_take_no_new_pages() -> None:
    assert faults("keep") < 100
    assert faults("leave") > 1000  # so the test can fail


def faults(what: str) -> int:
    words = [sys.executable, "-c", CHILD, what]
    return int(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)
