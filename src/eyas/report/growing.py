"""Files that only grow, read once: a page that stays open must not read a day of logs every second."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Growing:
    """How far a file of lines was read."""

    path: Path
    offset: int = 0
    inode: int = 0

    def news(self) -> tuple[list[bytes], bool]:
        """Whole lines since the last call, and whether the file is another one, read from its start.

        A torn last line waits until it is ended.

        Raises:
            OSError: the file cannot be read.
        """
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            is_new = status.st_ino != self.inode or status.st_size < self.offset
            if is_new:
                self.inode, self.offset = status.st_ino, 0
            file.seek(self.offset)
            content = file.read(status.st_size - self.offset)
        end = content.rfind(b"\n") + 1
        self.offset += end
        return content[:end].split(b"\n"), is_new
