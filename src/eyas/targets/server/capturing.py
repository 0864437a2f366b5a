"""Capturing through servers: one request, its dump, and every check before the states count."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.base.errors import CaptureInvalid, EyasError
from eyas.config.target_facts import TargetFacts
from eyas.targets.capture import CapturedStates
from eyas.targets.check import check_capture
from eyas.targets.server.as_json import Told, join, prove_beside, request_states
from eyas.targets.server.connection import Connection
from eyas.targets.server.dump import Dump, Expected, read_dump
from eyas.targets.server.faults import FAULTS, ServerFault
from eyas.targets.server.folder import FULL_SHARE, DumpFolder
from eyas.targets.server.heads import Heads
from eyas.targets.server.names import DumpNames
from eyas.targets.server.reference import Reference
from eyas.targets.server.replica import Job, Replica
from eyas.targets.server.settings import ClientSettings
from eyas.targets.server.wire import FLAVOURS, CaptureReply
from eyas.targets.weight_files import weight_files

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Prompt:
    """What is captured: a sample's tokens, and which rows of its last state are kept.

    Args:
        sample: its id.
        tokens: ids.
        rows: indices of last states to keep, ascending; None for all.
    """

    sample: str
    tokens: Sequence[int]
    rows: Sequence[int] | None = None


@dataclass(frozen=True)
class Taken:
    """Checked states, and the dump that they came from, which goes only when they are committed.

    ``states.last`` holds the rows that the prompt asks for. ``folder`` is None where states came as JSON.
    """

    prompt: Prompt
    states: CapturedStates
    name: str
    folder: DumpFolder | None

    def remove_dump(self) -> None:
        if self.folder is not None:
            self.folder.remove([self.name])


@dataclass(frozen=True)
class CaptureRules:
    """What every dump has to be.

    Args:
        facts: sizes of the target.
        layers: ids in the "after k decoder layers" sense.
        dtype: the target's arithmetic.
        store_dtype: what states are kept in.
    """

    facts: TargetFacts
    layers: tuple[int, ...]
    dtype: torch.dtype
    store_dtype: torch.dtype


@dataclass(frozen=True)
class Canary:
    """A real prompt whose states prove a server; ``reference`` is None where it is not affordable."""

    tokens: tuple[int, ...]
    reference: Reference | None

    @property
    def proves(self) -> str:
        if self.reference is not None:
            return "every layer and the last state compared with transformers"
        return "the last state predicts the server's token with the target's own norm and head"


class Capturing:
    """The pool's work when states are captured.

    Args:
        model: the target's folder.
        longest: tokens of the longest sample, which a server has to take.
    """

    def __init__(
        self,
        rules: CaptureRules,
        heads: Heads,
        canary: Canary,
        names: DumpNames,
        settings: ClientSettings,
        model: Path,
        longest: int,
    ) -> None:
        self._rules, self._heads, self._canary, self._model = rules, heads, canary, model
        self._names, self._settings, self._longest = names, settings, longest
        self._readers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="eyas-dump-reader")
        self._folders: dict[int, DumpFolder] = {}
        self._told: dict[int, Told] = {}
        self._abandoned: set[str] = set()
        self.engines: dict[str, str] = {}
        """Engine and version of each proven server, by URL."""
        self.counts: Counter[str] = Counter()
        """Dumps that came late but counted, and orphans that were swept."""

    async def attempt(self, replica: Replica[Prompt], job: Job[Prompt]) -> Taken:
        """Capture one prompt. Raises ServerFault with the code of what was wrong."""
        taken, instance = await self._capture(replica, job.payload, whole_head=False)
        if instance != replica.instance:
            taken.remove_dump()
            raise ServerFault("server_changed", f"{instance}, proven was {replica.instance}")
        return taken

    async def prove(self, replica: Replica[Prompt]) -> str:
        """Health, model, and the canary as a real request through every check; returns the instance.

        Raises:
            ServerFault: the server is not what it has to be.
        """
        await replica.connection.health()
        served = await replica.connection.model(replica.info.model)
        replica.model = served.name
        _check_weights(Path(served.path), self._model)
        if served.max_tokens is not None and self._longest > served.max_tokens:
            why = f"it takes {served.max_tokens} tokens, the longest sample has {self._longest}"
            raise ServerFault("wrong_model", why)
        if replica.beside is not None:
            self._told[replica.index] = await prove_beside(
                replica.connection, replica.beside, served, self._rules.layers, self._rules.facts
            )
        prompt = Prompt("canary", self._canary.tokens)
        taken, instance = await self._capture(replica, prompt, whole_head=True)
        taken.remove_dump()
        if self._canary.reference is not None:
            self._canary.reference.check(taken.states, self._rules.layers)
        return instance

    def held(self, replica: Replica[Prompt]) -> str:
        folder = self._folders.get(replica.index)
        if folder is None or not folder.full:
            return ""
        share, limit = 100 * folder.used_share(), 100 * FULL_SHARE
        return f"dumps take {share:.0f}% of the room in {folder.path} ({limit:.0f}% is the limit)"

    def sweep(self) -> int:
        """Remove orphans of this project from all folders seen; returns how many."""
        removed = sum(folder.sweep(self._abandoned) for folder in self._folders.values())
        self.counts["swept"] += removed
        return removed

    def close(self) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)

    async def _capture(
        self, replica: Replica[Prompt], prompt: Prompt, *, whole_head: bool
    ) -> tuple[Taken, str]:
        """One request and its dump; a dump that is not taken is removed. Gives the server's instance too."""
        if replica.beside is not None:
            return await self._capture_as_json(replica, replica.beside, prompt, whole_head)
        flavour = FLAVOURS[replica.info.engine]
        name = self._names.new(prompt.sample)
        path, body = flavour.capture(prompt.tokens, name, replica.model)
        sent_at, folder = time.time(), self._folders.get(replica.index)
        try:
            answer = await replica.connection.post(path, body, self._settings.first_byte_seconds)
            reply = flavour.read_capture(answer)
            folder = self._folder(replica, reply)
            if reply.model and reply.model != replica.model:
                raise ServerFault("wrong_model", f"{reply.model} answered, asked was {replica.model}")
            if reply.name != name:
                raise ServerFault("bad_reply", f"the echo is about {reply.name!r}, not {name!r}")
            await self._wait_for(folder, name)
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(
                self._readers, self._read, folder, name, prompt, reply, sent_at, whole_head
            )
        except BaseException as error:
            self._abandoned.add(name)  # the dump may still come
            why = folder.error(name) if folder is not None else None
            if folder is not None:
                folder.remove([name])
            if why is not None and isinstance(error, ServerFault) and error.code == "server_error":
                raise ServerFault("dump_failed", why) from error  # what the server says beside its 500
            raise
        finally:
            self._names.close(name)
        states, dump = found
        self.engines[replica.info.url] = dump.engine
        return Taken(prompt, states, name, folder), dump.instance

    async def _capture_as_json(
        self, replica: Replica[Prompt], beside: Connection, prompt: Prompt, whole_head: bool
    ) -> tuple[Taken, str]:
        """Two requests, whose replies hold the states."""
        name = self._names.new(prompt.sample)
        path, body = request_states(prompt.tokens, name)
        patience, told = self._settings.first_byte_seconds, self._told[replica.index]
        try:
            aux = await replica.connection.post_for_bytes(path, body, patience)
            last = await beside.post_for_bytes(path, body, patience)
        finally:
            self._names.close(name)

        def read() -> CapturedStates:
            dump, chosen = join(aux, last, self._expected(name, prompt, 0.0), told.engine, told.instance)
            return self._judge(dump, prompt, chosen, whole_head)

        states = await asyncio.get_running_loop().run_in_executor(self._readers, read)
        self.engines[replica.info.url] = told.engine
        return Taken(prompt, states, name, None), told.instance

    def _expected(self, name: str, prompt: Prompt, sent_at: float) -> Expected:
        rules = self._rules
        return Expected(name, prompt.tokens, rules.layers, rules.facts.hidden_size, rules.dtype, sent_at)

    def _folder(self, replica: Replica[Prompt], reply: CaptureReply) -> DumpFolder:
        path = replica.info.dump_dir or Path(reply.folder)
        known = self._folders.get(replica.index)
        if known is None or known.path != path:
            known = DumpFolder(path, self._names)
            self._folders[replica.index] = known
            self.counts["swept"] += known.sweep()
        return known

    async def _wait_for(self, folder: DumpFolder, name: str) -> None:
        """Return when the dump is there. Raises ``dump_failed`` or ``no_dump``."""
        began, pause = time.monotonic(), _POLL_SECONDS
        file = folder.file(name)
        while not file.exists():
            if (why := folder.error(name)) is not None:
                raise ServerFault("dump_failed", why)
            waited = time.monotonic() - began
            if waited > 2 * self._settings.dump_seconds:
                raise ServerFault("no_dump", f"none came in {waited:.3g} s")
            await asyncio.sleep(pause)
            pause = min(0.1, 1.2 * pause)
        if time.monotonic() - began > self._settings.dump_seconds:
            self.counts["late"] += 1

    def _read(
        self,
        folder: DumpFolder,
        name: str,
        prompt: Prompt,
        reply: CaptureReply,
        sent_at: float,
        whole_head: bool,
    ) -> tuple[CapturedStates, Dump]:
        """Read and judge a dump, in a thread."""
        try:
            dump = read_dump(folder.file(name), self._expected(name, prompt, sent_at), self._names.kind)
        except FileNotFoundError as error:
            raise ServerFault("no_dump", "it vanished before it could be read") from error
        except OSError as error:
            raise ServerFault("damaged", f"it cannot be read: {error}") from error
        if reply.token is None:
            raise ServerFault("bad_reply", "the reply does not say which token was chosen")
        return self._judge(dump, prompt, [reply.token], whole_head), dump

    def _judge(self, dump: Dump, prompt: Prompt, chosen: Sequence[int], whole_head: bool) -> CapturedStates:
        """Numbers that may be stored, as the store keeps them. Raises ServerFault."""
        rules = self._rules
        _check_numbers(dump, prompt, rules)
        whole = whole_head or self._heads.is_due(len(prompt.tokens))
        last_row = self._heads.after_norm(dump.last[-1:], before_norm=dump.before_norm, dtype=rules.dtype)[0]
        for token in chosen:
            self._heads.check_token(last_row, token, rules.dtype, whole=whole)
        kept = dump.last if prompt.rows is None else dump.last[torch.as_tensor(prompt.rows, dtype=torch.long)]
        last = self._heads.after_norm(kept, before_norm=dump.before_norm, dtype=rules.store_dtype)
        aux = dump.aux.to(rules.store_dtype)
        if (bad := _not_finite(aux, last)) is not None:
            raise ServerFault("infinite", f"{bad} states overflow {rules.store_dtype}")
        return CapturedStates(aux.contiguous(), last.contiguous())


