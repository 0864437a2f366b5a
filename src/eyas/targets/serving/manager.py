"""All servers of one mode: started or adopted, proven, restarted, stopped."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from eyas.base.clock import Clock, SystemClock
from eyas.base.errors import ConfigError, EyasError, ServerNotStarted, ServerUnreachable, TargetError
from eyas.base.layout import Layout
from eyas.base.process import ProcessIdentity
from eyas.base.stop import StopFlag
from eyas.base.units import format_seconds
from eyas.config.resolve import resolve
from eyas.config.schema import EyasConfig
from eyas.config.server_arguments import Engine, Mode
from eyas.targets.serving.address import Address
from eyas.targets.serving.dumps import dump_base, project_id, sweep_dumps, sweep_orphans
from eyas.targets.serving.launch import Launch, plan_launch
from eyas.targets.serving.proof import Expected, prove, prove_json
from eyas.targets.serving.records import ServerBook, ServerRecord
from eyas.targets.serving.starting import Starter, running, stop_server, wait_healthy

__all__ = ["Mode", "Server", "Servers"]

_MAX_NEW_PORTS = 3
"""So often a server is started on another port, when another program was the first to listen on its own."""


@dataclass
class Server:
    """One proven server.

    Args:
        model: the name to send as ``model``.
        ours: eyas started it; otherwise somebody else did, and only they stop it.
        pid: its first process, when it is ours.
        last_url: a second server, for last states, where both hand over states as JSON.
        log: where its output goes, when it is ours.
    """

    index: int
    engine: Engine
    mode: Mode
    url: str
    dump_dir: Path | None
    model: str
    ours: bool
    pid: int | None
    log: Path | None
    api_key: str | None
    ca_file: str = ""
    last_url: str = ""

    @property
    def address(self) -> Address:
        return Address(self.url, self.api_key, self.ca_file)


Canary = Callable[[Server], None]
"""Asks a server for something real; raises when the answer is not what it should be."""


class Servers:
    """The servers of one mode, as a context that closes what it opened; made by `open`."""

    def __init__(
        self,
        starter: Starter,
        mode: Mode,
        canary: Canary | None,
        say: Callable[[str], None],
        stop: StopFlag,
        keep: bool,
    ) -> None:
        self._starter, self._mode, self._canary = starter, mode, canary
        self._say, self._stop, self._keep = say, stop, keep
        self._records: dict[int, ServerRecord] = {}
        self.servers: list[Server] = []

    @classmethod
    def open(
        cls,
        config: EyasConfig,
        root: Path,
        mode: Mode,
        *,
        log_folder: Path,
        canary: Canary | None = None,
        drafter: Path | None = None,
        stop: StopFlag | None = None,
        say: Callable[[str], None] | None = None,
        keep: bool = False,
        clock: Clock | None = None,
    ) -> Servers:
        """Find or start every server of ``mode`` and prove it.

        A server that an earlier process of eyas left in the same mode, started with the same words, is
        adopted after the same proof; one left in another is stopped first.

        Args:
            root: the project folder.
            log_folder: output of servers that are started goes here.
            canary: asked once of each server, after health, model and mode.
            drafter: the exported folder to serve, in mode ``draft``.
            say: told what happens, a line at a time.
            keep: `close` leaves servers running.

        Raises:
            ServerNotStarted: a server ended at once or did not answer in time; with its log's last lines.
            TargetError: a server is not what it has to be.
            ConfigError: the tables contradict each other.
            Stopped: ``stop`` was requested while servers started.
        """
        root = root.resolve()
        resolved = resolve(config, root)
        launch = plan_launch(config, resolved, mode, drafter)
        layout = Layout(root)
        starter = Starter(
            launch=launch,
            serve=config.serve,
            layout=layout,
            book=ServerBook(layout.servers),
            project=project_id(layout.state),
            base=dump_base(config.serve.dump_dir, root),
            log_folder=log_folder,
            clock=clock or SystemClock(),
            stop=stop or StopFlag(),
        )
        servers = cls(starter, mode, canary, say or (lambda line: None), stop or StopFlag(), keep)
        try:
            if config.serve.urls:
                servers._find_foreign()
            else:
                servers._find_or_start(config.serve.replicas)
        except BaseException:
            with contextlib.suppress(EyasError):  # the first failure is the one to read
                servers.close()
            raise
        return servers

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self.servers]

    @property
    def dump_dirs(self) -> list[Path | None]:
        return [server.dump_dir for server in self.servers]

    def alive(self) -> list[bool]:
        """Whether each server's processes run and it refuses nobody; one that is only slow is alive."""
        found = []
        for server in self.servers:
            record = self._records.get(server.index)
            whole = record is None or self._starter.whole(record)
            found.append(whole and server.address.health() in ("ok", "silent"))
        return found

    def restart(self, index: int) -> None:
        """Stop a server for certain, start it again, and prove it; its address and dump folder change.

        One that somebody else runs is waited for instead.

        Raises:
            ServerNotStarted, ServerNotStopped, TargetError, Stopped: as `open` does.
        """
        server = self.servers[index]
        if not server.ours:
            self._await_foreign(server)
            return
        record = self._records.pop(server.index)
        self._say(f"server {server.index} ({server.engine}, {server.mode}) is stopped to be started again")
        stop_server(record, self._starter.book, self._starter.serve.stop_seconds, self._starter.clock)
        self.servers[index] = self._made_ready(self._started(server.index))

    def sweep(self, index: int, keep_names: Collection[str], older_than_seconds: float) -> int:
        """Remove dumps of a server of ours that nobody waits for; returns how many went."""
        server = self.servers[index]
        if not server.ours or server.dump_dir is None:
            return 0
        return sweep_dumps(server.dump_dir, keep_names, older_than_seconds)

    def close(self) -> None:
        """Stop what was started here, unless it is to be kept; servers of others are left alone."""
        records = list(self._records.values())
        self._records.clear()
        self.servers = []
        failure: EyasError | None = None
        for record in records:
            if record.keep and record.ready:
                continue
            try:
                stop_server(record, self._starter.book, self._starter.serve.stop_seconds, self._starter.clock)
            except EyasError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def __enter__(self) -> Servers:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # -- servers of ours -----------------------------------------------------------------------

    def _find_or_start(self, num_replicas: int) -> None:
        starter, launch = self._starter, self._starter.launch
        left: dict[int, ServerRecord] = {}
        for record in self._clear_the_way(launch):
            if record.index < num_replicas and record.index not in left:
                left[record.index] = record
            elif not record.keep:  # fewer are wanted than an earlier run had
                stop_server(record, starter.book, starter.serve.stop_seconds, starter.clock)
        sweep_orphans(starter.base, starter.project)
        for index in range(num_replicas):
            if index in left:
                record = left[index]
                if record.dump_dir is not None:  # whoever waited for these is gone
                    sweep_dumps(Path(record.dump_dir), (), 0.0)
                self._say(f"server {index} ({launch.engine}, {launch.mode}) runs already at {record.url}")
            else:
                record = self._started(index)
                self._say(
                    f"server {index} ({launch.engine}, {launch.mode}) starts as process "
                    f"{record.process.pid}; log: {record.log}"
                )
            self._records[index] = record
        for index in range(num_replicas):
            self.servers.append(self._made_ready(self._records[index]))

    def _clear_the_way(self, launch: Launch) -> list[ServerRecord]:
        """Records of running servers that fit; others are forgotten, stopped, or in the way."""
        starter, me = self._starter, ProcessIdentity.of(os.getpid())
        fitting = []
        for record in starter.book.read():
            used_by_other = record.opened_by != me and record.opened_by.alive
            if not running(record):
                stop_server(record, starter.book, starter.serve.stop_seconds, starter.clock)
            elif record.mode == launch.mode and record.digest == launch.digest and not used_by_other:
                fitting.append(record)
            elif record.opened_by == me and not record.keep:
                continue  # another set of servers of this very process
            elif record.keep or used_by_other:
                raise TargetError(
                    f"a server in mode {record.mode} runs already",
                    where=f"{record.url}, process {record.process.pid}",
                    why="it was started with eyas serve start, for something else than is needed now"
                    if record.keep
                    else f"process {record.opened_by.pid} of eyas uses it",
                    hint="eyas serve stop",
                )
            else:
                self._say(f"a server that an earlier run left in mode {record.mode} is stopped")
                stop_server(record, starter.book, starter.serve.stop_seconds, starter.clock)
        return fitting

    def _started(self, index: int) -> ServerRecord:
        record = self._starter.start(index, self._keep)
        self._records[index] = record
        return record

    def _made_ready(self, record: ServerRecord) -> Server:
        """Wait for a server and prove it; one whose port was taken meanwhile is started again on another."""
        starter = self._starter
        for _ in range(_MAX_NEW_PORTS):
            try:
                return self._proven(record)
            except (ServerUnreachable, TargetError):
                other = starter.port_taken_by(record)
                if other is None:
                    raise
                self._say(
                    f"server {record.index} ({record.engine}, {record.mode}): process {other} took port "
                    f"{record.port} before it; started again on another port"
                )
            self._records.pop(record.index, None)
            patience = starter.serve.stop_seconds
            stop_server(record, starter.book, patience, starter.clock, had_its_port=False)
            record = self._started(record.index)
        return self._proven(record)

    def _proven(self, record: ServerRecord) -> Server:
        starter = self._starter
        began = starter.clock.now()
        record = starter.wait_ready(record)
        launch = starter.launch
        dump_dir = Path(record.dump_dir) if record.dump_dir else None
        expected = Expected(
            launch.engine, launch.mode, launch.model, launch.min_length, launch.layers, dump_dir, True
        )
        address = Address(record.url, starter.api_key)
        proven = prove(address, expected, starter.clock)
        server = Server(
            index=record.index,
            engine=launch.engine,
            mode=launch.mode,
            url=record.url,
            dump_dir=dump_dir,
            model=proven.model,
            ours=True,
            pid=record.process.pid,
            log=Path(record.log),
            api_key=starter.api_key,
        )
        if self._canary is not None:
            self._canary(server)
        record = starter.proven(record)
        self._records[record.index] = record
        self._say(
            f"server {record.index} ({launch.engine}, {launch.mode}) is proven at {record.url} "
            f"after {format_seconds(starter.clock.now() - began)}"
        )
        return server

    # -- servers of others ---------------------------------------------------------------------

    def _find_foreign(self) -> None:
        starter = self._starter
        for url in starter.serve.every_url:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(
                    f"serve.urls has {url!r}", where="eyas.toml", hint="write it as http://host:port"
                )
        beside = [""] * len(starter.serve.urls)
        if self._mode == "capture" and starter.serve.last_urls:
            if starter.launch.engine != "sglang":
                raise ConfigError(
                    f"{starter.launch.engine} returns no states as JSON",
                    where="serve.last_urls",
                    hint="remove it, and start the servers with eyas' connector",
                )
            beside = [url.rstrip("/") for url in starter.serve.last_urls]
        for index, url in enumerate(starter.serve.urls):
            server = Server(
                index=index,
                engine=starter.launch.engine,
                mode=self._mode,
                url=url.rstrip("/"),
                dump_dir=None,
                model="",
                ours=False,
                pid=None,
                log=None,
                api_key=starter.api_key,
                ca_file=starter.serve.ca_file,
                last_url=beside[index],
            )
            self._await_foreign(server)
            self.servers.append(server)

    def _await_foreign(self, server: Server) -> None:
        """Wait until somebody else's server is healthy, then prove it."""
        starter, launch = self._starter, self._starter.launch
        seconds = starter.serve.start_seconds
        last = Address(server.last_url, server.api_key, server.ca_file) if server.last_url else None
        for address in (server.address, *([last] if last is not None else [])):
            if not wait_healthy(address, seconds, starter.clock, self._stop, lambda: None):
                raise ServerNotStarted(
                    f"the server is not healthy after {format_seconds(seconds)}",
                    where=address.url,
                    why=f"its health is: {address.health()}",
                    hint="it is not eyas' server (serve.urls): start it, or give serve.start_seconds more",
                )
        model = starter.serve.model_name or Path(launch.model).name
        expected = Expected(launch.engine, launch.mode, model, launch.min_length, launch.layers, None, False)
        if last is not None:
            proven = prove_json(server.address, last, expected)
        else:
            proven = prove(server.address, expected, starter.clock)
        server.model, server.dump_dir = proven.model, proven.dump_dir
        if self._canary is not None:
            self._canary(server)
        self._say(f"server {server.index} ({launch.engine}, {launch.mode}) is proven at {server.url}")
