"""One stage as a line: its view, and what it holds in samples, tokens and bytes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from eyas.base.files import read_json
from eyas.base.seal import is_sealed, read_seal
from eyas.stages.project import Project
from eyas.stages.protocol import StageState, StageView
from eyas.stages.records import checkpoint_folders

_FOLDERS = {
    "prepare": ("data/prompts",),
    "regenerate": ("data/answers", "data/samples"),
    "extract": ("store",),
    "train": ("drafter",),
    "evaluate": ("reports/evaluation.json",),
    "export": ("exports",),
}


@dataclass(frozen=True)
class StageStatus:
    """Where a stage stands and what it holds.

    ``state`` is as in `eyas.stages.protocol.StageView`; ``done`` and ``total`` count ``unit``. ``samples``
    and ``tokens`` are None where they are not known or mean nothing: prepared and regenerated samples,
    captured ones, tokens trained on (a sample counts once a pass), tokens decoded. ``bytes`` lie on disk.
    """

    name: str
    state: StageState
    done: int
    total: int | None
    unit: str
    samples: int | None
    tokens: int | None
    bytes: int
    detail: dict[str, Any]
    differences: tuple[str, ...]


def stage_status(project: Project, view: StageView, sizes: dict[str, int]) -> StageStatus:
    """The line of one stage.

    Args:
        sizes: bytes by folder, as `eyas.report.sizes.folder_sizes` gives them.
    """
    samples: object = None
    tokens: object = None
    with contextlib.suppress(Exception):  # a broken file is named by the stage's damages
        samples, tokens = _content(project, view)
    folders = _FOLDERS.get(view.name, ())
    if view.name == "prepare" and not project.config.regenerate.enabled:
        folders = ("data/samples",)
    return StageStatus(
        name=view.name,
        state=view.state,
        done=view.done,
        total=view.total,
        unit=view.unit,
        samples=samples if isinstance(samples, int) else None,
        tokens=tokens if isinstance(tokens, int) else None,
        bytes=0 if view.state == "skipped" else sum(sizes.get(folder, 0) for folder in folders),
        detail=dict(view.detail),
        differences=view.differences,
    )


def _content(project: Project, view: StageView) -> tuple[object, object]:
    """Samples and tokens."""
    layout = project.layout
    if view.state == "skipped":
        return None, None
    if view.name == "prepare":
        if project.config.regenerate.enabled or not is_sealed(layout.samples):
            return None, None
        stats = read_json(layout.samples / "stats.json")
        return read_seal(layout.samples)["about"].get("num_samples"), stats.get("tokens")
    if view.name == "regenerate" and is_sealed(layout.samples):
        about = read_seal(layout.samples)["about"]
        return about.get("num_samples"), about.get("num_tokens")
    if view.name == "extract":
        return view.done, view.detail.get("tokens")
    if view.name == "train":
        folders = checkpoint_folders(layout.checkpoints)
        return None, read_json(folders[-1] / "state.json").get("tokens") if folders else None
    if view.name == "evaluate" and view.state in ("done", "stale"):
        return None, read_json(layout.evaluation).get("num_tokens")
    return None, None
