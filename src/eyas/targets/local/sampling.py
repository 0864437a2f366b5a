"""Choosing next tokens, each row by its own stream of random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class RowSampler:
    """Draws tokens for rows; a row's draws depend on its seed and its logits alone.

    Args:
        temperature: 0 takes the likeliest token (the lowest id of equals); otherwise the logits are
            divided by it.
        top_p: only the likeliest tokens that together reach this probability are drawn; tokens as
            likely as the last of them are kept too. 1 keeps all.
        seeds: one for each row.
    """

    def __init__(self, temperature: float, top_p: float, seeds: Sequence[int]) -> None:
        self._temperature = temperature
        self._top_p = top_p
        self._streams = [torch.Generator().manual_seed(seed & (2**63 - 1)) for seed in seeds]

    def draw(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Next tokens [B] (on the logits' device) for logits [B, V] of these rows.

        With a temperature, each row takes one uniform number from its stream and inverts the
        cumulative distribution over token ids, in float64 so that 100,000 small terms keep their sum.
        """
        if self._temperature == 0:
            return logits.argmax(dim=-1)
        uniform = torch.stack([torch.rand((), generator=self._streams[r], dtype=torch.float64) for r in rows])
        wide = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
        probabilities = torch.softmax(wide / self._temperature, dim=-1)
        if self._top_p < 1:
            probabilities = nucleus(probabilities, self._top_p)
        cumulative = probabilities.cumsum(dim=-1, dtype=torch.float64)
        aim = uniform.to(logits.device)[:, None] * cumulative[:, -1:]
        found = torch.searchsorted(cumulative, aim, right=True).squeeze(-1)
        # a number next to 1 may land behind the last token that has any probability
        last = (probabilities > 0).to(torch.uint8).flip(-1).argmax(dim=-1)
        return torch.minimum(found, probabilities.shape[-1] - 1 - last)


def nucleus(probabilities: torch.Tensor, top_p: float, num_tried: int = 256) -> torch.Tensor:
    """Probabilities [B, V] with all but each row's nucleus set to zero.

    A few of the largest are looked at first: sorting a vocabulary costs more than a small model's pass.
    """
    num_tried = min(num_tried, probabilities.shape[-1])
    largest = probabilities.topk(num_tried, dim=-1).values
    reached = largest.cumsum(dim=-1, dtype=torch.float64) >= top_p
    if num_tried < probabilities.shape[-1] and not bool(reached[:, -1].all()):
        return nucleus(probabilities, top_p, num_tried * 16)
    # where rounding keeps the whole sum below top_p, argmax of no True is 0: take the last instead
    first = torch.where(reached[:, -1], reached.to(torch.uint8).argmax(dim=-1), num_tried - 1)
    cutoff = largest.gather(-1, first[:, None])
    return torch.where(probabilities >= cutoff, probabilities, 0.0)
