"""The pipeline running again, proven to capture the same states, and its first samples watched."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.base.errors import EyasError
from eyas.base.units import counted, format_amount, format_count, format_seconds
from eyas.pipeline.attempt import NO_RUN, runs
from eyas.pipeline.lock import current_holder
from eyas.pipeline.order import STAGES
from eyas.recovery.bench import Bench, Proof, Way
from eyas.recovery.scene import Scene
from eyas.stages.extract.stage import SAME_STATES
from eyas.store.segment import verify_segment
from eyas.store.segment_header import read_header

_POLL_SECONDS = 0.3


def stages_left(scene: Scene) -> list[str]:
    """Stages that are not finished, in order; one that cannot be looked at counts as left."""
    left = []
    for stage in STAGES:
        try:
            if not stage.look(scene.project).finished:
                left.append(stage.name)
        except (EyasError, OSError):
            left.append(stage.name)
    return left


def newest_work(logs: Path, since: str) -> tuple[str, list[dict[str, Any]]] | None:
    """Name and events of the newest attempt of the pipeline, if it began at or after ``since``; else None."""
    folder, events = next(runs(logs), (None, []))
    return (folder.name, events) if folder is not None and str(events[0].get("at")) >= since else None


@dataclass(frozen=True)
class Resume:
    """``eyas run`` in the background; proven by the lock, or by nothing being left."""

    since: str

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way("eyas run --detach", lambda: self._start(bench))]

    def _start(self, bench: Bench) -> str:
        # counted now: mending has brought samples back that are not new
        bench.baseline_stored = bench.num_stored()
        return bench.start_run(bench.scene.layout.root, bench.resume_words)

    def proof(self, bench: Bench) -> Proof:
        layout = bench.scene.layout
        holder = current_holder(layout.state)
        if holder is not None and holder.verb not in NO_RUN and holder.pid != os.getpid():
            return Proof(True, f"eyas {holder.verb} runs as process {holder.pid} since {holder.since}")
        found = newest_work(layout.logs, self.since)
        if found is not None:
            ends = [event for event in found[1] if event.get("event") == "attempt ended"]
            outcome = str(ends[-1].get("outcome")) if ends else "unfinished"
            if outcome == "done":
                return Proof(True, f"{found[0]} ran to its end")
            return Proof(False, f"{found[0]} ended with {outcome}: {_why(ends)}")
        left = stages_left(bench.look())
        return Proof(not left, f"left to do: {', '.join(left)}" if left else "nothing is left to do")


def _why(ends: list[dict[str, Any]]) -> str:
    last = ends[-1] if ends else {}
    parts = [str(last[key]) for key in ("what", "why") if last.get(key)]
    return "; ".join(parts) or "it was cut off"


class _Waits(ABC):
    """Waits for something that the resumed run does; has no way but patience."""

    name = "wait for it"

    def __init__(self, since: str) -> None:
        self.since = since

    def blocked(self, bench: Bench) -> str | None:
        return None

    def ways(self, bench: Bench) -> Sequence[Way]:
        return [Way(self.name, lambda: self._wait(bench))]

    def _wait(self, bench: Bench) -> str:
        seconds = bench.scene.project.config.recovery.watch_seconds
        started = time.monotonic()
        while time.monotonic() - started < seconds:
            bench.point("waiting")
            if self.proof(bench).done or not self._runs(bench):
                break
            time.sleep(_POLL_SECONDS)
        return f"watched for {format_seconds(time.monotonic() - started)}"

    def _runs(self, bench: Bench) -> bool:
        holder = current_holder(bench.scene.layout.state)
        return holder is not None and holder.verb not in NO_RUN

    @abstractmethod
    def proof(self, bench: Bench) -> Proof:
        """Whether what is waited for has come."""

    def _failed(self, name: str, events: list[dict[str, Any]]) -> Proof | None:
        """Not done, and why, when the run ended otherwise than well; None while it runs or ended well."""
        ends = [event for event in events if event.get("event") == "attempt ended"]
        if ends and ends[-1].get("outcome") != "done":
            return Proof(False, f"{name} ended with {ends[-1].get('outcome')}: {_why(ends)}")
        return None


class Continuity(_Waits):
    """Stored samples captured again come out the same; the run proves it before it adds any."""

    name = "wait until the run has captured stored samples again"

    def proof(self, bench: Bench) -> Proof:
        found = newest_work(bench.scene.layout.logs, self.since)
        if found is None:
            left = stages_left(bench.look())
            if "extract" not in left:
                return Proof(True, "no capture is left: nothing is added to the store")
            return Proof(False, "the run has not started yet")
        name, events = found
        said = [str(e.get("text")) for e in events if e.get("event") == "message" and SAME_STATES in str(e)]
        if said:
            return Proof(True, f"{name}: {said[-1]}")
        if (failed := self._failed(name, events)) is not None:
            return failed
        past = [e.get("stage") for e in events if e.get("event") in ("stage started", "stage ended")]
        order = [stage.name for stage in STAGES]
        later = order[order.index("extract") + 1 :]
        ended = any(e.get("event") in ("attempt ended",) for e in events)
        captured = any(e.get("event") == "stage ended" and e.get("stage") == "extract" for e in events)
        if captured or any(stage in later for stage in past) or ended:
            return Proof(True, f"{name}: nothing stored had to be compared before it went on")
        return Proof(False, f"{name} has not come to it yet")


class Watch(_Waits):
    """The first new samples are stored and hashed, or the run has ended well."""

    name = "wait for the first new samples"

    def proof(self, bench: Bench) -> Proof:
        scene = bench.look()
        found = newest_work(scene.layout.logs, self.since)
        if found is None:
            left = stages_left(scene)
            return Proof(not left, "the run has not started yet" if left else "nothing was left to do")
        name, events = found
        if (failed := self._failed(name, events)) is not None:
            return failed
        if any(event.get("event") == "attempt ended" for event in events):
            return Proof(True, f"{name} ran to its end; {self._hashed(scene, events)}")
        wanted = scene.project.config.recovery.watch_samples
        stored = bench.num_stored()
        with scene.ledger() as ledger:
            total = 0 if ledger is None else sum(count.samples for count in ledger.counts().values())
        new = stored - bench.baseline_stored
        if new >= wanted > 0:
            stored_now = f"{counted(new, 'new sample')} stored"
            return Proof(True, f"{name}: {stored_now}; {self._hashed(scene, events)}")
        steps = [e for e in events if e.get("event") == "progress" and e.get("stage") not in ("extract", "")]
        past_capture = any(e.get("event") == "stage ended" and e.get("stage") == "extract" for e in events)
        if (past_capture or stored == total > 0) and steps:
            beat = steps[-1]
            count = f"{format_count(beat['done'])} of {format_amount(beat['total'], beat['unit'])}"
            return Proof(True, f"{name}: {beat['stage']} goes on, {count}")
        return Proof(False, f"{name}: {new} of {wanted} new samples stored")

    def _hashed(self, scene: Scene, events: list[dict[str, Any]]) -> str:
        """Hashes the newest segment that the resumed run has written, if there is one."""
        began = str(events[0].get("at"))
        with scene.ledger() as ledger:
            segments = [] if ledger is None else [s for s in ledger.segments() if s.committed_at >= began]
        if not segments:
            return "no new segment"
        newest = max(segments, key=lambda segment: segment.committed_at)
        path = scene.layout.segments / newest.name
        try:
            faults = verify_segment(path, read_header(path))
        except FileNotFoundError:
            return f"{newest.name} is trained on and released already"
        except (EyasError, OSError) as error:
            return f"{newest.name} cannot be read: {error}"
        return f"{newest.name} is damaged" if faults else f"every hash of {newest.name} holds"


class ServedBy(_Waits):
    """The run's servers are up and proven by a real request (the canary)."""

    name = "wait until the run's servers are proven"

    def proof(self, bench: Bench) -> Proof:
        from eyas.targets.serving.overview import look_at_servers
        from eyas.targets.serving.records import ServerBook

        scene = bench.look()
        found = newest_work(scene.layout.logs, self.since)
        if found is None:
            return Proof("extract" not in stages_left(scene), "the run has not started yet")
        if (failed := self._failed(*found)) is not None:
            return failed
        name, events = found
        views = look_at_servers(ServerBook(scene.layout.servers), scene.project.config.serve)
        proven = [view for view in views if view.record.ready and view.state == "running"]
        if proven:
            said = ", ".join(
                f"{view.record.url} ({view.record.engine} {view.record.mode})" for view in proven
            )
            return Proof(True, f"{name}: proven by a real request: {said}")
        past = any(e.get("event") == "stage ended" and e.get("stage") == "extract" for e in events)
        ended = any(e.get("event") == "attempt ended" for e in events)
        captured = any(e.get("event") == "progress" and e.get("stage") == "extract" for e in events)
        if past or ended or captured:
            return Proof(True, f"{name}: it captured, which it does only after its canary")
        return Proof(False, f"{name}: no server is proven yet")
