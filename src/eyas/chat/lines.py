"""Lines of a ``.jsonl`` or ``.jsonl.gz`` file, numbered, as bytes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, cast

from eyas.base.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


class FileDamaged(Exception):
    """A compressed file that cannot be read any further; the lines before it were given."""


class LineFile:
    """A file of lines that tells how far it has been read.

    Compression is known by content or by name, so a ``.gz`` that is none is refused and a
    compressed file without the ending is read.

    Raises:
        DataError: the file does not exist or cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes_read = 0
        try:
            self._file: IO[bytes] = open(path, "rb")  # noqa: SIM115 - closed by __iter__
        except OSError as error:
            raise DataError(
                "a source cannot be opened",
                where=path,
                why=error.strerror,
                hint="check data.sources in eyas.toml",
            ) from error
        self.num_bytes = path.stat().st_size

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        """Pairs of line number (from 1) and line with its newline.

        Raises:
            FileDamaged: the compressed stream is broken or ends early.
        """
        with closing(self._file):
            magic = self._file.read(2)
            self._file.seek(0)
            lines = self._file
            if magic == _GZIP_MAGIC or (magic and self.path.suffix == ".gz"):
                lines = cast(IO[bytes], gzip.GzipFile(fileobj=self._file, mode="rb"))
            try:
                for number, line in enumerate(lines, start=1):
                    self.bytes_read = (
                        self._file.tell() if lines is not self._file else self.bytes_read + len(line)
                    )
                    yield number, line
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise FileDamaged(str(error)) from error
