"""One writer: a second one is refused at once, and a dead one blocks nobody."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eyas.base.errors import ProjectLocked
from eyas.pipeline.lock import current_holder, hold_lock

HOLD = """
import sys, time
from pathlib import Path
from eyas.pipeline.lock import hold_lock
with hold_lock(Path(sys.argv[1]), "train"):
    if sys.argv[2] == "fork":
        import os
        if os.fork() == 0:
            time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def holding(state: Path, mode: str = "plain") -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state), mode],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    return child


def end(child: subprocess.Popen[str]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def test_a_second_writer_is_told_who_holds_it(tmp_path: Path) -> None:
    child = holding(tmp_path)
    try:
        started = time.monotonic()
        with pytest.raises(ProjectLocked) as caught, hold_lock(tmp_path, "run"):
            pass
        assert time.monotonic() - started < 1
        assert caught.value.exit_code == 11
        assert str(child.pid) in caught.value.what
        assert "eyas train, since 20" in str(caught.value.why)
        holder = current_holder(tmp_path)
        assert holder is not None
        assert (holder.pid, holder.verb) == (child.pid, "train")
    finally:
        end(child)


def test_a_killed_writer_blocks_nobody_even_if_its_child_lives(tmp_path: Path) -> None:
    child = holding(tmp_path, "fork")
    try:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert current_holder(tmp_path) is None
        with hold_lock(tmp_path, "run") as holder:
            assert holder.pid == os.getpid()
    finally:
        os.killpg(child.pid, signal.SIGKILL)


def test_a_note_with_a_reused_pid_fools_nobody(tmp_path: Path) -> None:
    note = {"pid": os.getpid(), "host": "here", "since": "x", "boot": "y", "started_ticks": 1, "verb": "run"}
    (tmp_path / "writer.json").write_text(json.dumps(note))
    assert current_holder(tmp_path) is None
    with hold_lock(tmp_path, "run"):
        pass


def test_the_holder_may_ask_without_losing_the_lock(tmp_path: Path) -> None:
    ask = (
        "import sys; from pathlib import Path; from eyas.pipeline.lock import current_holder;"
        "print(current_holder(Path(sys.argv[1])))"
    )
    with hold_lock(tmp_path, "run"):
        first = current_holder(tmp_path)
        assert first is not None
        assert first.pid == os.getpid()
        seen = subprocess.run(
            [sys.executable, "-c", ask, str(tmp_path)], capture_output=True, text=True, check=True
        )
        assert f"pid={os.getpid()}" in seen.stdout
        with pytest.raises(ProjectLocked), hold_lock(tmp_path, "again"):
            pass
    assert current_holder(tmp_path) is None
