"""Checks of an export's tensors: whole, finite, trained, and akin to the target's where they must be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from eyas.export.findings import Finding, some
from eyas.export.layout import Eagle3Checkpoint

_CHUNK_ROWS = 4096
_NEAREST_ROWS = 256
"""Head rows whose nearest target row is looked for."""
_MATRICES = tuple(
    f"midlayer.{name}.weight"
    for name in (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
)


def check_tensors(checkpoint: Eagle3Checkpoint) -> Iterator[Finding]:
    """Findings on presence, shapes, types, finiteness, emptiness, duplicates and signs of training."""
    if checkpoint.missing:
        yield Finding("tensor-missing", "fault", f"missing: {some(checkpoint.missing)}")
    if checkpoint.unknown:
        yield Finding(
            "tensor-unknown",
            "fault",
            f"not part of this layout: {some(checkpoint.unknown)}",
            evidence="SGLang skips them in silence, vLLM raises",
        )
    for name, found, expected in checkpoint.wrong_shapes:
        yield Finding(
            "tensor-shape", "fault", f"{name} is {list(found)}, the configuration says {list(expected)}"
        )
    yield from _types(checkpoint.weights, checkpoint.config)
    floating = {n: t for n, t in checkpoint.weights.items() if t.is_floating_point()}
    if checkpoint.embedding is not None and checkpoint.embedding.is_floating_point():
        floating["embed_tokens.weight"] = checkpoint.embedding
    yield from _content(floating)
    yield from _duplicates(floating)
    yield from _training(floating)
    yield from _aux_chunks(floating.get("fc.weight"), checkpoint.dimensions.num_aux)


def check_against_target(
    checkpoint: Eagle3Checkpoint, embedding: torch.Tensor | None, head: torch.Tensor | None
) -> Iterator[Finding]:
    """Findings on the head and the embedding beside the target's.

    Args:
        embedding, head: the target's, both [V, H]; None where it is not at hand.
    """
    own, ours = checkpoint.embedding, checkpoint.weights.get("lm_head.weight")
    if own is not None:
        if embedding is None or own.shape != embedding.shape:
            yield Finding(
                "embedding-own", "note", "the folder brings its own embedding; engines share the target's"
            )
        else:
            yield from _embedding(own, embedding)
    ids = checkpoint.target_ids
    if head is None or ours is None or not ours.is_floating_point() or ours.shape[1:] != head.shape[1:]:
        return
    usable = len(ids) == len(ours) and bool(((ids >= 0) & (ids < len(head))).all())
    if usable and bool(ours.isfinite().all()):
        yield from _head(ours, head, ids)


def _types(weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Iterator[Finding]:
    names: dict[str, list[str]] = {}
    for name, tensor in weights.items():
        names.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(name)
    integers = [n for n, t in weights.items() if not t.is_floating_point()]
    if integers:
        yield Finding("tensor-dtype", "fault", f"no floating point: {some(integers)}")
    elif len(names) > 1:
        rare = min(names, key=lambda kind: len(names[kind]))
        yield Finding(
            "tensor-dtype",
            "warning",
            f"types are mixed: {', '.join(sorted(names))}",
            f"{rare}: {some(names[rare])}",
        )
    said = config.get("dtype") or config.get("torch_dtype")
    if said is not None and len(names) == 1 and said not in names:
        yield Finding(
            "dtype-differs", "warning", f"config.json says {said}, the weights are {next(iter(names))}"
        )


def _content(weights: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    for name, tensor in weights.items():
        if tensor.numel() == 0:
            continue
        bad = sum(int((~rows.isfinite()).sum()) for rows in torch.split(tensor, _CHUNK_ROWS))
        if bad:
            yield Finding("not-finite", "fault", f"{name} holds {bad:,} values that are NaN or infinite")
        elif not bool(tensor.any()):
            yield Finding("all-zero", "fault", f"{name} is zero everywhere")
        elif tensor.dim() > 1 and len(tensor) > 1 and bool((tensor[1:] == tensor[:1]).all()):
            yield Finding("tensor-constant", "fault", f"all rows of {name} are the same")


def _duplicates(weights: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    matrices = [(n, t) for n, t in weights.items() if t.dim() > 1]
    for number, (name, tensor) in enumerate(matrices):
        for other, candidate in matrices[number + 1 :]:
            if tensor.shape == candidate.shape and torch.equal(tensor, candidate):
                yield Finding("tensor-duplicate", "fault", f"{name} and {other} hold the same numbers")


def _training(weights: Mapping[str, torch.Tensor]) -> Iterator[Finding]:
    norms = [t for n, t in weights.items() if t.dim() == 1]
    if not norms or not all(bool((t == 1).all()) for t in norms):
        return
    if all(n in weights and _looks_initialised(weights[n]) for n in _MATRICES):
        yield Finding(
            "weights-untrained",
            "fault",
            "norms are exactly 1 and every matrix looks as it was drawn",
            evidence="rows and columns of one spread, no outliers",
            hint="export a trained checkpoint",
        )
    else:
        yield Finding(
            "norms-untouched",
            "warning",
            "every norm weight is exactly 1: they were not trained, or not loaded",
        )


def _looks_initialised(matrix: torch.Tensor) -> bool:
    """Whether a matrix has the statistics of independent draws: rows and columns of equal spread.

    Training makes some rows and columns grow; the spread of their norms then exceeds what drawing
    gives, which is 1 / sqrt(2 n) of the norm for n entries (a little less for uniform draws).
    """
    values = matrix.float()
    if min(values.shape) < 8 or not bool(values.isfinite().all()):
        return False
    for dim in (0, 1):
        norms = values.norm(dim=dim)
        expected = (2 * values.shape[dim]) ** -0.5
        if float(norms.std() / norms.mean().clamp_min(1e-30)) > 1.5 * expected:
            return False
    return True


def _aux_chunks(fc: torch.Tensor | None, num_aux: int) -> Iterator[Finding]:
    if fc is None or fc.dim() != 2 or num_aux < 2 or fc.shape[1] % num_aux or not bool(fc.isfinite().all()):
        return
    norms = [float(chunk.float().norm()) for chunk in fc.chunk(num_aux, dim=1)]
    if max(norms) > 0 and min(norms) < 1e-4 * max(norms):
        yield Finding(
            "aux-chunk-unused",
            "warning",
            f"fc hardly reads aux state {norms.index(min(norms))}",
            evidence="norms of its columns by aux state: " + ", ".join(f"{n:.3g}" for n in norms),
        )


def _embedding(own: torch.Tensor, target: torch.Tensor) -> Iterator[Finding]:
    likeness = mean_cosine(own, target, torch.arange(len(own)), torch.arange(len(own)))
    if likeness > 0.9999:
        yield Finding(
            "embedding-duplicate",
            "note",
            "the folder holds a copy of the target's embedding, which engines share anyway",
        )
    else:
        yield Finding(
            "embedding-foreign",
            "fault" if likeness < 0.5 else "warning",
            "the folder's embedding is not the target's",
            evidence=f"mean cosine of their rows {likeness:.2f}",
            hint="leave embed_tokens out if it was not trained",
        )


def _head(ours: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> Iterator[Finding]:
    rows = torch.arange(len(ours))
    straight = mean_cosine(ours, head, rows, ids)
    shifted: dict[str, float] = {}
    for shift in (-1, 1):
        near = ids + shift
        fits = (near >= 0) & (near < len(head))
        if bool(fits.any()):
            shifted[f"target ids {shift:+d}"] = mean_cosine(ours, head, rows[fits], near[fits])
        fits = (rows + shift >= 0) & (rows + shift < len(rows))
        if bool(fits.any()):
            shifted[f"draft ids {shift:+d}"] = mean_cosine(ours, head, rows[fits], ids[rows[fits] + shift])
    best = max(shifted, key=lambda name: shifted[name])
    if shifted[best] > max(straight + 0.1, 1.5 * straight):
        yield Finding(
            "head-shifted",
            "fault",
            f"the head's rows fit the target's better with {best}: the mapping is shifted",
            evidence=f"mean cosine {straight:.2f} as mapped, {shifted[best]:.2f} shifted",
        )
        return
    nearest, agreeing = _nearest(ours, head, ids)
    by_chance = (2 * math.log(len(head)) / ours.shape[1]) ** 0.5
    if nearest > max(straight + 0.2, 1.3 * by_chance) and agreeing < 0.5:
        yield Finding(
            "head-misaligned",
            "fault",
            "the head's rows fit other target rows than the mapping gives them: it is another drafter's",
            evidence=f"mean cosine {straight:.2f} as mapped, {nearest:.2f} with the nearest rows, of which "
            f"{agreeing:.0%} are the mapped ones",
            hint="a mapping travels with the weights and is never made anew",
        )
    elif straight < 0.1:
        drawn = abs(straight) < 0.02 and _looks_initialised(ours)
        yield Finding(
            "head-random" if drawn else "head-unlike-target",
            "fault" if drawn else "note",
            "the head's rows have nothing in common with the target's"
            + (" and look as they were drawn" if drawn else "; fine if the head was trained from scratch"),
            evidence=f"mean cosine {straight:.2f}",
        )


def _nearest(ours: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> tuple[float, float]:
    """Mean cosine of some head rows with the target row nearest to each; share where that is the mapped one.

    Centred as in `mean_cosine`.
    """
    rows = torch.arange(0, len(ours), max(1, len(ours) // _NEAREST_ROWS))[:_NEAREST_ROWS]
    mine = ours[rows].float() - ours.mean(dim=0, dtype=torch.float32)
    mine = torch.nn.functional.normalize(mine, dim=-1)
    mean = head.mean(dim=0, dtype=torch.float32)
    best = torch.full((len(rows),), -2.0)
    place = torch.zeros(len(rows), dtype=torch.long)
    for first in range(0, len(head), _CHUNK_ROWS):
        its = torch.nn.functional.normalize(head[first : first + _CHUNK_ROWS].float() - mean, dim=-1)
        value, where = (mine @ its.T).max(dim=1)
        place = torch.where(value > best, first + where, place)
        best = torch.maximum(best, value)
    return float(best.mean()), float((place == ids[rows]).float().mean())


def mean_cosine(
    ours: torch.Tensor, theirs: torch.Tensor, our_rows: torch.Tensor, their_rows: torch.Tensor
) -> float:
    """Mean cosine of paired rows, both centred on the mean of their matrix.

    Without centring, the direction that all rows of a language model's head share makes any two rows
    look alike.
    """
    our_mean = ours.mean(dim=0, dtype=torch.float32)
    their_mean = theirs.mean(dim=0, dtype=torch.float32)
    total = 0.0
    for mine, its in zip(
        torch.split(our_rows, _CHUNK_ROWS), torch.split(their_rows, _CHUNK_ROWS), strict=True
    ):
        a, b = ours[mine].float() - our_mean, theirs[its].float() - their_mean
        total += float(torch.cosine_similarity(a, b, dim=-1).sum())
    return total / max(len(our_rows), 1)
