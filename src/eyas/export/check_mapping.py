"""Checks of the draft vocabulary: is d2t a mapping, which one, and does t2d say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from eyas.export.dimensions import Eagle3Dimensions
from eyas.export.findings import Finding, some


def check_mapping(
    d2t: torch.Tensor | None,
    t2d: torch.Tensor | None,
    dims: Eagle3Dimensions,
    end_tokens: Sequence[int],
    special_tokens: Sequence[int],
) -> Iterator[Finding]:
    """Findings on d2t [Vd] (offsets) and t2d [V] (mask)."""
    num_draft, num_target = dims.draft_vocab_size, dims.target_vocab_size
    if d2t is None:
        if num_draft != num_target:
            yield Finding(
                "mapping-missing",
                "fault",
                f"{num_draft:,} draft ids for {num_target:,} target ids, and no d2t",
                evidence="engines would take draft id i for target id i",
            )
        return
    if num_draft == num_target:
        yield Finding(
            "mapping-superfluous",
            "warning",
            "both vocabularies have the same size, yet there is a d2t",
            evidence="vLLM has no place for it then and refuses the folder",
            hint="leave d2t and t2d out",
        )
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        yield Finding("mapping-dtype", "fault", f"d2t is {_name(d2t.dtype)}, it must hold integers")
        return
    if tuple(d2t.shape) != (num_draft,):
        yield Finding("mapping-length", "fault", f"d2t is {list(d2t.shape)}, the head has {num_draft:,} rows")
        return
    offsets = d2t.to(torch.int64)
    ids = offsets + torch.arange(num_draft)
    mask = _mask(t2d, num_target)
    if t2d is None:
        yield Finding("mapping-t2d-missing", "note", "there is no t2d; engines do not need it")
    elif mask is None:
        yield Finding("mapping-length", "fault", f"t2d is {list(t2d.shape)}, not [{num_target}]")
    if _is_absolute(offsets, ids, mask, num_target):
        yield Finding(
            "mapping-absolute",
            "fault",
            "d2t holds target ids, engines take it for offsets (target id = draft id + d2t)",
            evidence=f"d2t {some(offsets[:4].tolist())} ... {int(offsets[-1])}",
            hint="subtract 0, 1, 2, ... from it",
        )
        return
    yield from _bijection(ids, num_target)
    if mask is not None:
        reached = torch.zeros(num_target, dtype=torch.bool)
        reached[ids[(ids >= 0) & (ids < num_target)]] = True
        differ = (reached != mask).nonzero().flatten().tolist()
        if differ:
            yield Finding(
                "mapping-t2d-disagrees",
                "fault",
                f"t2d and d2t disagree on {len(differ):,} target ids",
                evidence=some(differ),
            )
    if num_draft < num_target and not bool(offsets.any()):
        yield Finding(
            "mapping-placeholder",
            "warning",
            f"the draft vocabulary is just the first {num_draft:,} target ids",
            evidence="d2t is zero everywhere, as before it is filled",
        )
    yield from _tokens_within(set(ids.tolist()), end_tokens, special_tokens)


def _mask(t2d: torch.Tensor | None, num_target: int) -> torch.Tensor | None:
    return None if t2d is None or tuple(t2d.shape) != (num_target,) else t2d.to(torch.bool)


def _is_absolute(
    offsets: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, num_target: int
) -> bool:
    """Whether the numbers make sense as ids, and less sense as offsets."""
    if len(offsets) < 2 or int(offsets.min()) < 0 or int(offsets.max()) >= num_target:
        return False
    if len(set(offsets.tolist())) != len(offsets):
        return False
    if mask is not None and int(mask.sum()) == len(offsets):
        return bool(mask[offsets].all()) and not _is_exactly(ids, mask, num_target)
    return int(ids.max()) >= num_target


def _is_exactly(ids: torch.Tensor, mask: torch.Tensor, num_target: int) -> bool:
    return int(ids.min()) >= 0 and int(ids.max()) < num_target and bool(mask[ids].all())


def _bijection(ids: torch.Tensor, num_target: int) -> Iterator[Finding]:
    outside = ((ids < 0) | (ids >= num_target)).nonzero().flatten().tolist()
    if outside:
        yield Finding(
            "mapping-range",
            "fault",
            f"{len(outside):,} draft ids map outside the target's {num_target:,} ids",
            evidence=some([f"{i} -> {int(ids[i])}" for i in outside[:5]]),
        )
    seen = Counter(ids.tolist())
    doubled = [target_id for target_id, count in seen.items() if count > 1]
    if doubled:
        yield Finding(
            "mapping-duplicate",
            "fault",
            f"{len(doubled):,} target ids are reached by several draft ids",
            evidence=some(doubled),
        )
    elif len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
        yield Finding("mapping-unsorted", "note", "target ids are not ascending; engines do not mind")


def _tokens_within(
    reached: set[int], end_tokens: Sequence[int], special_tokens: Sequence[int]
) -> Iterator[Finding]:
    absent = [t for t in end_tokens if t not in reached]
    if absent:
        yield Finding(
            "end-token-absent",
            "fault" if len(absent) == len(end_tokens) else "warning",
            f"end tokens {some(absent)} can never be drafted",
            evidence="every answer's last draft is lost",
        )
    absent = [t for t in special_tokens if t not in reached and t not in end_tokens]
    if absent:
        yield Finding(
            "special-token-absent",
            "warning",
            f"{len(absent)} of {len(special_tokens)} special tokens can never be drafted",
            evidence=some(absent),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
