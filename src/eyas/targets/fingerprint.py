"""What a target's weights are, as a hash of every byte."""

from __future__ import annotations

import contextlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import xxhash

from eyas.base.checked import require_check, with_check
from eyas.base.files import write_json
from eyas.targets.weight_files import weight_files

_CHUNK_BYTES = 8 << 20
_CACHE_FORMAT = 1


@dataclass(frozen=True)
class WeightsFingerprint:
    """Identity of a target's weights.

    Attributes:
        hash: 32 hexadecimal characters: xxh3-128 over one line ``name size hash`` per weight file,
            sorted by name. Configuration and tokenizer are not part of it; recipes carry those apart.
        files: xxh3-128 of each weight file by its name in the folder.
    """

    hash: str
    files: dict[str, str]


def weights_fingerprint(model: Path, cache_path: Path | None = None) -> WeightsFingerprint:
    """Hash every weight file of a model folder in full.

    Args:
        model: folder with safetensors.
        cache_path: a JSON file that remembers hashes by path, size, modification time and inode, so
            that an unchanged terabyte is read once. It is only ever a shortcut: damaged or missing,
            files are hashed again.

    Raises:
        TargetError: there are no weight files.
        OSError: a weight file cannot be read.
    """
    files = weight_files(model)
    known = _read_cache(cache_path)
    stamps = {path: _stamp(path) for path in files}
    todo = [path for path in files if known.get(str(path.resolve()), {}).get("stamp") != stamps[path]]
    with ThreadPoolExecutor(max_workers=max(1, min(4, len(todo)))) as pool:
        fresh = dict(zip(todo, pool.map(file_hash, todo), strict=True))
    hashes: dict[str, str] = {}
    for path in files:
        hashes[path.name] = fresh[path] if path in fresh else str(known[str(path.resolve())]["hash"])
    if fresh and cache_path is not None:
        for path, value in fresh.items():
            if _stamp(path) == stamps[path]:  # a file that changed while it was read is not remembered
                known[str(path.resolve())] = {"stamp": stamps[path], "hash": value}
        with contextlib.suppress(OSError):  # only a shortcut
            write_json(cache_path, with_check({"format": _CACHE_FORMAT, "files": known}))
    lines = "".join(f"{path.name} {path.stat().st_size} {hashes[path.name]}\n" for path in files)
    return WeightsFingerprint(hash=xxhash.xxh3_128_hexdigest(lines.encode()), files=hashes)


def file_hash(path: Path) -> str:
    """xxh3-128 of a file's bytes, in hexadecimal. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(_CHUNK_BYTES)
        view = memoryview(buffer)
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return str(digest.hexdigest())


def _stamp(path: Path) -> list[int]:
    status = os.stat(path)
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def _read_cache(cache_path: Path | None) -> dict[str, dict[str, object]]:
    if cache_path is None:
        return {}
    try:
        content = require_check(json.loads(cache_path.read_text(encoding="utf-8")))
        if content["format"] != _CACHE_FORMAT:
            return {}
        return {str(k): {"stamp": v["stamp"], "hash": str(v["hash"])} for k, v in content["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
