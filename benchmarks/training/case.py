"""What every contestant trains: one architecture, one set of first weights, one sample."""

from __future__ import annotations

import ctypes
import gc
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.shape import DrafterShape

EPS = 1e-5
THETA = 1e5


@dataclass(frozen=True)
class Case:
    """Sizes of one step; those of SmolLM2-135M unless said otherwise.

    Attributes:
        length: tokens of the sample.
        start: first token that the assistant wrote; all from there on are supervised.
        steps: draft steps unrolled (J).
        dtype: arithmetic, a name of torch.
    """

    hidden: int = 576
    intermediate: int = 1536
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    vocab: int = 49152
    drafts: int = 8192
    num_aux: int = 3
    length: int = 512
    start: int = 0
    steps: int = 7
    gamma: float = 0.8
    lr: float = 1e-4
    clip: float = 1.0
    dtype: str = "float32"
    seed: int = 0

    def rows(self, step: int, *, shifted: bool) -> range:
        """Rows supervised at a draft step.

        Args:
            shifted: as the peers count: the first step's rows moved back by one for each step, so that
                rows before the answer's first draft are trained too. Else `eyas.drafter.rows`.
        """
        first = max(self.start - 1, 0)
        return range(max(first - step, 0) if shifted else first, self.length - 2 - step)

    def first_mask(self) -> Tensor:
        """``[length]`` booleans of the rows supervised at step 0."""
        mask = torch.zeros(self.length, dtype=torch.bool)
        rows = self.rows(0, shifted=False)
        mask[rows.start : rows.stop] = True
        return mask

    def shape(self) -> DrafterShape:
        return DrafterShape(
            hidden_size=self.hidden,
            target_hidden_size=self.hidden,
            num_aux=self.num_aux,
            intermediate_size=self.intermediate,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            draft_vocab_size=self.drafts,
            target_vocab_size=self.vocab,
            rms_norm_eps=EPS,
            rope_theta=THETA,
            max_position_embeddings=self.length + self.steps,
        )

    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Case:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Parts:
    """Tensors of a case, float32.

    Attributes:
        weights: the drafter's, by the names of engines' checkpoints.
        embedding, head: ``[V, H]`` of the target. Head rows outside the draft vocabulary are zero, so that
            the target's favourite can always be drafted: one peer leaves other rows out.
        draft_ids: ``[K]`` ascending.
        tokens: ``[L]``.
        aux: ``[L, A, H]``.
        residual: ``[L, H]`` before the target's final norm, whose weight is ``norm``; ``last`` is after it.
    """

    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    draft_ids: Tensor
    tokens: Tensor
    aux: Tensor
    residual: Tensor
    norm: Tensor
    last: Tensor


def make_parts(case: Case) -> Parts:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(size, generator=generator) * std

    hidden, wide = case.hidden, 2 * case.hidden
    attention = "midlayer.self_attn."
    sizes = {
        "fc.weight": (hidden, case.num_aux * hidden),
        attention + "q_proj.weight": (case.heads * case.head_dim, wide),
        attention + "k_proj.weight": (case.kv_heads * case.head_dim, wide),
        attention + "v_proj.weight": (case.kv_heads * case.head_dim, wide),
        attention + "o_proj.weight": (hidden, case.heads * case.head_dim),
        "midlayer.mlp.gate_proj.weight": (case.intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (case.intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, case.intermediate),
        "lm_head.weight": (case.drafts, hidden),
    }
    weights = {name: normal(*size, std=size[1] ** -0.5) for name, size in sizes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"midlayer.{name}.weight"] = 1 + normal(hidden, std=0.1)
    weights["norm.weight"] = 1 + normal(hidden, std=0.1)
    draft_ids = torch.randperm(case.vocab, generator=generator)[: case.drafts].sort().values
    head = torch.zeros(case.vocab, hidden)
    head[draft_ids] = normal(case.drafts, hidden, std=2 * hidden**-0.5)
    residual, norm = normal(case.length, hidden), 1 + normal(hidden, std=0.1)
    return Parts(
        weights=weights,
        embedding=normal(case.vocab, hidden),
        head=head,
        draft_ids=draft_ids,
        tokens=torch.randint(0, case.vocab, (case.length,), generator=generator),
        aux=normal(case.length, case.num_aux, hidden),
        residual=residual,
        norm=norm,
        last=torch.nn.functional.rms_norm(residual, (hidden,), norm, EPS),
    )


def vocabulary_maps(case: Case, parts: Parts) -> tuple[Tensor, Tensor]:
    """``d2t [K]`` (offsets) and ``t2d [V]`` (booleans), as both peers keep them."""
    in_drafts = torch.zeros(case.vocab, dtype=torch.bool)
    in_drafts[parts.draft_ids] = True
    return parts.draft_ids - torch.arange(case.drafts), in_drafts


def peak_and_now() -> tuple[int, int]:
    """Bytes of this process: most so far, and now."""
    found: dict[str, Any] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "VmRSS"):
            found[name] = int(value.split()[0]) * 1024
    return found["VmHWM"], found["VmRSS"]


def forget_peak() -> None:
    """The most so far is what it is now: setting a case up takes more than a step of some contestants.

    What setting up has freed goes back to the system first, where the C library can do that.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def llama_config(shape: DrafterShape) -> Any:
    """The shape as transformers' configuration of one Llama layer, which peers build their drafters from."""
    import transformers

    return transformers.LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_hidden_layers=1,
        vocab_size=shape.target_vocab_size,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        max_position_embeddings=shape.max_position_embeddings,
    )
