"""Writing the engines' layout, reading it back, and sealing it when it computes the same."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas import __version__
from eyas.base.errors import ExportMismatch, GateFailed
from eyas.base.files import read_json, tree_bytes, write_atomic
from eyas.base.seal import is_sealed, sealed_folder
from eyas.drafter.batch import TrainingSample, pack
from eyas.drafter.model import EagleDrafter
from eyas.export.card import model_card
from eyas.export.layout import read_eagle3, write_eagle3
from eyas.export.layouts import Layout
from eyas.export.reference import ReferenceDrafter, require_agreement
from eyas.stages.export.contents import card_content
from eyas.stages.export.stage import ExportStage, export_recipe
from eyas.stages.project import Project
from eyas.stages.protocol import RunContext
from eyas.stages.stored_states import StoredSamples
from eyas.stages.threads import set_threads
from eyas.stages.trained import Trained, load_trained
from eyas.store.reader import StoreReader
from eyas.targets.parts import load_parts

TOLERANCE = 1e-3
"""Largest difference of logits as a share of their spread; both sides compute in float32."""
COMPARED_SAMPLES = 4
COMPARED_TOKENS = 256
EXPORT_DTYPE = torch.bfloat16


def run(project: Project, context: RunContext) -> dict[str, object]:
    """Export the final checkpoint.

    Raises:
        GateFailed: the measured acceptance length is below ``export.min_acceptance_length``.
        ExportMismatch: the folder, read back, does not compute what was trained; nothing is left.
        NotReady: training has not ended.
    """
    set_threads(project)
    trained = load_trained(project)
    evaluation = _evaluation(project)
    _gate(project, evaluation)
    parity = _Parity(project, trained, context)
    recipe = export_recipe(project, trained.path)
    folders, worst = ExportStage().folders(project), 0.0
    for layout, folder in folders.items():
        if is_sealed(folder):
            continue
        about: dict[str, object] = {"recipe": recipe, "layout": layout}
        with sealed_folder(folder, about) as temporary:
            _write(project, trained, temporary, layout)
            difference = parity.compare(temporary)
            content = card_content(
                project, trained, evaluation, temporary, str(EXPORT_DTYPE).removeprefix("torch."), layout
            )
            write_atomic(temporary / "README.md", model_card(content))
            about["largest_difference"] = difference
        worst = max(worst, difference)
    return {
        "folder": str(folders["both"]),
        "layouts": ", ".join(folders),
        "bytes": tree_bytes(folders["both"]),
        "largest_difference": worst,
    }


def _write(project: Project, trained: Trained, folder: Path, layout: Layout) -> None:
    resolved = project.resolved
    write_eagle3(
        folder,
        trained.checkpoint.model,
        trained.shape.as_dict(),
        torch.from_numpy(trained.vocabulary.d2t),
        torch.from_numpy(trained.vocabulary.t2d),
        resolved.aux_layers,
        resolved.facts,
        EXPORT_DTYPE,
        {"made_by": f"eyas {__version__}"},
        layout=layout,
        target_path=str(resolved.model),
        num_drafts=project.config.evaluate.num_drafts,
    )


def _evaluation(project: Project) -> dict[str, object]:
    """The newest measurement; empty when there is none."""
    try:
        return dict(read_json(project.layout.evaluation))
    except (OSError, ValueError, TypeError):
        return {}


def _gate(project: Project, evaluation: dict[str, object]) -> None:
    wanted = project.config.export.min_acceptance_length
    measured = float(str(evaluation.get("acceptance_length", 0.0)))
    if measured < wanted:
        raise GateFailed(
            f"the acceptance length is {measured:.3f}, and export.min_acceptance_length asks for {wanted}",
            where=project.layout.evaluation,
            why=None if evaluation else "nothing was measured yet",
            hint="train longer or on more data; or lower export.min_acceptance_length",
        )


class _Parity:
    """The trainer's logits on a few stored samples, to hold each folder against.

    The trainer's model holds the weights as exported (rounded), so that the two differ only if names,
    shapes, layout or arithmetic do.

    Raises:
        ExportMismatch: no stored sample is left.
    """

    def __init__(self, project: Project, trained: Trained, context: RunContext) -> None:
        self._embedding = load_parts(project.resolved.model, "cpu", torch.float32).embedding
        self._drafter = trained.drafter(self._embedding, torch.float32)
        with torch.no_grad():  # weights only: the embedding is the target's own and stays as it is
            for parameter in self._drafter.parameters():
                parameter.copy_(parameter.to(EXPORT_DTYPE))
        self._steps = project.config.train.steps
        self._samples = _samples(project, context)
        if not self._samples:
            raise ExportMismatch(
                "no stored sample is left to compare the export with", where=project.layout.store
            )

    def compare(self, folder: Path) -> float:
        """Largest difference of logits of a folder, read back. Raises ExportMismatch."""
        reference = ReferenceDrafter(read_eagle3(folder), self._embedding, torch.float32)
        worst = 0.0
        for sample in self._samples:
            ours, theirs = _both(self._drafter, reference, sample, self._steps)
            worst = max(worst, require_agreement(theirs, ours, TOLERANCE))
        return worst


def _both(
    drafter: EagleDrafter, reference: ReferenceDrafter, sample: TrainingSample, steps: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of the supervised rows of each step: the trainer's, and the folder's."""
    batch = pack([sample], device=torch.device("cpu"), dtype=torch.float32, steps=steps)
    assert batch is not None
    with torch.no_grad():
        ours = [drafter.logits(states) for states in drafter.unroll(batch, steps)]
    everything = reference.unroll(sample.tokens.tolist(), sample.aux.float(), steps)
    theirs = [
        logits[torch.as_tensor(batch.query_rows[kept])]
        for logits, kept in zip(everything, batch.kept, strict=True)
    ]
    return ours, theirs


def _samples(project: Project, context: RunContext) -> list[TrainingSample]:
    """A few stored samples, cut to a length that a plain forward pass takes in its stride."""
    reader = StoreReader(project.layout.segments, context.ledger)
    stored = StoredSamples(reader, context.ledger.entries())
    found: list[TrainingSample] = []
    for name in sorted(stored.lengths(), key=lambda id_: (stored.lengths()[id_], id_)):
        cut = _cut(stored.load([name])[0])
        if any(end - max(start, 1) >= 2 for start, end in cut.spans):
            found.append(cut)
        if len(found) == COMPARED_SAMPLES:
            break
    return found


def _cut(sample: TrainingSample) -> TrainingSample:
    length = min(len(sample.tokens), COMPARED_TOKENS)
    rows = sample.last_rows[sample.last_rows < length - 1]
    return TrainingSample(
        id=sample.id,
        tokens=sample.tokens[:length],
        spans=tuple((start, min(end, length)) for start, end in sample.spans if start < length),
        aux=sample.aux[:length],
        last=sample.last[: len(rows)],
        last_rows=rows,
    )
