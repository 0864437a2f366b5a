"""One of the servers that share the work: what is known of it and what it has in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, Protocol, TypeVar

from eyas.targets.server.breaker import Breaker
from eyas.targets.server.connection import Connection
from eyas.targets.server.faults import ServerFault
from eyas.targets.server.settings import ClientSettings

State = Literal["doubted", "ready", "resting", "lost"]
"""``doubted``: nothing is sent until it is proven (as at the start); ``resting``: it asked for a pause."""

Payload = TypeVar("Payload")


class ServerInfo(Protocol):
    """A server as its keeper describes it."""

    @property
    def engine(self) -> Literal["vllm", "sglang"]: ...
    @property
    def url(self) -> str: ...
    @property
    def dump_dir(self) -> Path | None: ...
    @property
    def model(self) -> str: ...
    @property
    def ours(self) -> bool: ...
    @property
    def last_url(self) -> str:
        """A second server, which returns last states while this one returns aux states; empty: none."""


class Keeper(Protocol):
    """Whoever starts, watches and stops servers."""

    @property
    def servers(self) -> Sequence[ServerInfo]:
        """All of them; entries change when one is started again."""

    def alive(self) -> list[bool]:
        """Whether each still runs; a hang counts as alive."""

    def restart(self, index: int) -> None:
        """Stop a server of ours and start it again.

        Raises:
            ServerUnreachable: it does not come up.
            TargetError: it comes up as something else.
        """


@dataclass
class Job(Generic[Payload]):
    """Something to ask a server for.

    Args:
        key: names it in messages.
        cost: what it takes of a server's budget.
        payload: whatever the work needs.
        deaths: how often a server died while this was in flight.
        sent_at: monotonic time of the last try.
    """

    key: str
    cost: int
    payload: Payload
    deaths: int = 0
    sent_at: float = 0.0

    @property
    def solo(self) -> bool:
        """Sent alone from now on, so that the next death has a culprit."""
        return self.deaths >= 2


@dataclass(frozen=True)
class Suspect(Generic[Payload]):
    """A job that failed, with its fault and when; whether it or the server is to blame is open."""

    job: Job[Payload]
    fault: ServerFault
    at: float


@dataclass
class Replica(Generic[Payload]):
    """A server, its connection and its state.

    Attributes:
        beside: to the server that returns last states, where states come as JSON.
        load: budget of jobs sent and not yet taken by the consumer.
        in_flight: jobs sent and not yet replied to.
        suspects: jobs that failed, until the server is known to have been sound after that.
        instance: boot and start of the server at its last proof; empty before.
        went_down: no connection was had since the last proof.
        model: name to send with requests.
        restarts: since the last success.
    """

    index: int
    info: ServerInfo
    connection: Connection
    beside: Connection | None = None
    breaker: Breaker = field(default_factory=Breaker)
    state: State = "doubted"
    load: int = 0
    in_flight: dict[str, Job[Payload]] = field(default_factory=dict)
    suspects: list[Suspect[Payload]] = field(default_factory=list)
    busy: int = 0
    instance: str = ""
    went_down: bool = False
    model: str = ""
    restarts: int = 0
    doubted_since: float = 0.0
    doubt: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def flying_solo(self) -> bool:
        return any(job.solo for job in self.in_flight.values())

    @classmethod
    def of(cls, index: int, info: ServerInfo, settings: ClientSettings) -> Replica[Payload]:
        """A server with its connections; it is in doubt."""
        beside = Connection(info.last_url, settings) if info.last_url else None
        return cls(index, info, Connection(info.url, settings), beside)

    async def close(self) -> None:
        """Close its connections."""
        await self.connection.close()
        if self.beside is not None:
            await self.beside.close()

    async def reconnect(self, info: ServerInfo, settings: ClientSettings) -> None:
        """Go on with the server that stands in this one's place now; ours have none beside them."""
        await self.connection.close()
        self.info = info
        self.connection = Connection(info.url, settings)
