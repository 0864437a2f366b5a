"""Doing what is left, in order; the same call starts, resumes and finds nothing to do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eyas.base.errors import DamageFound, EyasError, NotReady, RecipeChanged
from eyas.base.files import set_aside, sweep_temporaries
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.base.stop import StopFlag
from eyas.base.storage import named_storage_errors
from eyas.base.threads import wait_briefly
from eyas.base.units import counted
from eyas.drafter.trackers.kinds import require_trackers
from eyas.pipeline.attempt import EVENTS_NAME, Attempt, RecordedProgress, next_number
from eyas.pipeline.given import name_what_was_given
from eyas.pipeline.handover import Handover
from eyas.pipeline.lock import hold_lock
from eyas.pipeline.mend import MAX_MENDS, mend, scrub_store, set_damages_aside
from eyas.pipeline.order import STAGES
from eyas.pipeline.signals import stop_on_signals
from eyas.pipeline.stale import refuse_stale
from eyas.pipeline.waves import WAVE_STAGES, WaveRun
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext, Stage, StageView, run_stage
from eyas.stages.room import project_room
from eyas.stages.waves import Feed
from eyas.store.ledger import Ledger
from eyas.store.place import remember_place, require_place
from eyas.store.repair import open_or_rebuild

_OF_A_TURN = {"extract": ("captured", "tokens", "bytes")}
"""Numbers that belong to one turn of a stage, where it goes wave by wave."""


@dataclass(frozen=True)
class PlannedStep:
    """What a run would do with one stage: ``skip``, ``run``, ``resume``, ``redo``, ``mend`` or ``refuse``."""

    stage: str
    action: str
    why: str
    view: StageView


@dataclass
class RunResult:
    """What a run did; ``numbers`` holds each stage's own."""

    ran: list[str] = field(default_factory=list)
    numbers: dict[str, dict[str, object]] = field(default_factory=dict)
    num_set_aside: int = 0

    def add(self, stage: str, numbers: dict[str, object], *, turns: bool) -> None:
        """A stage ended, or a turn of it: then its numbers add up."""
        before = self.numbers.get(stage, {}) if turns else {}
        for key in _OF_A_TURN.get(stage, ()):
            count, more = numbers.get(key), before.get(key)
            if isinstance(count, int) and isinstance(more, int):
                numbers = {**numbers, key: count + more}
        self.numbers[stage] = numbers
        if stage not in self.ran:
            self.ran.append(stage)


def plan(project: Project, stages: Sequence[Stage] = STAGES, redo: Sequence[str] = ()) -> list[PlannedStep]:
    """What a run would do now; changes nothing.

    A stage after one that runs is planned as ``run``: its own state is known only then.
    """
    steps: list[PlannedStep] = []
    upstream_runs = ""
    for stage in stages:
        step = _plan_stage(stage, project, stage.name in redo, upstream_runs)
        released = step.view.detail.get("released")
        if stage.name == "extract" and step.action == "skip" and "train" in redo and released:
            why = f"{released} released samples are captured again for train"
            step = replace(step, action="run", why=why)
        steps.append(step)
        if steps[-1].action in ("run", "resume", "redo", "mend"):
            upstream_runs = upstream_runs or stage.name
    return steps


def _plan_stage(stage: Stage, project: Project, redo: bool, upstream_runs: str) -> PlannedStep:
    name = stage.name
    damages = stage.damages(project, deep=False)
    if damages and not redo:
        why = "; ".join(str(damage) for damage in damages[:3])
        return PlannedStep(name, "mend", f"{why}: set aside and made again", StageView(name, "partial"))
    view = stage.look(project)
    if view.state == "skipped":
        return PlannedStep(name, "skip", str(view.detail.get("why", "switched off")), view)
    if redo and view.state != "waiting":
        return PlannedStep(name, "redo", "asked to; its output is set aside", view)
    if view.state == "stale":
        fields = "; ".join(view.differences)
        if stage.redone_when_stale:
            return PlannedStep(name, "redo", f"its recipe changed: {fields}", view)
        return PlannedStep(name, "refuse", f"its recipe changed: {fields}", view)
    if view.state == "done":
        if upstream_runs:
            return PlannedStep(name, "run", f"if {upstream_runs} changes what it reads", view)
        return PlannedStep(name, "skip", "done", view)
    if view.state == "waiting":
        if upstream_runs:
            return PlannedStep(name, "run", f"after {upstream_runs}", view)
        return PlannedStep(name, "refuse", "what it reads does not exist yet", view)
    if view.state == "partial":
        return PlannedStep(name, "resume", f"{view.done} of {view.total} {view.unit} done", view)
    return PlannedStep(name, "run", "nothing done yet", view)


