"""Records that come as token ids: with spans, a mask, labels, or as prompt and output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eyas.chat.conversation import Spans, TokenArray, TokenRow
from eyas.chat.refusal import Refused

IGNORED_LABEL = -100
"""The label of a token that is not supervised, as trainers write it."""

_KIND = "wrong token row"
_MASK_KEYS = ("loss_mask", "assistant_masks", "assistant_mask")
_FINISH_REASONS = ("stop", "length")


def is_token_row(record: Mapping[str, Any]) -> bool:
    """Whether the record is given as token ids."""
    return "input_ids" in record or "prompt_ids" in record


def token_row_from(
    record: Mapping[str, Any], *, vocab_size: int, source: str, domain: str, line: int
) -> TokenRow:
    """Read one row of token ids.

    Args:
        vocab_size: ids must be below it.

    Raises:
        Refused: lengths differ, an id or a span is out of range, or nothing says what is supervised.
    """
    if "input_ids" in record:
        tokens = _ids(record["input_ids"], "input_ids", vocab_size)
        _refuse_padding(record, len(tokens))
        spans = _given_spans(record, tokens)
    else:
        if "output_ids" not in record:
            raise Refused(_KIND, "prompt_ids without output_ids")
        prompt = _ids(record["prompt_ids"], "prompt_ids", vocab_size)
        output = _ids(record["output_ids"], "output_ids", vocab_size, may_be_empty=True)
        tokens = np.concatenate([prompt, output])
        spans = ((len(prompt), len(tokens)),) if len(output) else ()
    reason = record.get("finish_reason")
    return TokenRow(
        tokens=tokens,
        spans=spans,
        finish_reason=reason if reason in _FINISH_REASONS else "given",
        source=source,
        domain=domain,
        line=line,
        name=str(record.get("id", "")),
    )


def spans_of_mask(mask: np.ndarray[Any, np.dtype[np.bool_]]) -> Spans:
    """Half-open ranges in which ``mask`` ``[T]`` is true."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return tuple((int(start), int(end)) for start, end in edges.reshape(-1, 2))


def _ids(value: object, key: str, vocab_size: int, *, may_be_empty: bool = False) -> TokenArray:
    if not isinstance(value, list):
        raise Refused(_KIND, f"{key} is not a list of token ids")
    if not value:
        if may_be_empty:
            return np.zeros(0, dtype=np.int32)
        raise Refused(_KIND, f"{key} is empty")
    if not all(type(item) is int for item in value):
        raise Refused(_KIND, f"{key} holds something that is not an integer")
    for index, token in enumerate(value):
        if not 0 <= token < vocab_size:
            raise Refused(
                _KIND, f"{key}[{index}] is {token}, outside the target's vocabulary of {vocab_size:,} ids"
            )
    return np.array(value, dtype=np.int32)


def _refuse_padding(record: Mapping[str, Any], length: int) -> None:
    mask = record.get("attention_mask")
    if mask is None:
        return
    if not isinstance(mask, list) or len(mask) != length:
        raise Refused(_KIND, f"attention_mask and input_ids differ in length ({length} ids)")
    if not all(mask):
        raise Refused(_KIND, "attention_mask marks padding; give rows without padding")


def _given_spans(record: Mapping[str, Any], tokens: TokenArray) -> Spans:
    given = [key for key in ("spans", *_MASK_KEYS, "labels") if record.get(key) is not None]
    if not given:
        raise Refused(_KIND, f"input_ids without spans, {', '.join(_MASK_KEYS)} or labels")
    key = given[0]
    value = record[key]
    if not isinstance(value, list):
        raise Refused(_KIND, f"{key} is not a list")
    if key == "spans":
        return _checked_spans(value, len(tokens))
    if len(value) != len(tokens):
        raise Refused(_KIND, f"{key} has {len(value)} entries, input_ids has {len(tokens)}")
    if key == "labels":
        return _spans_of_labels(value, tokens)
    if not all(type(item) in (int, bool) and item in (0, 1) for item in value):
        raise Refused(_KIND, f"{key} holds something other than 0 and 1")
    return spans_of_mask(np.array(value, dtype=np.bool_))


def _checked_spans(value: list[Any], length: int) -> Spans:
    spans: list[tuple[int, int]] = []
    for index, item in enumerate(value):
        if not isinstance(item, list) or len(item) != 2 or not all(type(edge) is int for edge in item):
            raise Refused(_KIND, f"spans[{index}] is not a pair [start, end) of integers")
        start, end = item
        if not 0 <= start < end <= length:
            raise Refused(_KIND, f"spans[{index}] = [{start}, {end}) does not lie in {length} tokens")
        if spans and start < spans[-1][1]:
            raise Refused(_KIND, f"spans[{index}] = [{start}, {end}) overlaps or precedes the one before")
        spans.append((start, end))
    return tuple(spans)


def _spans_of_labels(value: list[Any], tokens: TokenArray) -> Spans:
    if not all(type(item) is int for item in value):
        raise Refused(_KIND, "labels holds something that is not an integer")
    supervised = np.array([item != IGNORED_LABEL for item in value], dtype=np.bool_)
    for index in np.flatnonzero(supervised):
        if value[index] != tokens[index]:
            raise Refused(
                _KIND,
                f"labels[{index}] is {value[index]}, input_ids[{index}] is {tokens[index]}; "
                f"labels are not shifted, and {IGNORED_LABEL} marks what is not supervised",
            )
    return spans_of_mask(supervised)
