"""What the model card of an export tells, gathered from the project."""

from __future__ import annotations

from pathlib import Path

from eyas import __version__
from eyas.base.seal import read_seal
from eyas.export.card import CardContent, Measurement
from eyas.export.layouts import Layout
from eyas.stages.project import Project
from eyas.stages.trained import Trained


def card_content(
    project: Project,
    trained: Trained,
    evaluation: dict[str, object],
    folder: Path,
    dtype: str,
    layout: Layout,
) -> CardContent:
    """Everything for the card of the export that is being made in ``folder``."""
    config, state = project.config, trained.checkpoint.state
    samples = read_seal(project.layout.samples)["about"]
    measurement = None
    if evaluation:
        measurement = Measurement.from_report(
            evaluation, config.evaluate.max_new_tokens, str(evaluation.get("dtype", ""))
        )
    answers = (
        f"the target's own, temperature {config.regenerate.temperature:g}"
        if config.regenerate.enabled
        else "as given"
    )
    return CardContent(
        name=config.export.name,
        target=project.resolved.facts,
        target_name=project.resolved.model.name,
        target_path=project.resolved.model.name,
        shape=trained.shape.as_dict(),
        aux_layers=project.resolved.aux_layers,
        dtype=dtype,
        parameters=sum(tensor.numel() for tensor in trained.checkpoint.model.values()),
        data={
            "samples": samples.get("num_samples", 0),
            "tokens": samples.get("num_tokens", 0),
            "supervised tokens": samples.get("num_supervised", 0),
            "answers": answers,
        },
        recipe={
            "steps": state.step,
            "training tokens": state.tokens,
            "epochs": config.train.epochs,
            "draft steps": config.train.steps,
            "loss": config.train.loss,
            "learning rate": config.train.lr,
            "start": config.train.warm_start,
            "draft vocabulary": trained.vocabulary.size,
        },
        measurement=measurement,
        files={path.name: path.stat().st_size for path in sorted(folder.iterdir())},
        eyas_version=__version__,
        layout=layout,
    )
