"""One answer of a server, as it comes: when its pieces arrived, and what the server counted for it."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from eyas.base.errors import ServerUnreachable
from eyas.targets.serving.speculation import Speculation

_TEXT_KEYS = ("reasoning_content", "reasoning", "content")


@dataclass(frozen=True)
class Asking:
    """How answers are asked for.

    Args:
        model: name that requests carry.
        spec_details: ask SGLang for the drafts of each answer.
    """

    model: str
    max_tokens: int
    temperature: float
    seed: int
    spec_details: bool = False


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        text: reasoning included. ``said`` is what a chat client sends back: without it.
        tokens, prompt_tokens: by the server's count.
        first_seconds: from the request to the first piece of text.
        last_seconds: from the request to the last piece of the answer.
        speculation: drafts of this answer, where the server says so.
    """

    text: str
    said: str
    tokens: int
    prompt_tokens: int
    first_seconds: float
    last_seconds: float
    speculation: Speculation | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time between tokens behind the first; None for an answer of one token."""
        return (self.last_seconds - self.first_seconds) / (self.tokens - 1) if self.tokens > 1 else None


class Refused(Exception):
    """The server does not take this prompt (HTTP 400), too long for it for example."""


async def ask(
    client: httpx.AsyncClient,
    asking: Asking,
    *,
    messages: list[dict[str, Any]] | None = None,
    tools: tuple[dict[str, Any], ...] = (),
    tokens: tuple[int, ...] = (),
) -> Answer:
    """One answer to ``messages``, or to a prompt of ``tokens``.

    Raises:
        Refused: the server does not take the prompt.
        ServerUnreachable: it does not answer, breaks off, or answers with an error.
    """
    path, body = _request(asking, messages, tools, tokens)
    started = time.perf_counter()
    reading = _Reading(started)
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = " ".join((await response.aread()).decode(errors="replace").split())[:300]
                if response.status_code in (400, 413, 422):
                    raise Refused(text)
                raise ServerUnreachable(
                    f"the server answers {response.status_code}", where=f"{client.base_url}{path}", why=text
                )
            async for piece in _pieces(response):
                reading.take(piece)
    except (httpx.HTTPError, OSError) as error:
        raise ServerUnreachable(
            "the server did not finish its answer",
            where=f"{client.base_url}{path}",
            why=f"{type(error).__name__}: {error}",
        ) from error
    return reading.answer(f"{client.base_url}{path}")


def _request(
    asking: Asking,
    messages: list[dict[str, Any]] | None,
    tools: tuple[dict[str, Any], ...],
    tokens: tuple[int, ...],
) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "model": asking.model,
        "max_tokens": asking.max_tokens,
        "temperature": asking.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if asking.temperature > 0:
        body["seed"] = asking.seed
    if asking.spec_details:
        body["return_spec_tokens_details"] = True
    if messages is None:
        return "/v1/completions", {**body, "prompt": list(tokens)}
    return "/v1/chat/completions", {
        **body,
        "messages": messages,
        **({"tools": list(tools)} if tools else {}),
    }


async def _pieces(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """JSON objects of an event stream."""
    async for line in response.aiter_lines():
        name, _, value = line.partition(":")
        value = value.strip()
        if name.strip() != "data" or not value or value == "[DONE]":
            continue
        try:
            piece = json.loads(value)
        except ValueError as error:
            raise ServerUnreachable(
                "the server's stream holds something that is no JSON", where=response.url, why=value[:200]
            ) from error
        if not isinstance(piece, dict) or "error" in piece:
            raise ServerUnreachable("the server broke off an answer", where=response.url, why=value[:300])
        yield piece


class _Reading:
    """Gathers the pieces of one answer."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._first = self._last = 0.0
        self._text: list[str] = []
        self._said: list[str] = []
        self._usage: Mapping[str, Any] = {}
        self._speculation: Speculation | None = None

    def take(self, piece: Mapping[str, Any]) -> None:
        now = time.perf_counter() - self._started
        self._usage = piece.get("usage") or self._usage
        details = (piece.get("sglext") or {}).get("spec_tokens_details")
        if isinstance(details, Mapping):
            self._speculation = speculation_of(details)
        for choice in piece.get("choices") or []:
            delta = choice.get("delta") or {}
            said = str(choice.get("text") or delta.get("content") or "")
            text = "".join(str(delta.get(key) or "") for key in _TEXT_KEYS[:-1]) + said
            for call in delta.get("tool_calls") or []:
                function = call.get("function") or {}
                text += str(function.get("name") or "") + str(function.get("arguments") or "")
            self._last = now  # an end token comes without text
            if text:
                self._first = self._first or now
                self._text.append(text)
                self._said.append(said)

    def answer(self, where: str) -> Answer:
        if "completion_tokens" not in self._usage:
            raise ServerUnreachable(
                "the server does not say how many tokens it wrote",
                where=where,
                why="its stream holds no usage, although stream_options.include_usage asks for it",
            )
        return Answer(
            text="".join(self._text),
            said="".join(self._said),
            tokens=int(self._usage["completion_tokens"]),
            prompt_tokens=int(self._usage.get("prompt_tokens") or 0),
            first_seconds=self._first,
            last_seconds=self._last,
            speculation=self._speculation,
        )


def speculation_of(details: Mapping[str, Any]) -> Speculation | None:
    """Counts in SGLang's ``spec_tokens_details``; None where there was no round.

    Its histogram says in how many rounds 0, 1, 2, ... drafts were accepted.
    """
    rounds = int(details.get("spec_verify_ct") or 0)
    if not rounds:
        return None
    histogram = [int(count) for count in details.get("spec_correct_drafts_histogram") or []]
    at = tuple(sum(histogram[place + 1 :]) for place in range(max(0, len(histogram) - 1)))
    return Speculation(rounds, int(details.get("spec_num_correct_drafts") or 0), at)
