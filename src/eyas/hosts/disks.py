"""Filesystems of a machine: kind, source, room, and whether they can be written."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

from eyas.hosts.host import Host

MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
"""A reboot wipes these."""


@dataclass(frozen=True)
class Filesystem:
    """Where a path lies.

    Attributes:
        point: mount point; ``kind`` and ``source`` as the kernel names them.
        num_inodes: 0 where the filesystem does not count them.
    """

    path: str
    point: str
    kind: str
    source: str
    read_only: bool
    free_bytes: int
    total_bytes: int
    free_inodes: int
    num_inodes: int

    @property
    def is_wiped(self) -> bool:
        """Whether a reboot empties it."""
        return self.kind in MEMORY_KINDS


def filesystem_of(host: Host, path: str) -> Filesystem | None:
    """The filesystem below a path or its nearest existing parent; None when the machine does not say."""
    place = posixpath.normpath(path)
    while True:
        result = host.run(["stat", "-f", "-L", "-c", "%S %b %a %c %d", "--", place])
        if result.ok or place in ("/", "."):
            break
        place = posixpath.dirname(place)
    numbers = result.out.split()
    real = host.run(["readlink", "-f", "--", place]).out.strip() or place
    try:
        mounts = host.read_text("/proc/self/mounts")
    except OSError:
        return None
    if len(numbers) != 5:
        return None
    block, total, free, inodes, free_inodes = (int(number) for number in numbers)
    point, kind, source, read_only = "", "unknown", "unknown", False
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 4:
            continue
        candidate = fields[1].replace("\\040", " ")
        inside = real == candidate or real.startswith(candidate.rstrip("/") + "/")
        if inside and len(candidate) >= len(point):
            point, kind, source = candidate, fields[2], fields[0]
            read_only = "ro" in fields[3].split(",")
    return Filesystem(path, point, kind, source, read_only, free * block, total * block, free_inodes, inodes)
