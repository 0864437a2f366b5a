"""One level of concurrency on one server: all its prompts asked, all their turns, and what came out."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import httpx
import numpy as np

from eyas.targets.bench.prompts import BenchPrompt
from eyas.targets.bench.server import MeasuredServer
from eyas.targets.bench.stream import Answer, Asking, Refused, ask
from eyas.targets.serving.speculation import Speculation

_FIRST_BYTE_SECONDS = 1800.0
_STRAY_SHARE = 0.02
"""Tokens that the server wrote beyond ours, as a share, from which on somebody else was asking too."""


@dataclass(frozen=True)
class Spread:
    """Mean and percentiles over answers, in seconds."""

    mean: float
    p50: float
    p95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """None without a value; percentiles are interpolated."""
        if not values:
            return None
        p50, p95 = np.percentile(np.asarray(values, dtype=np.float64), [50, 95])
        return cls(float(np.mean(values)), float(p50), float(p95))


@dataclass(frozen=True)
class Measured:
    """What a server did at one level of concurrency.

    Attributes:
        answers, tokens, prompt_tokens: what was answered, by the server's own count of tokens.
        refused: prompts that the server did not take.
        seconds: from the first request to the end of the last answer.
        first_token: time to the first token of each answer.
        per_token: mean time between the tokens behind the first, of each answer.
        decode_seconds_per_token: the same over all tokens together, each weighing the same.
        speculation: rounds and drafts by the server's own count; None: it counted none.
        acceptance_length: by these counts.
        warnings: why a number may not be what it seems.
        texts: of each prompt, turn by turn.
    """

    concurrency: int
    answers: int
    tokens: int
    prompt_tokens: int
    refused: int
    seconds: float
    first_token: Spread | None
    per_token: Spread | None
    decode_seconds_per_token: float | None
    speculation: Speculation | None
    warnings: tuple[str, ...] = ()
    texts: dict[str, list[str]] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float | None:
        return self.speculation.acceptance_length if self.speculation and self.speculation.rounds else None

    def as_dict(self) -> dict[str, Any]:
        """The measurement as ``--json`` prints it; texts are left out."""
        speculation = self.speculation
        return {
            "concurrency": self.concurrency,
            "answers": self.answers,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "refused": self.refused,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "seconds_to_first_token": asdict(self.first_token) if self.first_token else None,
            "seconds_per_token": asdict(self.per_token) if self.per_token else None,
            "acceptance_length": self.acceptance_length,
            "rounds": speculation.rounds if speculation else None,
            "accepted": speculation.accepted if speculation else None,
            "unconditional_rates": list(speculation.unconditional_rates)
            if speculation and speculation.rounds
            else None,
            "warnings": list(self.warnings),
        }


async def measure(
    server: MeasuredServer,
    prompts: Sequence[BenchPrompt],
    concurrency: int,
    asking: Asking,
    told: Callable[[Answer], None],
) -> Measured:
    """Ask all prompts, ``concurrency`` conversations in flight at a time.

    Args:
        told: hears of every answer.

    Raises:
        ServerUnreachable: an answer failed; a measurement with holes is none.
    """
    answers: dict[str, list[Answer]] = {prompt.id: [] for prompt in prompts}
    refused = 0
    before = server.counts()
    queue = list(reversed(prompts))

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal refused
        while queue:
            prompt = queue.pop()
            given = answers[prompt.id]
            for _ in range(prompt.num_turns):
                try:
                    answer = await _turn(client, asking, prompt, given)
                except Refused:
                    refused += 1
                    break
                given.append(answer)
                told(answer)

    async with _client(server) as client:
        warm = await _warm_up(client, asking)
        before = server.counts_after(before, warm) if before else None
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(work(client))
        seconds = time.perf_counter() - started
    every = [answer for given in answers.values() for answer in given]
    tokens = sum(answer.tokens for answer in every)
    warnings: list[str] = []
    speculation: Speculation | None = None
    if before is not None:
        after = server.counts_after(before, tokens)
        if after.speculation is not None:
            speculation = after.speculation.since(before.speculation or Speculation(0, 0, ()))
        stray = after.tokens - before.tokens - tokens
        if abs(stray) > _STRAY_SHARE * tokens:
            warnings.append(
                f"the server wrote {after.tokens - before.tokens:,} tokens and {tokens:,} of them were "
                "asked for here: somebody else uses it"
            )
    else:
        for answer in every:
            if answer.speculation is not None:
                speculation = answer.speculation + (speculation or Speculation(0, 0, ()))
    if refused:
        warnings.append(f"{refused} prompts were refused by the server, too long for it most likely")
    return _measured(concurrency, every, refused, seconds, speculation, warnings, answers)


def _measured(
    concurrency: int,
    every: Sequence[Answer],
    refused: int,
    seconds: float,
    speculation: Speculation | None,
    warnings: Sequence[str],
    answers: dict[str, list[Answer]],
) -> Measured:
    paces = [answer for answer in every if answer.seconds_per_token is not None]
    later = sum(answer.tokens - 1 for answer in paces)
    decoding = sum(answer.last_seconds - answer.first_seconds for answer in paces)
    return Measured(
        concurrency=concurrency,
        answers=len(every),
        tokens=sum(answer.tokens for answer in every),
        prompt_tokens=sum(answer.prompt_tokens for answer in every),
        refused=refused,
        seconds=seconds,
        first_token=Spread.of([answer.first_seconds for answer in every if answer.first_seconds]),
        per_token=Spread.of([pace for a in paces if (pace := a.seconds_per_token) is not None]),
        decode_seconds_per_token=decoding / later if later else None,
        speculation=speculation,
        warnings=tuple(warnings),
        texts={name: [answer.text for answer in given] for name, given in answers.items()},
    )


_WARM_UP = BenchPrompt("warm-up", "", turns=(({"role": "user", "content": "Say hello."},),))


async def _warm_up(client: httpx.AsyncClient, asking: Asking) -> int:
    """One short answer that is not measured; its tokens."""
    try:
        return (await _turn(client, replace(asking, max_tokens=4), _WARM_UP, [])).tokens
    except Refused:  # a base model has no chat template; its prompts are token ids
        return 0


async def _turn(
    client: httpx.AsyncClient, asking: Asking, prompt: BenchPrompt, given: Sequence[Answer]
) -> Answer:
    if prompt.tokens:
        return await ask(client, asking, tokens=prompt.tokens)
    messages = prompt.messages([answer.said for answer in given])
    return await ask(client, asking, messages=messages, tools=prompt.tools)


def _client(server: MeasuredServer) -> httpx.AsyncClient:
    address = server.address
    verify: ssl.SSLContext | bool = (
        ssl.create_default_context(cafile=address.ca_file) if address.ca_file else True
    )
    return httpx.AsyncClient(
        base_url=address.url,
        headers={"Authorization": f"Bearer {address.api_key}"} if address.api_key else {},
        timeout=httpx.Timeout(_FIRST_BYTE_SECONDS, connect=10.0, pool=None),
        limits=httpx.Limits(max_connections=None),
        verify=verify,
        trust_env=False,
    )
