"""Threads that write dumps, so that a slow disk never holds up the engine's own loop."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from eyas_engine.dump import Provenance, write_dump, write_error
from eyas_engine.settings import EngineSettings

_log = logging.getLogger("eyas_engine")

States = tuple[torch.Tensor, torch.Tensor]
"""Aux states [T, A, H] and last states [T, H] on the CPU."""


class DumpWriter:
    """Writes dumps in the order they come, with a bound on the memory that waits.

    Args:
        settings: where, how many threads, how many bytes may wait.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="eyas-dump")
        self._lock = threading.Lock()
        self._waiting_bytes = 0

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may wait; one dump always may, however large."""
        with self._lock:
            return not self._waiting_bytes or self._waiting_bytes + num_bytes <= self._settings.pending_bytes

    def submit(
        self, provenance: Provenance, tokens: Sequence[int], num_bytes: int, states: Callable[[], States]
    ) -> None:
        """Write a dump when a thread is free; whatever fails becomes an error file.

        Args:
            num_bytes: size of the states, which counts as waiting from now on.
            states: gives the states, called in the thread (it may wait for a copy to end).
        """
        with self._lock:
            self._waiting_bytes += num_bytes
        self._pool.submit(self._write, provenance, list(tokens), num_bytes, states)

    def fail(self, name: str, why: str) -> None:
        """Tell the client why its dump will not come; a folder that is gone is logged."""
        try:
            write_error(self._settings.directory, name, why)
        except OSError as error:
            _log.error("eyas: dump %s failed (%s), and neither could that be reported: %s", name, why, error)

    def close(self) -> None:
        """Finish what waits."""
        self._pool.shutdown(wait=True)

    def _write(
        self, provenance: Provenance, tokens: list[int], num_bytes: int, states: Callable[[], States]
    ) -> None:
        try:
            aux, last = states()
            write_dump(self._settings.directory, provenance, tokens, aux, last)
        except BaseException as error:
            _log.error("eyas: dump %s failed: %r", provenance.name, error)
            with contextlib.suppress(BaseException):
                self.fail(provenance.name, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._waiting_bytes -= num_bytes
