"""Starting one server, waiting for it, and stopping it."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from eyas.base.clock import Clock, utc_now_text
from eyas.base.errors import ConfigError, ServerNotStarted
from eyas.base.layout import Layout
from eyas.base.process import ProcessIdentity
from eyas.base.stop import StopFlag
from eyas.base.units import format_seconds
from eyas.config.servers import ServeConfig
from eyas.targets.serving.address import Address
from eyas.targets.serving.dumps import make_dump_folder, new_owner, remove_dump_folder, write_owner
from eyas.targets.serving.launch import HOST, Launch
from eyas.targets.serving.plugin_folder import make_plugin_folder
from eyas.targets.serving.process import EngineProcess, free_port, log_tail, other_listener, prove_released
from eyas.targets.serving.records import ServerBook, ServerRecord

_POLL_SECONDS = 0.5


@dataclass
class Starter:
    """What is the same for all servers of one mode.

    Args:
        base: folder below which dump folders are made.
        log_folder: output of servers goes here, each start to a new file.
    """

    launch: Launch
    serve: ServeConfig
    layout: Layout
    book: ServerBook
    project: str
    base: Path
    log_folder: Path
    clock: Clock
    stop: StopFlag
    _processes: dict[str, EngineProcess] = field(default_factory=dict)

    @property
    def api_key(self) -> str | None:
        """The servers' key. Raises ConfigError when the variable that should hold it is empty."""
        name = self.serve.api_key_env
        if not name:
            return None
        key = os.environ.get(name)
        if not key:
            raise ConfigError(
                f"the environment variable {name} is not set",
                where="serve.api_key_env",
                hint=f"export {name}=...",
            )
        return key

    def start(self, index: int, keep: bool) -> ServerRecord:
        """Start replica ``index`` and write it down; it does not answer yet.

        Raises:
            ServerNotStarted: the command cannot be run.
            TargetError: the dump folder cannot be made.
        """
        launch, server_started = self.launch, f"{time.time():.3f}"
        marker = secrets.token_hex(8)
        dump_dir, settings, plugin = None, None, None
        if launch.mode == "capture":
            # until the server's own process is known, this process is the owner
            mine = new_owner(self.project, ProcessIdentity.of(os.getpid()), launch.engine, server_started)
            dump_dir = make_dump_folder(self.base, self.project, mine)
            settings = launch.settings(dump_dir, server_started)
            plugin = make_plugin_folder(self.layout.engine_plugin)
        port = self._unused_port()
        command = launch.command(port, settings)
        variables = launch.variables(index, settings, plugin)
        if self.api_key is not None and launch.engine == "vllm":
            variables["VLLM_API_KEY"] = self.api_key  # not as an argument, which everybody could read
        log = self._new_log(index)
        try:
            process = EngineProcess.start(command, variables, self.layout.root, log, marker)
        except OSError as error:
            if dump_dir is not None:
                remove_dump_folder(dump_dir)
            raise ServerNotStarted(
                f"the {launch.engine} server cannot be started",
                where=command[0],
                why=str(error),
                hint="set serve.python to the Python of the engine's environment",
            ) from error
        self._processes[marker] = process
        record = ServerRecord(
            index=index,
            engine=launch.engine,
            mode=launch.mode,
            host=HOST,
            port=port,
            model=launch.model,
            digest=launch.digest,
            marker=marker,
            process=process.identity,
            opened_by=ProcessIdentity.of(os.getpid()),
            dump_dir=None if dump_dir is None else str(dump_dir),
            log=str(log),
            started=utc_now_text(),
            keep=keep,
        )
        self.book.put(record)
        if dump_dir is not None:
            write_owner(dump_dir, new_owner(self.project, process.identity, launch.engine, server_started))
        return record

    def wait_ready(self, record: ServerRecord) -> ServerRecord:
        """Wait until a server that was started, or found, is healthy.

        Raises:
            ServerNotStarted: its process ended, or the time is over; with the log's last lines.
            Stopped: the run was asked to stop.
        """
        process, seconds = self._process(record), self.serve.start_seconds

        def check_process() -> None:
            if not process.leader_alive:
                raise self._not_started(record, f"the {record.engine} server ended: {process.how_it_ended()}")

        address = Address(record.url, self.api_key)
        if not wait_healthy(address, seconds, self.clock, self.stop, check_process):
            raise self._not_started(
                record, f"the {record.engine} server does not answer after {format_seconds(seconds)}"
            )
        return record

    def port_taken_by(self, record: ServerRecord) -> int | None:
        """Number of another process that took a server's port before it listened; None when none is known.

        Two runs that start servers at once can draw the same port: it is free until one of them listens.
        """
        return other_listener(record.port, self._process(record).members())

    def proven(self, record: ServerRecord) -> ServerRecord:
        """Note that a server passed its proof; it is this process' from now on."""
        record = record.made_ready(opened_by=ProcessIdentity.of(os.getpid()))
        self.book.put(record)
        self._process(record).remember_workers()
        return record

    def whole(self, record: ServerRecord) -> bool:
        """Whether the first process of a server and the workers that it had still run."""
        process = self._process(record)
        return process.leader_alive and not process.worker_gone

    def _process(self, record: ServerRecord) -> EngineProcess:
        return self._processes.setdefault(record.marker, EngineProcess(record.process, record.marker))

    def _not_started(self, record: ServerRecord, what: str) -> ServerNotStarted:
        tail = log_tail(Path(record.log))
        return ServerNotStarted(
            what,
            where=record.log,
            why=f"the log ends with:\n{tail}" if tail else "its log is empty",
            hint=f"eyas serve logs; serve.start_seconds is {self.serve.start_seconds:g}",
        )

    def _unused_port(self) -> int:
        taken = {record.port for record in self.book.read()}
        while (port := free_port(HOST)) in taken:
            pass
        return port

    def _new_log(self, index: int) -> Path:
        stem, number = f"server-{self.launch.mode}-{index}", 1
        while (path := self.log_folder / (f"{stem}.log" if number == 1 else f"{stem}-{number}.log")).exists():
            number += 1
        return path


def wait_healthy(
    address: Address, seconds: float, clock: Clock, stop: StopFlag, check: Callable[[], None]
) -> bool:
    """Ask for health until it is given; False when ``seconds`` are over.

    Args:
        check: called before each question; raises to end the waiting.
    """
    deadline = clock.now() + seconds
    while True:
        stop.check()
        check()
        if address.health() == "ok":
            return True
        if clock.now() >= deadline:
            return False
        clock.sleep(_POLL_SECONDS)


def running(record: ServerRecord) -> bool:
    """Whether a server's first process runs."""
    return EngineProcess(record.process, record.marker).leader_alive


def stop_server(
    record: ServerRecord,
    book: ServerBook,
    patience: float,
    clock: Clock,
    *,
    keep_dumps: bool = False,
    had_its_port: bool = True,
) -> str:
    """End a server, prove it gone, remove its dump folder and forget it.

    Args:
        patience: seconds that its processes have to end by themselves.
        keep_dumps: leave the folder and what is in it.
        had_its_port: False when another program listens there, which goes on.

    Returns:
        What is known of its GPU memory: ``released`` or ``not checked: WHY``.

    Raises:
        ServerNotStopped: something of it is left; its record is kept.
    """
    process = EngineProcess(record.process, record.marker)
    members = process.members()
    process.end(patience, clock)
    port = record.port if had_its_port else None
    gpu = prove_released(members, record.host, port, patience, clock) if members else "released"
    if record.dump_dir is not None and not keep_dumps:
        remove_dump_folder(Path(record.dump_dir))
    book.drop(record.marker)
    return gpu
