"""A machine that can be reached in several ways: the first that answers is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Protocol

from eyas.base.errors import HostUnreachable
from eyas.hosts.host import DEFAULT_SECONDS, Host, Result, run_here


class Way(Host, Protocol):
    """A host that can say whether it answers."""

    def reach(self) -> None:
        """Raises HostUnreachable with the reason."""


class Inside:
    """A container or jail of this machine: words before every command (``docker exec box``)."""

    is_here = False

    def __init__(self, name: str, inside: Sequence[str], connect_seconds: float = 10.0) -> None:
        self.name, self._inside, self._connect_seconds = name, tuple(inside), connect_seconds

    def reach(self) -> None:
        result = self.run(["true"], timeout_seconds=self._connect_seconds)
        if not result.ok:
            raise HostUnreachable(
                f"{self.name} does not answer", where=" ".join(self._inside), why=result.explain()
            )

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float = DEFAULT_SECONDS, stdin: IO[bytes] | None = None
    ) -> Result:
        return run_here([*self._inside, *argv], timeout_seconds, stdin)

    def stream(self, argv: Sequence[str]) -> int:
        import subprocess

        return subprocess.call([*self._inside, *argv], stdin=subprocess.DEVNULL)

    def read_text(self, path: str) -> str:
        result = self.run(["cat", "--", path])
        if not result.ok:
            raise OSError(2, result.explain(), path)
        return result.out


class Chain:
    """Ways to one machine, tried in order until one answers; a way that fails later starts a new search.

    Attributes:
        tried: one line for each way that did not answer.
    """

    is_here = False

    def __init__(self, name: str, ways: Sequence[Way]) -> None:
        self.name = name
        self._ways = tuple(ways)
        self._chosen: Way | None = None
        self.tried: list[str] = []

    def way(self) -> Way:
        """The way that answers. Raises HostUnreachable naming what each way said."""
        if self._chosen is None:
            self.tried = []
            for way in self._ways:
                try:
                    way.reach()
                except HostUnreachable as error:
                    self.tried.append(f"{error.where}: {error.why}")
                    continue
                self._chosen = way
                return way
            raise HostUnreachable(
                f"no way to {self.name} answers",
                where=f"hosts.{self.name}",
                why="; ".join(self.tried),
                hint="try the first way by hand; hosts are declared in eyas.toml",
            )
        return self._chosen

    def run(
        self, argv: Sequence[str], *, timeout_seconds: float = DEFAULT_SECONDS, stdin: IO[bytes] | None = None
    ) -> Result:
        try:
            return self.way().run(argv, timeout_seconds=timeout_seconds, stdin=stdin)
        except HostUnreachable:
            # a connection that broke: look once more, but only if nothing of stdin is used up
            if self._chosen is None or stdin is not None:
                raise
            self._chosen = None
            return self.way().run(argv, timeout_seconds=timeout_seconds)

    def stream(self, argv: Sequence[str]) -> int:
        return self.way().stream(argv)

    def read_text(self, path: str) -> str:
        return self.way().read_text(path)
