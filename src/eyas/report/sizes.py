"""What the parts of a project take on disk, from one walk over it."""

from __future__ import annotations

import os
from pathlib import Path


def folder_sizes(root: Path, depth: int = 2) -> dict[str, int]:
    """Bytes of everything below ``root`` and below each folder in it, ``depth`` levels down.

    Returns:
        By relative path, as in ``{"": 9, "data": 5, "data/samples": 4}``.
    """
    sizes = {"": 0}
    for folder, _, names in os.walk(root):
        num_bytes = 0
        for name in names:
            try:
                num_bytes += os.lstat(os.path.join(folder, name)).st_size
            except OSError:  # it went while we looked
                continue
        parts = Path(folder).relative_to(root).parts
        for level in range(min(depth, len(parts)) + 1):
            key = "/".join(parts[:level])
            sizes[key] = sizes.get(key, 0) + num_bytes
    return sizes
