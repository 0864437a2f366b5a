"""The recipe of SpecForge 0.2.0 by its defaults: random start, one sample a step, its optimizer.

Learning rate 1e-4 with a cosine after 1.5% of warm-up, gradients clipped at 0.5, seven draft steps weighted
by 0.8^j.
"""

from __future__ import annotations

import torch
from benchmarks.training.learner import Lesson, full_rows
from benchmarks.training.of_specforge import make_model, padding
from specforge.optimizer import BF16Optimizer
from torch import Tensor

STEPS, GAMMA = 7, 0.8


class Learner:
    def __init__(self, lesson: Lesson) -> None:
        torch.manual_seed(lesson.settings.seed)
        self.shape = lesson.plain_shape()
        self._draft, self._model = make_model(self.shape, STEPS, torch.float32)
        maps = {
            "d2t": torch.from_numpy(lesson.vocabulary.d2t),
            "t2d": torch.from_numpy(lesson.vocabulary.t2d),
        }
        self._draft.load_state_dict({"embed_tokens.weight": lesson.parts.embedding, **maps}, strict=False)
        self._draft.freeze_embedding()
        self._head = lesson.parts.head
        self._order = lesson.order()
        total = lesson.epochs * len(lesson.samples.lengths())
        self._optimizer = BF16Optimizer(self._draft, lr=1e-4, total_steps=total)

    def learn(self) -> int:
        sample = next(self._order, None)
        if sample is None:
            return 0
        last, supervised = full_rows(sample)
        tokens = torch.from_numpy(sample.tokens).long().unsqueeze(0)
        losses = self._model(
            input_ids=padding(tokens, left=False),
            attention_mask=torch.ones_like(tokens),
            loss_mask=supervised.long().view(1, -1, 1),
            target=None,
            hidden_states=sample.aux.float().flatten(1).unsqueeze(0),
            target_hidden_for_compact=padding(last.unsqueeze(0), left=False),
            target_head_weight=self._head,
        )[0]
        sum(GAMMA**step * loss for step, loss in enumerate(losses)).backward()
        self._optimizer.step()
        return tokens.shape[1]

    def weights(self) -> dict[str, Tensor]:
        own = ("embed_tokens.weight", "d2t", "t2d")
        return {name: tensor for name, tensor in self._draft.state_dict().items() if name not in own}
