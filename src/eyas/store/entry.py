"""What the ledger keeps of a sample; standard library only, so that ``status`` stays quick."""

from __future__ import annotations

from typing import NamedTuple


class SampleEntry(NamedTuple):
    """One sample without its tokens.

    Args:
        id: identity by content, 32 hexadecimal digits.
        length: tokens.
        num_supervised: tokens inside spans.
        split: ``train`` or ``validation``.
        source: name of the data source it came from.
    """

    id: str
    length: int
    num_supervised: int
    split: str
    source: str
