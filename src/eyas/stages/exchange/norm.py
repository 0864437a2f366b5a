"""The target's final norm, for layouts that keep last states from before it."""

from __future__ import annotations

import torch

from eyas.stages.project import Project
from eyas.stages.stored_states import to_torch
from eyas.store.tensors import STORAGE_DTYPES, StoredTensor
from eyas.targets.norm import final_norm
from eyas.targets.parts import load_parts


class FinalNorm:
    """Applies and undoes the final norm of a project's target; computes in float32.

    Raises:
        TargetError: the target's weights cannot be read.
    """

    def __init__(self, project: Project) -> None:
        parts = load_parts(project.resolved.model)
        self._weight, self._eps = parts.norm_weight.float(), parts.norm_eps

    def apply(self, states: StoredTensor) -> StoredTensor:
        """``x / rms(x) * weight`` for each row."""
        return self._stored(final_norm(to_torch(states), self._weight, self._eps), states)

    def undo(self, states: StoredTensor) -> StoredTensor:
        """Rows of unit scale that the norm maps to ``states``: their lengths before it are not known."""
        divided = to_torch(states).float() / self._weight
        return self._stored(torch.where(self._weight == 0, 0.0, divided), states)

    def _stored(self, values: torch.Tensor, like: StoredTensor) -> StoredTensor:
        rounded = values.to(to_torch(like).dtype)
        bits = rounded.view(torch.uint16) if like.dtype == "BF16" else rounded
        return StoredTensor(like.dtype, bits.numpy().astype(STORAGE_DTYPES[like.dtype], copy=False))
