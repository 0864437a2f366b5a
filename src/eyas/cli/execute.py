"""Running stages from the command line: plan, progress, summary, exit code."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

from eyas.base.errors import EyasError
from eyas.base.units import counted, format_numbers, format_seconds
from eyas.cli.common import Common
from eyas.cli.notifying import watch_from_outside
from eyas.cli.output import next_command, note, print_json, table
from eyas.cli.progress import listener
from eyas.pipeline.lock import current_holder
from eyas.pipeline.order import STAGES
from eyas.pipeline.run import PlannedStep, RunResult, plan, run
from eyas.report.forecast import Forecast, forecast, forecast_lines
from eyas.report.status import project_status
from eyas.stages.project import Project
from eyas.stages.protocol import Stage, StageView
from eyas.stages.train.outer import OuterPlace

SOME_SET_ASIDE = 3
_DETACH_PATIENCE_SECONDS = 15.0
_WORKER = "eyas.stages.train.worker"
"""Loaded by name: it needs torch, which no verb loads before it works."""


def execute(
    verb: str,
    stages: Sequence[Stage],
    common: Common,
    redo: Sequence[str],
    retry_failed: bool,
    dry_run: bool,
    detach: bool,
) -> int:
    """Do what a changing verb does; returns the exit code (0, or 3 when samples are set aside)."""
    project = common.open()
    place = OuterPlace.here()
    if place is not None and not place.first:
        return _follow(project, place, stages, dry_run)
    if dry_run:
        steps = plan(project, stages, redo)
        found = None if all(step.action == "skip" for step in steps) else forecast(project, exact=True)
        _print_plan(steps, found, common)
        return 0
    if detach:
        return _detach(project, verb, common)
    started = time.monotonic()
    watch_from_outside(project, common.words)
    try:
        result = run(
            project,
            verb=verb,
            progress=lambda stage: listener(stage, common.json),
            stages=stages,
            redo=redo,
            retry_failed=retry_failed,
        )
    finally:
        if place is not None:
            import_module(_WORKER).release(place)
    _print_result(result, common, time.monotonic() - started, project)
    return SOME_SET_ASIDE if result.num_set_aside else 0


def _follow(project: Project, place: OuterPlace, stages: Sequence[Stage], dry_run: bool) -> int:
    """What a process of an outer launcher does that is not its first: train beside it, and nothing else."""
    if dry_run or all(stage.name != "train" for stage in stages):
        return 0
    code: int = import_module(_WORKER).follow(project, place)
    return code


def _print_plan(steps: list[PlannedStep], found: Forecast | None, common: Common) -> None:
    if common.json:
        print_json(
            {
                "forecast": found.as_dict() if found is not None else None,
                "plan": [
                    {
                        "stage": s.stage,
                        "action": s.action,
                        "why": s.why,
                        "done": s.view.done,
                        "total": s.view.total,
                        "unit": s.view.unit,
                    }
                    for s in steps
                ],
            }
        )
        return
    table(None, ["stage", "would", "why"], [[s.stage, s.action, s.why] for s in steps])
    if found is not None:
        print("forecast\n  " + "\n  ".join(forecast_lines(found)))
    refused = [s for s in steps if s.action == "refuse"]
    if refused and refused[0].view.state == "stale":
        next_command(f"eyas run --redo {refused[0].stage}{common.suffix}")
    elif all(s.action == "skip" for s in steps):
        next_command(None)
    else:
        next_command(f"eyas run{common.suffix}")


def _print_result(result: RunResult, common: Common, seconds: float, project: Project) -> None:
    views = [stage.look(project) for stage in STAGES]
    left = [view.name for view in views if not view.finished]
    if common.json:
        print_json(
            {
                "ran": result.ran,
                "numbers": result.numbers,
                "set_aside": result.num_set_aside,
                "left": left,
                "seconds": round(seconds, 3),
            }
        )
        return
    for name in result.ran:
        note(f"{name}: {format_numbers(result.numbers[name]) or 'done'}", indent=2)
    if not result.ran:
        note("everything was done already")
    note(f"took {format_seconds(seconds)}")
    if result.num_set_aside:
        verb = "is" if result.num_set_aside == 1 else "are"
        names = f"eyas status{common.suffix} names them"
        note(f"{counted(result.num_set_aside, 'sample')} {verb} set aside; {names}")
        next_command(f"eyas extract --retry-failed{common.suffix}")
    else:
        if common.set and _stale_before(views, result.ran):
            # earlier output keeps to eyas.toml: what this one command was told is no reason to redo it
            common = replace(common, set=())
            project = common.open()
        next_command(project_status(project, common.suffix).next_command)


def _stale_before(views: Sequence[StageView], ran: Sequence[str]) -> bool:
    """Whether a stage before those that ran has output of another recipe."""
    first = next((place for place, view in enumerate(views) if view.name in ran), 0)
    return any(view.state == "stale" for view in views[:first])


def _detach(project: Project, verb: str, common: Common) -> int:
    """Start the same command in a session of its own and wait until it holds the lock."""
    holder = current_holder(project.layout.state)
    words = [word for word in sys.argv[1:] if word != "--detach"]
    log = project.layout.logs / "detached.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "eyas", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    deadline = time.monotonic() + _DETACH_PATIENCE_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        holder = current_holder(project.layout.state)
        if holder is not None and holder.pid == child.pid:
            break
        time.sleep(0.05)
    code = child.poll()
    if code not in (None, 0):
        raise EyasError(
            f"eyas {verb} ended at once with exit code {code}",
            where=log,
            why=_last_line(log.read_text(errors="replace")),
            hint=f"eyas {verb}{common.suffix} shows the error here",
        )
    if common.json:
        print_json({"pid": child.pid, "log": str(log)})
    else:
        note(f"running in the background as process {child.pid}; its output goes to {log}")
        next_command(f"eyas logs --follow{common.suffix}")
    return 0


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("error")), lines[-1] if lines else "")
