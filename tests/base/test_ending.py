"""How a process ends that leaves a library's threads behind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHILD = """
import atexit, os, sys
from eyas.base.ending import owned, threads_left

class AtTheVeryEnd:  # stands for a thread that aborts the process while the interpreter takes itself down
    def __del__(self):
        os.abort()

left = AtTheVeryEnd()
with owned():
    atexit.register(print, "others first")
    {said}
    {way}
"""


@pytest.mark.parametrize(
    ("way", "code"), [("pass", 0), ("sys.exit(7)", 7), ("sys.exit('words')", 1), ("raise ValueError", 1)]
)
def test_what_is_left_behind_changes_no_exit_code(way: str, code: int) -> None:
    child = run_child("threads_left()", way)
    assert child.returncode == code
    assert child.stdout == "others first\n"
    assert ("Traceback" in child.stderr) == (way == "raise ValueError")


def test_without_such_threads_python_ends_as_always() -> None:
    assert run_child("pass", "sys.exit(7)").returncode == -6  # so the test above can fail


def run_child(said: str, way: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", CHILD.format(said=said, way=way)]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=buffered)
