"""The draft vocabulary: which target tokens a drafter can propose.

It is built once, travels with the weights, and is never computed again: another order would move
every row of the head.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from eyas.base.errors import ConfigError, SealBroken
from eyas.base.seal import require_seal, sealed_folder

FILE_NAME = "vocabulary.safetensors"
DEFAULT_SIZE = 32_000


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """A one-to-one map from draft ids ``0..Vd-1`` to target ids, ascending.

    Attributes:
        target_ids: int64 ``[Vd]``, strictly ascending.
        target_vocab_size: V.

    Raises:
        ConfigError: the ids are not strictly ascending or leave the target's vocabulary.
    """

    target_ids: npt.NDArray[np.int64]
    target_vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or len(ids) == 0 or ids.dtype != np.int64:
            raise ConfigError("a draft vocabulary is a non-empty list of int64 target ids")
        if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise ConfigError(
                "a draft vocabulary's target ids have to ascend within the target's vocabulary",
                where=f"{len(ids)} ids, target vocabulary {self.target_vocab_size}",
            )

    @property
    def size(self) -> int:
        """Vd."""
        return len(self.target_ids)

    @cached_property
    def d2t(self) -> npt.NDArray[np.int64]:
        """Offsets ``[Vd]``: target id = draft id + offset."""
        return self.target_ids - np.arange(self.size, dtype=np.int64)

    @cached_property
    def t2d(self) -> npt.NDArray[np.bool_]:
        """``[V]``: whether a target id can be drafted."""
        mask = np.zeros(self.target_vocab_size, dtype=bool)
        mask[self.target_ids] = True
        return mask

    @cached_property
    def draft_ids(self) -> npt.NDArray[np.int64]:
        """``[V]``: draft id of each target id, -1 where it cannot be drafted."""
        inverse = np.full(self.target_vocab_size, -1, dtype=np.int64)
        inverse[self.target_ids] = np.arange(self.size)
        return inverse

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, DraftVocabulary)
            and self.target_vocab_size == other.target_vocab_size
            and np.array_equal(self.target_ids, other.target_ids)
        )

    __hash__ = None  # type: ignore[assignment]

    def coverage(self, counts: npt.NDArray[np.integer]) -> float:
        """Share of the counted tokens that can be drafted; 1.0 where nothing was counted."""
        total = int(counts.sum())
        return float(counts[self.target_ids].sum()) / total if total else 1.0

    @classmethod
    def from_offsets(cls, d2t: npt.NDArray[np.integer], target_vocab_size: int) -> DraftVocabulary:
        """The vocabulary whose offsets a checkpoint carries. Raises ConfigError as the class does."""
        return cls(np.asarray(d2t, dtype=np.int64) + np.arange(len(d2t), dtype=np.int64), target_vocab_size)


def build_vocabulary(
    counts: npt.NDArray[np.integer], size: int, always_in: Iterable[int] = ()
) -> DraftVocabulary:
    """The ``size`` most frequent tokens, with some always in; of equally frequent ones, lower ids.

    Args:
        counts: ``[V]`` supervised occurrences of each target id in the train split.
        size: Vd; 0 takes 32,000, or all tokens that were seen if these are fewer.
        always_in: special and end tokens.

    Raises:
        ConfigError: ``size`` is larger than what was seen or too small for ``always_in``, or an id
            lies outside the target's vocabulary.
    """
    num_ids = len(counts)
    forced = np.unique(np.fromiter(always_in, dtype=np.int64))
    if len(forced) and (forced[0] < 0 or forced[-1] >= num_ids):
        raise ConfigError(
            "a special token lies outside the target's vocabulary",
            where=f"ids {forced.min()} to {forced.max()}, vocabulary {num_ids}",
        )
    seen = counts > 0
    seen[forced] = True
    num_seen = int(seen.sum())
    if size == 0:
        size = max(min(DEFAULT_SIZE, num_seen), len(forced))
    if size > num_seen or size < 1:
        raise ConfigError(
            f"a draft vocabulary of {size} is larger than the {num_seen} tokens that were seen",
            where="drafter.vocab_size",
            why="head rows of unseen tokens would never be trained",
            hint=f"set drafter.vocab_size to {num_seen} or less, or to 0",
        )
    if size < len(forced):
        raise ConfigError(
            f"a draft vocabulary of {size} has no room for the {len(forced)} special tokens",
            where="drafter.vocab_size",
        )
    free = seen.copy()
    free[forced] = False
    candidates = np.flatnonzero(free)
    order = np.argsort(-counts[candidates].astype(np.int64), kind="stable")
    chosen = np.concatenate([forced, candidates[order[: size - len(forced)]]])
    return DraftVocabulary(np.sort(chosen).astype(np.int64), num_ids)


def save_vocabulary(folder: Path, vocabulary: DraftVocabulary, about: dict[str, object]) -> None:
    """Write a sealed folder. Raises FileExistsError, or OSError with nothing left under ``folder``."""
    with sealed_folder(folder, dict(about)) as temporary:
        write_vocabulary(temporary, vocabulary)


def write_vocabulary(folder: Path, vocabulary: DraftVocabulary) -> None:
    """Write the two tensors into a folder that the caller seals. Raises OSError."""
    save_file(
        {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d},
        str(folder / FILE_NAME),
        metadata={"format": "eyas-vocabulary", "version": "1"},
    )


def load_vocabulary(folder: Path) -> DraftVocabulary:
    """Read what `save_vocabulary` wrote, or the mapping that a checkpoint carries.

    Raises:
        SealBroken: the folder is not whole, or its two tensors disagree.
    """
    require_seal(folder)
    if not (folder / FILE_NAME).is_file():
        raise SealBroken("a sealed folder holds no draft vocabulary", where=folder)
    tensors = load_file(str(folder / FILE_NAME))
    vocabulary = DraftVocabulary.from_offsets(tensors["d2t"], len(tensors["t2d"]))
    if not np.array_equal(vocabulary.t2d, tensors["t2d"]):
        raise SealBroken("a draft vocabulary contradicts itself", where=folder, why="d2t and t2d disagree")
    return vocabulary
