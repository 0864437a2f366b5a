"""Where training processes find each other, and what they leave for each other to read."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eyas.base import errors
from eyas.base.ending import threads_left
from eyas.base.errors import EyasError, WorkerLost

EXCHANGE_TIMEOUT = timedelta(minutes=30)
"""Longest wait of one process for another: the first fits a drafter's first weights while others wait."""
LOCAL = "127.0.0.1"
_CONNECT_TIMEOUT = timedelta(seconds=60)
_LEAVE_SECONDS = 10.0


class Board:
    """Words by key that all processes see, kept by one of them over TCP.

    Args:
        serve: this process keeps it.
        listener: descriptor of the socket that it then listens on, instead of one of its own.

    Raises:
        WorkerLost: nobody keeps it there.
    """

    def __init__(self, address: str, port: int, *, serve: bool, listener: int | None = None) -> None:
        try:
            self._store: Any = dist.TCPStore(  # type: ignore[attr-defined]
                address,
                port,
                is_master=serve,
                wait_for_workers=False,
                timeout=_CONNECT_TIMEOUT,
                master_listen_fd=listener,
            )
            self._store.set_timeout(EXCHANGE_TIMEOUT)
        except RuntimeError as error:
            raise WorkerLost(
                "the first training process is not there",
                where=f"{address}:{port}",
                why=str(error).splitlines()[0],
                hint="eyas run",
            ) from error

    @classmethod
    def of_this_machine(cls) -> Board:
        """A board that this process keeps at a free port, which only this machine can reach."""
        listener = socket.create_server((LOCAL, 0))  # by itself the store would listen everywhere
        port = listener.getsockname()[1]
        return cls(LOCAL, port, serve=True, listener=listener.detach())

    @property
    def port(self) -> int:
        return int(self._store.port)

    def put(self, key: str, text: str) -> None:
        """Leave a word, there for all on return. Raises RuntimeError when its keeper is gone."""
        self._store.set(key, text)
        self._store.check([key])  # setting alone is not answered

    def get(self, key: str) -> str | None:
        """The word, if it is there already. Raises RuntimeError when its keeper is gone."""
        return bytes(self._store.get(key)).decode() if self._store.check([key]) else None

    def join(self, rank: int, size: int, device: str, name: str) -> None:
        """Become one of the processes that train together.

        Args:
            name: of this meeting; each has its own.

        Raises:
            WorkerLost: the others do not come.
        """
        threads_left()
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(torch.device(device))
        try:
            dist.init_process_group(
                # host memory always, and the device's own way
                "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
                store=dist.PrefixStore(name, self._store),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=EXCHANGE_TIMEOUT,
            )
        except RuntimeError as error:
            raise WorkerLost(
                "the training processes do not find each other",
                why=str(error).splitlines()[0],
                hint="eyas run",
            ) from error

    def tell(self, rank: int, error: BaseException, log: Path | None) -> None:
        """Leave behind what ends a process."""
        if not isinstance(error, EyasError):
            error = EyasError(
                f"training process {rank} failed",
                where=log,
                why=f"{type(error).__name__}: {error}",
                hint="eyas run resumes from the newest checkpoint",
            )
        with suppress(RuntimeError):
            self.put(_error_key(rank), json.dumps(error.as_dict()))

    def told_by(self, rank: int) -> EyasError | None:
        """The error that a process has left behind, of the class it was."""
        with suppress(RuntimeError, ValueError, KeyError, TypeError):
            text = self.get(_error_key(rank))
            if text is not None:
                table = json.loads(text)
                kind = getattr(errors, table["error"], EyasError)
                made: EyasError = kind(
                    table["what"], where=table["where"], why=table["why"], hint=table["hint"]
                )
                return made
        return None


def leave() -> None:
    """Take leave of the others; it is no matter if they have gone, nor waited for long."""

    def destroy() -> None:
        with suppress(Exception):
            dist.destroy_process_group()

    thread = threading.Thread(target=destroy, name="leaving", daemon=True)
    thread.start()
    thread.join(_LEAVE_SECONDS)


def _error_key(rank: int) -> str:
    return f"error/{rank}"
