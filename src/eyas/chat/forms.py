"""The forms in which a record of messages may come, and the one form they are turned into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from eyas.chat.conversation import Conversation, Message
from eyas.chat.refusal import Refused

_ROLE_NAMES = {
    **{name: name for name in ("system", "developer", "user", "assistant", "tool", "function")},
    **dict.fromkeys(("human",), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "bard", "bing"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response"), "tool"),
}
# What eyas writes holds reasoning_content beside the input's own key, so the own key is looked for first.
_REASONING_KEYS = ("reasoning", "thinking", "reasoning_content")
_TEXT_PARTS = ("text", "input_text", "output_text")
_ANSWER_KEYS = ("output", "response", "completion", "answer")
_PROMPT_KEYS = ("instruction", "prompt", "question")
_FORMS = "messages, conversations, turns, prompt, question, instruction, input_ids, prompt_ids"


def conversation_from(record: Mapping[str, Any], *, source: str, domain: str, line: int) -> Conversation:
    """Read one record of messages.

    Args:
        domain: what the record belongs to when it names no domain itself.

    Raises:
        Refused: the record has none of the known forms, or one of its messages is not understood.
    """
    each_turn = False
    if "messages" in record:
        messages = _messages(record["messages"], "messages")
    elif "conversations" in record:
        messages = _messages(record["conversations"], "conversations")
    elif "turns" in record:
        messages, each_turn = _user_turns(record["turns"])
    elif (key := next((key for key in _PROMPT_KEYS if key in record), None)) is not None:
        messages = _prompt_and_answer(record, key)
    else:
        raise Refused("unknown form", f"keys {_listed(record)}; known forms start from {_FORMS}")
    if not messages:
        raise Refused("no messages", "the list of messages is empty")
    for key in ("system", "system_prompt"):
        if record.get(key) and messages[0].role != "system":
            messages.insert(0, Message("system", _text(record[key], key)))
    return Conversation(
        messages=tuple(messages),
        tools=_tools(record.get("tools")),
        source=source,
        domain=domain,
        line=line,
        name=str(record.get("id", record.get("conversation_id", ""))),
        each_turn=each_turn,
    )


def message_from(value: object, where: str) -> Message:
    """Read one message in OpenAI's (role, content) or ShareGPT's (from, value) spelling.

    Raises:
        Refused: an unknown role, or content that is not text.
    """
    if not isinstance(value, Mapping):
        raise Refused("unknown form", f"{where} is {_kind(value)}, not an object")
    given = value.get("role", value.get("from"))
    role = _ROLE_NAMES.get(given) if isinstance(given, str) else None
    if role is None:
        raise Refused("unknown role", f"{where} has role {given!r}; known: {', '.join(_ROLE_NAMES)}")
    reasoning_key = next((key for key in _REASONING_KEYS if value.get(key) is not None), _REASONING_KEYS[-1])
    reasoning = value.get(reasoning_key)
    calls = _tool_calls(value, where)
    content = value.get("content", value.get("value"))
    if content is None and role == "assistant" and (calls or reasoning is not None):
        content = ""
    extra = {key: value[key] for key in ("name", "tool_call_id") if value.get(key) is not None}
    return Message(
        role=role,
        content=_text(content, where),
        reasoning=None if reasoning is None else _text(reasoning, f"{where}.{reasoning_key}"),
        reasoning_key=reasoning_key,
        tool_calls=calls,
        extra=extra,
    )


def _messages(value: object, key: str) -> list[Message]:
    if not isinstance(value, list):
        raise Refused("unknown form", f"{key} is {_kind(value)}, not a list")
    return [message_from(item, f"{key}[{index}]") for index, item in enumerate(value)]


def _user_turns(value: object) -> tuple[list[Message], bool]:
    if not isinstance(value, list):
        raise Refused("unknown form", f"turns is {_kind(value)}, not a list")
    if any(isinstance(item, Mapping) and ("role" in item or "from" in item) for item in value):
        return _messages(value, "turns"), False
    return [Message("user", _text(item, f"turns[{i}]")) for i, item in enumerate(value)], True


def _prompt_and_answer(record: Mapping[str, Any], key: str) -> list[Message]:
    prompt = record[key]
    answer_key = next((k for k in _ANSWER_KEYS if record.get(k) not in (None, "", [])), None)
    answer = None if answer_key is None else record[answer_key]
    if isinstance(prompt, list) and prompt and all(isinstance(m, Mapping) and "role" in m for m in prompt):
        messages = _messages(prompt, key)
    else:
        text = _text(prompt, key)
        addition = record.get("input")
        if addition not in (None, "", []):
            text = f"{text}\n\n{_text(addition, 'input')}"
        messages = [Message("user", text)]
    if isinstance(answer, list) and all(isinstance(m, Mapping) and "role" in m for m in answer):
        return messages + _messages(answer, str(answer_key))
    if answer is not None:
        messages.append(Message("assistant", _text(answer, str(answer_key))))
    return messages


def _text(value: object, where: str) -> str:
    """Text, or the text parts of a list joined without anything between them."""
    if isinstance(value, list):
        return "".join(_part(item, f"{where} part {index}") for index, item in enumerate(value))
    if not isinstance(value, str):
        raise Refused("unknown content", f"{where} has content that is {_kind(value)}, not text")
    return value


def _part(value: object, where: str) -> str:
    if isinstance(value, str):
        return _text(value, where)
    kind = value.get("type") if isinstance(value, Mapping) else None
    text = value.get("text") if isinstance(value, Mapping) else None
    if kind in _TEXT_PARTS and isinstance(text, str):
        return _text(text, where)
    raise Refused("unknown content part", f"{where} is of type {kind!r}; only text parts can be rendered")


def _tool_calls(value: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    calls = value.get("tool_calls")
    if calls is None and isinstance(value.get("function_call"), Mapping):
        calls = [{"type": "function", "function": value["function_call"]}]
    if calls is None:
        return ()
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise Refused("unknown content", f"{where}.tool_calls is not a list of objects")
    return tuple(_with_parsed_arguments(call) for call in calls)


def _with_parsed_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments as an object: templates print them as JSON, and would quote a string twice."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise Refused("unknown content", f"tools is a string that is not JSON: {error}") from error
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise Refused("unknown content", "tools is not a list of objects")
    return tuple(value)


def _kind(value: object) -> str:
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}
    return names.get(type(value).__name__, f"a {type(value).__name__}")


def _listed(record: Mapping[str, Any]) -> str:
    return ", ".join(list(record)[:8]) or "none"
