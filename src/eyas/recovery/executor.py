"""Carrying the plan out: every step verified before it counts, every change noted, resumable anywhere."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field

from eyas.base.clock import utc_now_text
from eyas.base.errors import EyasError, UsageError
from eyas.base.storage import named_storage_errors
from eyas.pipeline.attempt import Attempt, next_number
from eyas.pipeline.lock import hold_lock
from eyas.recovery.bench import Bench, Proof
from eyas.recovery.doctor import Diagnosis, diagnose
from eyas.recovery.plan import Step, make_plan
from eyas.recovery.scene import Scene
from eyas.store.ledger import Ledger
from eyas.store.ledger_history import Todo
from eyas.store.todos import OPEN_STATUSES, Phase, TodoBook, read_phases, whoami

PHASE = "recovery"
_GUARD = "recovery"  # folder of the lock that keeps a second recovery out


@dataclass
class Recovery:
    """What a recovery did.

    Attributes:
        phase: id of its phase; None when there was nothing to do.
        todos: all of the phase, in order.
        before, after: the diagnoses around it.
    """

    phase: str | None
    before: Diagnosis
    after: Diagnosis
    todos: list[Todo] = field(default_factory=list)

    @property
    def left(self) -> list[Todo]:
        """Todos that are not completed, those that can wait left out."""
        return [t for t in self.todos if t.status in OPEN_STATUSES and t.priority != "low"]


def planned(scene: Scene) -> tuple[Diagnosis, list[Step]]:
    """What `recover` would do; changes nothing."""
    found = diagnose(scene)
    if is_at_work(scene, found):
        return found, []
    return found, make_plan(scene, found, utc_now_text())


def is_at_work(scene: Scene, found: Diagnosis) -> bool:
    """Whether a run is going on that is not stuck: then there is nothing to recover."""
    silent = any(finding.code == "writer-silent" for finding in found.findings)
    return scene.holder is not None and scene.holder.pid != os.getpid() and not silent


def recover(bench: Bench, only: str | None = None) -> Recovery:
    """Mend what can be mended and bring the pipeline back.

    Args:
        only: one todo, by its key or id; nothing else is done, and the run is not resumed unless it is that.

    Raises:
        ProjectLocked: another recovery is at work.
        UsageError: ``only`` names no todo of the plan.
        EyasError: the ledger cannot be written, so no todo could be kept.
    """
    scene = bench.scene
    with named_storage_errors(scene.layout.root), hold_lock(scene.layout.state / _GUARD, "recover"):
        return _Executor(bench).run(only)


class _Executor:
    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._layout = bench.scene.layout
        self._ledger: Ledger | None = None
        self._todos: dict[str, Todo] = {}
        bench.release, bench.attach = self._release, self._attach

    def run(self, only: str | None) -> Recovery:
        bench, scene = self._bench, self._bench.scene
        before = diagnose(scene)
        self._open_ledger()
        phase = self._open_phase()
        if is_at_work(scene, before) and phase is None:
            return Recovery(None, before, before)
        since = phase.opened_at if phase is not None else utc_now_text()
        steps = make_plan(scene, before, since)
        if not steps and phase is None:
            return Recovery(None, before, before)
        if only is not None:
            steps = [_named(steps, only)]
        number = self._start_attempt()
        attempt = Attempt(self._layout.logs, number, "recover")
        self._book = TodoBook(attempt, whoami("recover"), number, self._ledger)
        outcome = "done"
        try:
            self._phase = self._book.open_phase(PHASE)
            self._note_plan(steps, phase, only is None)
            bench.point("planned")
            bench.baseline_stored = bench.num_stored()
            for step in steps:
                self._carry_out(step)
            after = diagnose(bench.look())
            self._settle(steps, after)
            result = Recovery(self._phase, before, after, list(self._todos.values()))
            if result.left:
                outcome = "blocked"
            elif only is None:
                self._book.close_phase(self._phase, "recovered")
            return result
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            attempt.event("attempt ended", outcome=outcome)
            attempt.close()
            if self._ledger is not None:
                self._ledger.end_attempt(number, outcome)
                self._ledger.close()

    def _open_ledger(self) -> None:
        try:
            if self._layout.ledger.exists():
                self._ledger = Ledger.open(self._layout.ledger, create=False)
        except EyasError:
            self._ledger = None  # a finding of its own; the log keeps the todos until it is rebuilt

    def _release(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None
        self._book.detach()

    def _attach(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._book.attach(ledger)

    def _open_phase(self) -> Phase | None:
        """The recovery that an earlier process did not finish."""
        phases = [] if self._ledger is None else [p for p in read_phases(self._ledger) if p.name == PHASE]
        return phases[-1] if phases and phases[-1].is_open else None

    def _start_attempt(self) -> int:
        at_least = next_number(self._layout.logs)
        if self._ledger is None:
            return at_least
        return self._ledger.start_attempt({"verb": "recover", "pid": os.getpid()}, at_least=at_least)

    def _note_plan(self, steps: list[Step], phase: Phase | None, whole: bool) -> None:
        known = {todo.id: todo for todo in phase.todos} if phase is not None else {}
        for step in steps:
            old = known.get(self._id(step.key))
            new = Todo(
                id=self._id(step.key),
                content=step.content,
                priority=step.priority,
                status="pending" if old is None else old.status,
                depends_on=tuple(self._id(key) for key in step.depends_on),
                evidence="; ".join(text for f in step.findings for text in f.evidence[:3]),
                changed_at="",
            )
            same = old is not None and (old.content, old.depends_on) == (new.content, new.depends_on)
            self._todos[new.id] = old if old is not None and same else self._book.put(new)
        if whole:  # todos of a recovery that was cut off, whose finding is gone
            self._todos |= {id_: todo for id_, todo in known.items() if id_ not in self._todos}

    def _id(self, key: str) -> str:
        return f"{self._phase}/{key}"

    def _change(self, id_: str, status: str, evidence: str) -> None:
        old = self._todos[id_]
        self._todos[id_] = self._book.put(
            Todo(id_, old.content, old.priority, status, old.depends_on, evidence, "")
        )
        self._bench.point(f"{id_.partition('/')[2]}: {status}")

    def _carry_out(self, step: Step) -> None:
        bench, id_ = self._bench, self._id(step.key)
        if self._todos[id_].status == "completed" and not step.findings:
            return  # an earlier process of this phase verified it, and no finding speaks against it
        waits = [key for key in step.depends_on if self._status(key) != "completed"]
        if waits:
            self._change(id_, "blocked", f"waits for {', '.join(waits)}")
            return
        bench.say(step.content)
        proof = self._proof(step)
        if proof.done:
            self._change(id_, "completed", f"already so: {proof.evidence}")
            bench.say(f"  already so: {proof.evidence}")
            return
        if (reason := step.remedy.blocked(bench)) is not None:
            self._change(id_, "blocked", reason)
            bench.say(f"  blocked: {reason}")
            return
        self._change(id_, "in_progress", proof.evidence)
        tried = []
        for way in step.remedy.ways(bench):
            bench.point(f"{step.key}: before {way.name}")
            try:
                said = way.act()
            except (EyasError, OSError, subprocess.SubprocessError) as error:
                said = "; ".join(str(error).splitlines())
            tried.append(f"{way.name}: {said}")
            bench.say(f"  {tried[-1]}")
            bench.point(f"{step.key}: after {way.name}")
            proof = self._proof(step)
            if proof.done:
                break
        evidence = "; ".join([*tried, proof.evidence])
        self._change(id_, "completed" if proof.done else "blocked", evidence)
        bench.say(f"  {'done' if proof.done else 'blocked'}: {proof.evidence}")

    def _status(self, key: str) -> str:
        todo = self._todos.get(self._id(key))
        return "completed" if todo is None else todo.status

    def _proof(self, step: Step) -> Proof:
        try:
            return step.remedy.proof(self._bench)
        except (EyasError, OSError) as error:
            return Proof(False, f"could not verify: {' '.join(str(error).splitlines())}")

    def _settle(self, steps: list[Step], after: Diagnosis) -> None:
        """Todos of an earlier, cut-off process: a finding that a new look does not have is mended."""
        planned = {self._id(step.key) for step in steps}
        for id_, todo in list(self._todos.items()):
            if id_ in planned or todo.status not in OPEN_STATUSES:
                continue
            still = [f for f in after.findings if id_.endswith((f.key, f"service:{f.subject}"))]
            if not still:
                self._change(
                    id_, "completed", "an earlier recovery was cut off here; a new look finds it mended"
                )


def _named(steps: list[Step], only: str) -> Step:
    for step in steps:
        if only in (step.key, f"{PHASE}/{step.key}") or only.endswith(f"/{step.key}"):
            return Step(step.key, step.group, step.content, step.priority, step.remedy, (), step.findings)
    known = ", ".join(step.key for step in steps) or "nothing is to be done"
    raise UsageError(f"no todo is called {only!r}", why=f"todos now: {known}", hint="eyas recover --dry-run")
