"""The trained drafter, as evaluate and export load it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.base.errors import NotReady
from eyas.drafter.checkpoint import Checkpoint, read_checkpoint
from eyas.drafter.model import EagleDrafter
from eyas.drafter.shape import DrafterShape
from eyas.drafter.vocabulary import DraftVocabulary, load_vocabulary
from eyas.stages.project import Project
from eyas.stages.records import final_checkpoint


@dataclass(frozen=True)
class Trained:
    """A finished drafter: where it lies, its content, and its vocabulary."""

    path: Path
    checkpoint: Checkpoint
    vocabulary: DraftVocabulary

    @property
    def shape(self) -> DrafterShape:
        return DrafterShape.from_dict(self.checkpoint.state.shape)

    def drafter(self, embedding: torch.Tensor, dtype: torch.dtype) -> EagleDrafter:
        """The drafter with its weights in ``dtype`` on the embedding's device."""
        model = EagleDrafter(self.shape, embedding)
        model.load_state_dict(self.checkpoint.model)
        return model.to(device=embedding.device, dtype=dtype).eval()


def load_trained(project: Project) -> Trained:
    """Read the final checkpoint and the vocabulary, every byte of them checked.

    Raises:
        NotReady: training has not ended.
        SealBroken: a file is damaged.
    """
    path = final_checkpoint(project)
    if path is None:
        raise NotReady("training has not ended", where=project.layout.checkpoints, hint="eyas run")
    return Trained(path, read_checkpoint(path), load_vocabulary(project.layout.vocabulary))
