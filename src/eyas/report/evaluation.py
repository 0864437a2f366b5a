"""What evaluation measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.base.files import read_json
from eyas.report.status import BROKEN
from eyas.stages.project import Project


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of one domain, or of all; rates are per position in the chain of drafts.

    ``conditional`` is the share of drafts accepted among those whose predecessors were, ``unconditional``
    the share among all drafts of the position.
    """

    name: str
    num_prompts: int
    acceptance_length: float
    rounds: int
    conditional: tuple[float, ...]
    unconditional: tuple[float, ...]


@dataclass(frozen=True)
class TreeView:
    """The same prompts with trees of drafts."""

    depth: int
    top_k: int
    total_tokens: int
    acceptance_length: float


@dataclass(frozen=True)
class EvaluationView:
    """The measured drafter against plain decoding; speeds are None when nothing was timed."""

    at: str
    dtype: str
    num_drafts: int
    num_answers: int
    num_tokens: int
    total: Acceptance
    domains: tuple[Acceptance, ...]
    equal_texts: int
    tied_texts: int
    different_texts: int
    plain_tokens_per_second: float | None
    drafted_tokens_per_second: float | None
    speedup: float | None
    tree: TreeView | None


def evaluation_view(project: Project) -> EvaluationView | None:
    """The newest evaluation; None before the first, or when its file is damaged."""
    try:
        found = dict(read_json(project.layout.evaluation))
        speed, texts = dict(found.get("speed") or {}), dict(found["lossless"])
        return EvaluationView(
            at=str(found["at"]),
            dtype=str(found["dtype"]),
            num_drafts=int(found["num_drafts"]),
            num_answers=int(found["num_answers"]),
            num_tokens=int(found["num_tokens"]),
            total=_acceptance("all", found),
            domains=tuple(_acceptance(name, row) for name, row in dict(found["domains"]).items()),
            equal_texts=int(texts["equal"]),
            tied_texts=int(texts["ties"]),
            different_texts=int(texts["different"]),
            plain_tokens_per_second=speed.get("plain_tokens_per_second"),
            drafted_tokens_per_second=speed.get("drafted_tokens_per_second"),
            speedup=speed.get("ratio"),
            tree=_tree(found.get("tree")),
        )
    except BROKEN:
        return None


def _tree(found: dict[str, Any] | None) -> TreeView | None:
    if not found:
        return None
    return TreeView(
        int(found["depth"]),
        int(found["top_k"]),
        int(found["total_tokens"]),
        float(found["acceptance_length"]),
    )


def _acceptance(name: str, row: dict[str, Any]) -> Acceptance:
    return Acceptance(
        name=name,
        num_prompts=int(row["num_prompts"]),
        acceptance_length=float(row["acceptance_length"]),
        rounds=int(row["rounds"]),
        conditional=tuple(float(x) for x in row["conditional_rates"]),
        unconditional=tuple(float(x) for x in row["unconditional_rates"]),
    )
