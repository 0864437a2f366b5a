"""Another machine, through OpenSSH's own client: its configuration, keys and known hosts count."""

from __future__ import annotations

import errno
import hashlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from eyas.base.errors import HostUnreachable
from eyas.hosts.host import DEFAULT_SECONDS, Result, run_here

_SSH_FAILED = 255  # OpenSSH's own failures; a remote command may end with it as well
_KEEP_CONNECTION_SECONDS = 30


class Ssh:
    """A machine behind ssh; all commands share one connection.

    Args:
        name: what eyas calls it.
        destination: as ssh takes it; never read as an option.
        inside: words before every command there (``pct exec 129 --``).
        connect_seconds: deadline of a connection.
        options: more ``-o`` settings, for tests and unusual ports.
    """

    is_here = False

    def __init__(
        self,
        name: str,
        destination: str,
        inside: Sequence[str] = (),
        connect_seconds: float = 10.0,
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        self._destination, self._inside = destination, tuple(inside)
        self._connect_seconds = connect_seconds
        self._options = tuple(options)

    def reach(self) -> None:
        """Prove that commands run there. Raises HostUnreachable with the reason."""
        result = run_here(self._words(["true"]), self._connect_seconds + 1)
        if not result.ok:
            raise HostUnreachable(
                f"{self.name} does not answer", where=self._way, why=result.explain().partition(": ")[2]
            )

    @property
    def _way(self) -> str:
        return shlex.join(["ssh", self._destination, *self._inside])

    def _words(self, argv: Sequence[str]) -> list[str]:
        """The local command: what is for the other side is one word, quoted for its shell."""
        settings = [
            "BatchMode=yes",
            f"ConnectTimeout={max(1, round(self._connect_seconds))}",
            "ControlMaster=auto",
            f"ControlPath={_control_folder()}/{self._key()}",
            f"ControlPersist={_KEEP_CONNECTION_SECONDS}",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            *self._options,
        ]
        words = [word for setting in settings for word in ("-o", setting)]
        return ["ssh", "-T", *words, "--", self._destination, shlex.join([*self._inside, *argv])]

    def _key(self) -> str:
        """Short, since the path of a socket may have 107 bytes; one for each destination and settings."""
        text = repr((self._destination, self._options))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float = DEFAULT_SECONDS, stdin: IO[bytes] | None = None
    ) -> Result:
        result = run_here(self._words(argv), timeout_seconds + self._connect_seconds, stdin)
        if result.code == _SSH_FAILED:
            self.reach()  # raises when it was the connection
        return Result(tuple(argv), result.code, result.out, result.err, result.seconds)

    def stream(self, argv: Sequence[str]) -> int:
        self.reach()
        return subprocess.call(self._words(argv), stdin=subprocess.DEVNULL)

    def read_text(self, path: str) -> str:
        result = self.run(["cat", "--", path])
        if not result.ok:
            number = errno.ENOENT if "No such file" in result.err else errno.EIO
            raise OSError(number, result.explain(), path)
        return result.out

    def close(self) -> None:
        """End the shared connection."""
        settings = [word for setting in self._options for word in ("-o", setting)]
        control = f"ControlPath={_control_folder()}/{self._key()}"
        run_here(["ssh", "-o", control, *settings, "-O", "exit", "--", self._destination], 5.0)


def _control_folder() -> Path:
    """A folder of this user alone for the sockets of shared connections. Raises HostUnreachable."""
    folder = Path(tempfile.gettempdir()) / f"eyas-ssh-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or not folder.is_dir() or folder.is_symlink():
        raise HostUnreachable(
            "the folder for shared connections is not this user's alone",
            where=folder,
            hint=f"move {folder} away",
        )
    return folder
