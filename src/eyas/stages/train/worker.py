"""A training process that is not the first: it loads, computes, and writes nothing but its log."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from eyas.base.errors import EyasError, Stopped, WorkerLost
from eyas.base.layout import Layout
from eyas.base.progress import SilentProgress
from eyas.base.stop import StopFlag
from eyas.config.schema import EyasConfig
from eyas.drafter.model import EagleDrafter
from eyas.drafter.world import World
from eyas.stages.project import Project
from eyas.stages.stored_states import StoredSamples
from eyas.stages.threads import set_threads
from eyas.stages.train.launch import MEETING, outer_board, ready_key
from eyas.stages.train.meeting import LOCAL, Board, leave
from eyas.stages.train.outer import OuterPlace
from eyas.stages.train.together import device_of, train_together

_OVER = "over"
_LOOK_SECONDS = 0.2


def follow(project: Project, place: OuterPlace) -> int:
    """Train beside the first process that an outer launcher started; returns the exit code.

    Waits for its word as long as it takes: it may have stages to do that only one can do.
    """
    board = _await_board(place)
    try:
        while (word := board.get(place.go_key)) is None:
            time.sleep(_LOOK_SECONDS)
    except RuntimeError as error:
        raise WorkerLost("the first training process is gone", why=str(error).splitlines()[0]) from error
    if word == _OVER:
        return 0
    set_threads(project, place.local_size)
    return _train(project, board, place.rank, place.size, place.local_rank, place.meeting, None)


def release(place: OuterPlace) -> None:
    """Let those go that wait for the first process's word; it is done."""
    if place.has_board:
        with suppress(WorkerLost, RuntimeError):  # without the launcher nobody waits any more
            outer_board(place).put(place.go_key, _OVER)


def _await_board(place: OuterPlace) -> Board:
    """The board; the first process's own appears only when training begins."""
    while True:
        try:
            return outer_board(place)
        except WorkerLost:
            if place.has_board:
                raise


def main() -> int:
    """Train beside the process that started this one, which tells all on stdin; returns the exit code."""
    brief = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_first, name="first process", daemon=True).start()
    project = Project(Layout(Path(brief["root"])), EyasConfig.model_validate(brief["config"]))
    board = Board(LOCAL, brief["port"], serve=False)
    rank: int = brief["rank"]
    board.put(ready_key(rank), "yes")
    return _train(project, board, rank, brief["size"], rank, MEETING, Path(brief["log"]))


def _train(
    project: Project, board: Board, rank: int, size: int, local_rank: int, name: str, log: Path | None
) -> int:
    stop = StopFlag()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda asked, frame: stop.request(asked))
    try:
        device = device_of(project, local_rank, size)
        board.join(rank, size, device, name)
        world = World(rank, size)
        train_together(
            project, world, device, world.from_first(None), SilentProgress(), stop, start=_no_start
        )
    except Stopped as stopped:
        return 0 if log is not None else stopped.exit_code
    except BaseException as error:
        board.tell(rank, error, log)
        traceback.print_exc()
        return error.exit_code if isinstance(error, EyasError) else 1
    finally:
        leave()
    return 0


def _no_start(drafter: EagleDrafter, samples: StoredSamples) -> None:
    raise AssertionError("first weights are the first process's matter")


def _end_with_first() -> None:
    """End when the pipe from the first process closes: it is gone, or done with this one."""
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no thread of torch's holds it up
