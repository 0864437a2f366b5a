"""Captured samples into segments, in a thread of its own so that capture goes on meanwhile."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np

from eyas.base.errors import CaptureInvalid
from eyas.store.commit import CommittedSegment, commit_samples, next_number, sweep_temporaries
from eyas.store.ledger import Ledger
from eyas.store.segment import CapturedSample
from eyas.store.tensors import StoredTensor

DEFAULT_SEGMENT_BYTES = 128 << 20
DEFAULT_SEGMENT_SECONDS = 5.0

_MAX_SEGMENT_SAMPLES = 8192  # keeps the header of tiny samples in the single megabytes


class StoreWriter:
    """Groups samples into segments and commits each: at most two segments are in memory.

    A segment closes when it holds ``segment_bytes`` or its first sample is ``segment_seconds`` old.
    When a commit failed (twice, in two files), the next `add` or `flush` raises its error; the
    samples stay in memory, and the call after that tries again.

    Args:
        folder: where segments lie; created, and swept of unfinished files.
        ledger: shared with the caller; the caller holds the project lock.
        recipe_hash: what the states were captured with.
        segment_bytes: size at which a segment is closed, 64 to 256 MiB for large runs.
        segment_seconds: age at which it is closed.
        on_commit: called in the writer's thread after each commit; an error it raises surfaces like a
            failed commit's, while the segment stays committed.
    """

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        recipe_hash: str,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        segment_seconds: float = DEFAULT_SEGMENT_SECONDS,
        on_commit: Callable[[CommittedSegment], None] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_temporaries(folder)
        self._folder = folder
        self._ledger = ledger
        self._recipe_hash = recipe_hash
        self._segment_bytes = segment_bytes
        self._segment_seconds = segment_seconds
        self._on_commit = on_commit
        self._shape: tuple[str, int, int] | None = None
        self._numbers = itertools.count(next_number(folder, ledger))

        self._changed = threading.Condition()
        self._filling: list[CapturedSample] = []
        self._filling_bytes = 0
        self._filling_since = 0.0
        self._filling_ids: set[str] = set()
        self._writing: list[CapturedSample] = []
        self._flush_wanted = False
        self._error: BaseException | None = None
        self._error_told = False
        self._closing = False
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name="eyas-store-writer", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            self.close()
        except Exception:
            # What ended the block is the cause that a person has to see.
            if error is None:
                raise

    def add(self, sample: CapturedSample) -> bool:
        """Take a sample; blocks while two segments are in memory.

        The arrays must not change afterwards: they are written as they are, without a copy.

        Returns:
            False when this sample is in memory already and was not taken again.

        Raises:
            CaptureInvalid: id, shapes and dtypes do not fit together, or not with earlier samples.
            DiskFull, EyasError: an earlier segment could not be written; this sample was not taken.
        """
        sample = _contiguous(sample)
        sample.check()
        self._check_shape(sample)
        with self._changed:
            self._require_open()
            self._surface_error()
            while self._is_full():
                self._changed.wait()
                self._surface_error()
            if sample.id in self._filling_ids or any(other.id == sample.id for other in self._writing):
                return False
            if not self._filling:
                self._filling_since = time.monotonic()
            self._filling.append(sample)
            self._filling_ids.add(sample.id)
            self._filling_bytes += sample.nbytes
            self._changed.notify_all()
        return True

    def flush(self) -> None:
        """Return when everything taken so far is committed.

        Raises:
            DiskFull, EyasError: a segment could not be written; calling again tries again.
        """
        with self._changed:
            self._require_open()
            self._surface_error()
            self._flush_wanted = True
            self._changed.notify_all()
            try:
                while self._filling or self._writing:
                    self._changed.wait()
                    self._surface_error()
                self._surface_error()
            finally:
                self._flush_wanted = False

    def close(self) -> None:
        """Flush and end the thread; may be called again.

        Raises:
            DiskFull, EyasError: as `flush`; samples that could not be written are given up, and the
                ledger still has them as in flight.
        """
        if self._thread is None:
            return
        try:
            self.flush()
        finally:
            with self._changed:
                self._closing = True
                self._changed.notify_all()
            self._thread.join()
            self._thread = None
            self._filling, self._writing = [], []

    @property
    def num_unwritten(self) -> int:
        """Samples in memory that are not committed yet."""
        with self._changed:
            return len(self._filling) + len(self._writing)

    def _require_open(self) -> None:
        if self._thread is None:
            raise ValueError("the store writer is closed")

    def _check_shape(self, sample: CapturedSample) -> None:
        _, num_layers, width = sample.aux.shape
        shape = (f"{sample.aux.dtype}/{sample.last.dtype}", num_layers, width)
        if self._shape is None:
            self._shape = shape
        elif shape != self._shape:
            raise CaptureInvalid(
                "a captured sample differs in dtype, layers or width",
                where=sample.id,
                why=f"{shape} after {self._shape}",
            )

    def _surface_error(self) -> None:
        """Raise a failure once; the call after that lets the thread try again."""
        if self._error is None:
            return
        if not self._error_told:
            self._error_told = True
            raise self._error
        self._error, self._error_told = None, False
        self._changed.notify_all()

    def _is_full(self) -> bool:
        return self._filling_bytes >= self._segment_bytes or len(self._filling) >= _MAX_SEGMENT_SAMPLES

    def _seconds_left(self) -> float | None:
        """Seconds until the filling segment is due; 0 when it is, None when it is empty."""
        if not self._filling:
            return None
        if self._is_full() or self._flush_wanted:
            return 0.0
        return max(0.0, self._filling_since + self._segment_seconds - time.monotonic())

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closing and not self._ready():
                    self._changed.wait(None if self._error is not None else self._seconds_left())
                if self._closing:
                    return
                if not self._writing:
                    self._writing, self._filling = self._filling, []
                    self._filling_bytes = 0
                    self._filling_ids = set()
                    self._changed.notify_all()
            error = self._commit(self._writing)
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _ready(self) -> bool:
        return self._error is None and (bool(self._writing) or self._seconds_left() == 0.0)

    def _commit(self, samples: list[CapturedSample]) -> BaseException | None:
        try:
            committed = commit_samples(self._folder, self._ledger, self._recipe_hash, samples, self._numbers)
        except BaseException as error:
            return error
        with self._changed:
            self._writing = []
        if self._on_commit is not None:
            try:
                self._on_commit(committed)
            except BaseException as error:
                return error
        return None


def _contiguous(sample: CapturedSample) -> CapturedSample:
    """The sample with row-major arrays; copies only those that are not."""
    return CapturedSample(
        id=sample.id,
        tokens=np.ascontiguousarray(sample.tokens, dtype="<i4"),
        spans=sample.spans,
        aux=StoredTensor(sample.aux.dtype, np.ascontiguousarray(sample.aux.array)),
        last=StoredTensor(sample.last.dtype, np.ascontiguousarray(sample.last.array)),
    )
