"""What becomes of a sample that is longer than allowed, or from which nothing can be learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas.chat.conversation import Spans
from eyas.chat.render import RenderedSample

PROMPT_TOO_LONG = "prompt too long"
TOO_LONG = "too long"
NOTHING_TO_DRAFT = "nothing to draft"


@dataclass(frozen=True)
class Fitted:
    """A sample within the limit, or the reason why there is none."""

    sample: RenderedSample | None
    reason: str = ""
    truncated: bool = False


def fit(sample: RenderedSample, max_seq_len: int, policy: Literal["truncate", "drop"]) -> Fitted:
    """Apply the length policy to one sample.

    ``truncate`` cuts at ``max_seq_len`` tokens and clips spans; an answer that was cut counts as
    finished by ``length``. A sample whose first answer does not fit at all is dropped under either
    policy, as is one that gives no draft to learn (`has_drafts`).
    """
    if not has_drafts(sample.spans):
        return Fitted(None, NOTHING_TO_DRAFT)
    if len(sample.tokens) <= max_seq_len:
        return Fitted(sample)
    spans = tuple((start, min(end, max_seq_len)) for start, end in sample.spans if start < max_seq_len)
    if not has_drafts(spans):
        return Fitted(None, PROMPT_TOO_LONG)
    if policy == "drop":
        return Fitted(None, TOO_LONG)
    reason = sample.finish_reason if spans == sample.spans else "length"
    return Fitted(RenderedSample(sample.tokens[:max_seq_len], spans, reason), truncated=True)


def has_drafts(spans: Spans) -> bool:
    """Whether some span holds two tokens after the first token of the sample.

    A draft is made from a supervised token for the next one: a span of one token asks for none,
    and a sample's first token is predicted by nothing.
    """
    return any(end - max(start, 1) >= 2 for start, end in spans)
