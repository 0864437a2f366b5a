"""Sealed folders: a folder without its seal does not exist.

Order: files, fsync of each, manifest with digests, fsync, rename of the folder, fsync of its parent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.base.checked import require_check, with_check
from eyas.base.clock import utc_now_text
from eyas.base.errors import SealBroken
from eyas.base.files import TEMPORARY_SUFFIX, fsync_folder

SEAL_NAME = "seal.json"


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def sealed_folder(final: Path, about: dict[str, Any]) -> Iterator[Path]:
    """Give a folder to fill; when the block ends well, seal it under ``final``.

    Args:
        final: where the folder appears; must not exist.
        about: what made it (recipe, counts); kept in the seal under ``about``. May be filled
            inside the block.

    Raises:
        FileExistsError: ``final`` exists already.
        OSError: nothing appears under ``final``.
    """
    if final.exists():
        raise FileExistsError(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _seal(temporary, about)
        os.rename(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync_folder(final.parent)


def _seal(folder: Path, about: dict[str, Any]) -> None:
    files: dict[str, dict[str, object]] = {}
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            folders.append(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        files[path.relative_to(folder).as_posix()] = {
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
        }
    manifest = with_check({"sealed_at": utc_now_text(), "about": about, "files": files})
    with open(folder / SEAL_NAME, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    for path in folders:
        fsync_folder(path)


def is_sealed(folder: Path) -> bool:
    """Whether ``folder`` carries a seal (its digests are not checked)."""
    return (folder / SEAL_NAME).is_file()


def read_seal(folder: Path) -> dict[str, Any]:
    """The seal of a folder: ``sealed_at``, ``about``, ``files``.

    Raises:
        SealBroken: there is no seal, or it is not what was written.
    """
    try:
        seal = require_check(json.loads((folder / SEAL_NAME).read_text(encoding="utf-8")))
        if not isinstance(seal["files"], dict) or not isinstance(seal["about"], dict):
            raise ValueError("fields of the wrong kind")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SealBroken("the seal cannot be read", where=folder / SEAL_NAME, why=str(error)) from error
    return seal


def seal_faults(folder: Path, *, deep: bool = True) -> list[str]:
    """What is wrong with a sealed folder: missing, resized, changed or foreign files; [] if nothing.

    Args:
        deep: hash every file; otherwise only names and sizes are compared.
    """
    try:
        files = read_seal(folder)["files"]
    except SealBroken as error:
        return [f"{SEAL_NAME}: {error.why}"]
    faults = []
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            faults.append(f"{name}: missing")
        elif path.stat().st_size != entry["bytes"]:
            faults.append(f"{name}: {path.stat().st_size} bytes, sealed with {entry['bytes']}")
        elif deep and file_digest(path) != entry["sha256"]:
            faults.append(f"{name}: content changed since it was sealed")
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != SEAL_NAME and name not in files:
            faults.append(f"{name}: not part of the seal")
    return faults


def require_seal(folder: Path) -> dict[str, Any]:
    """The seal of ``folder`` after every file in it was hashed.

    Raises:
        SealBroken: names the first fault.
    """
    faults = seal_faults(folder)
    if faults:
        raise SealBroken("a sealed folder is damaged", where=folder, why="; ".join(faults[:3]))
    return read_seal(folder)
