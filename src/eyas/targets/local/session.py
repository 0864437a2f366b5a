"""Decoding sessions: rows that grow by any number of tokens, shrink, and end, each for itself.

Legend: B rows, q new tokens (the longest row's), A aux layers, H width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from eyas.base.errors import TargetError
from eyas.targets.batches import plan_batches
from eyas.targets.local.attention import NAME, active_rows
from eyas.targets.local.cache import RaggedCache
from eyas.targets.local.taps import tapped
from eyas.targets.local.tree import Tree

if TYPE_CHECKING:
    from eyas.targets.local.model import LocalTarget

Wanted = Literal["last", "all"]


@dataclass(frozen=True)
class StepOutput:
    """What one pass over new tokens gives; rows beyond a row's own ``num_new`` mean nothing.

    Attributes:
        logits: [B, V] behind each row's last new token, or [B, q, V] behind each new token.
        last: the states that ``logits`` come from: [B, H] or [B, q, H].
        aux: [B, q, A, H], or None if no layers were asked for.
    """

    logits: torch.Tensor
    last: torch.Tensor
    aux: torch.Tensor | None


class DecodeSession(ABC):
    """Rows of tokens that a target continues; a row's results depend on its own tokens alone.

    ``lengths`` ([B], on the CPU) counts the tokens that each row has been given.
    """

    def __init__(self, target: LocalTarget, batch_size: int) -> None:
        self._target = target
        self.lengths = torch.zeros(batch_size, dtype=torch.long)

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor,
        num_new: torch.Tensor | None = None,
        *,
        logits: Wanted = "last",
        aux_layers: Sequence[int] | None = None,
    ) -> StepOutput:
        """Append tokens to every row and give what the target says behind them.

        Args:
            tokens: [B, q] token ids, padded on the right.
            num_new: [B] how many of a row's tokens are real, 1 to q; all of them if None.
            logits: behind the last new token of each row only, or behind every one.
            aux_layers: layers whose residual streams are wanted, in the "after k layers" sense.

        Raises:
            TargetError: tokens and rows do not fit each other.
        """
        counts = self._check(tokens, num_new)
        states, aux = self._run(tokens.to(self._target.device), counts, aux_layers)
        self.lengths = self.lengths + counts
        if logits == "last":
            states = _pick_last(states, counts)
        return StepOutput(self._target.logits(states), states, aux)

    @torch.no_grad()
    def forward_tree(
        self, tokens: torch.Tensor, parents: torch.Tensor, *, aux_layers: Sequence[int] | None = None
    ) -> StepOutput:
        """Read a tree behind each row: every node sees its row and what it descends from.

        Nothing of it counts until `keep_path` says which nodes do; the row's next pass has to come after.

        Args:
            tokens, parents: [B, N], as in `Tree`.

        Returns:
            Logits [B, N, V] behind every node, with states and aux states likewise.

        Raises:
            TargetError: tokens, rows and parents do not fit each other.
        """
        self._check(tokens, None)
        if not bool((self.lengths > 0).all()):
            raise TargetError("a tree grows behind a row that has tokens")
        states, aux = self._run_tree(tokens.to(self._target.device), Tree.of(parents), aux_layers)
        return StepOutput(self._target.logits(states), states, aux)

    def keep_path(self, paths: torch.Tensor, num_nodes: torch.Tensor) -> None:
        """Take the first ``num_nodes`` ([B]) nodes of each path ([B, n], from the root on) as new tokens."""
        self._take_path(paths.to("cpu", torch.long), num_nodes.to("cpu", torch.long))
        self.lengths = self.lengths + num_nodes.to("cpu", torch.long)

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], *, budget_tokens: int = 8192) -> torch.Tensor:
        """Give empty rows their prompts; logits [B, V] behind each, whatever their lengths.

        Args:
            prompts: one for each row.
            budget_tokens: positions, padding counted, of one pass; prompts of like length go together.

        Raises:
            TargetError: the rows are not empty, or there is not one prompt for each.
        """
        if len(prompts) != len(self.lengths) or bool(self.lengths.any()):
            raise TargetError("only empty rows take prompts, one for each row")
        if not all(prompts):
            raise TargetError("a prompt without tokens cannot be continued")
        items = [(f"{row:09d}", len(prompt)) for row, prompt in enumerate(prompts)]
        found: list[torch.Tensor] = []
        groups = plan_batches(items, budget_tokens)
        for rows in groups:
            ids = self._target.padded([prompts[row] for row in rows])
            counts = torch.tensor([len(prompts[row]) for row in rows])
            found.append(_pick_last(self._prefill(ids, counts, rows), counts))
        joined = torch.cat(found)
        states = torch.empty_like(joined)
        states[torch.tensor([row for rows in groups for row in rows], device=states.device)] = joined
        self.lengths = torch.tensor([len(prompt) for prompt in prompts])
        return self._target.logits(states)

    def rollback(self, lengths: torch.Tensor) -> None:
        """Shorten each row to a length ([B]) that is at most its present one.

        Raises:
            TargetError: a length is negative or above the present one.
        """
        wanted = lengths.to("cpu", torch.long)
        if wanted.shape != self.lengths.shape or bool(((wanted > self.lengths) | (wanted < 0)).any()):
            raise TargetError(
                "rows can only be shortened", why=f"{self.lengths.tolist()} to {wanted.tolist()}"
            )
        self.lengths = wanted.clone()

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only these rows (indices), in this order."""
        self.lengths = self.lengths[rows.to("cpu")]

    @abstractmethod
    def _run(
        self, tokens: torch.Tensor, counts: torch.Tensor, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States [B, q, H] and aux [B, q, A, H] of the new tokens."""

    @abstractmethod
    def _run_tree(
        self, tokens: torch.Tensor, tree: Tree, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """States [B, N, H] and aux [B, N, A, H] of a tree's nodes."""

    @abstractmethod
    def _take_path(self, paths: torch.Tensor, num_nodes: torch.Tensor) -> None:
        """Keep the nodes of the last tree that lie on the paths."""

    @abstractmethod
    def _prefill(self, ids: torch.Tensor, counts: torch.Tensor, rows: list[int]) -> torch.Tensor:
        """States [b, q, H] of prompts given to some empty rows."""

    def _check(self, tokens: torch.Tensor, num_new: torch.Tensor | None) -> torch.Tensor:
        if tokens.ndim != 2 or tokens.shape[0] != len(self.lengths) or tokens.shape[1] < 1:
            raise TargetError(
                "tokens do not fit the session's rows",
                why=f"{list(tokens.shape)} tokens for {len(self.lengths)} rows",
            )
        if num_new is None:
            return torch.full_like(self.lengths, tokens.shape[1])
        counts = num_new.to("cpu", torch.long)
        if counts.shape != self.lengths.shape or int(counts.min()) < 1 or int(counts.max()) > tokens.shape[1]:
            raise TargetError(
                "num_new must be between 1 and the tokens given",
                why=f"{num_new.tolist()} of {tokens.shape[1]}",
            )
        return counts


class RaggedSession(DecodeSession):
    """A session that keeps keys and values; a pass costs its new tokens only."""

    def __init__(self, target: LocalTarget, batch_size: int) -> None:
        super().__init__(target, batch_size)
        self._cache = RaggedCache(target.facts.num_layers, batch_size, target.device)

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        self._cache.keep(rows.to(self._target.device, torch.long))

    def _prefill(self, ids: torch.Tensor, counts: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if ids.shape[1] == 1:  # one token is no fresh pass to the cache
            ids = torch.nn.functional.pad(ids, (0, 1))
        return self._pass(ids, [0] * len(rows), rows)

    def _run(
        self, tokens: torch.Tensor, counts: torch.Tensor, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._tapped(tokens, None, aux_layers)

    def _run_tree(
        self, tokens: torch.Tensor, tree: Tree, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._tapped(tokens, tree, aux_layers)

    def _take_path(self, paths: torch.Tensor, num_nodes: torch.Tensor) -> None:
        self._cache.move(self.lengths, paths)

    def _tapped(
        self, tokens: torch.Tensor, tree: Tree | None, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        starts = self.lengths.tolist()
        if aux_layers is None:
            return self._pass(tokens, starts, None, tree), None
        taken: list[torch.Tensor] = [torch.empty(0)] * len(aux_layers)

        def take(slot: int, residual: torch.Tensor) -> None:
            taken[slot] = residual

        with tapped(self._target.structure.layers, aux_layers, take):
            states = self._pass(tokens, starts, None, tree)
        return states, torch.stack(taken, dim=2)

    def _pass(
        self,
        tokens: torch.Tensor,
        starts: list[int],
        row_ids: list[int] | None,
        tree: Tree | None = None,
    ) -> torch.Tensor:
        structure = self._target.structure
        rows = self._cache.begin(starts, tokens.shape[1], row_ids)
        if tree is not None:
            self._cache.branch(tree)
        token = active_rows.set(rows)
        try:
            arguments: dict[str, Any] = {"use_cache": True, "position_ids": rows.positions}
            if structure.cache_argument is not None:
                arguments[structure.cache_argument] = self._cache
            return self._target.states(tokens, **arguments)
        finally:
            active_rows.reset(token)
            rows.tiled.clear()


class RecomputeSession(DecodeSession):
    """A session that runs each row's whole prefix at every pass; for layers that cannot be rolled back."""

    def __init__(self, target: LocalTarget, batch_size: int) -> None:
        super().__init__(target, batch_size)
        self._tokens: list[list[int]] = [[] for _ in range(batch_size)]
        self._nodes: list[list[int]] = []

    def rollback(self, lengths: torch.Tensor) -> None:
        super().rollback(lengths)
        self._tokens = [row[:n] for row, n in zip(self._tokens, self.lengths.tolist(), strict=True)]

    def keep(self, rows: torch.Tensor) -> None:
        super().keep(rows)
        self._tokens = [self._tokens[row] for row in rows.tolist()]

    def _prefill(self, ids: torch.Tensor, counts: torch.Tensor, rows: list[int]) -> torch.Tensor:
        for row, tokens, count in zip(rows, ids.tolist(), counts.tolist(), strict=True):
            self._tokens[row] = tokens[:count]
        return self._target.states(ids)

    def _run(
        self, tokens: torch.Tensor, counts: torch.Tensor, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        starts, num_new = self.lengths, tokens.shape[1]
        added = zip(self._tokens, tokens.tolist(), counts.tolist(), strict=True)
        self._tokens = [row + new[:n] for row, new, n in added]
        ids = self._target.padded(self._tokens)
        places = (starts[:, None] + torch.arange(num_new)).clamp(max=ids.shape[1] - 1).to(ids.device)
        taken: list[torch.Tensor] = [torch.empty(0)] * len(aux_layers or ())

        def take(slot: int, residual: torch.Tensor) -> None:
            taken[slot] = _gather(residual, places)

        with tapped(self._target.structure.layers, aux_layers or (), take):
            states = _gather(self._target.states(ids), places)
        return states, torch.stack(taken, dim=2) if aux_layers is not None else None

    def _run_tree(
        self, tokens: torch.Tensor, tree: Tree, aux_layers: Sequence[int] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Each way to a leaf is a row of its own; a node is read where it first comes up."""
        self._nodes = tokens.tolist()
        ways: list[list[int]] = []
        found = torch.zeros((*tokens.shape, 2), dtype=torch.long)
        for row, before in enumerate(self._tokens):
            for leaf in reversed(tree.leaves(row)):
                path = tree.path(row, leaf)
                for step, node in enumerate(path):
                    found[row, node] = torch.tensor([len(ways), len(before) + step])
                ways.append(before + [self._nodes[row][node] for node in path])
        ids = self._target.padded(ways)
        way, place = found.to(ids.device).unbind(-1)
        taken: list[torch.Tensor] = [torch.empty(0)] * len(aux_layers or ())

        def take(slot: int, residual: torch.Tensor) -> None:
            taken[slot] = residual[way, place]

        with tapped(self._target.structure.layers, aux_layers or (), take):
            states = self._target.states(ids)[way, place]
        return states, torch.stack(taken, dim=2) if aux_layers is not None else None

    def _take_path(self, paths: torch.Tensor, num_nodes: torch.Tensor) -> None:
        for row, (path, count) in enumerate(zip(paths.tolist(), num_nodes.tolist(), strict=True)):
            self._tokens[row] = self._tokens[row] + [self._nodes[row][node] for node in path[:count]]


def ragged_fault(target: LocalTarget) -> str | None:
    """Why a target cannot keep keys and values in a ragged cache; None if it can.

    Besides the kinds of its layers, a short run with rows of different lengths and a rollback is
    compared with whole forward passes: code that counts positions in its own way is found here.
    """
    config = target.structure.decoder.config
    implementation = getattr(config, "_attn_implementation", None)
    if (
        implementation != NAME
        or target.structure.cache_argument is None
        or not target.structure.takes_positions
    ):
        return f"its code brings its own attention ({implementation})"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    foreign = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    if foreign:
        return f"layers of kind {', '.join(sorted(foreign))} cannot be rolled back"
    try:
        error = _ragged_error(target)
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError, NotImplementedError) as fault:
        return (
            f"its code does not run with eyas' cache ({type(fault).__name__}: {str(fault).splitlines()[0]})"
        )
    tolerance = 1e-3 if target.dtype in (torch.float32, torch.float64) else 0.15
    if not error <= tolerance:
        return f"its states differ with eyas' cache (relative error {error:.2g})"
    return None


def _ragged_error(target: LocalTarget) -> float:
    """Relative error of a ragged session against whole passes, over rows of 7 and 4 tokens."""
    size = target.facts.vocab_size
    rows = [[(7 * i + 3) % size for i in range(7)], [(11 * i + 5) % size for i in range(4)]]
    session = RaggedSession(target, 2)
    session.prefill([rows[0][:5], rows[1][:1]])
    spoiled = torch.tensor([[1, 2, 3], [3, 2, 1]]) % size
    session.forward(spoiled)
    session.rollback(torch.tensor([5, 1]))
    tokens = torch.tensor([[*rows[0][5:], 0], rows[1][1:]])
    output = session.forward(tokens, torch.tensor([2, 3]), logits="all")
    worst = 0.0
    for row, (start, end) in enumerate(((5, 7), (1, 4))):
        with torch.no_grad():
            whole = target.states(target.padded([rows[row]]))[0, start:end].double()
        found = output.last[row, : end - start].double()
        worst = max(worst, float((found - whole).norm() / whole.norm()))
    return worst


def _pick_last(states: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[B, q, H] to [B, H] at each row's last new token."""
    rows = torch.arange(states.shape[0], device=states.device)
    return states[rows, counts.to(states.device) - 1]


def _gather(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[B, T, H] at [B, q] places: [B, q, H]."""
    return states.gather(1, places[:, :, None].expand(-1, -1, states.shape[2]))
