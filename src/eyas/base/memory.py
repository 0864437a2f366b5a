"""What the C library does with memory that is given back."""

from __future__ import annotations

import ctypes

KEPT_BYTES = 1 << 30
"""Most freed memory that stays with the process."""
_MMAP_BYTES = 32 << 20  # the largest that mallopt takes everywhere
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> bool:
    """Keep freed memory for the next step instead of giving it back and taking it again, page by page.

    glibc only; elsewhere nothing changes. What is freed by then is reused, so the most that is held stays
    about the same.

    Returns:
        Whether the C library does so now.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, KEPT_BYTES))
