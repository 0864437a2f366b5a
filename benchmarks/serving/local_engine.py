"""The target, the drafter and held-out first turns of a trained project, to decode on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.drafter.model import EagleDrafter
from eyas.drafter.speculate import Decoded, DecodeSettings, Drafting, decode
from eyas.drafter.vocabulary import DraftVocabulary
from eyas.targets.local.model import LocalTarget

_GROUP = 8
"""Prompts decoded together."""


@dataclass(frozen=True)
class LocalEngine:
    """What decodes ``prompts``.

    Attributes:
        draft_ids: ``[D]`` target token of each draft token.
        aux_layers: layers whose states the drafter reads, counted after k decoder layers.
        end_tokens: of the target, ascending.
    """

    target: LocalTarget
    drafter: EagleDrafter
    vocabulary: DraftVocabulary
    draft_ids: Tensor
    aux_layers: tuple[int, ...]
    prompts: list[list[int]]
    end_tokens: tuple[int, ...]

    @classmethod
    def open(cls, project: Any, max_prompts: int, dtype: str = "float32") -> LocalEngine:
        """Load a trained project; at most so many prompts, spread over the held-out file.

        Args:
            dtype: arithmetic of target and drafter.
        """
        import torch

        from eyas.stages.chat_tools import load_renderer
        from eyas.stages.evaluate.prompts import held_out_conversations
        from eyas.stages.trained import load_trained
        from eyas.targets.parts import load_parts

        trained, renderer = load_trained(project), load_renderer(project)
        held_out = held_out_conversations(project, renderer)
        chosen = held_out[:: max(1, len(held_out) // max_prompts)][:max_prompts]
        target = LocalTarget.load(project.resolved.model, "cpu", dtype)
        embedding = load_parts(project.resolved.model, "cpu", target.dtype).embedding
        return cls(
            target,
            trained.drafter(embedding, target.dtype),
            trained.vocabulary,
            torch.from_numpy(trained.vocabulary.target_ids),
            tuple(project.resolved.aux_layers),
            [prompt for one in chosen if (prompt := one.next_prompt()) is not None],
            tuple(sorted(renderer.end_tokens)),
        )

    def chain(self, num_drafts: int) -> Drafting:
        """Drafting with a chain of this length."""
        return Drafting(self.drafter, self.draft_ids, self.aux_layers, num_drafts)

    def answers(self, drafting: Drafting | None, max_new_tokens: int) -> list[Decoded]:
        """Greedy answers to all prompts; plain ones without ``drafting``."""
        settings = DecodeSettings(max_new_tokens, frozenset(self.end_tokens))
        found: list[Decoded] = []
        for at in range(0, len(self.prompts), _GROUP):
            group = self.prompts[at : at + _GROUP]
            found += decode(self.target.session(len(group)), group, settings, drafting)
        return found
