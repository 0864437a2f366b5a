"""Feeds trackers from the metrics file, in a thread of its own.

Training only writes its file. So a tracker that is slow, broken or out of reach costs training nothing; one
that is added later gets the whole history; and after a kill at any instant the next attempt sends what is
missing.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.base.files import write_json
from eyas.drafter.trackers.interface import TrackedRun, Tracker
from eyas.drafter.trackers.kinds import open_tracker
from eyas.drafter.trackers.rows import row_time, row_values

LOOK_SECONDS = 1.0
"""How often the file is looked at."""
CLOSE_SECONDS, STOP_SECONDS = 120.0, 10.0
"""Longest that finished training waits for trackers, and one that was stopped: a stop has a deadline."""
_SENT_KINDS = ("train", "validation")


@contextmanager
def following(
    metrics: Path, run: TrackedRun, names: Sequence[str], say: Callable[[str], None]
) -> Iterator[None]:
    """Trackers follow the metrics file while the block runs, and get its last rows at the end.

    Args:
        metrics: JSON lines; need not exist yet.
        names: of `eyas.config.schema.TrainConfig.trackers`; none: nothing is started.
        say: tells a person; each failing tracker is told of once.
    """
    if not names:
        yield
        return
    follower = _Follower(metrics, run, names, say)
    thread = threading.Thread(target=follower.run, name="trackers", daemon=True)
    thread.start()
    patience = STOP_SECONDS
    try:
        yield
        patience = CLOSE_SECONDS
    finally:
        follower.ending.set()
        thread.join(patience)
        if thread.is_alive():
            say(f"trackers did not finish in {patience:.0f} s; what they lack is sent when training goes on")


class _Follower:
    def __init__(
        self, metrics: Path, run: TrackedRun, names: Sequence[str], say: Callable[[str], None]
    ) -> None:
        self.ending = threading.Event()
        self._metrics, self._run, self._say = metrics, run, say
        self._record = run.folder / "runs.json"
        self._runs = _recorded(self._record)
        self._names = list(names)
        self._trackers: dict[str, Tracker] = {}
        self._offset = 0

    def run(self) -> None:
        for name in self._names:
            with self._telling(name):
                known = self._runs.setdefault(name, {"run": None, "sent": {}})
                self._trackers[name] = open_tracker(name, self._run, known["run"])
                known["run"] = self._trackers[name].run
        self._write_record()
        ended = False
        while not ended and self._trackers:
            # rows written before the end was seen are read after it
            ended = self.ending.wait(LOOK_SECONDS)
            if self._send(self._new_rows()):
                self._write_record()
        for name in list(self._trackers):
            with self._telling(name):
                self._trackers[name].close()

    def _send(self, rows: list[dict[str, Any]]) -> bool:
        """Whether any tracker was told anything."""
        told = False
        for name in list(self._trackers):
            sent, tracker = self._runs[name]["sent"], self._trackers[name]
            with self._telling(name):
                before = dict(sent)
                for row in rows:
                    kind, step = row["kind"], row["step"]
                    # after a resume the steps since the checkpoint come again
                    if step > sent.get(kind, -1):
                        tracker.log(step, row_values(row), row_time(row))
                        sent[kind] = step
                if sent != before:
                    tracker.flush()
                    told = True
        return told

    def _new_rows(self) -> list[dict[str, Any]]:
        """Whole rows since the last look; half a row is left for the next."""
        try:
            with self._metrics.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = []
        for line in whole.splitlines():
            try:
                row = json.loads(line)
                if row["kind"] in _SENT_KINDS:
                    rows.append({**row, "step": int(row["step"])})
            except (ValueError, KeyError, TypeError):
                continue  # torn by a kill, and continued on a line of its own
        return rows

    @contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """A tracker's failure is said once and ends that tracker, nothing else."""
        try:
            yield
        except Exception as error:
            self._trackers.pop(name, None)
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._say(f"tracker {name} failed and is left out: {type(error).__name__}: {first}")

    def _write_record(self) -> None:
        """Which runs these are and what they have; a full disk here must not end anything."""
        try:
            self._run.folder.mkdir(parents=True, exist_ok=True)
            write_json(self._record, self._runs)
        except OSError as error:
            self._say(f"what trackers have could not be noted: {error}")


def _recorded(path: Path) -> dict[str, dict[str, Any]]:
    """What an earlier attempt noted; a note that cannot be read only means that rows are sent again."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): {"run": one["run"], "sent": dict(one["sent"])} for name, one in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