def _check_weights(served: Path, model: Path) -> None:
    """Raise ``wrong_model`` when a server's folder can be seen and has other weight files than the target's.

    Their content is not hashed here: the canary's numbers judge it.
    """
    if not served.is_absolute() or not served.is_dir() or served.resolve() == model.resolve():
        return
    try:
        sizes = [{path.name: path.stat().st_size for path in weight_files(one)} for one in (served, model)]
    except EyasError:
        return
    if sizes[0] != sizes[1]:
        raise ServerFault("wrong_model", f"it serves {served}, whose weight files are not those of {model}")


def _check_numbers(dump: Dump, prompt: Prompt, rules: CaptureRules) -> None:
    try:
        check_capture(
            dump.aux,
            dump.last,
            num_tokens=len(prompt.tokens),
            num_last_rows=len(prompt.tokens),
            aux_layers=rules.layers,
            hidden_size=rules.facts.hidden_size,
            dtype=rules.dtype,
            sample=prompt.sample,
        )
    except CaptureInvalid as error:
        code = error.reason if error.reason in FAULTS else "damaged"
        raise ServerFault(code, error.why or error.what) from error


def _not_finite(aux: torch.Tensor, last: torch.Tensor) -> str | None:
    """Which states became infinite when they were brought to the store's dtype."""
    for what, states in (("aux", aux), ("last", last)):
        if states.dtype == torch.float16 and not bool(torch.isfinite(states).all()):
            return what
    return None
