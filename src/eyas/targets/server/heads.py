"""The end of the target, as far as the client needs it: final norm and head, to judge what servers send."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from eyas.targets.compare import tie_tolerance
from eyas.targets.norm import final_norm
from eyas.targets.parts import TargetParts, load_parts
from eyas.targets.server.faults import ServerFault

LARGE_HEAD = 300_000_000
"""A larger head judges one dump in `LARGE_HEAD_SHARE` only: its product takes a tenth of a second."""
LARGE_HEAD_SHARE = 16


@dataclass
class Heads:
    """Norm and head of the target's own weights.

    Whether they fit what a server sends says whether it serves these weights: the token that it chose has
    to be the best one by our head of its last state, or a numeric tie of it.
    """

    parts: TargetParts

    def __post_init__(self) -> None:
        self._weight = self.parts.norm_weight.float()
        self._count = 0
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

    def check_token(self, state: torch.Tensor, token: int, dtype: torch.dtype, *, always: bool) -> None:
        """Raise ``other_token`` unless a server's greedy choice agrees with its last state.

        Args:
            state: [H] after the final norm.
            token: that the server chose.
            dtype: the server's arithmetic, which bounds a tie.
            always: also where a large head makes most dumps go without.
        """
        head = self.parts.head
        with self._lock:
            self._count += 1
            if not always and head.numel() > LARGE_HEAD and self._count % LARGE_HEAD_SHARE:
                return
        if not 0 <= token < head.shape[0]:
            raise ServerFault("other_token", f"token {token} is not in the vocabulary")
        logits = head @ state.float()
        cap = self.parts.final_softcap
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        gap = float(logits.max() - logits[token])
        allowed = tie_tolerance(dtype, float(logits.abs().max()))
        if not gap <= allowed:
            best = int(logits.argmax())
            raise ServerFault(
                "other_token", f"its last state says token {best}, it chose {token} ({gap:.3g} logits lower)"
            )
