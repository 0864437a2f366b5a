"""The step of speculators 0.9.0: its model with eager attention and its eager KL loss, on the CPU.

Its other attentions and its fused losses have no backward, or no form at all, on the CPU. It freezes the
head by default; here the head is trained, as in the others.
"""

from __future__ import annotations

from importlib.metadata import version

import torch
from benchmarks.training.case import Case, llama_config, make_parts, vocabulary_maps
from benchmarks.training.contestant import Optimizer
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.config import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig

from eyas.drafter.shape import DrafterShape


def make_model(shape: DrafterShape, steps: int) -> Eagle3DraftModel:
    """The drafter of speculators of a shape, in float32."""
    layer = llama_config(shape)
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.draft_vocab_size,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    config.transformer_layer_config._attn_implementation = "eager"
    return Eagle3DraftModel(config)


class Contestant:
    version = version("speculators")
    shifted = True
    objective = "kl"

    def __init__(self, case: Case) -> None:
        self._case, parts = case, make_parts(case)
        dtype = case.torch_dtype()
        model = make_model(case.shape(), case.steps)
        weights = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in parts.weights.items()}
        d2t, t2d = vocabulary_maps(case, parts)
        own = {
            "embed_tokens.weight": parts.embedding,
            "verifier_lm_head.weight": parts.head[parts.draft_ids],
            "verifier_norm.weight": parts.norm,
            "d2t": d2t,
            "t2d": t2d,
        }
        model.load_state_dict({**weights, **own})
        model.lm_head.weight.requires_grad_(True)
        self._model = model
        self._optimizer = Optimizer(case, model.parameters())
        self._loss = resolve_loss_config("kl_div", "eager")
        self._inputs = {
            "hidden_states": parts.aux.flatten(1)[:-1].unsqueeze(0).to(dtype),
            "input_ids": parts.tokens[1:].unsqueeze(0),
            "document_ids": torch.zeros(1, case.length - 1, dtype=torch.long),
            "verifier_last_hidden_states": parts.residual[1:].unsqueeze(0).to(dtype),
        }
        self._mask = case.first_mask()[:-1].unsqueeze(0)

    def step(self) -> list[float]:
        case = self._case
        # as its trainer has it: float32 weights, narrow arithmetic by autocast
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.dtype == "bfloat16"):
            _, loss, metrics = self._model(
                **self._inputs,
                loss_mask=self._mask.clone(),  # it is written to
                ttt_steps=case.steps,
                ttt_step_loss_decay=case.gamma,
                loss_config=self._loss,
            )
        loss.backward()
        self._optimizer.step()
        return [
            float(metrics[f"loss_{step}_sum"]) / case.gamma**step * len(case.rows(step, shifted=True))
            for step in range(case.steps)
        ]
