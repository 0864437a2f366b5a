"""EAGLE's dynamic tree of drafts, and the walk of the target's choices through it.

Li et al., EAGLE-2 (2024): a draft's score is the drafter's probability of the whole way to it. At each
depth the ``top_k`` best drafts get ``top_k`` children each; of all drafts that came up, the
``total_tokens`` best are given to the target. A way is never likelier than its beginning, so these hang
together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.cache import DraftCache
from eyas.drafter.wide import wide_dtype


@dataclass(frozen=True)
class TreeShape:
    """How a tree may grow.

    Attributes:
        depth: longest way from the root.
        top_k: drafts that get children at each depth, and children of each.
        total_tokens: drafts that the target reads, the pending token not counted.
    """

    depth: int
    top_k: int
    total_tokens: int


@dataclass(frozen=True)
class DraftTree:
    """A tree for each row; node 0 is the pending token, parents stand before their children.

    Attributes:
        tokens: ``[B, N]`` target ids.
        parents: ``[B, N]`` places of parents, -1 for node 0.
        depths: ``[B, N]`` steps from node 0.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor


@torch.no_grad()
def grow(
    cache: DraftCache, logits: Tensor, pending: Tensor, target_ids: Tensor, shape: TreeShape
) -> DraftTree:
    """Grow a tree behind each row.

    Args:
        cache: extended up to the pending tokens; what is drafted is forgotten at the next extension.
        logits: ``[B, K]`` of its newest rows.
        pending: ``[B]``, the roots.
        target_ids: ``[K]`` target id of each draft id.
    """
    width = min(shape.top_k, logits.shape[-1])
    num_rows, device = len(logits), logits.device
    rows = torch.arange(num_rows, device=device).unsqueeze(1)
    frontier, ids = _scores(logits).topk(width, dim=-1)
    frontier_tokens = target_ids[ids]
    feature = cache.feature.unsqueeze(1).expand(-1, width, -1)
    own = torch.eye(width, dtype=torch.bool, device=device).expand(num_rows, -1, -1)
    lineage = own
    places = torch.arange(width, device=device).expand(num_rows, -1)
    # all drafts that came up, in the order in which they did: score, token, parent's place in these lists
    scores, tokens, parents = [frontier], [frontier_tokens], [torch.full_like(places, -1)]
    depths, known = [1] * width, width
    for depth in range(1, shape.depth):
        logits, feature = cache.branch(frontier_tokens, feature, depth, lineage)
        best, ids = _scores(logits).topk(width, dim=-1)
        children = (frontier.unsqueeze(2) + best).flatten(1)
        child_tokens = target_ids[ids].flatten(1)
        scores.append(children)
        tokens.append(child_tokens)
        parents.append(places.repeat_interleave(width, dim=1))
        depths += [depth + 1] * (width * width)
        frontier, chosen = children.topk(width, dim=-1)
        frontier_tokens = child_tokens.gather(1, chosen)
        above = chosen // width
        feature, places = feature[rows, above], known + chosen
        lineage = torch.cat((lineage[rows, above], own), dim=2)
        known += width * width
    return _best(
        torch.cat(scores, dim=1),
        torch.cat(tokens, dim=1),
        torch.cat(parents, dim=1),
        torch.tensor(depths, device=device),
        pending,
        shape.total_tokens,
    )


def _scores(logits: Tensor) -> Tensor:
    return logits.to(wide_dtype(logits.dtype)).log_softmax(dim=-1)


def _best(
    scores: Tensor, tokens: Tensor, parents: Tensor, depths: Tensor, pending: Tensor, count: int
) -> DraftTree:
    """The ``count`` best drafts, with the pending token as the root of them."""
    # a stable sort puts a parent before a child of equal score, since it came up earlier
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, :count].sort(dim=1).values
    place = torch.zeros_like(parents)
    place.scatter_(1, chosen, torch.arange(1, chosen.shape[1] + 1, device=chosen.device).expand_as(chosen))
    above = parents.gather(1, chosen)
    above = torch.where(above < 0, 0, place.gather(1, above.clamp(min=0)))
    root = torch.zeros_like(pending).unsqueeze(1)
    return DraftTree(
        tokens=torch.cat((pending.unsqueeze(1), tokens.gather(1, chosen)), dim=1),
        parents=torch.cat((root - 1, above), dim=1),
        depths=torch.cat((root, depths[chosen]), dim=1),
    )


def follow(tree: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor]:
    """Walk from the root as long as a child is what the target chose.

    Args:
        choices: ``[B, N]`` the target's choice behind every node.

    Returns:
        Paths ``[B, 1 + deepest]`` of places from the root on, their ends repeated, and the number of
        drafts ``[B]`` on each.
    """
    num_rows, deepest = len(choices), int(tree.depths.max())
    place = torch.zeros(num_rows, dtype=torch.long, device=choices.device)
    path, agreed = [place], torch.zeros_like(place)
    for _ in range(deepest):
        wanted = choices.gather(1, place.unsqueeze(1))
        match = (tree.parents == place.unsqueeze(1)) & (tree.tokens == wanted)
        going = match.any(dim=1)  # who has stopped looks at the same children again, in vain
        place = torch.where(going, match.long().argmax(dim=1), place)
        agreed = agreed + going
        path.append(place)
    return torch.stack(path, dim=1), agreed
