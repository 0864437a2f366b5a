"""Answers through plain servers: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eyas.targets.server.connection import Connection
from eyas.targets.server.faults import ServerFault
from eyas.targets.server.names import DumpNames
from eyas.targets.server.replica import Job, Replica
from eyas.targets.server.settings import ClientSettings
from eyas.targets.server.wire import FLAVOURS, AnswerReply, Sampling

_PROBE_TOKENS = 1


@dataclass(frozen=True)
class Question:
    """A prompt and how its answer is drawn.

    Args:
        key: names it.
        tokens: ids that end where the assistant begins.
        sampling: limits, end tokens, temperature and seed.
    """

    key: str
    tokens: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class Answered:
    """What the target emitted: ids, with the end token last when ``finish_reason`` is ``stop``."""

    tokens: list[int]
    finish_reason: str


class Answering:
    """The pool's work when prompts are answered.

    Args:
        vocab_size: of the target; an id beyond it is no answer.
        probe: a short prompt with which a server is proven.
        names: for the probe that asks a server whether it dumps states.
    """

    def __init__(
        self, vocab_size: int, probe: Sequence[int], names: DumpNames, settings: ClientSettings
    ) -> None:
        self._vocab_size, self._probe = vocab_size, list(probe)
        self._names, self._settings = names, settings

    async def attempt(self, replica: Replica[Question], job: Job[Question]) -> Answered:
        """One answer. Raises ServerFault when it is none."""
        question = job.payload
        reply = await self._ask(replica, question)
        _check(reply, question, self._vocab_size)
        return Answered(reply.tokens, reply.finish_reason)

    async def prove(self, replica: Replica[Question]) -> str:
        """Health, model, that nothing is dumped there, and one short answer.

        Raises:
            ServerFault: ``for_extraction`` among others.
        """
        await replica.connection.health()
        served = await replica.connection.model(replica.info.model)
        replica.model = served.name
        await self._require_plain(replica)
        sampling = Sampling(_PROBE_TOKENS, (), 0.0, 1.0, 0)
        reply = await self._ask(replica, Question("probe", self._probe, sampling))
        if len(reply.tokens) != _PROBE_TOKENS:
            raise ServerFault("bad_answer", f"{len(reply.tokens)} tokens where one was asked for")
        return "plain"

    def held(self, replica: Replica[Question]) -> str:
        return ""

    async def _require_plain(self, replica: Replica[Question]) -> None:
        """Refuse a server that dumps states: engines draw wrong tokens after the first one there."""
        flavour = FLAVOURS[replica.info.engine]
        name = self._names.new("probe")
        path, body = flavour.capture(self._probe, name, replica.model)
        try:
            reply = await _post(replica.connection, path, body, self._settings.first_byte_seconds)
            flavour.read_capture(reply)
        except ServerFault as fault:
            if fault.code == "no_echo":
                return
            if fault.code not in ("dump_failed", "rows", "busy"):
                raise
        finally:
            self._names.close(name)
        raise ServerFault("for_extraction")

    async def _ask(self, replica: Replica[Question], question: Question) -> AnswerReply:
        flavour = FLAVOURS[replica.info.engine]
        name = self._names.new(question.key)
        path, body = flavour.answer(question.tokens, question.sampling, replica.model, name)
        try:
            reply = await _post(replica.connection, path, body, self._settings.answer_seconds)
        finally:
            self._names.close(name)
        read = flavour.read_answer(reply, question.sampling)
        if read.model and read.model != replica.model:
            raise ServerFault("wrong_model", f"{read.model} answered, asked was {replica.model}")
        return read


async def _post(
    connection: Connection, path: str, body: dict[str, object], seconds: float
) -> dict[str, object]:
    return await connection.post(path, body, seconds)


def _check(reply: AnswerReply, question: Question, vocab_size: int) -> None:
    limit, ends = question.sampling.max_new_tokens, question.sampling.end_tokens
    why = ""
    if reply.num_prompt_tokens not in (-1, len(question.tokens)):
        why = f"it answers a prompt of {reply.num_prompt_tokens} tokens, not {len(question.tokens)}"
    elif not reply.tokens or len(reply.tokens) > limit:
        why = f"{len(reply.tokens)} tokens, between 1 and {limit} were asked for"
    elif not all(0 <= token < vocab_size for token in reply.tokens):
        why = "a token is not in the vocabulary"
    elif reply.finish_reason == "stop" and reply.tokens[-1] not in ends:
        why = f"it ended by stop with token {reply.tokens[-1]}, which ends nothing"
    elif reply.finish_reason == "length" and len(reply.tokens) < limit:
        why = f"it ended by length after {len(reply.tokens)} of {limit} tokens"
    elif any(token in ends for token in reply.tokens[:-1]):
        why = "it goes on behind an end token"
    elif reply.finish_reason not in ("stop", "length"):
        why = f"it ended by {reply.finish_reason!r}"
    if why:
        raise ServerFault("bad_answer", why)
