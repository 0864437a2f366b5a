"""The end of the target, as far as the client needs it: final norm and head, to judge what servers send."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from eyas.targets.compare import engine_tie_gap
from eyas.targets.norm import final_norm
from eyas.targets.parts import TargetParts, load_parts
from eyas.targets.server.faults import ServerFault

WEIGHTS_PER_TOKEN = 30_000
"""Weights of the head that may be read for each captured token: the product with 49,152 rows of 576 takes
18 ms of a core, more than everything else that is done for a dump of 200 tokens."""
SAMPLED_ROWS = 1024
"""Rows of the head that judge every dump: a choice that none of so many tokens beats is among the best few in
a thousand, which a state of another place, layer or request hardly ever says of it."""


@dataclass
class Heads:
    """Norm and head of the target's own weights.

    Whether they fit what a server sends says whether it serves these weights: the token that it chose has
    to be the best one by our head of its last state, or a numeric tie of it.
    """

    parts: TargetParts

    def __post_init__(self) -> None:
        self._weight = self.parts.norm_weight.float()
        self._tokens = math.inf  # captured since the last check
        self._lock = threading.Lock()

    @classmethod
    def load(cls, model: Path) -> Heads:
        """Read them from the target's folder. Raises TargetError."""
        return cls(load_parts(model, dtype=torch.float32))

    def after_norm(self, last: torch.Tensor, *, before_norm: bool, dtype: torch.dtype) -> torch.Tensor:
        """Last states [rows, H] as the store keeps them: what the head takes."""
        if before_norm:
            return final_norm(last, self._weight, self.parts.norm_eps).to(dtype)
        return last.to(dtype)

    def is_due(self, num_tokens: int) -> bool:
        """Whether a dump of so many tokens is to be judged by the whole head; a small head judges each."""
        with self._lock:
            self._tokens += num_tokens
            due = self._tokens * WEIGHTS_PER_TOKEN >= self.parts.head.numel()
            if due:
                self._tokens = 0
            return due

    def check_token(self, state: torch.Tensor, token: int, dtype: torch.dtype, *, whole: bool) -> None:
        """Raise ``other_token`` unless a server's greedy choice agrees with its last state.

        Args:
            state: [H] after the final norm.
            token: that the server chose.
            dtype: the server's arithmetic, which bounds a tie.
            whole: compare with every token; otherwise with `SAMPLED_ROWS` tokens, always the same.
        """
        head, state = self.parts.head, state.float()
        if not 0 <= token < head.shape[0]:
            raise ServerFault("other_token", f"token {token} is not in the vocabulary")
        ids, rows = (None, head) if whole or len(head) <= SAMPLED_ROWS else self._sample
        logits, chosen = self._capped(rows @ state), self._capped(head[token] @ state)
        gap = float(logits.max() - chosen)
        allowed = engine_tie_gap(dtype, max(float(logits.abs().max()), float(chosen.abs())))
        if not gap <= allowed:
            place = int(logits.argmax())
            best = place if ids is None else int(ids[place])
            raise ServerFault(
                "other_token", f"its last state says token {best}, it chose {token} ({gap:.3g} logits lower)"
            )

    @cached_property
    def _sample(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids of some tokens, and their rows of the head, side by side in memory."""
        head = self.parts.head
        ids = torch.randperm(len(head), generator=torch.Generator().manual_seed(0))[:SAMPLED_ROWS]
        return ids, head[ids].contiguous()

    def _capped(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.parts.final_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap
