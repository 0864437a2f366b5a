"""The light half of train."""

from __future__ import annotations

import hashlib
from pathlib import Path

from eyas.base.errors import SealBroken
from eyas.base.files import read_json
from eyas.base.hashing import recipe_differences
from eyas.base.seal import is_sealed
from eyas.stages.digests import sealed_digest
from eyas.stages.project import Project
from eyas.stages.protocol import Damage, StageState, StageView
from eyas.stages.records import checkpoint_folders, recorded_capture_recipe, sealed_damages

# what may change in the middle of a training run without changing its result
_NOT_IN_RECIPE = (
    "checkpoint_minutes", "checkpoint_steps", "keep_checkpoints", "validations", "max_bad_steps",
    "spike_ratio", "processes", "sharding", "trackers",
)  # fmt: skip


def train_recipe(project: Project, dtype: str) -> dict[str, object]:
    """All that determines the trained weights.

    Args:
        dtype: what ``auto`` stands for: resolved when training begins, and kept.

    Raises:
        SealBroken: the samples are not there.
    """
    config, resolved = project.config, project.resolved
    settings = config.train.model_dump(mode="json")
    for key in _NOT_IN_RECIPE:
        settings.pop(key)
    if settings["dtype"] == "auto":
        settings["dtype"] = dtype
    bound = config.store.bound_bytes
    waves = {} if bound is None else {"waves": {"max_bytes": bound, "recapture": config.store.recapture}}
    start = settings.pop("start_from")
    begun = {} if start is None else {"start": start_digest(project.source_path(start)) or "missing"}
    return {
        **begun,
        "samples": sealed_digest(project.layout.samples),
        "store": recorded_capture_recipe(project) or {},
        "drafter": {
            "norms": config.drafter.norms,
            "vocab_limit": resolved.draft_vocab_limit,
            "intermediate_size": resolved.intermediate_size,
            "num_heads": resolved.num_heads,
            "num_kv_heads": resolved.num_kv_heads,
            "head_dim": resolved.head_dim,
        },
        "train": settings,
        **waves,
    }


def start_digest(folder: Path) -> str | None:
    """Identity of a drafter's folder: its configuration, and name and size of its weight files.

    Cheap enough for a look at the project; what is read is checked against the configuration when
    training begins. None: there is no drafter.
    """
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    except OSError:
        return None
    return digest.hexdigest()[:32]


class TrainStage:
    """Trains the drafter on the stored samples and resumes from the newest whole checkpoint."""

    name = "train"
    redone_when_stale = False
    work = "eyas.stages.train.work"

    def reads(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.samples, project.layout.store)

    def writes(self, project: Project) -> tuple[Path, ...]:
        return (project.layout.drafter,)

    def look(self, project: Project) -> StageView:
        unit, layout = "steps", project.layout
        folders = checkpoint_folders(layout.checkpoints)
        if not folders:
            ready = is_sealed(layout.samples) and layout.store_recipe.is_file()
            return StageView(self.name, "pending" if ready else "waiting", unit=unit)
        try:
            state = read_json(folders[-1] / "state.json")
            recorded = dict(state["recipe"]["inputs"])
            wanted = train_recipe(project, str(recorded.get("train", {}).get("dtype")))
        except (OSError, ValueError, KeyError, TypeError, SealBroken) as error:
            return StageView(self.name, "partial", unit=unit, detail={"damaged": str(error)})
        step, total = int(state["step"]), int(state["total_steps"])
        detail: dict[str, object] = {"checkpoint": folders[-1].name, "validation": state.get("validation")}
        differences = tuple(recipe_differences(recorded, wanted))
        if differences:
            return StageView(self.name, "stale", step, total, unit, detail, differences)
        done: StageState = "done" if step >= total and not state.get("unvalidated") else "partial"
        return StageView(self.name, done, step, total, unit, detail)

    def damages(self, project: Project, *, deep: bool) -> list[Damage]:
        layout = project.layout
        folders = sorted(layout.checkpoints.glob("step-*")) if layout.checkpoints.is_dir() else []
        return [
            damage for folder in [layout.vocabulary, *folders] for damage in sealed_damages(folder, deep=deep)
        ]
