"""What capturing is to the stages, whoever does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from eyas.config.target_facts import TargetFacts


@dataclass(frozen=True)
class CapturedStates:
    """States of one sequence of T tokens, on the CPU and contiguous.

    Attributes:
        aux: [T, A, H], the residual stream after each of the A aux layers.
        last: [T, H], what the head takes (after the final norm).
    """

    aux: torch.Tensor
    last: torch.Tensor


class CaptureTarget(Protocol):
    """Gives states for token ids: a model in this process, or servers.

    It is as small as continuity needs; how many sequences go at a time is each kind's own business.
    """

    @property
    def facts(self) -> TargetFacts:
        """Sizes of the model."""

    @property
    def any_layer(self) -> bool:
        """Whether every layer can be asked for; servers give those that they were started with."""

    def capture(
        self,
        batch: Sequence[Sequence[int]],
        aux_layers: Sequence[int],
        *,
        store_dtype: torch.dtype | None = None,
    ) -> list[CapturedStates]:
        """States of every token of a batch of sequences, in their order.

        Args:
            batch: token ids of each sequence; none is empty.
            aux_layers: layer ids in the "after k decoder layers" sense.
            store_dtype: dtype of the result; the target's own if None.

        Raises:
            TargetError: a token or layer cannot be had.
            ServerUnreachable: no server answers.
        """
        ...
