"""What a record of the input becomes: a conversation of messages, or a finished row of tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ANSWER_ROLE = "assistant"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_RESULT_ROLES = ("tool", "function")
_ASKING_ROLES = ("user", *_RESULT_ROLES)

Spans = tuple[tuple[int, int], ...]
TokenArray = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Message:
    """One message; ``extra`` holds ``name`` and ``tool_call_id`` where they were given.

    ``reasoning_key`` is the name under which the input gave ``reasoning``; templates differ in the
    name they look for.
    """

    role: str
    content: str
    reasoning: str | None = None
    reasoning_key: str = "reasoning_content"
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing at all: no text, no reasoning, no tool call."""
        return not (self.content.strip() or (self.reasoning or "").strip() or self.tool_calls)

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates take it, and as it is written to files."""
        value: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning is not None:
            value["reasoning_content"] = value[self.reasoning_key] = self.reasoning
        if self.tool_calls:
            value["tool_calls"] = [dict(call) for call in self.tool_calls]
        return {**value, **self.extra}


@dataclass(frozen=True)
class Conversation:
    """One record of messages.

    Args:
        messages: in order, at least one.
        tools: tool schemas offered to the assistant.
        source: name of the source it was read from.
        domain: kind of prompt, for reports.
        line: line in its file, from 1.
        name: the record's own id, for messages to people; identity is content.
        each_turn: every user message is a turn of its own, although no answers stand between them.
    """

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    domain: str = ""
    line: int = 0
    name: str = ""
    each_turn: bool = False

    @property
    def id(self) -> str:
        """Identity by content: 32 hexadecimal digits of messages and tools."""
        return _digest([[m.as_dict() for m in self.messages], list(self.tools), self.each_turn]).hex()

    @property
    def opening_key(self) -> bytes:
        """What decides the split: all before the first answer.

        Rows that cut one conversation at several lengths, or answer one prompt several times,
        share it, so none of them is trained on while another one validates.
        """
        opening: list[Message] = []
        for message in self.messages:
            if message.role == ANSWER_ROLE and any(m.role in _ASKING_ROLES for m in opening):
                break
            opening.append(message)
        return _digest([[m.as_dict() for m in opening], list(self.tools)])

    def dialogue(self) -> DialoguePrompts | None:
        """The side of the conversation that is not regenerated; None when nothing is asked."""
        turns = _turns(self.messages, self.each_turn)
        if not turns:
            return None
        return DialoguePrompts(turns, self.tools, self.source, self.domain)


@dataclass(frozen=True)
class DialoguePrompts:
    """What is said to the assistant, turn by turn; after each turn it answers anew.

    A given assistant message is part of a turn only where a tool result follows it: a call and its
    result belong together.
    """

    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    source: str = ""
    domain: str = ""
    split: str = "train"

    @property
    def id(self) -> str:
        """Identity by content: 32 hexadecimal digits of turns and tools."""
        return _digest([[[m.as_dict() for m in turn] for turn in self.turns], list(self.tools)]).hex()

    @property
    def opening_key(self) -> bytes:
        """As `Conversation.opening_key`: the first turn and the tools."""
        return _digest([[m.as_dict() for m in self.turns[0]], list(self.tools)])

    def as_dict(self) -> dict[str, Any]:
        """The line of ``conversations.jsonl``."""
        return {
            "id": self.id,
            "source": self.source,
            "domain": self.domain,
            "split": self.split,
            "turns": [[m.as_dict() for m in turn] for turn in self.turns],
            "tools": [dict(tool) for tool in self.tools],
        }


@dataclass(frozen=True)
class TokenRow:
    """A record that comes as token ids, with the spans that the assistant wrote.

    ``finish_reason`` is ``stop`` or ``length`` where the record says so, else ``given``.
    """

    tokens: TokenArray
    spans: Spans
    finish_reason: str = "given"
    source: str = ""
    domain: str = ""
    line: int = 0
    name: str = ""

    @property
    def id(self) -> str:
        """Identity by content: 32 hexadecimal digits of tokens and spans."""
        return content_key(self.tokens, self.spans).hex()

    @property
    def opening_key(self) -> bytes:
        """What decides the split: the tokens before the first span."""
        start = self.spans[0][0] if self.spans else len(self.tokens)
        return content_key(self.tokens[:start], ())


def content_key(tokens: Sequence[int] | TokenArray, spans: Iterable[tuple[int, int]]) -> bytes:
    """16 bytes that name token ids with spans."""
    digest = hashlib.blake2b(np.asarray(tokens, dtype="<i4").tobytes(), digest_size=16)
    digest.update(b"|spans|" + np.asarray(list(spans), dtype="<i4").tobytes())
    return digest.digest()


def _digest(value: object) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _turns(messages: Sequence[Message], each_turn: bool) -> tuple[tuple[Message, ...], ...]:
    turns: list[tuple[Message, ...]] = []
    turn: list[Message] = []
    asked = False

    def close() -> None:
        nonlocal turn, asked
        if asked:
            turns.append(tuple(turn))
            turn, asked = [], False

    for index, message in enumerate(messages):
        if message.role == ANSWER_ROLE:
            following = messages[index + 1].role if index + 1 < len(messages) else ""
            if following in _RESULT_ROLES and turn:
                turn.append(message)
            else:
                close()
            continue
        if each_turn and message.role == "user":
            close()
        turn.append(message)
        asked = asked or message.role in _ASKING_ROLES
    close()
    return tuple(turns)
