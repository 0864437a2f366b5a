"""An event loop in a thread of its own, for a caller that blocks."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from eyas.base.stop import StopFlag

T = TypeVar("T")
_LOOK_SECONDS = 0.2


class LoopThread:
    """Runs coroutines while the caller waits, and hands over what they emit."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="eyas-servers", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def wait(self, coroutine: Coroutine[Any, Any, T], stop: StopFlag | None = None) -> T:
        """The coroutine's result; it is cancelled when a stop is asked for.

        Raises:
            Stopped: a stop was asked for.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(_LOOK_SECONDS)
            if future.done():
                return future.result()
            if stop is not None and stop.requested:
                _cancel(future)
                stop.check()

    def items(
        self, coroutine: Coroutine[Any, Any, None], items: queue.Queue[T | None], stop: StopFlag | None
    ) -> Iterator[T]:
        """What a running coroutine puts into ``items``, until it ends.

        Ends early, without an error, when a stop is asked for: the caller has something to save first.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        future.add_done_callback(lambda _: items.put(None))
        try:
            while not (stop is not None and stop.requested):
                try:
                    item = items.get(timeout=_LOOK_SECONDS)
                except queue.Empty:
                    continue
                if item is None:
                    future.result()
                    return
                yield item
        finally:
            _cancel(future)

    def call(self, function: Callable[..., object], *arguments: object) -> None:
        """Call something in the loop, soon."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self) -> None:
        """End the loop; may be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


def _cancel(future: Future[Any]) -> None:
    if not future.done():
        future.cancel()
