"""Several processes that train together, forked so that starting one costs no start of Python."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from eyas.drafter.world import World


class Died(AssertionError):
    """A process ended by an error or a signal."""


def in_ranks(size, work, *, seconds=180.0, allow_death=False):
    """``work(world)`` in ``size`` processes; what each returned, by rank (None where one died).

    Raises:
        Died: one did not return, unless that is allowed.
        TimeoutError: they did not end in time; all are killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        children = [_start(rank, size, work, Path(folder)) for rank in range(size)]
        codes = _await(children, seconds)
        results = []
        for rank, code in enumerate(codes):
            path = Path(folder) / f"result-{rank}"
            results.append(pickle.loads(path.read_bytes()) if path.exists() else None)
            if code != 0 and not allow_death:
                error = Path(folder) / f"error-{rank}"
                raise Died(f"rank {rank}: {error.read_text() if error.exists() else code}")
        return results


def _start(rank, size, work, folder):
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if size > 1:
            store = dist.FileStore(str(folder / "store"), size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=40)
            )
        result = work(World(rank, size))
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        code = 0
    except BaseException:
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        os._exit(code)


def _await(children, seconds):
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for child in set(children) - set(codes):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            raise TimeoutError(f"{len(children) - len(codes)} processes did not end in {seconds} s")
        time.sleep(0.005)
    return [codes[child] for child in children]
