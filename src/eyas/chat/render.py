"""Conversations to samples, by rendering them the way serving would, one turn after the other.

Turn k's prompt is what serving would send before the answer: the template applied to the messages
before it, with the generation prompt. Its answer is what the template adds to that for the answer,
up to and with the token that ends it. Spans are these boundaries; no rendered text is searched.
"""

from __future__ import annotations

import contextlib
import json
import os.path
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.base.errors import DataError
from eyas.chat.conversation import ANSWER_ROLE, Conversation, Message, Spans
from eyas.chat.encode import ChatTokenizer, Encoder, StandIns


class TemplateRefused(DataError):
    """The target's chat template does not take these messages in this order."""


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

    def add(self, prompt: list[int], answer: list[int], *, supervised: bool, finish_reason: str = "given") -> None:
        """Add a turn: all ids before the answer, and the answer's own."""
        if prompt[: len(self._tokens)] != self._tokens:
            self._close()
        start = len(prompt)
        self._tokens = prompt + answer
        self._finish_reason = finish_reason
        if supervised and answer:
            self._spans.append((start, start + len(answer)))

    def extend_last_span(self) -> None:
        """Give the first token after the last answer to that answer."""
        start, end = self._spans[-1]
        self._spans[-1] = (start, end + 1)

    def finish(self) -> list[RenderedSample]:
        """All samples that hold a span, in order."""
        self._close()
        return self._done

    def _close(self) -> None:
        if self._spans:
            self._done.append(RenderedSample(self._tokens, tuple(self._spans), self._finish_reason))
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
        view = _View(self, messages, tools)
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
        view = _View(self, messages, conversation.tools)
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


class _View:
    """One conversation in one template: its texts, with stand-ins for what looks special."""

    def __init__(self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        self._renderer = renderer
        self._encoder = renderer._encoder
        self._stand_ins = StandIns()
        written = [message.as_dict() for message in messages]
        self._avoid = _private_use(written) + _private_use(list(tools))
        self._messages: list[dict[str, Any]] = [
            {**self._escaped(value), "role": value["role"]} for value in written
        ]
        self._tools = self._escaped(list(tools)) or None
        self._given = messages

    def encode(self, text: str) -> list[int]:
        return self._encoder.encode(text, self._stand_ins)

    def prompt(self, num_messages: int) -> str:
        """What serving renders before it asks for an answer."""
        return self._render(self._messages[:num_messages], add_generation_prompt=True)

    def turn(self, index: int) -> tuple[list[int], list[int], list[str]]:
        """Prompt ids, answer ids and notes of the assistant message at ``index``."""
        notes = []
        prompt = self.prompt(index)
        full = self._render(self._messages[: index + 1], add_generation_prompt=False)
        if not full.startswith(prompt):
            prompt = self._shared_with_answer(index, prompt, full)
            notes.append("answers that do not continue the generation prompt")
        prompt_ids = self.encode(prompt)
        tail = full[len(prompt) :]
        answer = self._encoder.encode_after(prompt, prompt_ids, tail, self._stand_ins)
        stop = _last_index(answer, self._renderer.end_tokens)
        if stop is None:
            stop = _last_index(answer, self._encoder.special_ids)
            if stop is not None:
                notes.append("answers that end with none of the target's end tokens")
        if stop is not None:
            answer = answer[: stop + 1]
        else:
            notes.append("answers without an end token")
            tail = self._without_what_follows(index, tail)
            answer = self._encoder.encode_after(prompt, prompt_ids, tail, self._stand_ins)
        reasoning = self._messages[index].get("reasoning_content")
        if reasoning and reasoning.strip() not in tail:
            notes.append("reasoning that the template left out")
        return prompt_ids, answer, notes

    def left_out(self) -> list[str]:
        """Notes on messages and tools that the template did not write."""
        last = max(i for i, message in enumerate(self._given) if message.role == ANSWER_ROLE)
        text = self._render(self._messages[: last + 1], add_generation_prompt=False)
        notes = [
            f"{given.role} messages that the template left out"
            for given, message in zip(self._given[:last], self._messages[:last], strict=True)
            if given.role != ANSWER_ROLE and message["content"].strip() not in text
        ]
        names = [(tool.get("function") or tool).get("name", "") for tool in self._tools or ()]
        notes += ["tools that the template left out" for name in names if str(name) not in text]
        return notes

    def _shared_with_answer(self, index: int, prompt: str, full: str) -> str:
        """The prompt as far as the answer's rendering follows it.

        A template may open the answer in one way when it asks (``<think>``) and in another when it
        writes history. A rendering with an answer that is one unused character keeps the answer's
        own text out of what is shared.
        """
        marked = self._render(self._with_unused_answer(index), add_generation_prompt=False)
        shared = os.path.commonprefix([prompt, full, marked])
        asked = self._render(self._messages[:index], add_generation_prompt=False)
        if len(shared) < len(os.path.commonprefix([asked, prompt])):
            raise TemplateRefused(
                "the chat template writes earlier messages differently once an answer follows",
                why=f"message {index + 1} of {len(self._messages)} changes what stands before it",
                hint="give this conversation as token ids, or turn regenerate.enabled on",
            )
        return shared

    def _without_what_follows(self, index: int, tail: str) -> str:
        marked = self._render(self._with_unused_answer(index), add_generation_prompt=False)
        suffix = marked.rpartition(self._unused)[2]
        return tail[: len(tail) - len(suffix)] if suffix and tail.endswith(suffix) else tail

    @property
    def _unused(self) -> str:
        return self._stand_ins.spare(self._avoid)

    def _with_unused_answer(self, index: int) -> list[dict[str, Any]]:
        return [*self._messages[:index], {"role": ANSWER_ROLE, "content": self._unused}]

    def _escaped(self, value: Any) -> Any:
        return self._encoder.escape(value, self._stand_ins, self._avoid)

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        tokenizer = self._renderer.tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the target has no chat template, so messages cannot be rendered",
                hint="put chat_template.jinja into the target's folder, or give token ids instead of messages",
            )
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "tools": self._tools}
        try:
            return str(tokenizer.apply_chat_template(messages, **options))
        except Exception as error:  # templates raise whatever their authors liked
            if any(message.get("tool_calls") for message in messages):
                with contextlib.suppress(Exception):  # some templates want arguments as text
                    return str(tokenizer.apply_chat_template(_with_text_arguments(messages), **options))
            roles = ", ".join(message["role"] for message in messages)
            raise TemplateRefused(
                "the target's chat template refuses the conversation", why=f"{error} (roles: {roles})"
            ) from error


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def text(call: dict[str, Any]) -> dict[str, Any]:
        function = call.get("function")
        if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
            return call
        arguments = json.dumps(function.get("arguments", {}), ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": [text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _last_index(ids: list[int], wanted: Iterable[int]) -> int | None:
    return next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in wanted), None)


def _private_use(value: Any) -> str:
    """All characters of the private-use planes in JSON of any depth."""
    if isinstance(value, str):
        return "".join({c for c in value if c >= "\U000f0000"}) if value and max(value) >= "\U000f0000" else ""
    if isinstance(value, Mapping):
        return "".join(_private_use(k) + _private_use(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return "".join(map(_private_use, value))
    return ""
