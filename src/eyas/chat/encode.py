"""Text to token ids, keeping what a conversation says apart from what its template writes.

A special token's string inside a message is text that somebody wrote. Before the template sees it,
each such string is replaced by one private-use character; after rendering, the stretch of text
around that character is encoded with the string put back and special tokens switched off.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

_FIRST_STAND_IN = 0xF0000  # the private-use planes: characters without meaning of their own
_LAST_STAND_IN = 0x10FFFC
UNUSED = chr(0x10FFFD)
"""Stands for nothing: an answer that shows where a template puts one."""
_LEADS = ("\n", "0", ";")  # the first that does not merge with what follows it


class ChatTokenizer(Protocol):
    """What eyas needs of a transformers tokenizer."""

    chat_template: Any

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def __call__(self, text: str, **options: Any) -> Any: ...

    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...


class StandIns:
    """The private-use characters of one conversation and the strings they stand for."""

    def __init__(self) -> None:
        self._of_string: dict[str, str] = {}
        self.strings: dict[str, str] = {}
        self._next = _FIRST_STAND_IN

    def put(self, string: str, avoid: str) -> str:
        """The character for ``string``, one that does not occur in ``avoid``."""
        if string not in self._of_string:
            while chr(self._next) in avoid:
                self._next += 1
            if self._next > _LAST_STAND_IN:
                raise ValueError("the conversation uses every private-use character")
            self._of_string[string] = chr(self._next)
            self.strings[chr(self._next)] = string
            self._next += 1
        return self._of_string[string]

    def restore(self, text: str) -> str:
        """``text`` with every stand-in put back."""
        for character, string in self.strings.items():
            text = text.replace(character, string)
        return text


class Encoder:
    """Encodes rendered text with one tokenizer.

    Args:
        end_tokens: ids that end an answer; they count as special whatever the tokenizer says.
    """

    def __init__(self, tokenizer: ChatTokenizer, end_tokens: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        added = _added_tokens(tokenizer)
        self.special_ids = set(end_tokens) | {i for i, (_, is_special) in added.items() if is_special}
        strings = {added[i][0] for i in self.special_ids if i in added}
        self._specials = sorted(strings - {""}, key=lambda string: (-len(string), string))
        # Only ever searched in what people wrote, never in what a template rendered.
        self._written = re.compile("|".join(map(re.escape, self._specials))) if self._specials else None
        self._context_free = self._ids("\na")[-len(self._ids("a")) :] == self._ids("a")

    def escape(self, value: Any, stand_ins: StandIns, avoid: str) -> Any:
        """``value`` (text, or JSON of any depth) with stand-ins for strings of special tokens."""
        if isinstance(value, str):
            if self._written is None:
                return value
            return self._written.sub(lambda match: stand_ins.put(match[0], avoid), value)
        if isinstance(value, Mapping):
            return {
                self.escape(k, stand_ins, avoid): self.escape(v, stand_ins, avoid) for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.escape(item, stand_ins, avoid) for item in value]
        return value

    def encode(self, text: str, stand_ins: StandIns) -> list[int]:
        """Ids of a rendered text from its beginning."""
        if not any(character in text for character in stand_ins.strings):
            return self._ids(text)
        ids: list[int] = []
        for is_written, piece in self._stretches(text, stand_ins):
            if is_written:
                ids += self._plain(stand_ins.restore(piece), at_start=not ids)
            else:
                ids += self._ids(piece) if not ids else self._inner(piece)
        return ids

    def encode_after(self, before: str, before_ids: list[int], text: str, stand_ins: StandIns) -> list[int]:
        """Ids of ``text`` as it follows ``before``, whose ids are fixed already.

        The boundary stays where it is: serving has the ids of ``before`` as a prompt, so no token
        may reach across it, however the two would merge.
        """
        if any(character in text for character in stand_ins.strings):
            ids: list[int] = []
            for is_written, piece in self._stretches(text, stand_ins):
                ids += self._plain(stand_ins.restore(piece)) if is_written else self._inner(piece)
            return ids
        if not self._context_free:
            whole = self.encode(before + text, stand_ins)
            if whole[: len(before_ids)] == before_ids:
                return whole[len(before_ids) :]
        return self._inner(text)

    def _stretches(self, text: str, stand_ins: StandIns) -> list[tuple[bool, str]]:
        """Cut ``text`` into stretches between special tokens that hold stand-ins, and the rest."""
        stretches: list[tuple[bool, str]] = []
        rest = ""
        for is_special, piece in _split_at(text, self._specials):
            if not is_special and any(character in piece for character in stand_ins.strings):
                if rest:
                    stretches.append((False, rest))
                stretches.append((True, piece))
                rest = ""
            else:
                rest += piece
        if rest:
            stretches.append((False, rest))
        return stretches

    def _plain(self, text: str, *, at_start: bool = False) -> list[int]:
        """Ids of text in which no special token is to be found."""
        ids = self._without_lead(text, at_start=at_start, split_special_tokens=True)
        if not self.special_ids.intersection(ids):
            return ids
        ids = []  # a tokenizer that knows no such switch: no piece may hold a whole marker
        for is_special, piece in _split_at(text, self._specials):
            parts = (piece[:1], piece[1:]) if is_special else (piece,)
            for part in parts:
                ids += self._without_lead(part, at_start=at_start and not ids)
        return ids

    def _inner(self, text: str) -> list[int]:
        return self._without_lead(text, at_start=False)

    def _without_lead(self, text: str, *, at_start: bool, **options: Any) -> list[int]:
        """Ids of ``text``, without the blank that some tokenizers put before a text's first word."""
        if self._context_free or at_start or not text:
            return self._ids(text, **options)
        for before in _LEADS:
            lead, whole = self._ids(before, **options), self._ids(before + text, **options)
            if whole[: len(lead)] == lead:
                return whole[len(lead) :]
        return self._ids(text, **options)

    def _ids(self, text: str, **options: Any) -> list[int]:
        if not text:
            return []
        return list(self._tokenizer(text, add_special_tokens=False, **options)["input_ids"])


def _split_at(text: str, strings: Sequence[str]) -> list[tuple[bool, str]]:
    """Cut ``text`` at every leftmost, then longest, occurrence of ``strings`` (longest first)."""
    present = [string for string in strings if string in text]
    pieces: list[tuple[bool, str]] = []
    position = 0
    while True:
        found = [(at, -len(s), s) for s in present if (at := text.find(s, position)) >= 0]
        if not found:
            break
        at, _, string = min(found)
        if at > position:
            pieces.append((False, text[position:at]))
        pieces.append((True, string))
        position = at + len(string)
    if position < len(text):
        pieces.append((False, text[position:]))
    return pieces


def _added_tokens(tokenizer: Any) -> dict[int, tuple[str, bool]]:
    """Tokens beside the vocabulary: id to string and whether it is special."""
    added = {
        int(i): (str(getattr(token, "content", token)), bool(getattr(token, "special", True)))
        for i, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
    }
    for i, string in zip(
        getattr(tokenizer, "all_special_ids", ()), getattr(tokenizer, "all_special_tokens", ()), strict=False
    ):
        added[int(i)] = (str(string), True)
    return added
