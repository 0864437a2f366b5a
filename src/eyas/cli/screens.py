"""The status screen: one look that fits 80 columns."""

from __future__ import annotations

import textwrap
from pathlib import Path

from eyas.base.units import format_bytes, format_count, format_seconds
from eyas.report.now import LastAttempt, Running
from eyas.report.server_status import server_text
from eyas.report.stage_status import StageStatus
from eyas.report.status import Failure, ProjectStatus, Waves
from eyas.report.training_status import TrainingStatus
from eyas.report.words import at_minute, count_text, done_text, ended_text, rate_text, time_left_text

_SHOWN_PROBLEMS, _SHOWN_FAILURES, _SHOWN_FILES, _SHOWN_MESSAGES = 8, 5, 3, 2
_MARKS = {"done": "+", "skipped": "-", "partial": "~", "pending": ".", "waiting": ".", "stale": "!"}
_INDENT = 12


def status_lines(view: ProjectStatus, width: int = 80) -> list[str]:
    """The lines of the screen; what is longer than ``width`` goes on in the next line."""
    lines = [view.project, f"target {Path(view.target).name or view.target}", ""]
    lines += _stage_table(view)
    marks = [f"! {problem}" for problem in view.problems[:_SHOWN_PROBLEMS]]
    if len(view.problems) > _SHOWN_PROBLEMS:
        marks.append(f"! and {len(view.problems) - _SHOWN_PROBLEMS} more: eyas status --json")
    for stage in view.stages:
        marks += [f"! {stage.name} was made by another recipe: {d}" for d in stage.differences]
    lines += ["", *marks, ""] if marks else [""]
    if view.running is not None:
        lines += _running_lines(view.running)
    lines += _attempt_lines(view.last_attempt, view.num_attempts)
    if view.last_attempt is not None and view.last_attempt.outcome != "done":
        said = [f"{message.stage}: {message.text}" for message in view.messages[-_SHOWN_MESSAGES:]]
        lines += _block("said", said)
    if view.training is not None:
        lines += _training_lines(view.training)
    lines += _block("servers", [server_text(server) for server in view.servers])
    lines += _set_aside_lines(view)
    lines += _block("todo", [*view.open_todos[:3]])
    lines += _disk_lines(view)
    if view.waves is not None:
        lines += _wave_lines(view.waves)
    if view.running is not None and view.then:
        lines += _block("then", [", ".join(view.then)])
    return [part for line in lines for part in _wrapped(line, width)]


def _stage_table(view: ProjectStatus) -> list[str]:
    now = view.running.stage if view.running else ""
    rows = [_stage_cells(stage, stage.name == now) for stage in view.stages]
    heads = ["  stage", "state", "done", "samples", "tokens", "disk"]
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = []
    for row in [heads, *rows]:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join([*left, *right]).rstrip())
    return lines


def _stage_cells(stage: StageStatus, is_running: bool) -> list[str]:
    if is_running:
        mark, state = ">", "running"
    else:
        mark, state = _MARKS[stage.state], stage.state
    return [
        f"{mark} {stage.name}",
        state,
        count_text(stage),
        "" if stage.samples is None else format_count(stage.samples),
        "" if stage.tokens is None else format_count(stage.tokens),
        format_bytes(stage.bytes) if stage.bytes else "",
    ]


def _running_lines(running: Running) -> list[str]:
    lines = [
        f"eyas {running.verb}, process {running.pid} on {running.host}, since {at_minute(running.since)} UTC"
    ]
    if running.stage:
        share = f" ({100 * running.done / running.total:.0f}%)" if running.total else ""
        lines.append(f"{running.stage}: {done_text(running)}{share}")
        lines.append(", ".join([rate_text(running), *([left] if (left := time_left_text(running)) else [])]))
        lines += [f"beside it {beside.stage}: {done_text(beside)}" for beside in running.beside]
    else:
        lines.append("starting")
    if running.silent_seconds is not None:
        lines.append(f"last event {format_seconds(running.silent_seconds)} ago")
    return _block("running", lines)


