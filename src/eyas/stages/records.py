"""What one stage leaves in the folder for another to find."""

from __future__ import annotations

import contextlib
from pathlib import Path

from eyas.base.errors import DamageFound
from eyas.base.files import read_json
from eyas.base.seal import is_sealed, read_seal, seal_faults
from eyas.stages.project import Project
from eyas.stages.protocol import Damage
from eyas.store.recipe import read_store_recipe


def recorded_capture_recipe(project: Project) -> dict[str, object] | None:
    """The recipe of the store on disk; None before the first capture, and when it is damaged.

    Raises:
        FormatTooNew: a newer eyas wrote it.
    """
    with contextlib.suppress(OSError, DamageFound):
        return read_store_recipe(project.layout.store_recipe).as_dict()
    return None


def sealed_damages(folder: Path, *, deep: bool) -> list[Damage]:
    """What is wrong with a sealed folder as one damage; none when it is whole or not there."""
    if not folder.exists():
        return []
    faults = seal_faults(folder, deep=deep)
    return [Damage(folder, "; ".join(faults[:3]))] if faults else []


def checkpoint_folders(checkpoints: Path) -> list[Path]:
    """Sealed checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(p for p in checkpoints.glob("step-*") if is_sealed(p))


def final_checkpoint(project: Project) -> Path | None:
    """The checkpoint that ends a training run; None while there is none."""
    folders = checkpoint_folders(project.layout.checkpoints)
    if not folders:
        return None
    about = read_seal(folders[-1])["about"]
    over = about.get("step", -1) >= about.get("total_steps", 0) and not about.get("unvalidated")
    return folders[-1] if over else None


def recorded_train_dtype(project: Project) -> str | None:
    """The arithmetic that training began with; None before the first checkpoint."""
    folders = checkpoint_folders(project.layout.checkpoints)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        return str(read_json(folders[-1] / "state.json")["recipe"]["inputs"]["train"]["dtype"])
    return None
