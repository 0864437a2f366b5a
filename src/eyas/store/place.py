"""Which filesystem a folder lies on, so that a moved or empty mount is recognised."""

from __future__ import annotations

import os
from pathlib import Path

from eyas.base.errors import EyasError, StoreNotMounted
from eyas.base.layout import Layout
from eyas.store.ledger import Ledger


def mount_identity(folder: Path) -> str:
    """Device number, filesystem id and mount source of ``folder`` as one text.

    It changes when another disk is mounted there, or none. Raises OSError when there is no folder.
    """
    device = os.stat(folder).st_dev
    filesystem = os.statvfs(folder).f_fsid
    number = f"{os.major(device)}:{os.minor(device)}"
    return f"{number} {filesystem:x} {_mount_source(folder.resolve(), number)}"


def _mount_source(folder: Path, number: str) -> str:
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    best_point, source = "", "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, sources = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(sources) < 2 or fields[2] != number:
            continue
        point = fields[4].replace("\\040", " ")
        if folder.is_relative_to(point) and len(point) >= len(best_point):
            best_point, source = point, sources[1]
    return source


_PLACE_KEY = "store_place"


def remember_place(layout: Layout, ledger: Ledger) -> None:
    """Note the filesystem that the store lies on, before the first segment is written there."""
    layout.segments.mkdir(parents=True, exist_ok=True)
    identity = mount_identity(layout.segments)
    if ledger.meta(_PLACE_KEY) != identity:
        ledger.set_meta(_PLACE_KEY, identity)


def require_place(layout: Layout, ledger: Ledger) -> str | None:
    """Refuse a store whose disk is not mounted; say so when it lies on another one now.

    Returns:
        None when the store lies where it lay (or nothing was ever stored), else one sentence about the
        move, after which every segment has to be hashed.

    Raises:
        StoreNotMounted: segments were stored, the folder is empty, and it is on another filesystem. Nothing
            may be written there: it would be hidden as soon as the disk comes back.
    """
    recorded = ledger.meta(_PLACE_KEY)
    if recorded is None or not ledger.segments():
        return None
    identity = mount_identity(layout.segments if layout.segments.is_dir() else _nearest(layout.segments))
    if _filesystem(identity) == _filesystem(recorded):
        return None
    if not layout.segments.is_dir() or next(layout.segments.iterdir(), None) is None:
        raise StoreNotMounted(
            "the store is empty and lies on another disk than before",
            where=layout.store,
            why=f"segments were written to {recorded}; this is {identity}",
            hint="mount the store's disk there, then: eyas run; if it is lost: eyas run --redo extract",
        )
    return f"the store lies on another disk ({identity}) than before ({recorded})"


def require_mounted(layout: Layout) -> None:
    """As `require_place`, for those that only look; a ledger that cannot be read says nothing of places."""
    try:
        with Ledger.open_read_only(layout.ledger) as ledger:
            require_place(layout, ledger)
    except StoreNotMounted:
        raise
    except EyasError:
        return


def _nearest(folder: Path) -> Path:
    """The folder or its nearest parent that exists; a link that leads nowhere counts as not there."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _filesystem(identity: str) -> str:
    """What stays the same when a disk is mounted again: its filesystem id, where it has one."""
    number, filesystem, _ = identity.split(" ", 2)
    return filesystem if filesystem != "0" else number