def run(
    project: Project,
    *,
    verb: str,
    progress: Callable[[str], Progress],
    stages: Sequence[Stage] = STAGES,
    redo: Sequence[str] = (),
    retry_failed: bool = False,
) -> RunResult:
    """Bring ``stages`` to their end.

    Args:
        verb: what was asked for, as the lock and the log name it.
        progress: gives the listener for a stage by its name.
        redo: stages whose output is set aside first.

    Raises:
        ProjectLocked: another writer is at work.
        RecipeChanged: an output of hours was made by another recipe.
        Stopped: a signal came; all state is saved.
        EyasError: whatever ends a stage.
    """
    wait_briefly()
    layout, result, stop = project.layout, RunResult(), StopFlag()
    with named_storage_errors(layout.root), hold_lock(layout.state, verb), stop_on_signals(stop):
        sweep_temporaries(layout.written)
        to_redo = set(redo)
        _require_trackers(project, stages)
        if to_redo:
            _ = project.resolved  # a target that cannot be read is said before anything is set aside for it
        for mends_left in reversed(range(MAX_MENDS + 1)):
            try:
                _attempt(project, verb, progress, stages, to_redo, retry_failed, result, stop)
                break
            except DamageFound as error:
                if not mends_left or not mend(project, stages, error, progress("mend")):
                    raise
    return result


def _attempt(
    project: Project,
    verb: str,
    progress: Callable[[str], Progress],
    stages: Sequence[Stage],
    to_redo: set[str],
    retry_failed: bool,
    result: RunResult,
    stop: StopFlag,
) -> None:
    """One pass over the stages, with a log of its own."""
    layout = project.layout
    with _ledger(layout, progress("ledger")) as ledger:
        number = ledger.start_attempt({"verb": verb, "pid": os.getpid()}, at_least=next_number(layout.logs))
        attempt = Attempt(layout.logs, number, verb, project.overrides)
        ledger.mirror = attempt.folder / EVENTS_NAME
        outcome: dict[str, object] = {"outcome": "done"}
        if retry_failed:
            ledger.retry_failed()
        handover = Handover(project, ledger, attempt, verb)
        try:
            if "extract" not in to_redo:
                _require_place(project, ledger, RecordedProgress(attempt, progress("store"), "store"))
            work = _Work(project, ledger, attempt, handover, progress, to_redo, result)
            waves = _wave_run(work, stages, stop)
            for stage in stages:
                if waves is None or stage not in waves.stages:
                    work.run_one(stage, stop)
                elif stage is waves.stages[0]:
                    waves.run()
            result.num_set_aside = ledger.counts()["set_aside"].samples
        except EyasError as error:
            if isinstance(error, RecipeChanged):
                name_what_was_given(error, layout, project.overrides, number)
            outcome = {"outcome": error.code, **error.as_dict()}
            raise
        except BaseException as error:
            outcome = {"outcome": type(error).__name__, "what": str(error)}
            raise
        finally:
            attempt.event("attempt ended", **outcome)
            attempt.close()
            with contextlib.suppress(EyasError):  # the log has it; the first error matters more
                ledger.end_attempt(number, str(outcome["outcome"]))


def _require_trackers(project: Project, stages: Sequence[Stage]) -> None:
    """A tracker whose package is missing is said now, not after the hours before training."""
    trains = any(stage.name == "train" and not stage.look(project).finished for stage in stages)
    require_trackers(project.config.train.trackers if trains else ())


def _require_place(project: Project, ledger: Ledger, progress: Progress) -> None:
    """Write nothing to an empty mount point; hash a store that came to another disk."""
    moved = require_place(project.layout, ledger)
    if moved is None:
        return
    progress.say(f"{moved}: every segment is hashed")
    for line in scrub_store(project.layout, ledger, progress):
        progress.say(line)
    remember_place(project.layout, ledger)


def _ledger(layout: Layout, progress: Progress) -> Ledger:
    """The ledger; one that is lost or damaged is rebuilt from the folder."""
    ledger, adoption = open_or_rebuild(layout, progress=progress)
    if adoption is not None and adoption.segments:
        progress.say(
            f"the ledger was rebuilt from the folder: {counted(adoption.num_samples, 'sample')} in "
            f"{counted(len(adoption.segments), 'segment')}"
        )
    return ledger


