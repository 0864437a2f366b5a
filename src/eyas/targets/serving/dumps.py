"""Dump folders: made with an owner, and swept by owner and age; nobody else's files are touched.

Below the base folder each project has one folder, and below that each start of a server has one. Its
owner file names project, host, boot and process. A folder without an owner file, or with somebody
else's, is left alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.base.clock import boot_id
from eyas.base.errors import TargetError
from eyas.base.files import write_atomic
from eyas.base.process import ProcessIdentity

OWNER_NAME = "eyas-owner.json"
DUMP_SUFFIXES = (".dump", ".err", ".tmp")
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Owner:
    """Whose a dump folder is.

    ``process_started`` is in clock ticks since boot, ``server_started`` in unix seconds.
    """

    eyas_owner: int
    project: str
    pid: int
    process_started: int
    server_started: str
    boot_id: str
    host: str
    engine: str

    @property
    def alive(self) -> bool:
        """Whether the process may still use its folder; of another host that is not known."""
        if self.host != socket.gethostname():
            return True
        return ProcessIdentity(self.pid, self.process_started, self.boot_id).alive


def project_id(state: Path) -> str:
    """The identity of a project folder, made on first use.

    Raises:
        OSError: it can be neither read nor written.
    """
    path = state / "project-id"
    with contextlib.suppress(FileNotFoundError):
        text = path.read_text(encoding="utf-8").strip()
        if len(text) == 16 and text.isalnum():
            return text
    made = secrets.token_hex(8)
    write_atomic(path, made + "\n")
    return made


def dump_base(dump_dir: str, root: Path) -> Path:
    """Where dump folders of a project lie: as configured, or in shared memory, or in ``state/``."""
    if dump_dir:
        return (root / Path(dump_dir).expanduser()).resolve()
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY
    return root / "state" / "dumps"


def make_dump_folder(base: Path, project: str, owner: Owner) -> Path:
    """A new, empty folder with its owner file.

    Raises:
        TargetError: nothing can be written there.
    """
    folder = base / f"eyas-{project}" / secrets.token_hex(6)
    try:
        folder.mkdir(parents=True, mode=0o700)
        write_owner(folder, owner)
    except OSError as error:
        raise TargetError(
            "the dump folder cannot be made",
            where=folder,
            why=str(error),
            hint="set serve.dump_dir to a folder that eyas and the server can write",
        ) from error
    return folder


def new_owner(project: str, process: ProcessIdentity, engine: str, server_started: str) -> Owner:
    """The owner file of a server that ``process`` runs."""
    return Owner(
        1,
        project,
        process.pid,
        process.started_ticks,
        server_started,
        boot_id(),
        socket.gethostname(),
        engine,
    )


def write_owner(folder: Path, owner: Owner) -> None:
    """Say whose ``folder`` is. Raises OSError."""
    write_atomic(folder / OWNER_NAME, json.dumps(asdict(owner), indent=2) + "\n")


def read_owner(folder: Path) -> Owner | None:
    """Whose ``folder`` is; None when it does not say so in a form that eyas writes."""
    try:
        table: dict[str, Any] = json.loads((folder / OWNER_NAME).read_text(encoding="utf-8"))
        return Owner(**table) if table.get("eyas_owner") == 1 else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def sweep_orphans(base: Path, project: str) -> int:
    """Remove dump folders of this project whose server is gone; returns how many dumps went."""
    num_removed = 0
    place = base / f"eyas-{project}"
    for folder in sorted(place.iterdir()) if place.is_dir() else []:
        owner = read_owner(folder) if folder.is_dir() and not folder.is_symlink() else None
        if owner is not None and owner.project == project and not owner.alive:
            num_removed += remove_dump_folder(folder)
    with contextlib.suppress(OSError):
        place.rmdir()  # only when nothing is left in it
    return num_removed


def remove_dump_folder(folder: Path) -> int:
    """Remove the dumps and the owner file of a folder, and itself when nothing else is in it."""
    num_removed = sweep_dumps(folder, (), 0.0)
    (folder / OWNER_NAME).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
    return num_removed


def sweep_dumps(folder: Path, keep_names: Collection[str], older_than_seconds: float) -> int:
    """Remove dumps that nobody waits for; returns how many went.

    Args:
        keep_names: dumps that somebody does wait for.
        older_than_seconds: leave younger files, by the file's time of change.
    """
    num_removed = 0
    now = time.time()
    kept = set(keep_names)
    for path in folder.iterdir() if folder.is_dir() else []:
        if path.suffix not in DUMP_SUFFIXES or path.stem in kept or path.stem.removesuffix("-err") in kept:
            continue
        with contextlib.suppress(FileNotFoundError):
            if now - path.stat().st_mtime >= older_than_seconds:
                path.unlink()
                num_removed += 1
    return num_removed
