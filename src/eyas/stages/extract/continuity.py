"""Before a resumed extraction goes on: do stored samples still come out the same?

Weights, layers and dtypes are part of the recipe and compared there. This finds what they cannot: another
library version, an edited model configuration, a patched engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from eyas.base.errors import ContinuityBroken
from eyas.stages.stored_states import to_torch
from eyas.store.reader import StoreReader
from eyas.store.recipe import StoreRecipe
from eyas.store.samples import last_rows
from eyas.store.segment import CapturedSample
from eyas.targets.capture import CaptureTarget
from eyas.targets.compare import TOLERANCE, relative_error


def chosen_samples(ids: Sequence[str], count: int, attempt: int) -> list[str]:
    """Other samples at each attempt, by hash."""
    return sorted(ids, key=lambda id_: hashlib.sha256(f"{attempt}:{id_}".encode()).digest())[:count]


def check_continuity(
    target: CaptureTarget, reader: StoreReader, recipe: StoreRecipe, ids: Sequence[str]
) -> float:
    """Capture stored samples again and compare; returns the largest error.

    Raises:
        ContinuityBroken: an error is above the tolerance; names the sample, the layer and, if another layer
            fits better, that one.
        SegmentDamaged: a stored sample cannot be read.
    """
    worst = 0.0
    for sample in reader.get_many(ids, check=True):
        stored = to_torch(sample.aux)
        states = target.capture([sample.tokens.tolist()], recipe.aux_layers, store_dtype=stored.dtype)[0]
        for slot, layer in enumerate(recipe.aux_layers):
            error = relative_error(states.aux[:, slot], stored[:, slot])
            worst = max(worst, error)
            if error > TOLERANCE:
                nearest = _nearest(target, sample, recipe.aux_layers, slot)
                raise _broken(sample, f"aux layer {layer}", error, nearest)
        rows = torch.from_numpy(last_rows(sample.spans, len(sample.tokens)))
        error = relative_error(states.last[rows], to_torch(sample.last))
        worst = max(worst, error)
        if error > TOLERANCE:
            raise _broken(sample, "the last state", error, "")
    return worst


def _nearest(target: CaptureTarget, sample: CapturedSample, aux_layers: Sequence[int], slot: int) -> str:
    """Which layer of the present target fits what is stored best."""
    layer = aux_layers[slot]
    layers = tuple(range(target.facts.num_layers + 1)) if target.any_layer else tuple(aux_layers)
    stored = to_torch(sample.aux)[:, slot]
    states = target.capture([sample.tokens.tolist()], layers, store_dtype=stored.dtype)[0]
    errors = {k: relative_error(states.aux[:, place], stored) for place, k in enumerate(layers)}
    best = min(layers, key=lambda k: errors[k])
    if errors[best] <= TOLERANCE:
        return f"; layer {best} fits ({errors[best]:.3f}): layers are shifted by {best - layer:+d}"
    if not target.any_layer:
        return "; none of the layers that the server gives fits: its layers, weights or arithmetic changed"
    return "; no layer of the target fits: its weights or its arithmetic changed"


def _broken(sample: CapturedSample, what: str, error: float, more: str) -> ContinuityBroken:
    return ContinuityBroken(
        "stored states cannot be captured again with this target",
        where=f"sample {sample.id}",
        why=f"{what} differs by {error:.3f} of its norm ({TOLERANCE} is allowed){more}",
        hint="bring the target back to what it was, or: eyas run --redo extract",
    )
