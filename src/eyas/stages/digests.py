"""Digests of input files, remembered by path, size, time and inode."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from eyas.base.checked import require_check, with_check
from eyas.base.files import read_json, write_json
from eyas.base.seal import file_digest, read_seal


class DigestCache:
    """SHA-256 of files; a file that was not touched is not read again.

    Args:
        writable: remember digests in the file at all; a look that changes nothing does not.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self._path, self._writable = path, writable
        self._known: dict[str, list[object]] = {}
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            self._known = dict(require_check(read_json(path))["files"])

    def digest(self, file: Path, *, remember: bool = True) -> str:
        """SHA-256 of ``file`` in hexadecimal. Raises OSError when it cannot be read."""
        status = file.stat()
        mark: list[object] = [status.st_size, status.st_mtime_ns, status.st_ino]
        entry = self._known.get(str(file))
        if isinstance(entry, list) and entry[:3] == mark and len(entry) == 4:
            return str(entry[3])
        value = file_digest(file)
        self._known[str(file)] = [*mark, value]
        if remember and self._writable:
            with contextlib.suppress(OSError):  # a cache: a full disk must not end a read-only verb
                write_json(self._path, with_check({"files": self._known}))
        return value


_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


def tokenizer_digest(model: Path, cache: DigestCache) -> str:
    """One digest over all files that decide tokens: vocabulary, merges, settings and chat template."""
    combined = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = model / name
        if path.is_file():
            combined.update(f"{name} {cache.digest(path)}\n".encode())
    return combined.hexdigest()[:32]


def sealed_digest(folder: Path) -> str:
    """One digest over the content of a sealed folder, taken from its seal.

    Raises:
        SealBroken: there is no readable seal.
    """
    combined = hashlib.sha256()
    files = read_seal(folder)["files"]
    for name in sorted(files):
        combined.update(f"{name} {files[name]['sha256']}\n".encode())
    return combined.hexdigest()[:32]
