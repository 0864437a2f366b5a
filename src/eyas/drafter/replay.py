"""Speculative decoding along stored answers: the target's part is read from the store.

What a target would say behind a stored token is the next stored token, so chains and trees can be decoded
with the drafter alone, round for round as with the target. For answers that were greedy this is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.base.stop import StopFlag
from eyas.drafter.batch import TrainingSample
from eyas.drafter.schedule import pack_by_tokens
from eyas.drafter.source import SampleSource
from eyas.drafter.speculate import DecodeSettings, Drafting, decode

BATCH_ANSWERS = 16


@dataclass(frozen=True)
class Replayed:
    """What a pass gives; see `eyas.drafter.speculate.TargetOutput`."""

    logits: Tensor
    aux: Tensor | None


class ReplaySession:
    """A target session that knows its answers.

    Behind a token that is not the stored one it says anything, which no walk ever reaches.

    Args:
        rows: tokens ``[L]`` and aux states ``[L, A, T]`` of each row.
        vocab_size: width of the logits.
    """

    def __init__(
        self, rows: Sequence[tuple[npt.NDArray[np.integer], Tensor]], vocab_size: int, device: torch.device
    ) -> None:
        longest = max(len(tokens) for tokens, _ in rows)
        # one more, so that there is something behind the last token
        self._tokens = torch.zeros((len(rows), longest + 1), dtype=torch.long, device=device)
        self._aux = torch.zeros(
            (len(rows), longest, *rows[0][1].shape[1:]), device=device, dtype=rows[0][1].dtype
        )
        for row, (tokens, aux) in enumerate(rows):
            self._tokens[row, : len(tokens)] = torch.as_tensor(np.asarray(tokens, dtype=np.int64))
            self._aux[row, : len(tokens)] = aux
        self._vocab_size = vocab_size
        self._lengths = torch.zeros(len(rows), dtype=torch.long, device=device)

    @property
    def lengths(self) -> Tensor:
        return self._lengths

    def forward(
        self,
        tokens: Tensor,
        num_new: Tensor | None = None,
        *,
        logits: Literal["last", "all"] = "last",
        aux_layers: Sequence[int] | None = None,
    ) -> Replayed:
        count = (
            torch.full_like(self._lengths, tokens.shape[1]) if num_new is None else num_new.to(self._lengths)
        )
        ahead = torch.arange(tokens.shape[1], device=self._lengths.device)
        found = self._at(self._lengths.unsqueeze(1) + ahead)
        self._lengths = self._lengths + count
        if logits == "last":
            rows = torch.arange(len(tokens), device=count.device)
            return Replayed(found.logits[rows, count - 1], found.aux)
        return found

    def forward_tree(
        self, tokens: Tensor, parents: Tensor, *, aux_layers: Sequence[int] | None = None
    ) -> Replayed:
        depths = torch.zeros_like(parents)
        for node in range(1, parents.shape[1]):
            depths[:, node] = depths.gather(1, parents[:, node : node + 1]).squeeze(1) + 1
        return self._at(self._lengths.unsqueeze(1) + depths)

    def keep_path(self, paths: Tensor, num_nodes: Tensor) -> None:
        self._lengths = self._lengths + num_nodes.to(self._lengths)

    def rollback(self, lengths: Tensor) -> None:
        self._lengths = lengths.to(self._lengths)

    def keep(self, rows: Tensor) -> None:
        self._lengths, self._tokens, self._aux = self._lengths[rows], self._tokens[rows], self._aux[rows]

    def _at(self, places: Tensor) -> Replayed:
        """What the target says behind, and saw at, places ``[B, q]``; those behind the end say anything."""
        rows = torch.arange(len(places), device=places.device).unsqueeze(1)
        following = self._tokens[rows, (places + 1).clamp(max=self._tokens.shape[1] - 1)]
        logits = self._aux.new_zeros((*places.shape, self._vocab_size))
        logits.scatter_(2, following.unsqueeze(2), 1.0)
        return Replayed(logits, self._aux[rows, places.clamp(max=self._aux.shape[1] - 1)])


@torch.no_grad()
def replay_counts(
    ways: Sequence[Drafting],
    source: SampleSource,
    *,
    end_tokens: frozenset[int],
    batch_tokens: int,
    stop: StopFlag,
) -> dict[str, npt.NDArray[np.int64]]:
    """For each sample, rounds and accepted drafts of each way of drafting: int64 ``[2, ways]``.

    Every span is an answer to all that stands before it.

    Raises:
        Stopped: a stop was asked for.
    """
    counts: dict[str, npt.NDArray[np.int64]] = {}
    lengths = dict(source.lengths())
    for ids in pack_by_tokens(sorted(lengths), lengths, batch_tokens):
        answers: list[tuple[str, TrainingSample, int, int]] = []
        for sample in source.load(ids):
            counts[sample.id] = np.zeros((2, len(ways)), dtype=np.int64)
            answers += [(sample.id, sample, start, end) for start, end in sample.spans if start > 0]
        for first in range(0, len(answers), BATCH_ANSWERS):
            group = answers[first : first + BATCH_ANSWERS]
            for number, way in enumerate(ways):
                for (name, *_), found in zip(group, _decoded(way, group, end_tokens, stop), strict=True):
                    counts[name][:, number] += found
    return counts


def _decoded(
    way: Drafting,
    group: Sequence[tuple[str, TrainingSample, int, int]],
    end_tokens: frozenset[int],
    stop: StopFlag,
) -> list[tuple[int, int]]:
    weight = way.drafter.fc.weight
    rows = [(sample.tokens[:end], sample.aux[:end].to(weight.dtype)) for _, sample, _, end in group]
    session = ReplaySession(rows, way.drafter.shape.target_vocab_size, weight.device)
    prompts = [sample.tokens[:start].tolist() for _, sample, start, _ in group]
    limits = [
        # an answer that ended by itself was not cut: drafts beyond its end were made too
        end - start + (way.depth + 1 if int(sample.tokens[end - 1]) in end_tokens else 0)
        for _, sample, start, end in group
    ]
    answers = decode(session, prompts, DecodeSettings(limits, end_tokens), way, stop)
    return [(answer.counts.rounds, sum(answer.counts.accepted)) for answer in answers]
