"""The whole view of a project: what the report writes and the dashboard shows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from eyas.base.clock import utc_now_text
from eyas.report.contents import DataView, StoreView, data_view, store_view
from eyas.report.curves import TrainingView, training_view
from eyas.report.evaluation import EvaluationView, evaluation_view
from eyas.report.history import AttemptView, Incident, attempts, failure_reasons, incidents
from eyas.report.provenance import Fact, provenance
from eyas.report.status import ProjectStatus, project_status
from eyas.stages.project import Project


@dataclass(frozen=True)
class Overview:
    """All view models of one moment; a part is None while its stage has nothing to show."""

    at: str
    status: ProjectStatus
    data: DataView | None
    store: StoreView | None
    failure_reasons: dict[str, int]
    training: TrainingView | None
    evaluation: EvaluationView | None
    attempts: tuple[AttemptView, ...]
    incidents: tuple[Incident, ...]
    provenance: tuple[Fact, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def overview(project: Project, suffix: str = "") -> Overview:
    """Look at everything without changing it; works on a dead run and a half-broken folder.

    Args:
        suffix: added to suggested commands (``--project DIR``).
    """
    status = project_status(project, suffix)
    tries = attempts(project)
    running = status.last_attempt.name if status.running and status.last_attempt else None
    return Overview(
        at=utc_now_text(),
        status=status,
        data=data_view(project),
        store=store_view(project),
        failure_reasons=failure_reasons(project),
        training=training_view(project),
        evaluation=evaluation_view(project),
        attempts=tries,
        incidents=incidents(project, tries, running),
        provenance=provenance(project),
    )
