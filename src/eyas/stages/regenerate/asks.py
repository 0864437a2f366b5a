"""A conversation while it is answered, and one prompt of the present round."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from eyas.chat.conversation import DialoguePrompts
from eyas.chat.dialogue import Dialogue, EmittedAnswer
from eyas.stages.regenerate.answers import Answer


@dataclass
class OpenConversation:
    """A conversation, its answers so far, and why it ends early if it does."""

    prompts: DialoguePrompts
    dialogue: Dialogue
    answers: list[Answer] = field(default_factory=list)
    ended: str = ""

    @property
    def emitted(self) -> list[EmittedAnswer]:
        return [EmittedAnswer(tuple(answer.tokens), answer.finish_reason) for answer in self.answers]


@dataclass(frozen=True)
class Ask:
    """One prompt of a round: its conversation and turn, token ids, their digest, and the answer's limit."""

    conversation: OpenConversation
    turn: int
    tokens: list[int]
    digest: str
    limit: int

    @property
    def key(self) -> tuple[str, int, str]:
        """What an answer has to carry to be this one's."""
        return self.conversation.prompts.id, self.turn, self.digest

    def seed(self, seed: int) -> int:
        """A stream of its own for each answer, made of content."""
        words = ":".join([str(seed), self.digest, self.conversation.prompts.id])
        return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 1

    def answered(self, tokens: list[int], finish_reason: str) -> Answer:
        return Answer(self.conversation.prompts.id, self.turn, self.digest, tokens, finish_reason)