def _attempt_lines(last: LastAttempt | None, count: int) -> list[str]:
    if last is None:
        return _block("attempts", ["none yet"])
    if last.outcome == "running":
        return _block("attempts", [f"{count}, {last.name} runs"])
    ago = "" if last.last_event_seconds is None else f", {format_seconds(last.last_event_seconds)} ago"
    return _block("attempts", [f"{last.name} {ended_text(last.outcome, last.what)}{ago}"])


def _training_lines(training: TrainingStatus) -> list[str]:
    lines = []
    if training.step is not None and training.loss is not None:
        lines.append(f"step {format_count(training.step)}, loss {training.loss:.3f} (all draft steps)")
    if training.checkpoint is not None:
        age = training.checkpoint_seconds
        lines.append(f"{training.checkpoint}{'' if age is None else f', {format_seconds(age)} old'}")
    if training.validation_step is not None:
        numbers = []
        if training.validation_acceptance_length is not None:
            numbers.append(f"acceptance length {training.validation_acceptance_length:.2f}")
        if training.validation_top1 is not None:
            numbers.append(f"top-1 {training.validation_top1:.1%}")
        if training.validation_loss is not None:
            numbers.append(f"loss {training.validation_loss:.3f} (draft step 0)")
        lines.append(f"validation at step {format_count(training.validation_step)}: {', '.join(numbers)}")
    return _block("drafter", lines)


def _set_aside_lines(view: ProjectStatus) -> list[str]:
    lines = []
    if view.set_aside_samples:
        lines.append(f"{format_count(view.set_aside_samples)} samples after their retries")
    reasons: dict[str, list[Failure]] = {}
    for failed in view.failures:
        reasons.setdefault(failed.reason, []).append(failed)
    left = _SHOWN_FAILURES
    for reason, failures in reasons.items():
        if left > 0:
            lines.append(reason)
        for failed in failures[:left]:
            lines.append(f"  {failed.id} {failed.state}, {failed.failures} tries")
        left -= min(left, len(failures))
    if len(view.failures) > _SHOWN_FAILURES:
        lines.append("more of them: eyas status --json")
    if view.set_aside_files:
        lines.append(f"in set-aside/: {view.set_aside_files}")
    lines += [f"  {moved.name}: {moved.reason}" for moved in view.set_aside[:_SHOWN_FILES]]
    return _block("set aside", lines)


def _disk_lines(view: ProjectStatus) -> list[str]:
    disk = view.disk
    budget = "" if disk.budget_bytes is None else f" of {format_bytes(disk.budget_bytes)}"
    text = f"{format_bytes(disk.used_bytes)}{budget} used, {format_bytes(disk.free_bytes)} free"
    if disk.left_bytes is not None and disk.left_bytes > 0:
        text += f", {format_bytes(disk.left_bytes)} to come{'' if disk.fits else ': does not fit'}"
    return _block("disk", [text])


def _wave_lines(waves: Waves) -> list[str]:
    """``3 of 7 waves are over: 5 samples on disk, 9 released`` and the store against its bound."""
    over = (
        ""
        if waves.waves is None
        else f"{format_count(waves.waves_over or 0)} of {format_count(waves.waves)} waves are over: "
    )
    return _block(
        "waves",
        [
            f"{over}{format_count(waves.stored)} samples on disk, {format_count(waves.released)} released",
            f"store {format_bytes(waves.store_bytes)}, store.max_bytes {format_bytes(waves.max_bytes)}",
        ],
    )


def _block(label: str, lines: list[str]) -> list[str]:
    return [f"{label if i == 0 else '':<{_INDENT}}{line}" for i, line in enumerate(lines)]


def _wrapped(line: str, width: int) -> list[str]:
    """A line in as many as it needs; those that follow are indented as its text is."""
    if len(line) <= width:
        return [line]
    text = line[_INDENT:]
    indent = _INDENT + len(text) - len(text.lstrip()) if line[:_INDENT].endswith("  ") else 2
    return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_on_hyphens=False)
