"""The step of SpecForge 0.2.0: its model and its teacher, on the CPU.

Its loss is a Triton kernel, which has no CPU form; the reference that the package keeps beside it is used
instead, compiled by torch as the package declares it. Attention is ``sdpa``, the only one that has a
backward here.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
import types
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import torch
import torch._inductor.compile_fx  # must look for the real triton before the stand-in is there
from benchmarks.training.case import Case, llama_config, make_parts, vocabulary_maps
from benchmarks.training.contestant import Optimizer, row_shares

from eyas.drafter.shape import DrafterShape


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@contextlib.contextmanager
def _triton_imports() -> Iterator[None]:
    """``import triton`` succeeds within; no kernel can be launched."""
    triton, language = _StandIn("triton"), _StandIn("triton.language")
    vars(triton).update(jit=lambda function: function, language=language)
    for module in (triton, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


with _triton_imports():
    from specforge.algorithms.eagle3 import model as eagle3
    from specforge.core.loss import _compute_loss
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.utils import padding


__all__ = ["Contestant", "make_model", "padding"]


class _ReferenceLoss:
    apply = staticmethod(_compute_loss)


def make_model(shape: DrafterShape, steps: int, dtype: torch.dtype) -> tuple[Any, Any]:
    """SpecForge's drafter of a shape, and its training model around it."""
    eagle3.LogSoftmaxLoss = _ReferenceLoss
    config = llama_config(shape)
    config.pretraining_tp = 1
    config.draft_vocab_size = shape.draft_vocab_size
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa").to(dtype)
    return draft, eagle3.OnlineEagle3Model(draft, length=steps, attention_backend="sdpa")


class Contestant:
    version = version("specforge")
    shifted = True
    objective = "soft_ce"

    def __init__(self, case: Case) -> None:
        self._case, parts = case, make_parts(case)
        dtype = case.torch_dtype()
        draft, self._model = make_model(case.shape(), case.steps, dtype)
        d2t, t2d = vocabulary_maps(case, parts)
        own = {"embed_tokens.weight": parts.embedding, "d2t": d2t, "t2d": t2d}
        draft.load_state_dict({**parts.weights, **own})
        draft.freeze_embedding()
        self._optimizer = Optimizer(case, draft.parameters())
        self._head = parts.head.to(dtype)
        self._tokens = parts.tokens.unsqueeze(0)
        self._aux = parts.aux.flatten(1).unsqueeze(0).to(dtype)
        self._last = parts.last.unsqueeze(0).to(dtype)
        self._mask = case.first_mask().long().view(1, -1, 1)
        self._shares = row_shares(case, shifted=True)

    def step(self) -> list[float]:
        case = self._case
        losses = self._model(
            input_ids=padding(self._tokens, left=False),
            attention_mask=torch.ones_like(self._tokens),
            loss_mask=self._mask,
            target=None,
            hidden_states=self._aux,
            # the compact teacher: less memory, and no slower
            target_hidden_for_compact=padding(self._last, left=False),
            target_head_weight=self._head,
        )[0]
        sums = [loss * case.length for loss in losses]  # its mean is over all rows, trained or not
        total = sum(share * row_sum for share, row_sum in zip(self._shares, sums, strict=True))
        total.backward()
        self._optimizer.step()
        return [float(x.detach()) for x in sums]
