"""``eyas recover``: carry the plan out, verified step by step, until the pipeline runs again."""

from __future__ import annotations

from eyas.base.units import counted, format_bytes, format_count
from eyas.cli.common import Common
from eyas.cli.hints import placed
from eyas.cli.main import PROJECT_VERBS
from eyas.cli.output import folded, next_command, note, print_json, table
from eyas.cli.progress import listener
from eyas.recovery.bench import Bench
from eyas.recovery.executor import Recovery, planned
from eyas.recovery.executor import recover as carry_out
from eyas.recovery.findings import DAMAGE_EXIT, Finding
from eyas.recovery.plan import Step, notes
from eyas.recovery.scene import Scene
from eyas.report.status import project_status
from eyas.store.ledger_history import Todo
from eyas.store.todos import as_todo_list


def recover(
    *,
    dry_run: bool = False,
    only: str | None = None,
    yes_stop_services: bool = False,
    common: Common = Common(),  # noqa: B008 - frozen
) -> int:
    """Mend what doctor finds, verify each step, and end with the run going on in the background.

    Nothing is deleted: what is damaged moves to set-aside/. May be killed and called again at any time.
    Services of others are stopped, disabled and masked only with --yes-stop-services or a line in
    recovery.may_stop; otherwise their todo is blocked and says which command to run. Exit code 14 says that
    todos are left.

    Args:
        dry_run: print the plan and change nothing.
        only: carry out this one todo.
        yes_stop_services: stop, disable and mask services that hold the GPUs.
    """
    given, common = common.last_given, common.as_last_run()
    project = common.open()
    scene = Scene(project, progress=listener("recover", common.json))
    if dry_run:
        return _show_plan(scene, common)

    def say(text: str) -> None:
        if not common.json:
            # a command that is cut in two by the fold cannot be copied
            note(placed(text, common.suffix, PROJECT_VERBS), indent=None if "eyas " in text else 4)

    if given is not None:
        say(f"as {given.attempt} was given: {given.words}")
    result = carry_out(Bench(scene, yes_stop_services, say, resume_words=common.set_words), only)
    if common.json:
        print_json(as_dict(result))
    elif result.phase is None:
        note("nothing to recover")
        next_command(project_status(project, common.suffix).next_command)
    else:
        for line in summary(result, scene):
            print(folded(line, 10))
        next_command(_next(result, common.suffix))
    return DAMAGE_EXIT if result.left else 0


def _show_plan(scene: Scene, common: Common) -> int:
    found, steps = planned(scene)
    waiting = notes(found)
    if common.json:
        print_json(
            as_todo_list(as_todo(step) for step in steps)
            | {"notes": [finding.as_dict() for finding in waiting]}
        )
        return 0
    if scene.holder is not None and not steps:
        note(f"eyas {scene.holder.verb} is at work (process {scene.holder.pid}): nothing to recover")
    elif not steps:
        note("nothing to recover")
    if steps:
        numbers = {step.key: number for number, step in enumerate(steps, 1)}
        rows = [[numbers[step.key], step.content, step.key, _after(step, numbers)] for step in steps]
        table(None, ["", "would", "id", "after"], rows)
    for finding in waiting:
        mend = placed(finding.mend, common.suffix, PROJECT_VERBS)
        note(f"for you to decide: {finding.what}\n  -> {mend}")
    blocked = {step.key: reason for step in steps if (reason := step.remedy.blocked(Bench(scene)))}
    for key, reason in blocked.items():
        note(f"needs you: {key}: {placed(reason, common.suffix, PROJECT_VERBS)}")
    stops = any(key.startswith("service:") for key in blocked)
    flag = " --yes-stop-services" if stops else ""
    left = project_status(scene.project, common.suffix).next_command
    next_command(f"eyas recover{flag}{common.suffix}" if steps else left)
    return 0


def _after(step: Step, numbers: dict[str, int]) -> str:
    after = sorted(numbers[key] for key in step.depends_on)
    if after == list(range(1, numbers[step.key])) and len(after) > 2:
        return "all above"
    return ", ".join(str(number) for number in after)


def as_todo(step: Step) -> Todo:
    """A step of a plan that is not carried out yet."""
    evidence = "; ".join(text for finding in step.findings for text in finding.evidence)
    return Todo(step.key, step.content, step.priority, "pending", step.depends_on, evidence, "")


def as_dict(result: Recovery) -> dict[str, object]:
    """The recovery as ``--json`` prints it."""
    return {
        "phase": result.phase,
        "recovered": not result.left,
        **as_todo_list(result.todos),
        "before": result.before.as_dict(),
        "after": result.after.as_dict(),
    }


def summary(result: Recovery, scene: Scene) -> list[str]:
    """Six lines: what was done, the store, the machine, the run, what is left."""
    view = project_status(scene.again().project)
    stages = {stage.name: stage for stage in view.stages}
    extract = stages["extract"]
    completed = [todo for todo in result.todos if todo.status == "completed"]
    total = "?" if extract.total is None else format_count(extract.total)
    hashed = next(line for line in result.after.lines if line.check == "hashed")
    gpus = next(line for line in result.after.lines if line.check == "gpus")
    if view.running is not None:
        run = f"eyas {view.running.verb}, process {view.running.pid}: {view.running.stage or 'starting'}"
    else:
        run = f"nothing runs; {f'next: {view.next_command}' if view.next_command else 'everything is done'}"
    aside = sum(1 for _ in scene.layout.set_aside.glob("*.reason.json"))
    left = "nothing" if not result.left else "; ".join(f"{todo.content}" for todo in result.left[:2])
    more = f" and {len(result.left) - 2} more" if len(result.left) > 2 else ""
    return [
        "",
        f"recovery  {len(completed)} of {len(result.todos)} todos completed; "
        f"{counted(aside, 'thing') if aside else 'nothing'} in set-aside/, nothing deleted",
        f"store     {format_count(extract.done)} of {total} samples; {hashed.says}",
        f"machine   {format_bytes(view.free_bytes)} free; {gpus.says}",
        f"run       {run}",
        f"findings  {_counted(result.before.findings)} before, {_counted(result.after.findings)} now",
        f"left      {left}{more}",
    ]


def _counted(findings: list[Finding]) -> str:
    return str(len(findings)) if findings else "none"


def _next(result: Recovery, suffix: str) -> str | None:
    if result.left:
        service = next((t for t in result.left if "--yes-stop-services" in t.evidence), None)
        return f"eyas recover --yes-stop-services{suffix}" if service else f"eyas todo{suffix}"
    return f"eyas recover --dry-run{suffix}" if result.after.findings else f"eyas status{suffix}"
