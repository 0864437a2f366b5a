"""The end of a command's process in which a library has left threads of its own.

gloo's threads outlive their process group once DDP has used it. Now and then one of them is still at work
while the interpreter takes itself down; the process then aborts (SIGABRT), although all was done and saved.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_threads_left = False


def threads_left() -> None:
    """Say that threads will be left which cannot be ended: `owned` then ends the process without them."""
    global _threads_left
    _threads_left = True


@contextmanager
def owned() -> Iterator[None]:
    """The block is the whole of this process: call it before anything else registers with `atexit`.

    What others registered there still runs before the end, and the exit code stays what it was.
    """
    code = 1

    def last() -> None:
        if not _threads_left:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # closed, or nobody reads it any more
                stream.flush()
        os._exit(code)

    atexit.register(last)
    try:
        yield
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        raise
