"""A segment that was touched, or found damaged, is hashed again before it counts as whole."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from eyas.base.clock import boot_id
from eyas.base.layout import Layout
from eyas.pipeline.order import STAGES
from eyas.store import scrub
from eyas.store.doubt import unhashed_segments
from eyas.store.ledger import Ledger
from eyas.store.place import mount_identity
from tests.faults.forked import run_here
from tests.projects import make_project, tiny_target


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Layout:
    base = tmp_path_factory.mktemp("doubt")
    root = make_project(base / "p", tiny_target(base / "model"), count=4)
    assert run_here(root, STAGES[:3]) == 0
    return Layout(root)


def hashed(layout: Layout) -> list[str]:
    """All segments hashed now; returns their names."""
    with Ledger.open(layout.ledger, create=False) as ledger:
        names = [segment.name for segment in ledger.segments()]
        ledger.note_verified(names, boot_id(), mount_identity(layout.segments))
        assert unhashed_segments(layout, ledger) == []
    return names


def test_a_touched_segment_is_in_doubt(stored: Layout) -> None:
    name = hashed(stored)[0]
    path = stored.segments / name
    time.sleep(0.02)  # the clock of files ticks every few milliseconds
    os.utime(path)
    with Ledger.open_read_only(stored.ledger) as ledger:
        assert unhashed_segments(stored, ledger) == [name]
    hashed(stored)


def test_one_found_damaged_stays_in_doubt(stored: Layout) -> None:
    name = hashed(stored)[0]
    path = stored.segments / name
    whole, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    os.utime(path, ns=times)
    with Ledger.open(stored.ledger, create=False) as ledger:
        assert unhashed_segments(stored, ledger) == []  # nothing can be seen from outside
        assert [fault.kind for fault in scrub.deep(stored, ledger)] == ["content"]
        assert unhashed_segments(stored, ledger) == [name]
    path.write_bytes(whole)
    with Ledger.open(stored.ledger, create=False) as ledger:
        assert scrub.deep(stored, ledger) == []
        assert unhashed_segments(stored, ledger) == []


def test_a_missing_segment_has_another_name(stored: Layout, tmp_path: Path) -> None:
    name = hashed(stored)[0]
    path = stored.segments / name
    path.rename(tmp_path / name)
    with Ledger.open_read_only(stored.ledger) as ledger:
        assert unhashed_segments(stored, ledger) == []
    (tmp_path / name).rename(path)
