"""Sources: files of records, each read into a conversation, a token row, or a named refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eyas.chat.conversation import Conversation, TokenRow
from eyas.chat.forms import conversation_from
from eyas.chat.lines import FileDamaged, LineFile
from eyas.chat.refusal import Refused, Unreadable
from eyas.chat.tokens import is_token_row, token_row_from

Record = Conversation | TokenRow | Unreadable

_UTF8_MARK = b"\xef\xbb\xbf"


class SourceReader:
    """Reads one ``.jsonl`` or ``.jsonl.gz`` file, record by record; may be iterated once.

    Blank lines are no records. What cannot be read is given as `Unreadable` with line and reason,
    so that the caller decides whether it ends the stage.

    Args:
        path: the file.
        name: the source's name in statistics.
        domain: domain of records that do not name their own; None: the record's ``source`` field
            where there is one, else ``name``.
        vocab_size: ids of token rows must be below it.

    Raises:
        DataError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, name: str, domain: str | None, vocab_size: int) -> None:
        self.path = path
        self.name = name
        self._domain = domain
        self._vocab_size = vocab_size
        self._lines = LineFile(path)

    @property
    def bytes_read(self) -> int:
        """Bytes of the file taken so far, compressed ones where it is compressed."""
        return self._lines.bytes_read

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self._lines.num_bytes

    def __iter__(self) -> Iterator[Record]:
        number, num_records = 0, 0
        try:
            for number, line in self._lines:
                text = line.removeprefix(_UTF8_MARK) if number == 1 else line
                if text.strip():
                    num_records += 1
                    yield self._record(number, text)
        except FileDamaged as error:
            detail = f"the compressed file cannot be read beyond line {number}: {error}"
            yield self._unreadable(number + 1, "damaged gzip", detail)
            return
        if not num_records:
            yield self._unreadable(1, "empty file", "there is no record in it")

    def _record(self, number: int, line: bytes) -> Record:
        domain = self._domain or self.name
        try:
            record = _parsed(line)
            domain = self._domain_of(record)
            if is_token_row(record):
                return token_row_from(
                    record, vocab_size=self._vocab_size, source=self.name, domain=domain, line=number
                )
            return conversation_from(record, source=self.name, domain=domain, line=number)
        except Refused as refusal:
            return Unreadable(self.path, number, refusal.kind, refusal.detail, self.name, domain)

    def _unreadable(self, number: int, kind: str, detail: str) -> Unreadable:
        return Unreadable(self.path, number, kind, detail, self.name, self._domain or self.name)

    def _domain_of(self, record: Mapping[str, Any]) -> str:
        own = record.get("domain")
        if isinstance(own, str) and own:
            return own
        if self._domain:
            return self._domain
        own = record.get("source")
        return own if isinstance(own, str) and own else self.name


def read_source(path: Path, *, name: str, vocab_size: int, domain: str | None = None) -> Iterator[Record]:
    """All records of one file; see `SourceReader`. Raises DataError when it cannot be opened."""
    return iter(SourceReader(path, name=name, domain=domain, vocab_size=vocab_size))


def _parsed(line: bytes) -> Mapping[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("not UTF-8", f"byte {error.start} of the line") from error
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            raise Refused(
                "torn last line",
                f"the file ends in the middle of a record ({len(line)} bytes without a newline): {error}",
            ) from error
        raise Refused("not JSON", str(error)) from error
    if not isinstance(record, dict):
        raise Refused("unknown form", f"the line is not an object but a {type(record).__name__}")
    if "\\ud" in text.lower():  # an escaped half of a surrogate pair is valid JSON, but no character
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise Refused("unknown content", "the record holds half of a surrogate pair") from error
    return record
