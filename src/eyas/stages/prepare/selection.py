"""First pass over the sources: what is usable, and which of it makes the mixture.

Only a line number and a content key are kept of each record; the second pass reads the chosen ones
again. Text is therefore never held, however large the sources are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.base.errors import ConfigError
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.chat.conversation import ANSWER_ROLE, Conversation, TokenRow
from eyas.chat.length import NOTHING_TO_DRAFT, has_drafts
from eyas.chat.mixture import SourceKeys, choose
from eyas.chat.readers import Record, SourceReader
from eyas.chat.refusal import Unreadable
from eyas.config.schema import EyasConfig

NO_ANSWER = "no answer"
NO_QUESTION = "nothing asked"

_REPORT_BYTES = 1_000_000


@dataclass(frozen=True)
class Source:
    """One configured source with its path and name resolved."""

    path: Path
    name: str
    domain: str | None
    limit: int | None
    share: float | None

    def reader(self, vocab_size: int) -> SourceReader:
        """A reader from the start of the file. Raises DataError when it cannot be opened."""
        return SourceReader(self.path, name=self.name, domain=self.domain, vocab_size=vocab_size)


@dataclass(frozen=True)
class Selection:
    """What the first pass found.

    ``left_out`` gives per source the lines that do not take part, with the reason; ``keys`` the
    content keys of all others, in file order.
    """

    sources: list[Source]
    left_out: list[dict[int, str]]
    keys: list[dict[int, bytes]]
    num_records: int


def configured_sources(config: EyasConfig, layout: Layout) -> list[Source]:
    """The sources of a project; relative paths count from its folder.

    Raises:
        ConfigError: two sources have the same name.
    """
    sources: list[Source] = []
    for source in config.data.sources:
        path = (layout.root / Path(source.path).expanduser()).resolve()
        name = source.name or path.name.split(".")[0]
        if any(name == other.name for other in sources):
            raise ConfigError(
                f"two sources are named {name!r}",
                where="data.sources",
                why="statistics are kept by name",
                hint="give each source a name of its own",
            )
        sources.append(Source(path, name, source.domain, source.limit, source.share))
    return sources


def record_key(record: Record, *, regenerate: bool) -> tuple[bytes, str]:
    """Content key of a record, and the reason why it is of no use (empty when it is).

    With regeneration, conversations that differ in their answers alone are the same record.
    """
    if isinstance(record, Unreadable):
        return b"", record.kind
    if isinstance(record, TokenRow):
        return bytes.fromhex(record.id), "" if has_drafts(record.spans) else NOTHING_TO_DRAFT
    if regenerate:
        prompts = record.dialogue()
        return (b"", NO_QUESTION) if prompts is None else (bytes.fromhex(prompts.id), "")
    return bytes.fromhex(record.id), "" if _is_answered(record) else NO_ANSWER


def select(
    sources: list[Source], config: EyasConfig, vocab_size: int, progress: Progress, stop: StopFlag
) -> Selection:
    """Read all sources once and choose the mixture.

    Raises:
        DataError: a source cannot be opened, or a record is not readable and ``on_unreadable`` is
            ``fail``.
        ConfigError: the shares of the sources leave nothing.
        Stopped: a stop was asked for.
    """
    readers = [source.reader(vocab_size) for source in sources]
    progress.start("read", total=sum(reader.num_bytes for reader in readers), unit="bytes")
    keys: list[SourceKeys] = []
    num_records = 0
    for source, reader in zip(sources, readers, strict=True):
        own = SourceKeys(source.name, source.limit, source.share)
        for record in _reported(reader, progress):
            stop.check()
            num_records += 1
            if isinstance(record, Unreadable) and config.data.on_unreadable == "fail":
                raise record.error()
            key, reason = record_key(record, regenerate=config.regenerate.enabled)
            if not reason:
                own.add(record.line, key)
        keys.append(own)
    left_out = choose(keys, config.data.seed)
    kept = [
        {line: key for line, key in zip(own.lines, own.keys, strict=True) if line not in reasons}
        for own, reasons in zip(keys, left_out, strict=True)
    ]
    return Selection(sources, left_out, kept, num_records)


def _reported(reader: SourceReader, progress: Progress) -> Iterator[Record]:
    reported = 0
    for record in reader:
        yield record
        if reader.bytes_read - reported >= _REPORT_BYTES:
            progress.advance(reader.bytes_read - reported)
            reported = reader.bytes_read
    progress.advance(reader.num_bytes - reported)


def _is_answered(conversation: Conversation) -> bool:
    return any(message.role == ANSWER_ROLE for message in conversation.messages[1:])
