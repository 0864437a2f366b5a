"""Conversations to samples, by rendering them the way serving would, one turn after the other.

Turn k's prompt is what serving would send before the answer: the template applied to the messages
before it, with the generation prompt. Its answer is what the template adds to that for the answer,
up to and with the token that ends it. Spans are these boundaries; no rendered text is searched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.chat.conversation import ANSWER_ROLE, Conversation, Message, Spans
from eyas.chat.encode import ChatTokenizer, Encoder
from eyas.chat.view import TemplateView


@dataclass(frozen=True)
class RenderedSample:
    """Token ids ``[T]`` with the half-open ranges that the assistant wrote."""

    tokens: list[int]
    spans: Spans
    finish_reason: str = "given"

    @property
    def num_supervised(self) -> int:
        """Tokens inside spans."""
        return sum(end - start for start, end in self.spans)


@dataclass
class Rendering:
    """The samples of one conversation, and what deserves to be counted about how they came.

    ``num_answers`` counts assistant messages, ``num_empty`` those that say nothing. ``notes`` holds
    what the template left out or did otherwise than serving.
    """

    samples: list[RenderedSample]
    num_answers: int = 0
    num_empty: int = 0
    notes: Counter[str] = field(default_factory=Counter)


class SampleBuilder:
    """Collects turns of one dialogue: a turn extends the sample it continues, or begins a new one."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._spans: list[tuple[int, int]] = []
        self._finish_reason = "given"
        self._done: list[RenderedSample] = []

    @property
    def tokens(self) -> list[int]:
        """Tokens of the sample that is being built."""
        return self._tokens

    def add(
        self, prompt: list[int], answer: list[int], *, supervised: bool, finish_reason: str = "given"
    ) -> None:
        """Add a turn: all ids before the answer, and the answer's own."""
        if prompt[: len(self._tokens)] != self._tokens:
            self._close()
        start = len(prompt)
        self._tokens = prompt + answer
        if supervised and answer:
            self._spans.append((start, start + len(answer)))
            self._finish_reason = finish_reason

    def extend_last_span(self) -> None:
        """Give the first token after the last answer to that answer."""
        start, end = self._spans[-1]
        self._spans[-1] = (start, end + 1)

    def finish(self) -> list[RenderedSample]:
        """All samples that hold a span, in order; none goes on behind its last span."""
        self._close()
        return self._done

    def _close(self) -> None:
        if self._spans:
            tokens = self._tokens[: self._spans[-1][1]]
            self._done.append(RenderedSample(tokens, tuple(self._spans), self._finish_reason))
        self._tokens, self._spans = [], []


class Renderer:
    """Renders with one target's tokenizer and chat template.

    Args:
        tokenizer: a transformers tokenizer, or anything that behaves like one.
        end_tokens: ids at which the target ends an answer.
    """

    def __init__(self, tokenizer: ChatTokenizer, end_tokens: Iterable[int]) -> None:
        self.tokenizer = tokenizer
        self.end_tokens = frozenset(end_tokens)
        self._encoder = Encoder(tokenizer, self.end_tokens)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Ids that serving would send for ``messages``, generation prompt included.

        Raises:
            DataError: there is no chat template.
            TemplateRefused: the template does not take these messages.
        """
        view = TemplateView(self.tokenizer, self._encoder, self.end_tokens, messages, tools)
        return view.encode(view.prompt(len(messages)))

    def answer_text(self, tokens: Sequence[int]) -> str:
        """Text of emitted ids as a chat client sends it back: without end and special tokens."""
        ids = [token for token in tokens if token not in self._encoder.special_ids]
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def samples(self, conversation: Conversation) -> list[RenderedSample]:
        """The samples of a conversation; see `render`."""
        return self.render(conversation).samples

    def render(self, conversation: Conversation) -> Rendering:
        """Render a conversation with the answers as given.

        While each turn's prompt continues what was rendered before, the conversation is one sample
        with several spans. Where the template rewrites history (drops earlier reasoning, say), a
        new sample begins. Answers that say nothing are context, not supervised.

        Raises:
            DataError: there is no chat template.
            TemplateRefused: the template does not take these messages, or writes an answer in a
                way that cannot be told apart from its prompt.
        """
        messages = conversation.messages
        view = TemplateView(self.tokenizer, self._encoder, self.end_tokens, messages, conversation.tools)
        builder = SampleBuilder()
        rendering = Rendering([])
        open_ended = False
        for index, message in enumerate(messages):
            if message.role != ANSWER_ROLE:
                continue
            if index == 0:
                rendering.notes["opening answers, to which there is no prompt"] += 1
                continue
            prompt, answer, notes = view.turn(index)
            if open_ended and self._ends_with_next(builder.tokens, prompt):
                builder.extend_last_span()
            builder.add(prompt, answer, supervised=not message.is_empty)
            open_ended = bool(answer) and not message.is_empty and answer[-1] not in self.end_tokens
            rendering.num_answers += 1
            rendering.num_empty += message.is_empty
            rendering.notes.update(notes)
        if rendering.num_answers:
            rendering.notes.update(view.left_out())
        rendering.samples = builder.finish()
        return rendering

    def _ends_with_next(self, tokens: list[int], prompt: list[int]) -> bool:
        """Whether the next turn opens with an end token, as where a model ends by naming who speaks next."""
        following = prompt[len(tokens) : len(tokens) + 1]
        return prompt[: len(tokens)] == tokens and bool(self.end_tokens.intersection(following))
