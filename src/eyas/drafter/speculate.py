"""Speculative decoding with chains and trees, and plain decoding by the same code.

Each round drafts a chain or a tree, lets the target read the pending token and the drafts in one forward
pass, takes the target's own choice behind each of them, and keeps choices as long as there is a draft that
is the same. Greedy choices are the target's most likely tokens. A sampled choice inverts the
target's distribution at a number drawn for that place in the answer: a draft d is then accepted with
probability p(d), and a refused one is replaced by a token of p without d. That is residual sampling for
drafts that are single tokens (Leviathan et al., 2023); the answer is the one that plain decoding gives
from the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from eyas.base.stop import StopFlag
from eyas.drafter.acceptance import AcceptanceCounts
from eyas.drafter.cache import DraftCache
from eyas.drafter.model import EagleDrafter
from eyas.drafter.tree import TreeShape, follow, grow


class TargetOutput(Protocol):
    """What a forward pass of the target gives."""

    @property
    def logits(self) -> Tensor:
        """``[B, V]`` of the last new token, or ``[B, q, V]``."""

    @property
    def aux(self) -> Tensor | None:
        """``[B, q, A, T]``."""


class TargetSession(Protocol):
    """A target with a ragged cache for a batch of answers."""

    def forward(
        self,
        tokens: Tensor,
        num_new: Tensor | None = None,
        *,
        logits: Literal["last", "all"] = "last",
        aux_layers: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Read ``tokens [B, q]``, right-padded to ``num_new [B]`` each."""

    def rollback(self, lengths: Tensor) -> None:
        """Forget what lies behind ``lengths [B]``."""

    def forward_tree(
        self, tokens: Tensor, parents: Tensor, *, aux_layers: Sequence[int] | None = None
    ) -> TargetOutput:
        """Read a tree ``tokens [B, N]`` behind each row, logits behind every node; none of it counts yet."""

    def keep_path(self, paths: Tensor, num_nodes: Tensor) -> None:
        """Count the first ``num_nodes [B]`` nodes of ``paths [B, n]`` of the tree that was read."""

    def keep(self, rows: Tensor) -> None:
        """Drop all answers but ``rows``."""

    @property
    def lengths(self) -> Tensor:
        """Tokens read so far, ``[B]``."""


@dataclass(frozen=True)
class Drafting:
    """A drafter at work.

    Attributes:
        target_ids: int64 ``[K]`` target id of each draft id.
        aux_layers: layers whose states it reads.
        num_drafts: longest chain of a round.
        tree: draft trees of this shape instead of chains.
    """

    drafter: EagleDrafter
    target_ids: Tensor
    aux_layers: tuple[int, ...]
    num_drafts: int
    tree: TreeShape | None = None

    @property
    def depth(self) -> int:
        """Most drafts that a round can accept."""
        return self.num_drafts if self.tree is None else self.tree.depth


@dataclass(frozen=True)
class DecodeSettings:
    """How answers are chosen and when they end.

    Attributes:
        max_new_tokens: longest answer, one for all or one per prompt; at least 1.
        end_tokens: an answer ends with the first of these, which belongs to it.
        temperature: 0 takes the most likely token.
        seeds: one per prompt; needed above temperature 0.
    """

    max_new_tokens: int | Sequence[int]
    end_tokens: frozenset[int] = frozenset()
    temperature: float = 0.0
    seeds: Sequence[int] = ()


