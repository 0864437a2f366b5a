"""One conversation seen through one chat template: prompts, answers, and where one ends."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eyas.base.errors import DataError
from eyas.chat.conversation import ANSWER_ROLE, Message
from eyas.chat.encode import UNUSED, ChatTokenizer, Encoder, StandIns


class TemplateRefused(DataError):
    """The target's chat template does not take these messages in this order."""


class TemplateView:
    """One conversation in one template: its texts, with stand-ins for what looks special."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        encoder: Encoder,
        end_tokens: frozenset[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder = encoder
        self._end_tokens = end_tokens
        self._stand_ins = StandIns()
        written = [message.as_dict() for message in messages]
        self._avoid = _private_use(written) + _private_use(list(tools))
        self._messages: list[dict[str, Any]] = [
            {**self._escaped(value), "role": value["role"]} for value in written
        ]
        self._tools = self._escaped(list(tools)) or None
        self._given = messages
        self._rendered = (0, "")

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
        self._rendered = (index + 1, full)
        if not full.startswith(prompt):
            prompt = self._shared_with_answer(index, prompt, full)
            notes.append("answers that do not continue the generation prompt")
        prompt_ids = self.encode(prompt)
        tail = full[len(prompt) :]
        answer = self._encoder.encode_after(prompt, prompt_ids, tail, self._stand_ins)
        stop = _last_index(answer, self._end_tokens)
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
        """Notes on messages and tools that the template did not write before the last turn."""
        num_messages, text = self._rendered
        notes = [
            f"{given.role} messages that the template left out"
            for given, message in zip(self._given[:num_messages], self._messages, strict=False)
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
        shared = prompt[: _shared_length(prompt, full, marked)]
        asked = self._render(self._messages[:index], add_generation_prompt=False)
        if len(shared) < _shared_length(asked, prompt):
            raise TemplateRefused(
                "the chat template writes earlier messages differently once an answer follows",
                why=f"message {index + 1} of {len(self._messages)} changes what stands before it",
                hint="give this conversation as token ids, or turn regenerate.enabled on",
            )
        return shared

    def _without_what_follows(self, index: int, tail: str) -> str:
        marked = self._render(self._with_unused_answer(index), add_generation_prompt=False)
        suffix = marked.rpartition(UNUSED)[2]
        return tail[: len(tail) - len(suffix)] if suffix and tail.endswith(suffix) else tail

    def _with_unused_answer(self, index: int) -> list[dict[str, Any]]:
        return [*self._messages[:index], {"role": ANSWER_ROLE, "content": UNUSED}]

    def _escaped(self, value: Any) -> Any:
        return self._encoder.escape(value, self._stand_ins, self._avoid)

    def _render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        tokenizer = self._tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "the target has no chat template, so messages cannot be rendered",
                hint="put chat_template.jinja into the target's folder, or give token ids",
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
        return (
            "".join({c for c in value if c >= "\U000f0000"}) if value and max(value) >= "\U000f0000" else ""
        )
    if isinstance(value, Mapping):
        return "".join(_private_use(k) + _private_use(v) for k, v in value.items())
    if isinstance(value, list | tuple):
        return "".join(map(_private_use, value))
    return ""


def _shared_length(*texts: str) -> int:
    """Characters that all texts begin with."""
    for index, characters in enumerate(zip(*texts, strict=False)):
        if len(set(characters)) > 1:
            return index
    return min(map(len, texts))
