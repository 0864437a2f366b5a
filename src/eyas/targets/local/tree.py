"""Trees of tokens behind a row: who descends from whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eyas.base.errors import TargetError


@dataclass(frozen=True)
class Tree:
    """One tree for each row, all of the same number of nodes.

    Attributes:
        parents: [B, N] place of each node's parent, before its own; -1 for the first node, the root.
        depths: [B, N] steps from the root.
        lineage: [B, N, N] whether node j is node i or one that i descends from.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    lineage: torch.Tensor

    @classmethod
    def of(cls, parents: torch.Tensor) -> Tree:
        """The tree of ``parents``, on the CPU.

        Raises:
            TargetError: a node's parent does not stand before it.
        """
        parents = parents.to("cpu", torch.long)
        num_rows, num_nodes = parents.shape
        before = torch.arange(num_nodes)
        if bool((parents[:, :1] != -1).any()) or bool(((parents < 0) | (parents >= before))[:, 1:].any()):
            raise TargetError("a tree begins at its root, and each parent stands before its children")
        lineage = torch.eye(num_nodes, dtype=torch.bool).repeat(num_rows, 1, 1)
        depths = torch.zeros_like(parents)
        rows = torch.arange(num_rows)
        for node in range(1, num_nodes):
            lineage[:, node] |= lineage[rows, parents[:, node]]
            depths[:, node] = depths[rows, parents[:, node]] + 1
        return cls(parents, depths, lineage)

    def path(self, row: int, node: int) -> list[int]:
        """Places from the root to a node."""
        found: list[int] = self.lineage[row, node].nonzero().flatten().tolist()
        return found

    def leaves(self, row: int) -> list[int]:
        """Places of nodes without children."""
        inner = set(self.parents[row].tolist())
        return [node for node in range(self.parents.shape[1]) if node not in inner]
