"""The recipe of speculators 0.9.0 by its defaults: head from the target and frozen, three draft steps, KL.

Muon for matrices and AdamW for the rest, both at 1e-3 and falling in a line after 1% of warm-up, 20 epochs.
One sample a step: its packing joins samples up to 8,192 tokens, which makes few and slow steps here.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from benchmarks.training.learner import Lesson, full_rows
from benchmarks.training.of_speculators import make_model
from speculators.losses import resolve_loss_config
from speculators.train.optimizers import build_optimizers
from torch import Tensor

STEPS, LR, WARMUP = 3, 1e-3, 0.01
OPTIMIZER = SimpleNamespace(
    optimizer="muon", lr=LR, weight_decay=0.01, muon_lr=LR, muon_momentum=0.95, muon_weight_decay=0.1,
    muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw",
)  # fmt: skip
"""The defaults of its configuration."""


class Learner:
    def __init__(self, lesson: Lesson) -> None:
        torch.manual_seed(lesson.settings.seed)
        self.shape = lesson.plain_shape()
        ids = torch.from_numpy(lesson.vocabulary.target_ids)
        head = lesson.parts.head[ids].float()
        model = make_model(self.shape, STEPS)
        model.load_state_dict(
            {
                "embed_tokens.weight": lesson.parts.embedding,
                "verifier_lm_head.weight": head,
                "lm_head.weight": head,
                "d2t": torch.from_numpy(lesson.vocabulary.d2t),
                "t2d": torch.from_numpy(lesson.vocabulary.t2d),
            },
            strict=False,
        )
        # the store keeps states after the final norm, and this would norm them again
        model.verifier_norm = torch.nn.Identity()
        self._model, self._order = model, lesson.order()
        self._total = lesson.epochs * len(lesson.samples.lengths())
        self._done = 0
        self._optimizers = build_optimizers(model, OPTIMIZER)
        self._loss = resolve_loss_config("kl_div", "eager")

    def learn(self) -> int:
        sample = next(self._order, None)
        if sample is None:
            return 0
        last, supervised = full_rows(sample)
        tokens = torch.from_numpy(sample.tokens).long().unsqueeze(0)
        _, loss, _ = self._model(
            hidden_states=sample.aux.float().flatten(1)[:-1].unsqueeze(0),
            input_ids=tokens[:, 1:],
            document_ids=torch.zeros(1, tokens.shape[1] - 1, dtype=torch.long),
            loss_mask=supervised[:-1].unsqueeze(0),
            verifier_last_hidden_states=last[1:].unsqueeze(0),
            ttt_steps=STEPS,
            ttt_step_loss_decay=1.0,
            loss_config=self._loss,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self._model.parameters() if p.requires_grad], 1.0)
        rising = max(1, int(WARMUP * self._total))
        falling = (self._total - self._done) / max(1, self._total - rising)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LR * min((self._done + 1) / rising, falling, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._done += 1
        return tokens.shape[1]

    def weights(self) -> dict[str, Tensor]:
        own = ("embed_tokens.weight", "verifier_", "d2t", "t2d")
        state = self._model.state_dict()
        return {
            name.replace("layers.0.", "midlayer."): tensor
            for name, tensor in state.items()
            if not name.startswith(own)
        }
