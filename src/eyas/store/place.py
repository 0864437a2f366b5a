"""Which filesystem a folder lies on, so that a moved or empty mount is recognised."""

from __future__ import annotations

import os
from pathlib import Path


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
