"""Which samples there are and which the store lacks, as flat arrays: a million of them take 37 MB."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from eyas.base.layout import Layout
from eyas.base.seal import read_seal, require_seal
from eyas.store.entry import SampleEntry
from eyas.store.ledger import Ledger
from eyas.store.ledger_file import ledger_damaged
from eyas.store.samples import iter_sample_index

_LISTED_KEY = "listed"
_ID_DIGITS = 32
_LENGTH_DIGITS = 9
_ROW = np.dtype([("id", f"S{_ID_DIGITS}"), ("length", np.uint8, _LENGTH_DIGITS), ("left", "S1")])
_EDGES = ("", *"123456789abcdef", chr(0x10FFFF))
# SQLite joins the rows itself, into one text of rows of equal width: a million rows that each become objects
# of Python take three times as long. In pieces by the first digit: a text of SQLite has at most 1e9 bytes.
# The plus keeps it from the index by state: rows come by id, and an index could be damaged by itself.
_QUERY = (
    "SELECT count(*), group_concat(row, '') FROM ("
    f"SELECT id || printf('%0{_LENGTH_DIGITS}d%d', length, state IN ('pending', 'failed')) AS row"
    " FROM samples WHERE +listed = 1 AND id >= ? AND id < ? ORDER BY id)"
)


@dataclass(frozen=True, eq=False)
class Listing:
    """All samples of data/samples, ascending by id.

    Args:
        ids: ``[N]`` of 32 ASCII digits each.
        lengths: tokens, int32 ``[N]``.
        is_left: bool ``[N]``; pending, or failed and to be tried again.
    """

    ids: np.ndarray[Any, np.dtype[np.bytes_]]
    lengths: np.ndarray[Any, np.dtype[np.int32]]
    is_left: np.ndarray[Any, np.dtype[np.bool_]]

    def __len__(self) -> int:
        return len(self.ids)

    def id_texts(self, indices: np.ndarray[Any, Any]) -> list[str]:
        """The ids at these places."""
        text = self.ids[indices].tobytes().decode()
        return [text[start : start + _ID_DIGITS] for start in range(0, len(text), _ID_DIGITS)]

    def only(self, ids: Iterable[str]) -> Listing:
        """Those of ``ids`` that are listed, ascending by id."""
        wanted = np.array(sorted(ids), dtype=self.ids.dtype)
        places = np.flatnonzero(np.isin(self.ids, wanted))
        return Listing(self.ids[places], self.lengths[places], self.is_left[places])

    def left(self) -> set[str]:
        """Ids of what is left to do."""
        return set(self.id_texts(np.flatnonzero(self.is_left)))

    def digest(self) -> str:
        """A hash of ids and lengths; what is done of them does not change it."""
        hashed = xxhash.xxh3_128(self.ids.tobytes())
        hashed.update(self.lengths.astype("<i4").tobytes())
        return str(hashed.hexdigest())


def list_samples(layout: Layout, ledger: Ledger) -> Listing:
    """What the ledger has listed, after it was made to list exactly the samples of data/samples.

    Listing writes a row for each sample; a resume finds by the seal of data/samples and by the digest of
    the rows that this was done before, and writes nothing.

    Raises:
        DamageFound: data/samples or the ledger is damaged.
    """
    seal = str(read_seal(layout.samples)["check"])
    noted = ledger.meta(_LISTED_KEY)
    if noted is not None:
        listing = read_listing(ledger)
        if noted == _note(seal, listing):
            return listing
    require_seal(layout.samples)
    return list_entries(ledger, iter_sample_index(layout.samples), seal)


def list_entries(ledger: Ledger, entries: Iterable[SampleEntry], seal: str) -> Listing:
    """List exactly these samples, and note the seal that they come from; one transaction."""
    with ledger.transaction():
        ledger.replace_samples(entries)
        listing = read_listing(ledger)
        ledger.set_meta(_LISTED_KEY, _note(seal, listing))
    return listing


def read_listing(ledger: Ledger) -> Listing:
    """The listed samples as the ledger has them. Raises DamageFound for rows that cannot be."""
    powers = 10 ** np.arange(_LENGTH_DIGITS - 1, -1, -1, dtype=np.int64)
    ids, lengths, is_left = [], [], []
    with ledger.reading() as connection:
        for low, high in pairwise(_EDGES):
            num_rows, text = connection.execute(_QUERY, (low, high)).fetchone()
            data = (text or "").encode()
            if len(data) != num_rows * _ROW.itemsize:
                raise ledger_damaged(ledger.path, "a sample has an id or a length that cannot be")
            rows = np.frombuffer(data, dtype=_ROW)
            ids.append(np.ascontiguousarray(rows["id"]))
            lengths.append(((rows["length"] - np.uint8(ord("0"))) @ powers).astype(np.int32))
            is_left.append(rows["left"] == b"1")
    joined = np.concatenate(ids)
    if len(joined) > 1 and not bool((joined[:-1] < joined[1:]).all()):
        raise ledger_damaged(ledger.path, "its samples are not in the order of their ids")
    return Listing(joined, np.concatenate(lengths), np.concatenate(is_left))


def _note(seal: str, listing: Listing) -> str:
    return json.dumps({"seal": seal, "samples": len(listing), "digest": listing.digest()})
