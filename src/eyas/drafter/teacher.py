"""The target's own distributions, from its stored last states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.base.errors import ConfigError
from eyas.drafter.few_shapes import linear
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.drafter.wide import wide_dtype

CHUNK_ELEMENTS = 1 << 22
"""Logits of the whole target vocabulary held at a time."""


@dataclass(frozen=True)
class FullFacts:
    """Rows over the whole target vocabulary: ``log sum exp`` of the logits, and the most likely id."""

    log_normaliser: Tensor
    top_tokens: npt.NDArray[np.int64]


class Teacher:
    """The target's head, whole and cut down to the draft vocabulary.

    Args:
        head: ``[V, T]`` of the target.

    Raises:
        ConfigError: head and vocabulary do not belong together.
    """

    def __init__(
        self, head: Tensor, vocabulary: DraftVocabulary, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        if len(head) < vocabulary.target_vocab_size:
            raise ConfigError(
                "the target's head is smaller than the vocabulary that drafts were chosen from",
                where=f"{len(head)} rows, vocabulary {vocabulary.target_vocab_size}",
            )
        self.vocabulary = vocabulary
        self.head = head.detach().to(device=device, dtype=dtype)
        self.draft_head = self.head[torch.from_numpy(vocabulary.target_ids).to(device)].contiguous()

    @torch.no_grad()
    def full_facts(self, last: Tensor) -> FullFacts:
        """Normaliser and top token of last states ``[n, T]``, in chunks of rows.

        The result for a sample does not depend on what else is in its batch, provided that it is asked
        for alone.
        """
        last = last.to(device=self.head.device, dtype=self.head.dtype)
        size = max(1, CHUNK_ELEMENTS // len(self.head))
        sums, tops = [], []
        for start in range(0, len(last), size):
            logits = linear(last[start : start + size], self.head)
            logits = logits.to(wide_dtype(logits.dtype))
            sums.append(torch.logsumexp(logits, dim=-1))
            tops.append(logits.argmax(dim=-1))
        if not sums:
            return FullFacts(self.head.new_zeros(0, dtype=torch.float32), np.zeros(0, dtype=np.int64))
        return FullFacts(torch.cat(sums), torch.cat(tops).cpu().numpy())