@dataclass
class _Work:
    """What the stages of one attempt share."""

    project: Project
    ledger: Ledger
    attempt: Attempt
    handover: Handover
    progress: Callable[[str], Progress]
    to_redo: set[str]
    result: RunResult

    def recorded(self, name: str, *, quiet: bool = False) -> RecordedProgress:
        """Progress of a stage, shown and written into the log; ``quiet`` shows only what is said."""
        shown = self.progress(name)
        return RecordedProgress(self.attempt, _OnlySaid(shown) if quiet else shown, name)

    def run_one(self, stage: Stage, stop: StopFlag, feed: Feed | None = None) -> None:
        """Do what is left of a stage; raises what ends it."""
        listener = self.recorded(stage.name, quiet=feed is not None)
        context = RunContext(self.ledger, listener, stop, self.attempt.number, feed)
        with named_storage_errors(self.project.layout.root):
            _run_one(self, stage, context, stage.name in self.to_redo)
        self.to_redo.discard(stage.name)

    def redo(self, stage: Stage) -> None:
        """Set a stage's output aside now if that was asked for."""
        if stage.name in self.to_redo:
            step = _plan_stage(stage, self.project, True, "")
            if step.action == "redo":
                self.recorded(stage.name).say(f"{stage.name} is redone: {step.why}")
                _set_outputs_aside(stage, self.project, step.why, self.ledger)
            self.to_redo.discard(stage.name)


class _OnlySaid:
    """Beside another stage's bar there is no room for a second one."""

    def __init__(self, listener: Progress) -> None:
        self.say = listener.say

    def start(self, label: str, *, total: int, unit: str, done: int = 0) -> None:
        pass

    def advance(self, units: int, **facts: float | int | str) -> None:
        pass


def _wave_run(work: _Work, stages: Sequence[Stage], stop: StopFlag) -> WaveRun | None:
    """Those stages that go wave by wave; None when the store has no bound, or they are not asked for."""
    project, named = work.project, [stage for stage in stages if stage.name in WAVE_STAGES]
    if project.config.store.bound_bytes is None:
        trains = [stage for stage in named if stage.name == "train" and stage.name not in work.to_redo]
        if trains and work.ledger.counts()["released"].samples:
            # before what was released is captured again for nothing
            refuse_stale(project, trains[0], trains[0].look(project))
        return None
    if not named:
        return None
    listener = work.recorded("waves", quiet=True)
    return WaveRun(project, work.ledger, named, work.redo, work.run_one, work.handover, listener, stop)


def _run_one(work: _Work, stage: Stage, context: RunContext, redo: bool) -> None:
    project, attempt, result, handover = work.project, work.attempt, work.result, work.handover
    context.stop.check()
    step = _plan_stage(stage, project, redo, "")
    if step.action == "mend":
        for line in set_damages_aside(stage, project, context.ledger):
            context.progress.say(line)
        step = _plan_stage(stage, project, redo, "")
    if step.action == "skip":
        handover.found_done(stage.name)
        return
    if step.action == "refuse":
        refuse_stale(project, stage, step.view)
        raise NotReady(
            f"{stage.name} has nothing to read yet",
            where=", ".join(str(path) for path in stage.reads(project)),
            hint="eyas run does all stages in order",
        )
    if step.action == "redo":
        context.progress.say(f"{stage.name} is redone: {step.why}")
        _set_outputs_aside(stage, project, step.why, context.ledger)
    attempt.event("stage started", stage=stage.name, action=step.action, why=step.why)
    handover.began(stage.name)
    room = project_room(project, context.progress, context.stop)
    # every stage goes on where it was, so a full disk costs no more than the wait for room
    numbers = room.patiently(_Tries(stage, project, context), 0)
    handover.ended(stage.name, numbers)
    result.add(stage.name, numbers, turns=project.config.store.bound_bytes is not None)
    attempt.event("stage ended", stage=stage.name, **{"numbers": numbers})


@dataclass
class _Tries:
    """A stage's work, again after each full disk.

    The disk may have failed behind the stage's last step, when the output was sealed: nothing is left then.
    """

    stage: Stage
    project: Project
    context: RunContext
    began: bool = False

    def __call__(self) -> dict[str, object]:
        if self.began and self.stage.look(self.project).finished:
            return {}
        self.began = True
        with named_storage_errors(self.project.layout.root):
            return run_stage(self.stage, self.project, self.context)


def _set_outputs_aside(stage: Stage, project: Project, why: str, ledger: Ledger) -> None:
    for path in stage.writes(project):
        if path.exists():
            set_aside(path, project.layout.set_aside, f"{stage.name} is redone: {why}")
    if stage.name == "extract":
        for segment in ledger.segments():
            ledger.release_segment(segment.name)
