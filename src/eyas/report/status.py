"""What stands where: the view model behind ``eyas status``, the dashboard and the report."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass
from typing import Any

from eyas.base.errors import EyasError
from eyas.base.files import read_json
from eyas.base.units import format_bytes, format_seconds, parse_bytes
from eyas.pipeline.attempt import attempt_folders, recent_events
from eyas.pipeline.lock import Holder, current_holder
from eyas.pipeline.order import STAGES
from eyas.report.forecast import forecast
from eyas.report.now import LastAttempt, Message, Running, last_attempt, messages, running
from eyas.report.server_status import ServerStatus, server_status
from eyas.report.sizes import folder_sizes
from eyas.report.stage_status import StageStatus, stage_status
from eyas.report.training_status import TrainingStatus, training_status
from eyas.stages.project import Project
from eyas.stages.protocol import StageView
from eyas.store.ledger import Ledger
from eyas.store.todos import OPEN_STATUSES, read_phases

BROKEN = (EyasError, OSError, ValueError, TypeError, KeyError, AttributeError, LookupError)
"""What a half-broken folder may make a reader raise; it becomes a line of ``problems``."""


@dataclass(frozen=True)
class Failure:
    """A sample that failed ``failures`` times, last for ``reason``."""

    id: str
    state: str
    failures: int
    reason: str


@dataclass(frozen=True)
class SetAside:
    """A file or folder that was moved to ``set-aside/``."""

    name: str
    reason: str
    at: str


@dataclass(frozen=True)
class Disk:
    """Bytes now and to come; forecasts are None when nothing is left or no counts and expectations are known.

    ``left_bytes`` is what is still to be written, ``room_bytes`` what may be: by the budget or the
    filesystem.
    """

    used_bytes: int
    free_bytes: int
    budget_bytes: int | None
    left_bytes: int | None
    room_bytes: int | None
    fits: bool | None
    low: bool


@dataclass(frozen=True)
class Waves:
    """The store of a project with a bound: which samples lie in it now, and how far its waves are.

    ``waves_over`` of ``waves`` are trained and gone; both are None before the first of them was planned.
    ``captures`` counts a sample once for each time that it is captured. ``stored`` samples lie on disk,
    ``released`` ones did; with the pending, failed and set-aside ones they are all there are.
    """

    max_bytes: int
    store_bytes: int
    stored: int
    released: int
    waves_over: int | None
    waves: int | None
    captures: int | None


@dataclass(frozen=True)
class ProjectStatus:
    """One look at a project.

    ``damages`` are those of the ``problems`` that a run mends by making something again. ``failures`` names
    samples that failed or are set aside, most failures first, and ``set_aside`` files, newest first (both
    at most 20); ``next_command`` is None when nothing is left, ``then`` are the stages after the present one.
    """

    project: str
    target: str
    stages: tuple[StageStatus, ...]
    problems: tuple[str, ...]
    damages: tuple[str, ...]
    running: Running | None
    last_attempt: LastAttempt | None
    num_attempts: int
    messages: tuple[Message, ...]
    training: TrainingStatus | None
    servers: tuple[ServerStatus, ...]
    disk: Disk
    waves: Waves | None
    project_bytes: int
    free_bytes: int
    set_aside_samples: int
    failures: tuple[Failure, ...]
    set_aside_files: int
    set_aside: tuple[SetAside, ...]
    open_todos: tuple[str, ...]
    next_command: str | None
    then: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def project_status(project: Project, suffix: str = "") -> ProjectStatus:
    """Look at a project without changing it; works on a dead run and a half-broken folder.

    Args:
        suffix: added to suggested commands (``--project DIR``).
    """
    layout = project.layout
    views, problems, damages = _look(project)
    damaged = bool(problems)
    holder = current_holder(layout.state)
    folders = attempt_folders(layout.logs)
    events = recent_events(folders[-1]) if folders else []
    now = running(holder, events) if holder else None
    if now is not None and now.stalled:
        problems.append(f"no event for {format_seconds(now.silent_seconds or 0)}: the run may hang")
    sizes = folder_sizes(layout.root)
    disk = _disk(project, sizes[""], problems, finished=not damaged and all(v.finished for v in views))
    set_aside = next((int(str(v.detail.get("set_aside", 0))) for v in views if v.name == "extract"), 0)
    moved = _moved(project)
    failures, todos = _from_ledger(project)
    servers = _servers(project, problems)
    return ProjectStatus(
        project=str(layout.root),
        target=project.config.target.model,
        stages=tuple(stage_status(project, view, sizes) for view in views),
        problems=tuple(problems),
        damages=tuple(damages),
        running=now,
        last_attempt=last_attempt(folders[-1], events, holder is not None) if folders else None,
        num_attempts=len(folders),
        messages=messages(events),
        training=training_status(project),
        servers=servers,
        disk=disk,
        waves=_waves(project, views, sizes.get("store", 0)),
        project_bytes=disk.used_bytes,
        free_bytes=disk.free_bytes,
        set_aside_samples=set_aside,
        failures=failures,
        set_aside_files=len(moved),
        set_aside=tuple(moved[:20]),
        open_todos=todos,
        next_command=_next_command(views, holder, set_aside, suffix, damaged),
        then=_then(views, now),
    )


def is_finished(project: Project) -> bool:
    """Whether nothing is left to be done: every stage is, and nothing is damaged."""
    views, problems, _ = _look(project)
    return not problems and all(view.finished for view in views)


def _look(project: Project) -> tuple[list[StageView], list[str], list[str]]:
    """Views, problems, and those of the problems that are damage."""
    views: list[StageView] = []
    problems: list[str] = []
    damages: list[str] = []
    for stage in STAGES:
        try:
            found = [f"{stage.name}: damaged: {d}" for d in stage.damages(project, deep=False)]
            problems += found
            damages += found
            views.append(stage.look(project))
        except BROKEN as error:
            problem = f"{stage.name}: {_first_line(error)}"
            # what all stages read (the target, the sources) is named once, by the first that misses it
            if not any(known.partition(": ")[2] == problem.partition(": ")[2] for known in problems):
                problems.append(problem)
            views.append(StageView(stage.name, "waiting", detail={"problem": _first_line(error)}))
    if not project.layout.ledger.exists() and any(project.layout.segments.glob("*.safetensors")):
        damages.append("extract: the ledger is gone; eyas run rebuilds it from the segments")
        problems.append(damages[-1])
    return views, problems, damages


def _first_line(error: BaseException) -> str:
    if isinstance(error, EyasError):
        why = error.why or error.where
        return error.what + (f" ({why})" if why else "")
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _disk(project: Project, used: int, problems: list[str], *, finished: bool) -> Disk:
    settings, free = project.config.disk, shutil.disk_usage(project.layout.root).free
    found = None
    if not finished:
        with contextlib.suppress(*BROKEN):
            found = forecast(project, used_bytes=used)
    low = free < parse_bytes(settings.warn) and (found is None or found.left_bytes > 0)
    if found is not None and not found.fits:
        problems.append(
            f"disk: {format_bytes(found.left_bytes)} are still to be written, "
            f"{format_bytes(found.room_bytes)} may be"
        )
    elif low:
        problems.append(f"disk: only {format_bytes(free)} free (disk.warn is {settings.warn})")
    return Disk(
        used_bytes=used,
        free_bytes=free,
        budget_bytes=None if settings.budget is None else parse_bytes(settings.budget),
        left_bytes=found.left_bytes if found else None,
        room_bytes=found.room_bytes if found else None,
        fits=found.fits if found else None,
        low=low,
    )


def _waves(project: Project, views: list[StageView], store_bytes: int) -> Waves | None:
    """What extract says of waves; None while the store has no bound."""
    bound = project.config.store.bound_bytes
    detail = next((view.detail for view in views if view.name == "extract"), {})
    if bound is None:
        return None

    def count(key: str) -> int | None:
        value = detail.get(key)
        return value if isinstance(value, int) else None

    return Waves(
        max_bytes=bound,
        store_bytes=store_bytes,
        stored=count("stored") or 0,
        released=count("released") or 0,
        waves_over=count("waves_over"),
        waves=count("waves"),
        captures=count("captures"),
    )


def _from_ledger(project: Project, limit: int = 20) -> tuple[tuple[Failure, ...], tuple[str, ...]]:
    with contextlib.suppress(*BROKEN), Ledger.open_read_only(project.layout.ledger) as ledger:
        failed = tuple(Failure(*row) for row in ledger.failed_samples()[:limit])
        todos = [todo for phase in read_phases(ledger) if phase.is_open for todo in phase.todos]
        return failed, tuple(todo.content for todo in todos if todo.status in OPEN_STATUSES)
    return (), ()


def _servers(project: Project, problems: list[str]) -> tuple[ServerStatus, ...]:
    try:
        return server_status(project)
    except BROKEN as error:
        problems.append(f"servers: {_first_line(error)}")
        return ()


def _moved(project: Project) -> list[SetAside]:
    """Whatever lies in ``set-aside/``, newest first."""
    found = []
    folder = project.layout.set_aside
    for note in folder.glob("*.reason.json") if folder.is_dir() else ():
        with contextlib.suppress(*BROKEN):
            text = dict(read_json(note))
            name = note.name.removesuffix(".reason.json")
            found.append(SetAside(name, str(text.get("reason", "")), str(text.get("at", ""))))
    return sorted(found, key=lambda moved: (moved.at, moved.name), reverse=True)


def _then(views: list[StageView], now: Running | None) -> tuple[str, ...]:
    """Stages that are left after the one at work, or after the first that is left."""
    names = [view.name for view in views]
    left = [view.name for view in views if not view.finished]
    if now is not None and now.stage in names:
        return tuple(name for name in left if names.index(name) > names.index(now.stage))
    return tuple(left)


def _next_command(
    views: list[StageView], holder: Holder | None, set_aside: int, suffix: str, damaged: bool
) -> str | None:
    if holder is not None:
        return f"eyas logs --follow{suffix}"
    stale = [
        view for view in views if view.state == "stale" and view.name in ("regenerate", "extract", "train")
    ]
    if stale:
        return f"eyas run --redo {stale[0].name}{suffix}"
    if damaged or any(not view.finished for view in views):
        return f"eyas run{suffix}"
    return f"eyas extract --retry-failed{suffix}" if set_aside else None
