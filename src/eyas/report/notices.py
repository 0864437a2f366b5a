"""What deserves a message: the changes between two looks at a project."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas.base.units import counted, format_bytes, format_seconds
from eyas.config.machines import NoticeKind
from eyas.report.status import ProjectStatus
from eyas.report.words import ended_text


@dataclass(frozen=True)
class Notice:
    """One message."""

    kind: NoticeKind
    title: str
    text: str


def notices(before: ProjectStatus, after: ProjectStatus) -> list[Notice]:
    """Messages for what changed: each state is told once, when it begins."""
    found = []
    name = Path(after.project).name

    def add(kind: NoticeKind, what: str, text: str) -> None:
        command = f"\nnext: {after.next_command}" if after.next_command else ""
        found.append(Notice(kind, f"eyas {name}: {what}", text + command))

    if _stalled(after) and not _stalled(before):
        silent = format_seconds(after.running.silent_seconds or 0) if after.running else ""
        add("stalled", "stalled", f"no event for {silent}; the process is alive")
    ended = after.running is None and _another_end(before, after)
    if ended and _is_finished(after):
        add("finished", "finished", _result(after))
    elif ended:
        add("stopped", "stopped", _end(after))
    if (after.disk.low or after.disk.fits is False) and not (before.disk.low or before.disk.fits is False):
        left = (
            "" if after.disk.left_bytes is None else f", {format_bytes(after.disk.left_bytes)} to be written"
        )
        add("disk_low", "disk low", f"{format_bytes(after.disk.free_bytes)} free{left}")
    new = [damage for damage in after.damages if damage not in before.damages]
    if new:
        more = f"\nand {len(new) - 5} more" if len(new) > 5 else ""
        add("damage", "damage found", "\n".join(new[:5]) + more)
    return found


def _another_end(before: ProjectStatus, after: ProjectStatus) -> bool:
    """Whether a run came to its end since: also one that began and ended between two looks."""
    if before.running is not None:
        return True
    new = after.last_attempt
    return new is not None and (before.last_attempt is None or before.last_attempt.name != new.name)


def _stalled(status: ProjectStatus) -> bool:
    return status.running is not None and status.running.stalled


def _is_finished(status: ProjectStatus) -> bool:
    done = all(stage.state in ("done", "skipped") for stage in status.stages)
    return done and status.last_attempt is not None and status.last_attempt.outcome == "done"


def _result(status: ProjectStatus) -> str:
    evaluated = next((stage.detail for stage in status.stages if stage.name == "evaluate"), {})
    length = evaluated.get("acceptance_length")
    text = f"acceptance length {length:.3f}" if isinstance(length, float) else "everything is done"
    if status.set_aside_samples:
        text += f"; {counted(status.set_aside_samples, 'sample')} set aside"
    return text


def _end(status: ProjectStatus) -> str:
    last = status.last_attempt
    if last is None:
        return "the run is gone"
    left = [stage.name for stage in status.stages if stage.state not in ("done", "skipped")]
    return f"{last.name} {ended_text(last.outcome, last.what)}" + (
        f"\nleft: {', '.join(left)}" if left else ""
    )
