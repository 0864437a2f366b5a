"""The few tensors of a target that training needs, read without loading the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eyas.base.errors import TargetError
from eyas.config.target_facts import TargetFacts, read_target_facts
from eyas.targets.weight_files import INDEX_NAME, read_index, weight_files

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight",
              "tok_embeddings.weight")  # fmt: skip
_NORM = ("norm.weight", "ln_f.weight", "final_layernorm.weight", "final_layer_norm.weight",
         "final_norm.weight")  # fmt: skip
_HEAD = ("lm_head.weight", "embed_out.weight", "output.weight")
_FOREIGN = ("vision", "visual", "image", "audio", "projector", "speech", "video", "mtp", "talker", "encoder")
"""A name with one of these in it belongs to another part than the language model."""
_CENTRED_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text",
                  "qwen3_5_text", "qwen3_next", "recurrent_gemma", "vaultgemma")  # fmt: skip
"""Model types whose norms store ``weight - 1``."""


@dataclass(frozen=True)
class TargetParts:
    """Embedding, final norm and head of a target, with their numbers as the model uses them.

    Attributes:
        embedding: [V, H], the rows of the table as stored.
        head: [V, H], so that ``last @ head.T`` are the logits (a constant factor is folded in).
        norm_weight: [H], the factor that the final norm multiplies with.
        norm_eps: the final norm's epsilon.
        embedding_scale: what the model multiplies embedding rows with before its first layer.
        final_softcap: the logits are ``c * tanh(logits / c)``; None without a cap.
        tied: the head is the embedding.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    norm_weight: torch.Tensor
    norm_eps: float
    embedding_scale: float
    final_softcap: float | None
    tied: bool


def load_parts(model: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TargetParts:
    """Read embedding, final norm and head from a single-file, sharded, tied or nested checkpoint.

    Only these tensors are read, so a target of any size costs its two largest matrices.

    Raises:
        TargetError: a tensor is missing, ambiguous, quantized or of another shape than config.json says.
    """
    facts = read_target_facts(model)
    where = _locate(model)
    candidates = [name for name in where if _of_language_model(name)]
    embedding_name = _pick("embedding", candidates, _EMBEDDING, "", model)
    prefix = next(embedding_name.removesuffix(e) for e in _EMBEDDING if embedding_name.endswith(e))
    norm_name = _pick("final norm", candidates, _NORM, prefix, model)
    heads = [name for name in candidates if name.endswith(_HEAD)]
    if not heads and not facts.tie_word_embeddings:
        raise TargetError(
            "the target's checkpoint holds no head",
            where=model,
            why=f"no tensor ends in {' or '.join(_HEAD)}, and config.json does not tie it to the embedding",
        )
    embedding = _read(where, embedding_name, device, dtype)
    norm = _read(where, norm_name, device, dtype)
    head = _read(where, _pick("head", heads, _HEAD, "", model), device, dtype) if heads else embedding
    _check_shapes(facts, model, {embedding_name: embedding, (heads or [embedding_name])[0]: head})
    if norm.shape != (facts.hidden_size,):
        raise TargetError("the final norm has another width", where=norm_name, why=f"{list(norm.shape)}")
    if facts.model_type in _CENTRED_NORMS:
        norm = norm + 1
    rule = read_head_rule(model)
    return TargetParts(
        embedding=embedding,
        head=head if rule.scale == 1.0 else head * rule.scale,
        norm_weight=norm,
        norm_eps=facts.rms_norm_eps,
        embedding_scale=rule.embedding_scale,
        final_softcap=rule.softcap,
        tied=not heads,
    )


@dataclass(frozen=True)
class HeadRule:
    """What a model does around its embedding and head: constant factors and a soft cap."""

    scale: float = 1.0
    softcap: float | None = None
    embedding_scale: float = 1.0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits as the model gives them, from ``last @ lm_head.T``."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def read_head_rule(model: Path) -> HeadRule:
    """The head rule that ``config.json`` states under the names that transformers' models read."""
    outer = json.loads((model / "config.json").read_text(encoding="utf-8"))
    inner = outer.get("text_config") or outer

    def number(key: str) -> float | None:
        value = inner.get(key, outer.get(key))
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    scale = (number("logit_scale") or 1.0) / (number("logits_scaling") or 1.0)
    embedding_scale = number("embedding_multiplier") or 1.0
    if str(inner.get("model_type", "")).startswith(("gemma", "recurrent_gemma", "vaultgemma")):
        embedding_scale = float(inner["hidden_size"]) ** 0.5
    return HeadRule(scale, number("final_logit_softcapping"), embedding_scale)


def _locate(model: Path) -> dict[str, Path]:
    """Tensor name to file, from the index or the headers of the files."""
    files = weight_files(model)
    if (model / INDEX_NAME).is_file():
        return {name: model / file for name, file in read_index(model).items()}
    found: dict[str, Path] = {}
    for path in files:
        with _open(path) as file:
            found.update(dict.fromkeys(file.keys(), path))
    return found


def _of_language_model(name: str) -> bool:
    components = name.split(".")
    if any(component.isdigit() for component in components):
        return False
    return not any(word in component for component in components for word in _FOREIGN)


def _pick(what: str, names: Iterable[str], endings: Sequence[str], prefix: str, model: Path) -> str:
    """The one name that ends in one of ``endings``; one right under ``prefix`` is preferred."""
    found = [n for n in names if any(n == ending or n.endswith("." + ending) for ending in endings)]
    if prefix:
        found = [n for n in found if n.startswith(prefix) and n.removeprefix(prefix) in endings] or found
    if len(found) == 1:
        return found[0]
    if not found:
        raise TargetError(
            f"the target's {what} was not found",
            where=model,
            why=f"no tensor of the language model ends in {' or '.join(endings)}",
        )
    raise TargetError(
        f"the target's {what} is ambiguous", where=model, why=f"candidates: {', '.join(sorted(found))}"
    )


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise TargetError("a weight file cannot be read", where=path, why=str(error)) from error


def _read(where: dict[str, Path], name: str, device: str, dtype: torch.dtype) -> torch.Tensor:
    with _open(where[name]) as file:
        try:
            tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            place = f"{where[name]}: {name}"
            raise TargetError("a tensor cannot be read", where=place, why=str(error)) from error
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise TargetError(
            "a tensor that training needs is quantized", where=f"{where[name]}: {name}", why=str(tensor.dtype)
        )
    return tensor.to(device=device, dtype=dtype)


def _check_shapes(facts: TargetFacts, model: Path, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or tensor.shape[1] != facts.hidden_size or tensor.shape[0] < facts.vocab_size:
            raise TargetError(
                "a tensor has another shape than config.json says",
                where=f"{model}: {name}",
                why=f"{list(tensor.shape)} instead of {[facts.vocab_size, facts.hidden_size]}",
            )
