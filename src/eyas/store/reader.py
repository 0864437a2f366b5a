"""Random reads from the store: samples as views into mapped segments."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path

from eyas.base.errors import SegmentDamaged
from eyas.store.ledger import Ledger
from eyas.store.segment import CapturedSample, SegmentReader

_MAX_OPEN_SEGMENTS = 64


class StoreReader:
    """Stored samples by id; may be shared by threads.

    Args:
        folder: where segments lie.
        index: a ledger, or the name of the segment for each id.
        split: with a ledger, only samples of this split.
        max_open: segments that stay mapped; a view keeps its own segment mapped beyond that.
    """

    def __init__(
        self,
        folder: Path,
        index: Ledger | Mapping[str, str],
        *,
        split: str | None = None,
        max_open: int = _MAX_OPEN_SEGMENTS,
    ) -> None:
        self._folder = folder
        self._segment_of: Mapping[str, str]
        if isinstance(index, Ledger):
            names: dict[str, str] = {}
            # One string per segment instead of one per sample: a million samples share their names.
            self._segment_of = {
                sample: names.setdefault(segment, segment) for sample, segment in index.stored(split)
            }
        else:
            self._segment_of = index
        self._max_open = max_open
        self._open: OrderedDict[str, SegmentReader] = OrderedDict()
        self._turn = threading.Lock()

    def __len__(self) -> int:
        return len(self._segment_of)

    def __contains__(self, sample: str) -> bool:
        return sample in self._segment_of

    def ids(self) -> list[str]:
        """Ids of all samples that can be read, sorted."""
        return sorted(self._segment_of)

    def sample(self, sample: str, *, check: bool = False) -> CapturedSample:
        """One sample as views into its segment; nothing is copied.

        Args:
            check: hash its tensors first.

        Raises:
            KeyError: the sample is not stored.
            SegmentDamaged: its segment is missing or damaged, or does not hold it.
        """
        name = self._segment_of[sample]
        reader = self._reader(name)
        try:
            return reader.sample(sample, check=check)
        except KeyError:
            raise SegmentDamaged(
                "a segment misses a sample that the ledger has in it",
                where=self._folder / name,
                why=f"sample {sample}",
                hint="eyas run",
            ) from None

    def get_many(self, ids: Iterable[str], *, check: bool = False) -> list[CapturedSample]:
        """Samples in the order of ``ids``. Raises as `sample` does."""
        return [self.sample(sample, check=check) for sample in ids]

    def close(self) -> None:
        """Forget the mapped segments; views that are still held stay valid."""
        with self._turn:
            self._open.clear()

    def _reader(self, name: str) -> SegmentReader:
        with self._turn:
            reader = self._open.get(name)
            if reader is None:
                try:
                    reader = SegmentReader(self._folder / name)
                except FileNotFoundError as error:
                    raise SegmentDamaged(
                        "a segment is missing", where=self._folder / name, hint="eyas run"
                    ) from error
                self._open[name] = reader
                if len(self._open) > self._max_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(name)
            return reader
