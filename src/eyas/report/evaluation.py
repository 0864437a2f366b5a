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
class Predicted:
    """Acceptance length along stored answers, with its 95% interval over conversations.

    ``part`` says of what: a number of drafts, a stretch of the answers, or a length of the prompts.
    """

    part: str
    acceptance_length: float
    low: float
    high: float


@dataclass(frozen=True)
class PredictionView:
    """What the stored states of held-out conversations say, without generation.

    ``drafts`` is by number of drafts in the chain; ``places`` (in the answer) and ``prompt_lengths`` are of
    the chain that was measured.
    """

    conversations: int
    drafts: tuple[Predicted, ...]
    places: tuple[Predicted, ...]
    prompt_lengths: tuple[Predicted, ...]


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
    prediction: PredictionView | None


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
            prediction=_prediction(found.get("prediction"), int(found["num_drafts"])),
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


def _prediction(found: dict[str, Any] | None, num_drafts: int) -> PredictionView | None:
    if not found:
        return None
    return PredictionView(
        conversations=int(found["conversations"]),
        drafts=tuple(_predicted(str(row["num_drafts"]), row) for row in found["rows"]),
        places=_stretches(found["places"], num_drafts),
        prompt_lengths=_stretches(found["prompt_lengths"], num_drafts),
    )


def _stretches(groups: list[dict[str, Any]], num_drafts: int) -> tuple[Predicted, ...]:
    """One row for each stretch of tokens, ``0 to 31``, the last ``from 512``."""
    begins = [int(group["from_token"]) for group in groups]
    found = []
    for group, begin, after in zip(groups, begins, [*begins[1:], None], strict=True):
        part = f"from {begin:,}" if after is None else f"{begin:,} to {after - 1:,}"
        rows = [row for row in group["rows"] if int(row["num_drafts"]) <= num_drafts]
        found.append(_predicted(part, max(rows, key=lambda row: int(row["num_drafts"]))))
    return tuple(found)


def _predicted(part: str, row: dict[str, Any]) -> Predicted:
    return Predicted(part, float(row["acceptance_length"]), float(row["low"]), float(row["high"]))


def _acceptance(name: str, row: dict[str, Any]) -> Acceptance:
    return Acceptance(
        name=name,
        num_prompts=int(row["num_prompts"]),
        acceptance_length=float(row["acceptance_length"]),
        rounds=int(row["rounds"]),
        conditional=tuple(float(x) for x in row["conditional_rates"]),
        unconditional=tuple(float(x) for x in row["unconditional_rates"]),
    )
