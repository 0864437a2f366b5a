"""A key-value cache whose rows have lengths of their own and can be shortened or dropped.

Legend: B rows, H_kv key heads, D width of a head, q new tokens, C capacity in positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from eyas.targets.local.tree import Tree

_BLOCK = 64
_VIEW_MULTIPLE = 8
"""Views end at a multiple of this, as fused kernels ask of masks; what lies behind is masked."""


@dataclass
class RowState:
    """Where the rows of the running forward pass stand; shared by all layers and masks.

    Attributes:
        starts: [B] position of each row's first new token.
        positions: [B, q] position of each new token.
        fresh: all rows start at zero, so that the new keys are all there are.
        slots: [B * q] places of the new tokens in storage flattened over rows and positions.
        view_length: positions that attention sees.
        tiled: masks repeated for groups of heads, by mask.
        lineage: [B, q, q] which new tokens each new token sees, where they are a tree; None: all before it.
    """

    starts: torch.Tensor
    positions: torch.Tensor
    fresh: bool
    slots: torch.Tensor
    view_length: int
    tiled: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    lineage: torch.Tensor | None = None


class RaggedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values, stored as [B, C, H_kv, D] so that a new token is one copied row."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys, self.values = self._storage(key_states), self._storage(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new tokens ([B, H_kv, q, D]) and give what attention sees ([B, H_kv, kv, D])."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self._cache.rows
        self.keys = self._write(self.keys, key_states, rows)
        self.values = self._write(self.values, value_states, rows)
        if rows.fresh:
            return key_states, value_states
        return self._view(self.keys, rows), self._view(self.values, rows)

    def _storage(self, states: torch.Tensor) -> torch.Tensor:
        # zeros, since a masked key still enters a product: 0 * NaN would be NaN
        cache = self._cache
        return states.new_zeros((cache.num_rows, cache.capacity, states.shape[1], states.shape[3]))

    def _write(self, storage: torch.Tensor, states: torch.Tensor, rows: RowState) -> torch.Tensor:
        capacity = self._cache.capacity
        if storage.shape[1] < capacity:
            larger = storage.new_zeros((storage.shape[0], capacity, *storage.shape[2:]))
            larger[:, : storage.shape[1]] = storage
            storage = larger
        flat = storage.view(storage.shape[0] * capacity, -1)
        flat.index_copy_(0, rows.slots, states.transpose(1, 2).reshape(rows.slots.shape[0], flat.shape[1]))
        return storage

    @staticmethod
    def _view(storage: torch.Tensor, rows: RowState) -> torch.Tensor:
        return storage[:, : rows.view_length].transpose(1, 2)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.rows.view_length, 0

    def get_seq_length(self) -> int:
        return self._cache.seen

    def get_max_length(self) -> int:
        return -1

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        if self.is_initialized:
            self.keys = self.keys.index_select(0, rows)
            self.values = self.values.index_select(0, rows)

    def move(self, sources: torch.Tensor, places: torch.Tensor) -> None:
        """Copy what lies at ``sources`` to ``places``, both flattened over rows and positions."""
        if self.is_initialized:
            for storage in (self.keys, self.values):
                flat = storage.view(storage.shape[0] * storage.shape[1], -1)
                flat.index_copy_(0, places, flat.index_select(0, sources))


class RaggedCache(Cache):  # type: ignore[misc]
    """The cache of a decoding session: storage for all layers and the rows of the running pass.

    Lengths are the session's; here a row is only ever told where its new tokens go.
    """

    def __init__(self, num_layers: int, num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.capacity = 0
        self.device = device
        self.seen = 0
        super().__init__(layers=[RaggedLayer(self) for _ in range(num_layers)])

    def begin(self, starts: Sequence[int], num_new: int, row_ids: Sequence[int] | None = None) -> RowState:
        """Make room for ``num_new`` tokens behind each start and say where they go.

        Args:
            starts: position of the first new token for each row of this pass.
            row_ids: which rows of the storage these are; all of them, in order, if None. A subset is
                only possible when all start at zero.
        """
        fresh = max(starts) == 0 and num_new > 1
        if row_ids is not None and not fresh:
            raise ValueError("a pass over some of the rows must start all of them at zero")
        self.seen = max(starts)
        need = _round_up(self.seen + num_new, _VIEW_MULTIPLE)
        if need > self.capacity:
            self.capacity = _round_up(max(need, self.capacity + self.capacity // 4), _BLOCK)
        start = torch.tensor(starts, dtype=torch.long, device=self.device)
        positions = start[:, None] + torch.arange(num_new, device=self.device)
        ids = range(self.num_rows) if row_ids is None else row_ids
        origin = torch.tensor([i * self.capacity for i in ids], dtype=torch.long, device=self.device)
        self.rows = RowState(
            starts=start,
            positions=positions,
            fresh=fresh,
            slots=(origin[:, None] + positions).flatten(),
            view_length=num_new if fresh else need,
        )
        return self.rows

    def branch(self, tree: Tree) -> None:
        """Make the new tokens of the running pass a tree instead of a line."""
        rows = self.rows
        rows.lineage = tree.lineage.to(self.device)
        rows.positions = rows.starts[:, None] + tree.depths.to(self.device)

    def move(self, starts: torch.Tensor, paths: torch.Tensor) -> None:
        """Move the nodes ``paths`` ([B, n]) of a tree that begins at ``starts`` ([B]) next to each other."""
        origin = torch.arange(self.num_rows, device=self.device)[:, None] * self.capacity
        begin = origin + starts.to(self.device)[:, None]
        sources = begin + paths.to(self.device)
        places = begin + torch.arange(paths.shape[1], device=self.device)
        for layer in self.layers:
            layer.move(sources.flatten(), places.flatten())

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows, in this order."""
        for layer in self.layers:
            layer.keep(rows)
        self.num_rows = len(rows)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
