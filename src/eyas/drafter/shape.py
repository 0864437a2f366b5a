"""The sizes of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from eyas.base.errors import ConfigError

Norms = Literal["eagle3", "eagle3.1"]


@dataclass(frozen=True)
class DrafterShape:
    """Everything that fixes the tensors of a drafter and its arithmetic, apart from the weights.

    ``hidden_size`` is also the width of the embedding, which the drafter shares with its target.
    ``num_aux`` aux states of width ``target_hidden_size`` enter ``fc``.

    Raises:
        ConfigError: the sizes cannot belong to one drafter.
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
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    norms: Norms = "eagle3"

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ConfigError(f"a drafter's {name} has to be above 0, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly",
                hint="set drafter.num_kv_heads to a divisor of drafter.num_heads",
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim {self.head_dim} is odd, and rotary positions turn pairs")
        if self.draft_vocab_size > self.target_vocab_size:
            raise ConfigError(
                f"a draft vocabulary of {self.draft_vocab_size} is larger than the target's "
                f"{self.target_vocab_size}",
                hint="lower drafter.vocab_size",
            )
        if self.norms not in get_args(Norms):
            raise ConfigError(f"norms {self.norms!r} is none of {', '.join(get_args(Norms))}")

    @property
    def normed_feedback(self) -> bool:
        """EAGLE-3.1: aux chunks are normed and the next step's feature is the post-norm state."""
        return self.norms == "eagle3.1"

    def as_dict(self) -> dict[str, Any]:
        """The shape as JSON keeps it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DrafterShape:
        """The shape that `as_dict` gave.

        Raises:
            ConfigError: a key is missing or unknown, or sizes do not fit.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(values.keys() - known)
        if unknown:
            raise ConfigError(f"a drafter's shape has no {', '.join(unknown)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError("a drafter's shape is incomplete", why=str(error)) from error


_POSITIVE = (
    "hidden_size",
    "target_hidden_size",
    "num_aux",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "draft_vocab_size",
    "target_vocab_size",
    "max_position_embeddings",
)
