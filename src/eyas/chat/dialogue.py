"""Dialogues in which the target writes every answer anew: next prompts, and samples at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import DamageFound
from eyas.chat.conversation import ANSWER_ROLE, DialoguePrompts, Message
from eyas.chat.forms import message_from
from eyas.chat.refusal import Refused
from eyas.chat.render import RenderedSample, Renderer, SampleBuilder


@dataclass(frozen=True)
class EmittedAnswer:
    """Token ids as the target emitted them, the end token included where there is one.

    ``finish_reason`` is ``stop`` or ``length``.
    """

    tokens: tuple[int, ...]
    finish_reason: str


class Dialogue:
    """One conversation's prompts, answered turn by turn.

    It holds no state of its own: everything follows from the answers so far, so that an
    interrupted dialogue goes on from stored answers.
    """

    def __init__(self, renderer: Renderer, prompts: DialoguePrompts) -> None:
        self._renderer = renderer
        self._prompts = prompts

    @property
    def num_turns(self) -> int:
        """Answers that the dialogue asks for."""
        return len(self._prompts.turns)

    def next_prompt(self, answers: Sequence[EmittedAnswer]) -> list[int] | None:
        """Ids of the prompt after ``answers``, rendered as serving would; None after the last turn.

        Earlier answers stand in it as a chat client would send them back: as text, without special
        tokens, cut ones included.

        Raises:
            DataError: there is no chat template, or it refuses the messages.
        """
        if len(answers) >= self.num_turns:
            return None
        messages: list[Message] = []
        for turn, answer in zip(self._prompts.turns, answers, strict=False):
            messages += turn
            messages.append(Message(ANSWER_ROLE, self._renderer.answer_text(answer.tokens)))
        messages += self._prompts.turns[len(answers)]
        return self._renderer.prompt_ids(messages, self._prompts.tools)

    def samples(self, answers: Sequence[EmittedAnswer]) -> list[RenderedSample]:
        """Samples of the turns that are answered, with exactly the ids that were emitted.

        A turn whose prompt starts with all tokens so far extends the sample, another begins a new
        one. An answer that is nothing but an end token is context, not supervised. A sample's
        ``finish_reason`` is that of its last supervised answer.

        Raises:
            DataError: as `next_prompt`.
        """
        builder = SampleBuilder()
        for index, answer in enumerate(answers[: self.num_turns]):
            prompt = self.next_prompt(answers[:index])
            assert prompt is not None
            said = any(token not in self._renderer.end_tokens for token in answer.tokens)
            builder.add(prompt, list(answer.tokens), supervised=said, finish_reason=answer.finish_reason)
        return builder.finish()


def read_dialogues(path: Path) -> Iterator[DialoguePrompts]:
    """The dialogues of a ``conversations.jsonl`` that prepare wrote.

    Raises:
        DamageFound: a line is not what prepare writes.
    """
    with open(path, encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _dialogue_from(json.loads(line))
            except (ValueError, KeyError, TypeError, Refused) as error:
                raise DamageFound(
                    "a prompt cannot be read", where=f"{path}:{number}", why=str(error)
                ) from error


def _dialogue_from(value: dict[str, Any]) -> DialoguePrompts:
    return DialoguePrompts(
        turns=tuple(
            tuple(message_from(message, f"turn {i + 1}") for message in turn)
            for i, turn in enumerate(value["turns"])
        ),
        tools=tuple(value["tools"]),
        source=value["source"],
        domain=value["domain"],
        split=value["split"],
    )
