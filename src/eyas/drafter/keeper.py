"""Checkpoints written beside training: a copy of the state is taken, a thread writes it."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from eyas.drafter.checkpoint import TrainingState, prune_checkpoints, save_checkpoint
from eyas.drafter.snapshot import Snapshot
from eyas.drafter.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class Written:
    """A finished checkpoint.

    Attributes:
        seconds: for which training stood still.
        write_seconds: that the writing took beside it.
    """

    path: Path
    step: int
    seconds: float
    write_seconds: float


class CheckpointKeeper:
    """Writes checkpoints one at a time and removes those that are no longer kept.

    A process that is killed while one is written leaves the older ones whole. Leave the block to wait for
    the last; an error of the disk is raised by whatever call comes next.

    Args:
        keep: how many of the newest stay, beside the best.
        vocabulary: what the drafter's head belongs to.
    """

    def __init__(self, folder: Path, keep: int, vocabulary: DraftVocabulary) -> None:
        self._folder, self._keep, self._vocabulary = folder, keep, vocabulary
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._written: list[Written] = []

    def start(self, snapshot: Snapshot, state: TrainingState, began: float) -> None:
        """Begin to write; waits for the one before.

        Args:
            began: ``time.monotonic()`` when training stood still for the copy.

        Raises:
            OSError: the one before could not be written.
        """
        self.wait()
        kept = copy.deepcopy(state)
        held_up = time.monotonic() - began
        self._thread = threading.Thread(
            target=self._write, args=(snapshot, kept, held_up), name="checkpoint", daemon=False
        )
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises OSError when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def finished(self) -> list[Written]:
        """Those that were finished since the last call. Raises OSError as `wait` does."""
        self._raise()
        done, self._written = self._written, []
        return done

    def close(self) -> None:
        """Wait without a word of errors: for the way out after another one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, snapshot: Snapshot, state: TrainingState, held_up: float) -> None:
        began = time.monotonic()
        try:
            path = save_checkpoint(self._folder, snapshot, state, self._vocabulary)
            # one that will be replaced does not count: the one before stands in for it meanwhile
            keep = self._keep + state.unvalidated
            prune_checkpoints(self._folder, keep, state.best["step"] if state.best else None)
        except BaseException as error:
            self._error = error
        else:
            self._written.append(Written(path, state.step, held_up, time.monotonic() - began))
