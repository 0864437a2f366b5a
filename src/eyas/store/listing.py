"""Which samples there are and which the store lacks, as flat arrays: a million of them take 37 MB."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
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
_ROWS_AT_ONCE = 20_000
# The table itself, in its own order: an index would have to be sorted, and could be damaged by itself.
_QUERY = (
    "SELECT id, length, state IN ('pending', 'failed') FROM samples NOT INDEXED WHERE listed = 1 ORDER BY id"
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

    def id_texts(self, indices: Iterable[int] | np.ndarray[Any, Any]) -> list[str]:
        """The ids at these places."""
        return [name.decode() for name in self.ids[np.asarray(indices)].tolist()]

    def left(self) -> set[str]:
        """Ids of what is left to do."""
        return {name.decode() for name in compress(self.ids.tolist(), self.is_left.tolist())}

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
    """The listed samples as the ledger has them. Raises DamageFound for ids that are none."""
    ids, lengths, is_left = [], [], []
    with ledger.reading() as connection:
        cursor = connection.execute(_QUERY)
        while rows := cursor.fetchmany(_ROWS_AT_ONCE):
            names, sizes, left = zip(*rows, strict=True)
            digits = "".join(names).encode()
            if len(digits) != _ID_DIGITS * len(names):
                raise ledger_damaged(ledger.path, "the id of a sample does not have 32 digits")
            ids.append(np.frombuffer(digits, dtype=f"S{_ID_DIGITS}"))
            lengths.append(np.array(sizes, dtype=np.int32))
            is_left.append(np.array(left, dtype=bool))
    if not ids:
        return Listing(np.zeros(0, f"S{_ID_DIGITS}"), np.zeros(0, np.int32), np.zeros(0, bool))
    return Listing(np.concatenate(ids), np.concatenate(lengths), np.concatenate(is_left))


def _note(seal: str, listing: Listing) -> str:
    return json.dumps({"seal": seal, "samples": len(listing), "digest": listing.digest()})
