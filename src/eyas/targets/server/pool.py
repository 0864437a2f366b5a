"""Sharing jobs among servers: longest first, under a budget, and no fault blamed before it is proven.

A fault puts either its job or its server in doubt. A server in doubt gets no jobs until it is proven again
by real requests. Only then are the jobs that failed there told to have failed; if the server was down, was
started anew or is not sound, they go back into the queue, which costs nothing but the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from eyas.base.errors import DiskFull, EyasError, ServerUnreachable, TargetError
from eyas.targets.server.faults import ServerFault
from eyas.targets.server.replica import Job, Keeper, Replica, Suspect
from eyas.targets.server.settings import ClientSettings

P = TypeVar("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

MAX_SUSPECTS = 3
"""Failures on one server without a success after them, before it has to prove itself."""
MAX_PROOFS = 3
"""Failed proofs of a server that answers, before it is restarted or given up."""
MAX_RESTARTS = 5
"""Restarts of a server without a single success in between."""
_GONE = ("unreachable", "reset", "hang", "busy", "full")
"""Faults of a proof that say nothing of what the server would give."""


class Work(Protocol[P, R_co]):
    """What is done with a server: the pool knows only this of it."""

    async def attempt(self, replica: Replica[P], job: Job[P]) -> R_co:
        """One try. Raises ServerFault."""
        ...

    async def prove(self, replica: Replica[P]) -> str:
        """Return the server's instance when real requests gave what they should. Raises ServerFault."""
        ...

    def held(self, replica: Replica[P]) -> str:
        """Why nothing may be sent there now (a full folder); empty when it may."""


@dataclass(frozen=True)
class Outcome(Generic[P, R]):
    """How a job ended: with a result, or with a fault that is its own."""

    job: Job[P]
    result: R | None
    fault: ServerFault | None
    replica: int


