"""Digest of a folder, to see that nothing changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

SHARED_INDEX = "-shm"  # SQLite's index in shared memory: rebuilt by any reader, holds nothing of its own


def tree_digest(root: Path) -> str:
    """Hash over names, kinds and contents of everything below ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if name.endswith(SHARED_INDEX) or (name.endswith("-wal") and path.stat().st_size == 0):
            continue
        digest.update(f"{name} {path.is_dir()} {path.is_symlink()}\n".encode())
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
