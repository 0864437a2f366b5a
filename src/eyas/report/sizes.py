"""What the parts of a project take on disk, from one walk over it."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def folder_sizes(root: Path, depth: int = 2) -> dict[str, int]:
    """Bytes of everything below ``root`` and below each folder in it, ``depth`` levels down.

    Returns:
        By relative path, as in ``{"": 9, "data": 5, "data/samples": 4, "data/stats.json": 1}``.
    """
    sizes = {"": 0}
    for folder, _, names in os.walk(root):
        num_bytes = 0
        parts = Path(folder).relative_to(root).parts
        for name in names:
            try:
                found = os.lstat(os.path.join(folder, name))
            except OSError:  # it went while we looked
                continue
            if not stat.S_ISREG(found.st_mode):
                continue
            size = found.st_size
            num_bytes += size
            if len(parts) == 1 and depth > 1:
                sizes[f"{parts[0]}/{name}"] = size
        for level in range(min(depth, len(parts)) + 1):
            key = "/".join(parts[:level])
            sizes[key] = sizes.get(key, 0) + num_bytes
    return sizes
