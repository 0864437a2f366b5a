"""How fast a folder takes bytes, measured by writing some."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from eyas.base.files import temporary_name
from eyas.store.commit import write_all

_PROBE_BYTES = 64 << 20
_CHUNK_BYTES = 4 << 20
_MAX_SECONDS = 2.0


def measure_write_speed(folder: Path, num_bytes: int = _PROBE_BYTES) -> float | None:
    """Bytes per second of a sequential write with one fsync; None when it could not be written.

    Writes random bytes, which no storage can compress, to a file that is removed again. A slow disk is not
    kept busy: the write ends after 2 seconds.
    """
    path = temporary_name(folder / "write-speed")
    chunk = os.urandom(min(num_bytes, _CHUNK_BYTES))
    written = 0
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            started = time.perf_counter()
            while written < num_bytes and time.perf_counter() - started < _MAX_SECONDS:
                write_all(descriptor, [chunk])
                written += len(chunk)
            os.fsync(descriptor)
            seconds = time.perf_counter() - started
        finally:
            os.close(descriptor)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    return written / max(seconds, 1e-9)
