"""Losses of all draft steps, with the head's gradient made on the way.

Chunk by chunk of teacher rows: the target's probabilities over the draft vocabulary are made once and
serve every step that predicts the same token; the draft logits live only as long as their chunk, and
leave behind the gradients of the head and of its input. Nothing of size [rows, vocabulary] is kept.

With q the drafter's distribution, p the target's softmax restricted to the draft vocabulary and made to
sum to one, m the target's mass in the draft vocabulary, and so p' = m p the target's real probabilities:

- ``soft_ce``: -sum p log q
- ``kl``: sum p log (p / q)
- ``lk``: -log alpha, where alpha = sum min(p', q) is the rate at which speculative sampling accepts q's
  drafts (Leviathan et al., 2023). Mass outside the draft vocabulary is a miss. Below `MIN_ACCEPTANCE`
  a row has no gradient.
- ``mixed``: soft_ce + lk

The loss of a batch is sum over steps j of gamma^j times the mean over the rows supervised at step j.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.drafter.few_shapes import joined, linear
from eyas.drafter.kernels.compiled import kernels_for
from eyas.drafter.settings import LossKind
from eyas.drafter.wide import wide_dtype

MIN_ACCEPTANCE = 1e-6
CHUNK_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 26}
"""Logits in a chunk, of all steps: enough rows for matrix products to run at full rate."""

CACHE_ELEMENTS = 1 << 17
"""Logits of a block on the CPU, for each thread: the passes over it find it in the cache of a core."""

ADDED_ROWS = 1024
"""Rows of the head's gradient that are added up at a time."""

Kept = Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True)
class LossTask:
    """What a loss needs beside states and head.

    Attributes:
        kept: for each step, places in the order of step 0 (see `eyas.drafter.batch`).
        teacher: ``[N, T]`` last states in the order of step 0.
        teacher_head: ``[K, T]`` the target's head rows of the draft vocabulary.
        log_normaliser: ``[N]`` over the whole vocabulary; needed by ``lk`` and ``mixed``.
        row_weights: weight of one row of each step: gamma^j over the number of rows in the whole
            optimizer step.
    """

    kind: LossKind
    kept: Kept
    teacher: Tensor
    teacher_head: Tensor
    log_normaliser: Tensor | None
    row_weights: Sequence[float]


def needs_normaliser(kind: LossKind) -> bool:
    """Whether a loss looks at the target's mass outside the draft vocabulary."""
    return kind in ("lk", "mixed")


def draft_loss(states: Sequence[Tensor], head: Tensor, task: LossTask) -> tuple[Tensor, Tensor]:
    """The weighted loss, and the plain sum of row losses for each step (without gradient).

    Args:
        states: ``[n_j, H]`` for each step, what the head takes.
        head: ``[K, H]`` the drafter's head.
    """
    loss, sums = _DraftLoss.apply(task, head, *states)  # type: ignore[no-untyped-call]
    return loss, sums


@dataclass(frozen=True)
class RowFacts:
    """Per step: loss, drafted id of the draft vocabulary, and acceptance rate of each row."""

    losses: list[Tensor]
    drafts: list[Tensor]
    acceptance: list[Tensor]


@torch.no_grad()
def row_facts(states: Sequence[Tensor], head: Tensor, task: LossTask) -> RowFacts:
    """What validation looks at; ``task.log_normaliser`` is needed."""
    losses: list[list[Tensor]] = [[] for _ in states]
    drafts: list[list[Tensor]] = [[] for _ in states]
    acceptance: list[list[Tensor]] = [[] for _ in states]
    head = head.to(states[0].dtype)
    for chunk in _chunks(states, task):
        all_logits = F.linear(chunk.states, head)
        for piece in chunk.pieces:
            logits = _wide(all_logits[piece.rows])
            drafts[piece.step].append(logits.argmax(dim=-1))
            normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)
            drafted = (logits - normaliser).exp_()
            assert piece.mass is not None
            acceptance[piece.step].append(torch.minimum(drafted, piece.teacher * piece.mass).sum(dim=-1))
            losses[piece.step].append(_losses(task.kind, logits, piece))
    empty = states[0].new_zeros(0)
    return RowFacts(
        [torch.cat(parts) if parts else empty for parts in losses],
        [torch.cat(parts) if parts else empty.long() for parts in drafts],
        [torch.cat(parts) if parts else empty for parts in acceptance],
    )


@dataclass(frozen=True)
class _Piece:
    """Rows of one step whose teacher rows lie in one chunk.

    Attributes:
        of_step: where they lie among the step's rows.
        rows: where they lie in the chunk.
        teacher: p ``[r, K]``.
        mass: m ``[r, 1]``.
        negative_entropy: sum p log p ``[r]``.
    """

    step: int
    of_step: slice
    rows: slice
    teacher: Tensor
    mass: Tensor | None
    negative_entropy: Tensor | None


