"""``eyas status``: one look."""

from __future__ import annotations

from eyas.base.units import format_bytes, format_count, format_seconds
from eyas.cli.common import Common
from eyas.cli.output import next_command, print_json
from eyas.report.status import ProjectStatus, project_status
from eyas.stages.protocol import StageView

_SHOWN_FAILURES = 5
_MARKS = {"done": "+", "skipped": "+", "partial": "~", "pending": ".", "waiting": ".", "stale": "!"}


def status(*, common: Common = Common()) -> int:  # noqa: B008 - frozen
    """Where every stage stands, what runs, what is set aside, and what comes next."""
    view = project_status(common.open(), common.suffix)
    if common.json:
        print_json(view.as_dict())
        return 0
    print("\n".join(render(view)))
    next_command(view.next_command)
    return 0


def render(view: ProjectStatus) -> list[str]:
    """The lines of the screen."""
    lines = [view.project, ""]
    lines += [_stage_line(stage) for stage in view.stages]
    lines += [f"  ! {problem}" for problem in view.problems]
    for stage in view.stages:
        if stage.state == "stale":
            lines += [f"  ! {stage.name} was made by another recipe: {d}" for d in stage.differences]
    lines.append("")
    lines += _attempt_lines(view)
    if view.set_aside_samples:
        lines.append(f"set aside   {format_count(view.set_aside_samples)} samples after their retries")
    for failed in view.failures[:_SHOWN_FAILURES]:
        lines.append(
            f"            {failed['id']} {failed['state']}, {failed['failures']} tries: {failed['reason']}"
        )
    if len(view.failures) > _SHOWN_FAILURES:
        lines.append("            more of them: eyas status --json")
    lines.append(f"disk        {format_bytes(view.project_bytes)} used, {format_bytes(view.free_bytes)} free")
    return lines


def _stage_line(stage: StageView) -> str:
    count = ""
    if stage.total is not None:
        share = (
            f" ({100 * stage.done / stage.total:.0f}%)" if stage.total and stage.state == "partial" else ""
        )
        count = f"{format_count(stage.done)} of {format_count(stage.total)} {stage.unit}{share}"
    extra = ""
    if stage.name == "extract" and stage.detail.get("tokens"):
        extra = f", {format_count(int(str(stage.detail['tokens'])))} tokens"
    if stage.name == "evaluate" and stage.detail.get("acceptance_length"):
        extra = f", acceptance length {float(str(stage.detail['acceptance_length'])):.3f}"
    return f"{_MARKS[stage.state]} {stage.name:<11} {stage.state:<8} {count}{extra}".rstrip()


def _attempt_lines(view: ProjectStatus) -> list[str]:
    running = view.running
    if running is not None:
        left = "" if running.seconds_left is None else f", about {format_seconds(running.seconds_left)} left"
        work = (
            f"{running.stage} {running.label}: {format_count(running.done)} of {format_count(running.total)}"
        )
        silent = running.silent_seconds
        return [
            f"running     eyas {running.verb}, process {running.pid} on {running.host}",
            f"            since {running.since}",
            f"            {work} {running.unit}, {running.rate:.4g}/s{left}"
            if running.stage
            else "            starting",
            *([f"            last event {format_seconds(silent)} ago"] if silent is not None else []),
        ]
    last = view.last_attempt
    if last is None:
        return ["attempts    none yet"]
    why = f": {last['what']}" if last.get("what") else ""
    ended = {"unfinished": "did not end by itself (killed, or the machine went down)", "done": "ended well"}
    outcome = ended.get(last["outcome"], f"ended with {last['outcome']}{why}")
    return [f"attempts    {last['name']} {outcome}; last event {last['last_event']}"]
