"""How a drafter is trained, free of the configuration's classes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from eyas.base.errors import ConfigError
from eyas.drafter.schedule import Schedule, learning_rate
from eyas.drafter.wide import wide_dtype

LossKind = Literal["soft_ce", "kl", "lk", "mixed"]
WarmStart = Literal["head", "head+ridge", "head+ridge+layer"]

_FREE = {
    "checkpoint_minutes", "checkpoint_steps", "keep_checkpoints", "validations", "max_bad_steps",
    "spike_ratio",
}  # fmt: skip
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class TrainSettings:
    """The fields of ``[train]``, with the meanings that the configuration's schema documents.

    ``dtype`` is resolved by the caller: it names an arithmetic, never ``auto``.
    """

    epochs: float = 6.0
    batch_tokens: int = 2048
    accumulate: int = 1
    lr: float = 1e-3
    warmup: float = 0.03
    min_lr_ratio: float = 0.05
    schedule: Schedule = "cosine"
    decay: float = 0.2
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    steps: int = 7
    gamma: float = 0.8
    loss: LossKind = "soft_ce"
    warm_start: WarmStart = "head+ridge+layer"
    dtype: str = "float32"
    seed: int = 0
    checkpoint_minutes: float = 10.0
    checkpoint_steps: int = 0
    keep_checkpoints: int = 2
    validations: int = 6
    max_bad_steps: int = 20
    spike_ratio: float = 2.0

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step ``step`` (from 0) of so many; see `learning_rate`."""
        return learning_rate(
            step,
            total_steps,
            peak=self.lr,
            warmup=self.warmup,
            min_ratio=self.min_lr_ratio,
            schedule=self.schedule,
            decay=self.decay,
        )

    def compute_dtype(self) -> torch.dtype:
        """Arithmetic of the matrix products.

        Raises:
            ConfigError: the dtype is unknown, or float16, whose range loses small gradients.
        """
        if self.dtype not in _DTYPES:
            raise ConfigError(
                f"a drafter cannot be trained in {self.dtype}",
                hint="set train.dtype to one of auto, bfloat16, float32, float64",
            )
        return _DTYPES[self.dtype]

    def master_dtype(self) -> torch.dtype:
        """Arithmetic of the weights and the optimizer: float32, or float64 where that is asked for."""
        return wide_dtype(self.compute_dtype())

    def step_weights(self) -> list[float]:
        """gamma^j for each draft step."""
        return [self.gamma**step for step in range(self.steps)]

    def content(self) -> dict[str, Any]:
        """The fields that decide the trained weights; the rest may change between attempts."""
        values = {key: value for key, value in asdict(self).items() if key not in _FREE}
        values["betas"] = list(self.betas)
        return values
