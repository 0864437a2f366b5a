"""The target in this process, as regenerate, extract and evaluate load it."""

from __future__ import annotations

import transformers

from eyas.base.progress import Progress
from eyas.stages.project import Project
from eyas.stages.threads import set_threads
from eyas.targets.dtype import resolve_device, resolve_dtype
from eyas.targets.local.model import LocalTarget


def target_arithmetic(project: Project, recorded: str | None) -> tuple[str, str]:
    """Device and dtype of the target.

    Args:
        recorded: the dtype that earlier output was made with; ``auto`` keeps to it, so that a run that
            moves to another machine stays one run.

    Raises:
        ConfigError: the device or dtype is unknown or not here.
    """
    device, _ = resolve_device(project.config.target.device)
    wanted = project.config.target.dtype
    if wanted == "auto" and recorded is not None:
        return device, recorded
    return device, resolve_dtype(wanted, device)[0]


def load_target(project: Project, device: str, dtype: str, progress: Progress) -> LocalTarget:
    """Load the target. Raises TargetError."""
    set_threads(project)
    transformers.utils.logging.disable_progress_bar()  # eyas shows its own
    progress.say(f"loading {project.resolved.model.name} in {dtype} on {device}")
    return LocalTarget.load(
        project.resolved.model, device, dtype, trust_remote_code=project.config.target.trust_remote_code
    )
