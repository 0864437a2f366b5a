"""The folder in which a server leaves its dumps: room in it, removal, and orphans."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from eyas.targets.server.dump import ERROR_SUFFIX, SUFFIX, UNFINISHED_SUFFIX
from eyas.targets.server.faults import ServerFault
from eyas.targets.server.names import DumpNames

FULL_SHARE = 0.8
"""A folder whose dumps take this share of what they can hold gets no new requests."""
ORPHAN_SECONDS = 60.0
"""What another run of this project left unfinished is removed at this age; the server may be writing it."""
OWNER = "eyas-owner.json"


class DumpFolder:
    """One server's dumps, as this process sees them.

    Args:
        path: of the folder on this machine.
        names: whose dumps are ours.

    Raises:
        ServerFault: ``no_folder``: it is not here.
    """

    def __init__(self, path: Path, names: DumpNames) -> None:
        if not path.is_dir():
            raise ServerFault("no_folder", f"{path} is not a folder on this machine")
        self.path = path
        self._names = names
        self._looked_at, self._share = 0.0, 0.0

    def file(self, name: str) -> Path:
        return self.path / f"{name}{SUFFIX}"

    def error(self, name: str) -> str | None:
        """What the server says of a dump that it could not write; None while it says nothing."""
        try:
            text = (self.path / f"{name}{ERROR_SUFFIX}").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(text)["why"])
        return text[:200]

    def remove(self, names: Iterable[str]) -> None:
        """Remove the dumps of these names, finished or not; those that are not there are no matter."""
        for name in names:
            for suffix in (SUFFIX, ERROR_SUFFIX):
                with contextlib.suppress(OSError):
                    (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def used_share(self) -> float:
        """What files here take, as a share of that and the space that is free, between 0 and 1.

        Looked at a few times a second. What others keep on the same filesystem does not count: it says
        nothing of the room that is left.
        """
        now = time.monotonic()
        if now - self._looked_at > 0.25 or not self._looked_at:
            held = self._held_bytes()
            capacity = held + shutil.disk_usage(self.path).free
            self._share = held / capacity if capacity else 1.0
            self._looked_at = now
        return self._share

    @property
    def full(self) -> bool:
        return self.used_share() >= FULL_SHARE

    def _held_bytes(self) -> int:
        total = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # one that was just taken
                    total += entry.stat().st_size
        return total

    def sweep(self, abandoned: Iterable[str] = ()) -> int:
        """Remove orphans of this project and dumps that came after they were given up; returns how many.

        The caller holds the project's lock, so nobody waits for dumps of another run. What belongs to
        other projects stays.
        """
        given_up, removed = set(abandoned), 0
        for path in list(self.path.iterdir()):
            if path.suffix not in (SUFFIX, ERROR_SUFFIX, UNFINISHED_SUFFIX):
                continue
            name = path.name.removesuffix(path.suffix)
            if not self._names.of_project(name) or (self._names.of_run(name) and name not in given_up):
                continue
            with contextlib.suppress(OSError):
                age = time.time() - path.stat().st_mtime
                if path.suffix == UNFINISHED_SUFFIX and age < ORPHAN_SECONDS:
                    continue
                path.unlink()
                removed += 1
        return removed