@dataclass(frozen=True)
class _Chunk:
    """Rows of all steps that meet the same teacher rows, one step after the other, as ``[R, H]``.

    Together they are few large products instead of many small ones. Rows behind the last piece are zeros: so
    are their logits, and their share of any gradient.
    """

    states: Tensor
    pieces: list[_Piece]


def _chunks(states: Sequence[Tensor], task: LossTask) -> Iterator[_Chunk]:
    num_places = len(task.teacher)
    limit = CHUNK_ELEMENTS["cpu" if task.teacher.device.type == "cpu" else "cuda"]
    size = max(1, limit // (len(task.teacher_head) * len(task.kept)))
    for start in range(0, num_places, size):
        end = min(start + size, num_places)
        teacher, inside, entropy = _teacher_rows(task, slice(start, end))
        mass = None
        if task.log_normaliser is not None:
            whole = task.log_normaliser[start:end].to(inside.dtype).unsqueeze(-1)
            mass = (inside - whole).exp_().clamp_(max=1.0)
        parts, pieces, num_rows = [], [], 0
        for step, kept in enumerate(task.kept):
            first, last = (int(place) for place in np.searchsorted(kept, [start - step, end - step]))
            if first == last:
                continue
            take = _taker(kept[first:last] + step - start, teacher.device)
            pieces.append(
                _Piece(
                    step,
                    slice(first, last),
                    slice(num_rows, num_rows + last - first),
                    take(teacher),
                    None if mass is None else take(mass),
                    None if entropy is None else take(entropy),
                )
            )
            parts.append(states[step][first:last])
            num_rows += last - first
        if pieces:
            yield _Chunk(joined(parts), pieces)


def _teacher_rows(task: LossTask, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of some places: p ``[r, K]``, log sum exp over the draft vocabulary ``[r, 1]``, and for ``kl``
    sum p log p ``[r]``."""
    logits = linear(task.teacher[rows], task.teacher_head)
    kernels = kernels_for(logits)
    if kernels is not None:
        return kernels.softmax_rows(logits, entropy=task.kind == "kl")
    narrow = logits.dtype != wide_dtype(logits.dtype)
    teacher = torch.empty_like(logits, dtype=wide_dtype(logits.dtype)) if narrow else logits
    normalisers, entropies = [], []
    for block in _row_blocks(logits):
        part = teacher[block]
        if narrow:
            part.copy_(logits[block])
        raw = part.clone() if task.kind == "kl" else None
        powers, normaliser, sums = _exponentials(part)
        powers.div_(sums)
        normalisers.append(normaliser)
        if raw is not None:
            entropies.append(torch.linalg.vecdot(powers, raw) - normaliser.squeeze(-1))
    return teacher, torch.cat(normalisers), torch.cat(entropies) if entropies else None


def _taker(places: npt.NDArray[np.int64], device: torch.device) -> Any:
    """Picks rows: a view where they lie side by side, which is the usual case, else a copy."""
    first, last = int(places[0]), int(places[-1]) + 1
    if last - first == len(places):
        return lambda x: x[first:last]
    index = torch.from_numpy(places).to(device)
    return lambda x: x.index_select(0, index)


def _row_blocks(logits: Tensor) -> list[slice]:
    """Rows of ``[r, K]`` that passes go over together."""
    size = len(logits)
    if logits.device.type == "cpu":
        size = CACHE_ELEMENTS * torch.get_num_threads() // logits.shape[1]
    return [slice(start, start + max(1, size)) for start in range(0, len(logits), max(1, size))]


def _losses(kind: LossKind, logits: Tensor, piece: _Piece, weight: float | None = None) -> Tensor:
    """Row losses ``[r]``; with a weight, ``logits`` become the gradient of the rows' weighted losses.

    Narrow logits are widened block by block, in the cache, and never as a whole.
    """
    kernels = kernels_for(logits)
    if kernels is not None:
        plain = "soft_ce" if kind == "kl" else kind
        made = kernels.loss_rows(
            logits, piece.teacher, piece.mass, kind=plain, weight=weight, least=MIN_ACCEPTANCE
        )
        return made if piece.negative_entropy is None else made + piece.negative_entropy
    losses = []
    for rows in _row_blocks(logits):
        wide = _wide(logits[rows])
        losses.append(_block_losses(kind, wide, piece, rows, weight))
        if weight is not None and wide.dtype != logits.dtype:
            logits[rows] = wide
    return torch.cat(losses)


def _block_losses(kind: LossKind, logits: Tensor, piece: _Piece, rows: slice, weight: float | None) -> Tensor:
    """`_losses` of some rows of a piece.

    Every pass over ``[r, K]`` costs memory traffic, so they are few and in place: one exponential, no copy.
    """
    teacher = piece.teacher[rows]
    scores = torch.linalg.vecdot(teacher, logits) if kind != "lk" else None
    drafted, normaliser, sums = _exponentials(logits)
    losses = logits.new_zeros(len(logits))
    if scores is not None:
        losses = normaliser.squeeze(-1) - scores
    if kind == "kl":
        assert piece.negative_entropy is not None
        losses = losses + piece.negative_entropy[rows]
    if not needs_normaliser(kind):
        if weight is not None:
            drafted.mul_(weight / sums).sub_(teacher, alpha=weight)
        return losses
    assert piece.mass is not None
    real = teacher * piece.mass[rows]
    drafted.div_(sums)
    alpha = torch.minimum(drafted, real).sum(dim=-1, keepdim=True)
    losses = losses - alpha.clamp(min=MIN_ACCEPTANCE).log().squeeze(-1)
    if weight is not None:
        # only drafts that the target wants more of move alpha: d(alpha)/dz = q (below - sum below q)
        below = drafted * (drafted < real)
        slope = below - drafted * below.sum(dim=-1, keepdim=True)
        scale = torch.where(alpha > MIN_ACCEPTANCE, alpha.clamp(min=MIN_ACCEPTANCE).reciprocal(), 0.0)
        slope.mul_(-scale)
        logits.copy_(slope if kind == "lk" else slope + drafted - teacher).mul_(weight)
    return losses


def _exponentials(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place, exp(logits - maximum); also log sum exp of the logits and the sum, each ``[r, 1]``."""
    peak = logits.amax(dim=-1, keepdim=True)
    powers = logits.sub_(peak).exp_()
    sums = powers.sum(dim=-1, keepdim=True)
    return powers, sums.log() + peak, sums


class _DraftLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        task, master_head, *states = arguments
        with torch.autocast(master_head.device.type, enabled=False):
            head = master_head.to(states[0].dtype)
            wide = wide_dtype(head.dtype)
            sums = torch.zeros(len(states), dtype=wide, device=head.device)
            gradient = any(ctx.needs_input_grad)
            d_states = [torch.zeros_like(state) for state in states] if gradient else None
            d_head: Tensor | None = None
            for chunk in _chunks(states, task):
                d_head = _add_chunk(chunk, head, task, sums, d_states, d_head)
        if d_states is not None:
            d_head = torch.zeros_like(head, dtype=wide) if d_head is None else d_head
            ctx.gradients = [d_head.to(master_head.dtype), *d_states]
        ctx.mark_non_differentiable(sums)
        weights = torch.tensor(list(task.row_weights), dtype=wide, device=sums.device)
        return (sums * weights).sum(), sums

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # scaled in place and handed on: the head's is the largest tensor of a step, and a copy of it costs
        # as much as the optimizer
        made, ctx.gradients = ctx.gradients, None
        if made is None:
            raise RuntimeError("a backward pass has taken the gradients of this loss; make the loss again")
        scale = gradients[0]
        if scale.device.type != "cpu" or scale != 1:
            for gradient in made:
                gradient.mul_(scale.to(gradient.dtype))
        return None, *made


def _add_chunk(
    chunk: _Chunk,
    head: Tensor,
    task: LossTask,
    sums: Tensor,
    d_states: list[Tensor] | None,
    d_head: Tensor | None,
) -> Tensor | None:
    """Add a chunk's losses to ``sums`` ``[J]`` and, where there are gradients to make, its share of them.

    In a function of its own, so that its logits are gone when those of the next chunk are made.

    Returns:
        The head's gradient so far, in the wide type; None where no gradients are made.
    """
    logits = F.linear(chunk.states, head)
    for piece in chunk.pieces:
        weight = None if d_states is None else task.row_weights[piece.step]
        sums[piece.step] += _losses(task.kind, logits[piece.rows], piece, weight).sum()
    if d_states is None:
        return None
    d_chunk = logits @ head  # the logits are their own gradient by now
    for piece in chunk.pieces:
        d_states[piece.step][piece.of_step] = d_chunk[piece.rows]
    return _with_product(d_head, logits, chunk.states)


def _with_product(total: Tensor | None, d_logits: Tensor, state: Tensor) -> Tensor:
    """``total`` (nothing yet where None) with d_logits^T state added to it, summed in the wide type."""
    wide = wide_dtype(state.dtype)
    if total is None:
        return (d_logits.T @ state).to(wide)
    if wide == state.dtype:
        return total.addmm_(d_logits.T, state)
    product = d_logits.T @ state
    for start in range(0, len(total), ADDED_ROWS):  # as a whole it would be widened into one more copy
        total[start : start + ADDED_ROWS] += product[start : start + ADDED_ROWS]
    return total


def _wide(x: Tensor) -> Tensor:
    return x.to(wide_dtype(x.dtype))
