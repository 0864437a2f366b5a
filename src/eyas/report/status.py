"""What stands where: the view model behind ``eyas status``."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from eyas.base.errors import EyasError
from eyas.base.files import tree_bytes
from eyas.pipeline.attempt import attempt_folders, read_events
from eyas.pipeline.lock import Holder, current_holder
from eyas.pipeline.order import STAGES
from eyas.stages.project import Project
from eyas.stages.protocol import StageView
from eyas.store.ledger import Ledger


@dataclass(frozen=True)
class Running:
    """The work that is going on; ``rate`` is in units of the stage per second, of this attempt.

    ``seconds_left`` is None while no rate is known; ``silent_seconds`` since its last event.
    """

    pid: int
    host: str
    verb: str
    since: str
    stage: str
    label: str
    done: int
    total: int
    unit: str
    rate: float
    seconds_left: float | None
    silent_seconds: float | None


@dataclass(frozen=True)
class ProjectStatus:
    """One look at a project.

    ``last_attempt`` tells how the newest attempt ended (``unfinished``: it was killed); ``failures``
    names samples that failed or are set aside, with the last reason, most failures first; sizes are
    bytes; ``next_command`` is None when nothing is left.
    """

    project: str
    stages: tuple[StageView, ...]
    problems: tuple[str, ...]
    running: Running | None
    last_attempt: dict[str, Any] | None
    project_bytes: int
    free_bytes: int
    set_aside_samples: int
    failures: tuple[dict[str, Any], ...]
    next_command: str | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def project_status(project: Project, suffix: str = "") -> ProjectStatus:
    """Look at a project without changing it; works on a dead run and a half-broken folder.

    Args:
        suffix: added to suggested commands (``--project DIR``).
    """
    views, problems = [], []
    for stage in STAGES:
        try:
            problems += [f"{stage.name}: damaged: {d}" for d in stage.damages(project, deep=False)]
            views.append(stage.look(project))
        except (EyasError, OSError) as error:
            problems.append(f"{stage.name}: {str(error).splitlines()[0]}")
            views.append(StageView(stage.name, "waiting", detail={"problem": str(error)}))
    layout = project.layout
    holder = current_holder(layout.state)
    folders = attempt_folders(layout.logs)
    events = read_events(folders[-1]) if folders else []
    set_aside = next((int(str(v.detail.get("set_aside", 0))) for v in views if v.name == "extract"), 0)
    return ProjectStatus(
        project=str(layout.root),
        stages=tuple(views),
        problems=tuple(problems),
        running=_running(holder, events) if holder else None,
        last_attempt=_last_attempt(folders[-1], events, holder is not None) if folders else None,
        project_bytes=tree_bytes(layout.root),
        free_bytes=shutil.disk_usage(layout.root).free,
        set_aside_samples=set_aside,
        failures=_failures(project),
        next_command=_next_command(views, holder, set_aside, suffix, bool(problems)),
    )


def _failures(project: Project, limit: int = 20) -> tuple[dict[str, Any], ...]:
    with contextlib.suppress(EyasError, OSError), Ledger.open_read_only(project.layout.ledger) as ledger:
        return tuple(failed._asdict() for failed in ledger.failed_samples()[:limit])
    return ()


def _running(holder: Holder, events: list[dict[str, Any]]) -> Running:
    beats = [event for event in events if event.get("event") == "progress"]
    beat = beats[-1] if beats else {}
    rate, done, total = float(beat.get("rate", 0)), int(beat.get("done", 0)), int(beat.get("total", 0))
    return Running(
        pid=holder.pid,
        host=holder.host,
        verb=holder.verb,
        since=holder.since,
        stage=str(beat.get("stage", "")),
        label=str(beat.get("label", "")),
        done=done,
        total=total,
        unit=str(beat.get("unit", "")),
        rate=rate,
        seconds_left=(total - done) / rate if rate > 0 else None,
        silent_seconds=_age(str(events[-1].get("at"))) if events else None,
    )


def _last_attempt(folder: Path, events: list[dict[str, Any]], running: bool) -> dict[str, Any]:
    ends = [event for event in events if event.get("event") == "attempt ended"]
    outcome = str(ends[-1].get("outcome")) if ends else ("running" if running else "unfinished")
    return {
        "name": folder.name,
        "started": events[0].get("at") if events else None,
        "last_event": events[-1].get("at") if events else None,
        "outcome": outcome,
        "what": ends[-1].get("what") if ends else None,
    }


def _age(at: str) -> float | None:
    try:
        then = datetime.fromisoformat(at.replace("Z", "+00:00"))
    except ValueError:
        return None
    return max(0.0, (datetime.now(UTC) - then).total_seconds())


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
