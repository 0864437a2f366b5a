"""The stages in the order in which one feeds the next."""

from __future__ import annotations

from eyas.stages.evaluate.stage import EvaluateStage
from eyas.stages.export.stage import ExportStage
from eyas.stages.extract.stage import ExtractStage
from eyas.stages.prepare.stage import PrepareStage
from eyas.stages.protocol import Stage
from eyas.stages.regenerate.stage import RegenerateStage
from eyas.stages.train.stage import TrainStage

STAGES: tuple[Stage, ...] = (
    PrepareStage(),
    RegenerateStage(),
    ExtractStage(),
    TrainStage(),
    EvaluateStage(),
    ExportStage(),
)


def stage_named(name: str) -> Stage:
    """The stage of that name. Raises KeyError."""
    return {stage.name: stage for stage in STAGES}[name]
