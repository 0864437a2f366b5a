"""Damaged outputs set aside by name, so that the run makes exactly those again.

Every output is derived: from the sources, or from outputs of earlier stages. So damage costs work, never
a decision of a person; what was damaged is kept in ``set-aside/`` with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eyas.base.errors import DamageFound
from eyas.base.files import set_aside
from eyas.base.layout import Layout
from eyas.base.progress import Progress
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, Stage
from eyas.store.imports import imports_path
from eyas.store.ledger import Ledger
from eyas.store.ledger_file import ledger_damaged
from eyas.store.repair import open_or_rebuild, set_ledger_aside

MAX_MENDS = 8
"""How often one run mends what it meets; a disk that damages more than that has to be looked at."""


def set_damages_aside(stage: Stage, project: Project, ledger: Ledger, *, deep: bool = False) -> list[str]:
    """Set aside what is damaged among a stage's outputs; returns a line per thing.

    Segments are mended in the store and the ledger, whose samples become pending again.

    Args:
        deep: hash everything instead of comparing names and sizes.

    Raises:
        DamageFound: the ledger itself is damaged, which cannot be mended while it is open.
    """
    layout = project.layout
    damages = stage.damages(project, deep=deep)
    for damage in damages:
        if damage.path == layout.ledger:
            raise ledger_damaged(layout.ledger, damage.detail)
    records = [damage for damage in damages if damage.path == imports_path(layout)]
    damages = [damage for damage in damages if damage not in records]
    lines = [_set_aside(layout, damage) for damage in records]
    if any(layout.store in damage.path.parents for damage in damages):
        return lines + (scrub_store(layout, ledger) if deep else _mend_store(layout, ledger))
    return lines + [_set_aside(layout, damage) for damage in damages]


def scrub_store(layout: Layout, ledger: Ledger, progress: Progress | None = None) -> list[str]:
    """Hash the whole store and mend it; returns a line per thing done, the sum of it first."""
    from eyas.store import scrub  # numpy is loaded only when it is needed

    faults = scrub.deep(layout, ledger, progress=progress)
    num_damaged = sum(fault.is_damage for fault in faults)
    lines = [f"{len(ledger.segments())} segments hashed, {num_damaged} faults"]
    return lines + scrub.repair(layout, ledger, faults, progress)


def mend(project: Project, stages: Sequence[Stage], error: DamageFound, progress: Progress) -> bool:
    """Set aside what ended an attempt; False when that is not for these stages to make again."""
    layout = project.layout
    if error.where is None:
        return False
    path = Path(error.where)
    if path == layout.ledger:
        _ledger_aside(layout, error, progress)
        return True
    owners = [stage for stage in stages if _owns(stage, project, path)]
    lines: list[str] = []
    for stage in owners:
        ledger, _ = open_or_rebuild(layout)
        try:
            with ledger:
                lines += set_damages_aside(stage, project, ledger, deep=True)
        except DamageFound as damage:
            _ledger_aside(layout, damage, progress)
            return True
    for line in lines:
        progress.say(line)
    return bool(lines)


def _ledger_aside(layout: Layout, error: DamageFound, progress: Progress) -> None:
    set_ledger_aside(layout, error.why)
    progress.say(f"the ledger is damaged ({error.why}); it is set aside and rebuilt")


def _owns(stage: Stage, project: Project, path: Path) -> bool:
    return any(path == written or written in path.parents for written in stage.writes(project))


def _set_aside(layout: Layout, damage: Damage) -> str:
    if not damage.path.exists():
        return f"{damage.path.name}: {damage.detail}"
    place = set_aside(damage.path, layout.set_aside, damage.detail)
    return f"{damage.path.name} is damaged ({damage.detail}): set aside as {place.name}, to be made again"


def _mend_store(layout: Layout, ledger: Ledger) -> list[str]:
    from eyas.store import scrub

    return scrub.repair(layout, ledger, scrub.quick(layout, ledger))