class Pool(Generic[P, R]):
    """Runs jobs on servers; all methods belong to one event loop.

    Args:
        keeper: of the servers.
        budget: cost that one server has in hand at most; a job above it goes alone.
        emit: takes outcomes; a job's cost stays with its server until `release`.
        say: takes one line for a person.
        sent: told the key of each job when it is sent.
    """

    def __init__(
        self,
        keeper: Keeper,
        work: Work[P, R],
        settings: ClientSettings,
        budget: int,
        emit: Callable[[Outcome[P, R]], None],
        say: Callable[[str], None],
        sent: Callable[[str], None] | None = None,
    ) -> None:
        self._keeper, self._work, self._settings, self._budget = keeper, work, settings, budget
        self._emit, self._say, self._sent = emit, say, sent
        self.faults: Counter[str] = Counter()
        self.replicas: list[Replica[P]] = [
            Replica.of(index, info, settings) for index, info in enumerate(keeper.servers)
        ]
        self._queue: deque[Job[P]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._errors: list[EyasError] = []
        self._fatal: EyasError | None = None
        self._held_since: float | None = None

    async def start(self) -> None:
        """Prove the servers; returns when one is ready, the others follow in the background.

        Raises:
            ServerUnreachable, TargetError: none can be had.
        """
        for replica in self.replicas:
            self._doubt(replica)
            self._spawn(self._watch(replica))
        while not any(replica.state == "ready" for replica in self.replicas):
            await self._sleep_until_change()

    async def run(self, jobs: Iterable[Job[P]]) -> None:
        """Bring every job to an outcome.

        Raises:
            ServerUnreachable, TargetError: all servers are lost.
            DiskFull: the folders of dumps stay full.
        """
        self._queue = deque(sorted(jobs, key=lambda job: -job.cost))
        while True:
            self._send_what_fits()
            if not any(replica.in_flight for replica in self.replicas):
                suspects = [replica for replica in self.replicas if replica.suspects]
                if not suspects and not self._queue:
                    return
                for replica in suspects:  # nothing is under way that could clear the server or them
                    self._doubt(replica)
            await self._sleep_until_change()

    async def close(self) -> None:
        """Cancel what is under way and close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            with contextlib.suppress(Exception):
                await replica.close()

    def release(self, outcome: Outcome[P, R]) -> None:
        """The consumer has taken an outcome: its cost is free again."""
        self.replicas[outcome.replica].load -= outcome.job.cost
        self._wake.set()

    async def _sleep_until_change(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), 0.5)
        self._wake.clear()
        if self._fatal is not None:
            raise self._fatal

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fatal = self._fatal or _as_eyas_error(error)
        self._wake.set()

    def _send_what_fits(self) -> None:
        while self._queue:
            replica = self._choose(self._queue[0])
            if replica is None:
                return
            job = self._queue.popleft()
            replica.in_flight[job.key] = job
            replica.load += job.cost
            job.sent_at = time.monotonic()
            if self._sent is not None:
                self._sent(job.key)
            self._spawn(self._do(replica, job))

    def _choose(self, job: Job[P]) -> Replica[P] | None:
        """The ready server with the least in hand that may take this job."""
        fitting = [r for r in self.replicas if r.state == "ready" and self._fits(r, job)]
        free = [replica for replica in fitting if not self._work.held(replica)]
        if fitting and not free:
            self._note_held(self._work.held(fitting[0]))
        elif free:
            self._held_since = None
        return min(free, key=lambda replica: (replica.load, replica.index), default=None)

    def _fits(self, replica: Replica[P], job: Job[P]) -> bool:
        if not replica.in_flight and replica.load == 0:
            return True
        if job.solo or replica.flying_solo or len(replica.in_flight) >= self._settings.requests_in_flight:
            return False
        return replica.load + job.cost <= self._budget

    def _note_held(self, why: str) -> None:
        now = time.monotonic()
        if self._held_since is None:
            self._held_since = now
            self._say(f"new requests are held back: {why}")
        elif now - self._held_since > self._settings.away_seconds:
            self._fatal = DiskFull(
                "the dump folder stays full", why=why, hint="free space there, then: eyas run"
            )

    async def _do(self, replica: Replica[P], job: Job[P]) -> None:
        instance = replica.instance
        try:
            result = await self._work.attempt(replica, job)
        except ServerFault as fault:
            replica.in_flight.pop(job.key, None)
            self._note_fault(replica, job, fault)
        else:
            replica.in_flight.pop(job.key, None)
            self._note_success(replica, job, result, instance)
        self._wake.set()

    def _note_success(self, replica: Replica[P], job: Job[P], result: R, instance: str) -> None:
        self._emit(Outcome(job, result, None, replica.index))
        if replica.state == "ready" and replica.instance == instance:
            replica.busy = replica.restarts = 0
            # only what was sent after a failure says that the server was sound then
            self._tell_suspects(replica, before=job.sent_at)

    def _note_fault(self, replica: Replica[P], job: Job[P], fault: ServerFault) -> None:
        self.faults[fault.code] += 1
        if fault.scope == "busy":
            replica.busy += 1
            self._requeue(replica, job)
            if replica.busy > MAX_SUSPECTS:
                self._doubt(replica)
            elif replica.state == "ready":
                replica.state = "resting"
                self._spawn(self._rest(replica))
            return
        replica.suspects.append(Suspect(job, fault, time.monotonic()))
        if fault.scope == "server" or len(replica.suspects) >= MAX_SUSPECTS:
            self._doubt(replica)

    async def _rest(self, replica: Replica[P]) -> None:
        await asyncio.sleep(rest_seconds(replica.busy))
        if replica.state == "resting":
            replica.state = "ready"

    def _doubt(self, replica: Replica[P]) -> None:
        if replica.state in ("ready", "resting") or not replica.doubt.is_set():
            replica.state = "doubted"
            replica.doubted_since = time.monotonic()
            replica.doubt.set()

    async def _watch(self, replica: Replica[P]) -> None:
        """Prove a server whenever it is in doubt, until it is lost."""
        while replica.state != "lost":
            await replica.doubt.wait()
            try:
                instance = await self._work.prove(replica)
            except ServerFault as fault:
                await self._unproven(replica, fault)
            else:
                self._proven(replica, instance)
            self._wake.set()

    def _proven(self, replica: Replica[P], instance: str) -> None:
        again = replica.went_down or (replica.instance not in ("", instance))
        replica.breaker.succeeded()
        replica.instance, replica.went_down, replica.state = instance, False, "ready"
        replica.busy = 0
        replica.doubt.clear()
        if again:
            self._requeue_suspects(replica)
            self._say(f"{replica.info.url} is back and proven")
        else:
            self._tell_suspects(replica)

    async def _unproven(self, replica: Replica[P], fault: ServerFault) -> None:
        self.faults[fault.code] += 1
        pause = replica.breaker.failed()
        away = time.monotonic() - replica.doubted_since
        if fault.scope == "busy" and away < self._settings.away_seconds:
            await asyncio.sleep(pause)
            return
        gone = fault.code in _GONE
        if fault.code in ("unreachable", "reset"):
            replica.went_down = True
        # it is to blame, so what failed there goes to another server, or waits; jobs it died with are counted
        self._requeue_suspects(replica, died=gone)
        self._wake.set()
        if replica.breaker.failures == 1:
            self._say(f"{replica.info.url} is not sound: {fault}")
        if replica.info.ours:
            dead = gone and not (await asyncio.to_thread(self._keeper.alive))[replica.index]
            if dead or replica.breaker.failures >= MAX_PROOFS:
                await self._restart(replica, fault)
                return
        elif (gone and away > self._settings.away_seconds) or (
            not gone and replica.breaker.failures >= MAX_PROOFS
        ):
            self._lose(replica, _error_of(fault, replica.info.url))
            return
        await asyncio.sleep(pause)

    async def _restart(self, replica: Replica[P], fault: ServerFault) -> None:
        replica.restarts += 1
        # one that answers wrongly is not mended by more restarts than one; one never proven by none
        allowed = MAX_RESTARTS if fault.code in _GONE else min(1, len(replica.instance))
        if replica.restarts > allowed:
            self._lose(replica, _error_of(fault, replica.info.url))
            return
        self._say(f"restarting the server of {replica.info.url}: {fault}")
        replica.went_down = True
        try:
            await asyncio.to_thread(self._keeper.restart, replica.index)
        except EyasError as error:
            self._lose(replica, error)
            return
        self.faults["restarted"] += 1
        replica.breaker.succeeded()
        replica.doubted_since = time.monotonic()
        await replica.reconnect(self._keeper.servers[replica.index], self._settings)

    def _lose(self, replica: Replica[P], error: EyasError) -> None:
        replica.state = "lost"
        self._requeue_suspects(replica, died=False)
        self._errors.append(error)
        if all(other.state == "lost" for other in self.replicas):
            self._fatal = self._errors[0]
        else:
            self._say(f"{replica.info.url} is given up; the others go on ({error.what})")

    def _tell_suspects(self, replica: Replica[P], before: float = math.inf) -> None:
        """The server is sound: what failed there before that failed by itself."""
        for suspect in [one for one in replica.suspects if one.at <= before]:
            replica.suspects.remove(suspect)
            self._emit(Outcome(suspect.job, None, suspect.fault, replica.index))

    def _requeue_suspects(self, replica: Replica[P], *, died: bool = True) -> None:
        """The server was to blame; only a job that was alone with it when it died is told so."""
        for suspect in replica.suspects:
            if died and suspect.fault.scope == "server":
                self._requeue_died(replica, suspect.job)
            else:
                self._requeue(replica, suspect.job)
        replica.suspects.clear()

    def _requeue_died(self, replica: Replica[P], job: Job[P]) -> None:
        """A server died while it had this job in hand."""
        if job.solo:
            self.faults["died"] += 1
            alone = ServerFault("died", f"{job.deaths + 1} times, the last time alone", final=True)
            self._emit(Outcome(job, None, alone, replica.index))
            return
        job.deaths += 1
        self._requeue(replica, job)

    def _requeue(self, replica: Replica[P], job: Job[P]) -> None:
        replica.load -= job.cost
        self._queue.appendleft(job)


def rest_seconds(times: int) -> float:
    """Seconds of rest after a server asked for a pause for the so-many-th time in a row."""
    return min(10.0, 0.25 * 2.0**times)


def _as_eyas_error(error: BaseException) -> EyasError:
    if isinstance(error, EyasError):
        return error
    return EyasError("the client of the servers failed", why=f"{type(error).__name__}: {error}")


def _error_of(fault: ServerFault, url: str) -> EyasError:
    """What a person is told when a server is given up."""
    if fault.code in (*_GONE, "unauthorized", "certificate", "server_error"):
        hints = {
            "unauthorized": "name the variable that holds the key with serve.api_key_env",
            "certificate": "name the certificates to trust with serve.ca_file",
        }
        return ServerUnreachable(
            "the server does not answer as it should",
            where=url,
            why=str(fault),
            hint=hints.get(fault.code, "look at the server's log, then: eyas run"),
        )
    hints = {
        "no_echo": "start the server with eyas serve start, or load eyas' connector (docs/guide.md)",
        "for_extraction": "give regenerate a plain server: --set serve.urls, or let eyas start one",
        "no_folder": "start eyas on the server's machine, or set serve.dump_dir to where the dumps appear",
    }
    return TargetError(
        "the server does not give what the target would",
        where=url,
        why=str(fault),
        hint=hints.get(fault.code, "serve target.model with these aux layers and this dtype, then: eyas run"),
    )