@dataclass
class Decoded:
    """One answer."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"
    counts: AcceptanceCounts = field(default_factory=lambda: AcceptanceCounts.empty(0))


def decode(
    session: TargetSession,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    drafting: Drafting | None = None,
    stop: StopFlag | None = None,
) -> list[Decoded]:
    """Answer a batch of prompts together.

    Args:
        session: fresh, for ``len(prompts)`` answers.
        drafting: None decodes plainly, one token a round.

    Raises:
        Stopped: a stop was asked for; nothing of this batch is returned.
        ValueError: seeds are missing, or a prompt is empty.
    """
    return _Decoding(session, prompts, settings, drafting).run(stop or StopFlag())


@dataclass(frozen=True)
class _Read:
    """A round that the target has read: its choices ``[B, q]`` along what was drafted, how many drafts
    ``[B]`` it agrees with, aux states ``[B, q, A, T]``, and most drafts that it could."""

    choices: Tensor
    agreed: Tensor
    aux: Tensor | None
    num_drafts: int


class _Decoding:
    def __init__(
        self,
        session: TargetSession,
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings,
        drafting: Drafting | None,
    ) -> None:
        if not all(prompts):
            raise ValueError("an empty prompt has no last state to go on from")
        self._session, self._settings = session, settings
        self._drafting = drafting if drafting is not None and drafting.depth > 0 else None
        num_drafts = self._drafting.depth if self._drafting else 0
        limits = settings.max_new_tokens
        self._limits = [limits] * len(prompts) if isinstance(limits, int) else list(limits)
        self._answers = [Decoded(counts=AcceptanceCounts.empty(num_drafts)) for _ in prompts]
        self._prompts = prompts
        self._live = list(range(len(prompts)))
        self._device = session.lengths.device
        self._numbers = self._draw() if settings.temperature > 0 else None

    def _draw(self) -> list[Tensor]:
        """For each answer one number in [0, 1) per place, from a stream of its own."""
        if len(self._settings.seeds) != len(self._prompts):
            raise ValueError("sampling needs one seed per prompt")
        return [
            torch.rand(limit, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            for limit, seed in zip(self._limits, self._settings.seeds, strict=True)
        ]

    @torch.no_grad()
    def run(self, stop: StopFlag) -> list[Decoded]:
        if not self._prompts:
            return []
        cache = DraftCache(self._drafting.drafter, len(self._prompts)) if self._drafting else None
        pending, draft_logits = self._read_prompts(cache)
        while self._live:
            stop.check()
            read = self._read_tree(cache, pending, draft_logits)
            if read is None:
                read = self._read_chain(cache, pending, draft_logits)
            choices, agreed = read.choices, read.agreed
            unfinished = self._take(choices.tolist(), agreed.tolist(), read.num_drafts)
            alive = torch.tensor(unfinished, dtype=torch.long, device=self._device)
            if not unfinished:
                break
            if len(alive) < len(choices):
                self._session.keep(alive)
                if cache is not None:
                    cache.keep(alive)
                choices, agreed = choices[alive], agreed[alive]
            pending = choices.gather(1, agreed.unsqueeze(1)).squeeze(1)
            if cache is not None:
                assert read.aux is not None
                draft_logits = cache.extend(read.aux[alive], choices, agreed + 1)
        return self._answers

    def _read_chain(self, cache: DraftCache | None, pending: Tensor, logits: Tensor | None) -> _Read:
        """Draft a chain, have the target read it, and keep what it agrees with."""
        drafts = self._draft(cache, logits)
        before = self._session.lengths
        chain = torch.cat((pending.unsqueeze(1), drafts), dim=1)
        output = self._session.forward(chain, None, logits="all", aux_layers=self._layers)
        choices = self._choose(output.logits)
        agreed = (choices[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
        self._session.rollback(before + 1 + agreed.to(before.device))
        return _Read(choices, agreed, output.aux, drafts.shape[1])

    def _read_tree(self, cache: DraftCache | None, pending: Tensor, logits: Tensor | None) -> _Read | None:
        """The same with a tree; None where no tree is wanted, or no draft can be used any more."""
        drafting = self._drafting
        if cache is None or logits is None or drafting is None or drafting.tree is None:
            return None
        depth = min(drafting.tree.depth, self._most_usable())
        if depth < 1:
            return None
        shape = replace(drafting.tree, depth=depth)
        tree = grow(cache, logits, pending, drafting.target_ids, shape)
        output = self._session.forward_tree(tree.tokens, tree.parents, aux_layers=self._layers)
        choices = self._choose(output.logits, tree.depths)
        paths, agreed = follow(tree, choices)
        self._session.keep_path(paths, agreed + 1)
        assert output.aux is not None
        rows = torch.arange(len(paths), device=paths.device).unsqueeze(1)
        return _Read(choices.gather(1, paths), agreed, output.aux[rows, paths], depth)

    @property
    def _layers(self) -> tuple[int, ...] | None:
        return self._drafting.aux_layers if self._drafting else None

    def _read_prompts(self, cache: DraftCache | None) -> tuple[Tensor, Tensor | None]:
        """Read the prompts; first tokens of the answers still alive ``[B]`` and their draft logits."""
        lengths = torch.tensor([len(prompt) for prompt in self._prompts])
        width = int(lengths.max())
        padded = [list(prompt) + [0] * (width - len(prompt)) for prompt in self._prompts]
        tokens = torch.tensor(padded)
        output = self._session.forward(tokens, lengths, logits="last", aux_layers=self._layers)
        self._device = output.logits.device  # a session may count on the CPU and compute elsewhere
        tokens, lengths = tokens.to(self._device), lengths.to(self._device)
        pending = self._choose(output.logits.unsqueeze(1)).squeeze(1)
        draft_logits = None
        if cache is not None:
            assert output.aux is not None
            following = torch.cat((tokens[:, 1:], tokens[:, :1]), dim=1)
            following[torch.arange(len(tokens), device=self._device), lengths - 1] = pending
            draft_logits = cache.extend(output.aux, following, lengths)
        unfinished = [
            place
            for place, token in enumerate(pending.tolist())
            if not self._append(self._live[place], token)
        ]
        if len(unfinished) < len(self._live):
            alive = torch.tensor(unfinished, dtype=torch.long, device=self._device)
            self._live = [self._live[place] for place in unfinished]
            if unfinished:
                self._session.keep(alive)
            pending = pending[alive]
            if cache is not None and draft_logits is not None:
                cache.keep(alive)
                draft_logits = draft_logits[alive]
        return pending, draft_logits

    def _draft(self, cache: DraftCache | None, logits: Tensor | None) -> Tensor:
        """Drafted target ids ``[B, k]``; no more than the longest remaining answer can use."""
        if cache is None or logits is None or self._drafting is None:
            return torch.empty((len(self._live), 0), dtype=torch.long, device=self._device)
        count = min(self._drafting.num_drafts, self._most_usable())
        drafts: list[Tensor] = []
        for _ in range(count):
            if drafts:
                logits = cache.draft(drafts[-1])
            drafts.append(self._drafting.target_ids[logits.argmax(dim=-1)])
        if not drafts:
            return torch.empty((len(self._live), 0), dtype=torch.long, device=self._device)
        return torch.stack(drafts, dim=1)

    def _most_usable(self) -> int:
        """Drafts that the longest remaining answer has room for, before the token that comes for nothing."""
        return max(self._room(answer) for answer in self._live) - 1

    def _take(self, choices: list[list[int]], agreed: list[int], num_drafts: int) -> list[int]:
        """Append a round's tokens and count it; places that go on."""
        unfinished, live = [], []
        for place, answer in enumerate(self._live):
            usable = max(0, min(num_drafts, self._room(answer) - 1))
            emitted, ended = 0, False
            for token in choices[place][: agreed[place] + 1]:
                emitted += 1
                ended = self._append(answer, token)
                if ended:
                    break
            accepted = min(agreed[place], usable, emitted)
            self._answers[answer].counts.count_round(
                usable=usable, accepted=accepted, ended_by_draft=ended and emitted == accepted
            )
            if not ended:
                unfinished.append(place)
                live.append(answer)
        self._live = live
        return unfinished

    def _room(self, answer: int) -> int:
        return self._limits[answer] - len(self._answers[answer].tokens)

    def _append(self, answer: int, token: int) -> bool:
        """Append a token; whether the answer is finished."""
        decoded = self._answers[answer]
        decoded.tokens.append(token)
        if token in self._settings.end_tokens:
            decoded.finish_reason = "stop"
            return True
        return self._room(answer) <= 0

    def _choose(self, logits: Tensor, ahead: Tensor | None = None) -> Tensor:
        """The target's choices ``[B, q]`` from ``[B, q, V]``.

        ``ahead [B, q]`` is how far each lies before the next place of its answer; 0, 1, 2, ... if None.
        Choices of the same place are made with the same number, whatever they follow.
        """
        if self._numbers is None:
            return logits.argmax(dim=-1)
        wide = logits.to(torch.float64) / self._settings.temperature
        bounds = wide.softmax(dim=-1).cumsum(dim=-1)
        if ahead is None:
            ahead = torch.arange(logits.shape[1]).expand(len(logits), -1)
        ahead = ahead.cpu()
        numbers = torch.zeros(logits.shape[:2], dtype=torch.float64)
        for place, answer in enumerate(self._live):
            wanted_places = len(self._answers[answer].tokens) + ahead[place]
            within = wanted_places < len(self._numbers[answer])  # what lies behind the limit is never taken
            numbers[place, within] = self._numbers[answer][wanted_places[within]]
        wanted = numbers.to(logits.device).unsqueeze(-1) * bounds[..., -1:]
        found = torch.searchsorted(bounds, wanted, right=True).squeeze(-1)
        return found.clamp(max=logits.shape[-1] - 1)
