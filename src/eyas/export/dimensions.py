"""What an EAGLE-3 ``config.json`` says, and the tensors that follow from it; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eyas.base.errors import DataError
from eyas.config.engine_layers import IDS_KEY

ARCHITECTURE = "LlamaForCausalLMEagle3"


@dataclass(frozen=True)
class Eagle3Dimensions:
    """Sizes and switches of an exported drafter, defaults as both engines take them.

    ``norm_before_fc`` (one norm over all aux chunks) and ``norm_before_residual`` are never trained
    here but occur in published drafters.
    """

    hidden_size: int
    target_hidden_size: int
    num_aux: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int
    target_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: int
    fc_norm: bool
    norm_output: bool
    norm_before_residual: bool
    norm_before_fc: bool

    def as_shape(self) -> dict[str, Any]:
        """The fields of a ``DrafterShape``, for fine-tuning an imported drafter.

        Raises:
            DataError: the drafter uses norms that eyas does not train.
        """
        if self.norm_before_residual or self.norm_before_fc or self.fc_norm != self.norm_output:
            raise DataError(
                "this drafter's norms are neither those of EAGLE-3 nor of EAGLE-3.1",
                why=f"fc_norm {self.fc_norm}, norm_output {self.norm_output}, norm_before_residual "
                f"{self.norm_before_residual}, norm_before_fc {self.norm_before_fc}",
            )
        return {
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "num_aux": self.num_aux,
            "intermediate_size": self.intermediate_size,
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "draft_vocab_size": self.draft_vocab_size,
            "target_vocab_size": self.target_vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": self.rope_scaling,
            "max_position_embeddings": self.max_position_embeddings,
            "norms": "eagle3.1" if self.fc_norm else "eagle3",
        }


def read_dimensions(config: Mapping[str, Any]) -> Eagle3Dimensions:
    """Sizes and switches from a parsed ``config.json``.

    Raises:
        DataError: a size is missing or is no number.
    """
    needed = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        raise DataError(f"the drafter's config.json does not say {', '.join(missing)}")
    nested = config.get("eagle_config")
    eagle = nested if isinstance(nested, Mapping) else {}
    for ids in (config.get(IDS_KEY), eagle.get(IDS_KEY)):
        if ids is not None and not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
            raise DataError(f"{IDS_KEY} in the drafter's config.json is no list of numbers", why=f"{ids!r}")
    ids = eagle.get(IDS_KEY) or config.get(IDS_KEY)

    def get(key: str, default: Any) -> Any:
        value = config.get(key)
        return default if value is None else value

    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        theta, scaling = read_rope(config)
        return Eagle3Dimensions(
            hidden_size=hidden,
            target_hidden_size=int(get("target_hidden_size", hidden)),
            num_aux=int(get("num_aux_hidden_states", len(ids) if ids else 3)),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(get("num_key_value_heads", heads)),
            head_dim=int(get("head_dim", hidden // max(heads, 1))),
            draft_vocab_size=int(get("draft_vocab_size", config["vocab_size"])),
            target_vocab_size=int(config["vocab_size"]),
            rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=int(get("max_position_embeddings", 2048)),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=bool(config.get("norm_output")),
            norm_before_residual=bool(config.get("norm_before_residual")),
            norm_before_fc=bool(eagle.get("norm_before_fc", config.get("norm_before_fc"))),
        )
    except (TypeError, ValueError) as error:
        raise DataError("the drafter's config.json holds a size that is no number", why=str(error)) from error


def read_rope(config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """Rope base and scaling from either spelling, the new one (``rope_parameters``) first.

    Scaling comes back without the base, with ``rope_type``; None stands for plain rope.
    """
    new = config.get("rope_parameters")
    if isinstance(new, Mapping):
        theta = new.get("rope_theta", config.get("rope_theta", 10000.0))
        return float(theta), plain_scaling(new)
    theta = config.get("rope_theta")
    return float(10000.0 if theta is None else theta), plain_scaling(config.get("rope_scaling"))


def plain_scaling(scaling: object) -> dict[str, Any] | None:
    """A rope scaling table in one form: ``rope_type`` named, no base, None for plain rope."""
    if not isinstance(scaling, Mapping):
        return None
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return None
    rest = {k: v for k, v in scaling.items() if k not in ("rope_type", "type", "rope_theta")}
    return {"rope_type": kind, **rest}


def expected_shapes(dims: Eagle3Dimensions) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the trained tensors (the mapping and an embedding are not among them)."""
    h, d, i = dims.hidden_size, dims.head_dim, dims.intermediate_size
    aux = dims.num_aux * dims.target_hidden_size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (h,),
        "hidden_norm": (h,),
        "post_attention_layernorm": (h,),
        "self_attn.q_proj": (dims.num_heads * d, 2 * h),
        "self_attn.k_proj": (dims.num_kv_heads * d, 2 * h),
        "self_attn.v_proj": (dims.num_kv_heads * d, 2 * h),
        "self_attn.o_proj": (h, dims.num_heads * d),
        "mlp.gate_proj": (i, h),
        "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (h, aux)}
    shapes |= {f"midlayer.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"norm.weight": (h,), "lm_head.weight": (dims.draft_vocab_size, h)}
    if dims.fc_norm:
        shapes |= {f"fc_norm.{n}.weight": (dims.target_hidden_size,) for n in range(dims.num_aux)}
    if dims.norm_before_fc:
        shapes["input_norm.weight"] = (aux,)
    return shapes
