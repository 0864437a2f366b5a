"""What is said to vLLM and SGLang and how their replies are read; the protocol's one home on this side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from eyas.targets.server.faults import ServerFault

Engine = Literal["vllm", "sglang"]
_ECHO_ERRORS = {"full": "full", "rows": "rows", "bad-name": "bad_reply", "bad-request": "bad_reply"}
"""Codes of the echo's ``error`` as faults; others are a dump that could not be written."""


@dataclass(frozen=True)
class Sampling:
    """How one answer is drawn.

    Args:
        max_new_tokens: its limit.
        end_tokens: ids that end it.
        temperature: 0 is greedy.
        top_p: share of the probability that is drawn from.
        seed: of its own stream.
    """

    max_new_tokens: int
    end_tokens: tuple[int, ...]
    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class CaptureReply:
    """A reply to a captured prompt.

    Attributes:
        name: of the dump, as the server repeats it.
        folder: where the server puts it.
        token: that the server chose after the prompt; None if it does not say.
        model: name of the model that answered; empty if it does not say.
    """

    name: str
    folder: str
    token: int | None
    model: str


@dataclass(frozen=True)
class AnswerReply:
    """A reply with an answer: its token ids, why it ended, and how many prompt tokens it counted."""

    tokens: list[int]
    finish_reason: str
    num_prompt_tokens: int
    model: str
    extracting: bool


class Flavour(Protocol):
    """One engine's requests and replies."""

    @property
    def engine(self) -> Engine:
        """Its name."""

    def capture(self, tokens: Sequence[int], name: str, model: str) -> tuple[str, dict[str, Any]]:
        """Path and body of a request that dumps the states of ``tokens`` under ``name``."""

    def read_capture(self, reply: Mapping[str, Any]) -> CaptureReply:
        """Raises ServerFault: no echo, an error in it, or a reply of another form."""

    def answer(
        self, tokens: Sequence[int], sampling: Sampling, model: str, name: str
    ) -> tuple[str, dict[str, Any]]:
        """Path and body of a request for an answer; ``name`` identifies it where the engine can."""

    def read_answer(self, reply: Mapping[str, Any], sampling: Sampling) -> AnswerReply:
        """Raises ServerFault: a reply of another form."""


class Vllm:
    """vLLM's completions, token ids in and out."""

    engine: Engine = "vllm"

    def capture(self, tokens: Sequence[int], name: str, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "model": model,
            "prompt": [int(token) for token in tokens],
            "max_tokens": 1,
            "temperature": 0,
            "return_token_ids": True,
            "kv_transfer_params": {"eyas": {"name": name}},
        }
        return "/v1/completions", body

    def read_capture(self, reply: Mapping[str, Any]) -> CaptureReply:
        choice = _choice(reply)
        echo = _echo((reply.get("kv_transfer_params") or {}).get("eyas"))
        tokens = choice.get("token_ids") or []
        return CaptureReply(
            name=str(echo.get("name", "")),
            folder=str(echo.get("dir", "")),
            token=int(tokens[0]) if tokens else None,
            model=str(reply.get("model", "")),
        )

    def answer(
        self, tokens: Sequence[int], sampling: Sampling, model: str, name: str
    ) -> tuple[str, dict[str, Any]]:
        body = {
            "model": model,
            "prompt": [int(token) for token in tokens],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,  # the model's own generation settings would fill what is left out
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "seed": sampling.seed,
            "stop_token_ids": list(sampling.end_tokens),
            "skip_special_tokens": False,
            "return_token_ids": True,
        }
        return "/v1/completions", body

    def read_answer(self, reply: Mapping[str, Any], sampling: Sampling) -> AnswerReply:
        choice = _choice(reply)
        tokens, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
        if tokens is None:
            raise ServerFault("bad_reply", "the reply has no token ids (return_token_ids is not known?)")
        count = len(prompt) if prompt else int((reply.get("usage") or {}).get("prompt_tokens", -1))
        reason = str(choice.get("finish_reason"))
        found = _with_end(
            [int(token) for token in tokens], reason, choice.get("stop_reason"), sampling.end_tokens
        )
        extracting = bool((reply.get("kv_transfer_params") or {}).get("eyas"))
        return AnswerReply(found, reason, count, str(reply.get("model", "")), extracting)


class Sglang:
    """SGLang's own endpoint, token ids in and out."""

    engine: Engine = "sglang"

    def capture(self, tokens: Sequence[int], name: str, model: str) -> tuple[str, dict[str, Any]]:
        body = {
            "input_ids": [int(token) for token in tokens],
            "sampling_params": {
                "max_new_tokens": 1,
                "temperature": 0,
                "custom_params": {"eyas_name": name},
            },
            "rid": name,
            "extra_key": name,  # nothing of an earlier request's cache
        }
        return "/generate", body

    def read_capture(self, reply: Mapping[str, Any]) -> CaptureReply:
        meta = _meta(reply)
        told = meta.get("eyas")
        told = told[0] if isinstance(told, list) and told else told
        if isinstance(told, str):
            try:
                told = json.loads(told)
            except ValueError as error:
                raise ServerFault("bad_reply", f"the echo is no JSON: {told[:100]!r}") from error
        echo = _echo(told)
        tokens = reply.get("output_ids") or []
        return CaptureReply(
            name=str(echo.get("name", "")),
            folder=str(echo.get("dir", "")),
            token=int(tokens[0]) if tokens else None,
            model="",
        )

    def answer(
        self, tokens: Sequence[int], sampling: Sampling, model: str, name: str
    ) -> tuple[str, dict[str, Any]]:
        body = {
            "input_ids": [int(token) for token in tokens],
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": sampling.seed,
                "stop_token_ids": list(sampling.end_tokens),
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
            "rid": name,
        }
        return "/generate", body

    def read_answer(self, reply: Mapping[str, Any], sampling: Sampling) -> AnswerReply:
        meta = _meta(reply)
        tokens = reply.get("output_ids")
        if tokens is None:
            raise ServerFault("bad_reply", "the reply has no output_ids")
        ended = meta.get("finish_reason") or {}
        reason = str(ended.get("type")) if isinstance(ended, dict) else str(ended)
        matched = ended.get("matched") if isinstance(ended, dict) else None
        found = _with_end([int(token) for token in tokens], reason, matched, sampling.end_tokens)
        count = int(meta.get("prompt_tokens", -1))
        return AnswerReply(found, reason, count, "", meta.get("eyas") is not None)


FLAVOURS: dict[str, Flavour] = {"vllm": Vllm(), "sglang": Sglang()}


def _choice(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ServerFault("bad_reply", "the reply does not hold exactly one choice")
    return choices[0]


def _meta(reply: Mapping[str, Any]) -> Mapping[str, Any]:
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise ServerFault("bad_reply", "the reply has no meta_info")
    return meta


def _echo(told: object) -> Mapping[str, Any]:
    if not isinstance(told, dict):
        raise ServerFault("no_echo")
    if told.get("error"):
        code, _, why = str(told["error"]).partition(":")
        fault = _ECHO_ERRORS.get(code.strip(), "dump_failed")
        raise ServerFault(fault, f"the server says {code.strip()}: {why.strip()}")
    return told


def _with_end(tokens: list[int], reason: str, matched: object, end_tokens: Sequence[int]) -> list[int]:
    """Put back the end token where an engine has cut it off."""
    if reason != "stop" or (tokens and tokens[-1] in end_tokens):
        return tokens
    if isinstance(matched, int) and matched in end_tokens:
        return [*tokens, matched]
    return [*tokens, end_tokens[0]] if matched is None and len(end_tokens) == 1 else tokens
