"""States of the canary computed here, so that a server's layers are proven and not assumed."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from eyas.targets.capture import CapturedStates
from eyas.targets.compare import TOLERANCE, relative_error
from eyas.targets.local.model import LocalTarget
from eyas.targets.server.faults import ServerFault
from eyas.targets.weight_files import weight_files

AFFORDABLE_BYTES = 4 << 30
"""Targets of larger weight files are not loaded for the canary."""


@dataclass(frozen=True)
class Reference:
    """The canary's states by transformers: every layer, so that a wrong one can be named.

    Attributes:
        aux: [T, n + 1, H], slot k is layer k.
        last: [T, H] after the final norm.
    """

    aux: torch.Tensor
    last: torch.Tensor

    def check(self, states: CapturedStates, layers: Sequence[int]) -> float:
        """Raise ``wrong_states`` unless every layer fits; returns the largest error.

        A layer counts as proven when it fits and no other layer fits better.
        """
        worst = 0.0
        for slot, layer in enumerate(layers):
            errors = [relative_error(states.aux[:, slot], self.aux[:, k]) for k in range(self.aux.shape[1])]
            worst = max(worst, errors[layer])
            best = min(range(len(errors)), key=lambda k: errors[k])
            if not errors[layer] <= TOLERANCE or errors[best] < errors[layer] / 2:
                more = f"; layer {best} fits best ({errors[best]:.3g})" if best != layer else ""
                why = f"what should be layer {layer} differs by {errors[layer]:.3g}{more}"
                raise ServerFault("wrong_states", why)
        error = relative_error(states.last, self.last)
        if not error <= TOLERANCE:
            raise ServerFault(
                "wrong_states", f"the last state differs by {error:.3g} ({TOLERANCE} is allowed)"
            )
        return max(worst, error)


def make_reference(model: Path, tokens: Sequence[int], *, trust_remote_code: bool) -> Reference | None:
    """Compute the canary here when the target is small enough; None when it is not.

    It runs on the CPU in float32: the servers may have every GPU.

    Raises:
        TargetError: the target cannot be loaded.
    """
    num_bytes = sum(path.stat().st_size for path in weight_files(model))
    if num_bytes > AFFORDABLE_BYTES or 3 * num_bytes > psutil.virtual_memory().available:
        return None
    target = LocalTarget.load(model, "cpu", "float32", trust_remote_code=trust_remote_code)
    layers = range(target.facts.num_layers + 1)
    states = target.capture([list(tokens)], layers)[0]
    found = Reference(states.aux.clone(), states.last.clone())
    del target, states
    gc.collect()
    return found
